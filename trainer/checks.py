"""Lists of checks whose results are printed line by line: of the doctor, of preflight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

from trainer.errors import DataError, UsageError

_MAX_TEXT = 600  # of an exception of somebody else's


class NotKnown(Exception):
    """The check needs something that an earlier check did not find."""


class Subject:
    """What is being looked at; its attributes are what earlier checks have established, None where they have not."""

    def need(self, name: str) -> Any:
        """Returns what an earlier check established.

        Raises:
          NotKnown: it did not.
        """
        value = getattr(self, name)
        if value is None:
            raise NotKnown(name)
        return value


def run(checks: Mapping[str, Callable[[Any], str]], subject: Subject) -> int:
    """Runs every check in its order and prints a line for each; returns how many found something wrong.

    Args:
      checks: by name; a check returns in a few words what it found, or raises UsageError or DataError with the problem and its
        remedy. One that needs what an earlier one could not establish is passed over.
      subject: what they look at.
    """
    problems, width = 0, max(map(len, checks)) + 1
    for name, check in checks.items():
        try:
            mark, text = 'ok', check(subject)
        except NotKnown as missing:
            mark, text = '-', f'not looked at: no {missing}'
        except (UsageError, DataError) as error:
            mark, text = 'WRONG', str(error)
        except Exception as error:
            # A model_fn may raise anything; what the other checks say is wanted all the same.
            mark, text = 'WRONG', f'{type(error).__name__}: {error}'[:_MAX_TEXT]
        problems += mark == 'WRONG'
        print(f'{mark:6}{name:{width}} {" ".join(text.split())}', flush=True)
    return problems
