"""Models and datasets of the user's own, named `package.module:NAME` in a flag."""

from __future__ import annotations

import importlib
import types
from typing import Any

from trainer.errors import UsageError


def load(spec: str, flag: str) -> tuple[types.ModuleType, Any]:
    """Imports what a flag names.

    Args:
      spec: 'package.module:NAME'.
      flag: for messages, such as '--model'.

    Returns:
      The module and its NAME, None when it has none.

    Raises:
      UsageError: the module cannot be imported.
    """
    module_name, _, name = spec.partition(':')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f'{flag}={spec}: cannot import {module_name} ({error}); is its folder on PYTHONPATH?') from error
    return module, getattr(module, name, None)
