"""What is special to gs://: folders that are only parts of names, and errors that say bucket, object, account and remedy.

For `storage.py` only, which everything else calls. TensorFlow's client does the work. It retries what may pass (408, 429, 5xx,
broken connections) with a growing delay and gives up after about three minutes; 401, 403 and 404 it reports at once.

Folders are listed without asking what each entry is, which takes a request or two each. Buckets are never asked for: to look at
one takes a right (storage.buckets.get) that the roles for reading and writing its objects do not include.
"""

from __future__ import annotations

import fnmatch
import json
import os
import pathlib
import re
import urllib.request
from collections.abc import Mapping
from typing import Any, Optional

SCHEME = 'gs://'
CREDENTIALS = 'GOOGLE_APPLICATION_CREDENTIALS'
TEST_TOKEN = 'GOOGLE_AUTH_TOKEN_FOR_TESTING'
METADATA_HOST = 'metadata.google.internal'
_METADATA_SECS = 2.0
_MAX_MESSAGE = 240  # characters
WILDCARDS = '*?['
# error_code of tf.errors, known here without importing TensorFlow.
_NOT_FOUND, _ALREADY_EXISTS, _PERMISSION_DENIED = 5, 6, 7
# The service's own words in its two kinds of answer, JSON and XML; of XML the details say more.
_WORDS = (r'"message":\s*"((?:[^"\\]|\\.)+)"', r'<Details>([^<]+)</Details>', r'<Message>([^<]+)</Message>')


def is_gs(path: str) -> bool:
    """Whether the path is Cloud Storage's."""
    return path.startswith(SCHEME)


def is_bucket(path: str) -> bool:
    """Whether the path is a bucket alone."""
    return is_gs(path) and not split_bucket(path.rstrip('/'))[1]


def is_dir(path: str) -> bool:
    """Whether objects have the path as a folder; taken for granted of a bucket."""
    if is_bucket(path):
        return True
    try:
        return bool(_gfile().stat(path).is_directory)  # its isdir() also says False when it may not look
    except Exception as error:
        if _code_of(error) == _NOT_FOUND:
            return False
        raise


def list_dir(folder: str) -> dict[str, bool]:
    """Names in the folder, and whether each is a folder's; two requests for each 1,000."""
    try:
        names = _gfile().listdir(folder)
    except Exception as error:
        # It says 'not found' of a folder, or a bucket, at which it may not look, too.
        if _code_of(error) != _NOT_FOUND or not is_dir(folder):
            raise
        prefix = folder.rstrip('/') + '/'
        paths = _gfile().glob(prefix + '*')
        names = [path[len(prefix) :] + ('/' if is_dir(path) else '') for path in paths]
    # Where an object has the name of a folder, the object comes last and counts.
    return {name.rstrip('/'): name.endswith('/') for name in sorted(names, reverse=True) if name.strip('/')}


def glob(pattern: str, *, files_only: bool = False) -> list[str]:
    """Paths that match, looked for folder by folder.

    TensorFlow's own lists all that is below the first folder, which may be the whole bucket.

    Args:
      pattern: '*', '?' and '[...]' match within one name; a name that is spelt like the pattern is taken before all others.
      files_only: leave out folders.
    """
    bucket, *parts = pattern[len(SCHEME) :].split('/')
    paths = [SCHEME + bucket]
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if not is_last and not any(character in part for character in WILDCARDS):
            paths = [f'{path}/{part}' for path in paths]
            continue
        found = []
        for path in paths:
            entries = list_dir(path) if is_dir(path) else {}
            usable = [
                name for name, is_folder in entries.items() if (not is_folder or not files_only if is_last else is_folder)
            ]
            names = [part] if part in usable else [name for name in usable if fnmatch.fnmatchcase(name, part)]
            found += [f'{path}/{name}' for name in names]
        paths = found
    return paths


def make_dir(folder: str) -> None:
    """Makes an empty object that stands for the folder, if there is none; none is needed for those above it."""
    if is_bucket(folder):
        return
    try:
        _gfile().mkdir(folder)
    except Exception as error:
        if _code_of(error) != _ALREADY_EXISTS:
            raise


def split_bucket(path: str) -> tuple[str, str]:
    """Bucket and object of a gs:// path; the object of a bucket alone is ''."""
    bucket, _, name = path[len(SCHEME) :].partition('/')
    return bucket, name


def find_failed_path(message: str) -> Optional[str]:
    """The gs:// path of a request that failed, from an error of TensorFlow; None when the error is of another kind."""
    match = re.search(r'gs://[^\s\'",;\]]+', message)
    is_request = re.search(r'HTTP response code \d|libcurl code \d', message)
    return match.group(0).rstrip('.:') if match and is_request else None


def explain(message: str, code: int, path: str, environ: Mapping[str, str] = os.environ) -> str:
    """What an error of TensorFlow's client means.

    Args:
      message: the error's.
      code: the error's `error_code`.
      path: what was asked for.
      environ: where the credentials are looked for.

    Returns:
      One line without the path: the reason, bucket, object and account, the remedy.
    """
    bucket, name = split_bucket(path)
    where = f'bucket {bucket}' + (f', object {name}' if name else '') + f', account: {describe_account(environ)}'
    status = _find_status(message, code)
    words = _find_words(message)
    said = f'HTTP {status}' + (f': {words.rstrip(".")}' if words else '')
    if status in (401, 403):
        remedy = (
            f'grant the account roles/storage.objectUser on {SCHEME}{bucket} (roles/storage.objectViewer is enough to read)'
        )
        return f'permission denied ({said}); {where}; {remedy}'
    if status == 404:
        return f'not found ({said}); {where}; look with: gcloud storage ls {SCHEME}{bucket}'
    if status == 429:
        remedy = 'run again with fewer workers, or after raising GCS_RETRY_CONFIG_MAX_RETRIES; it goes on from its checkpoint'
        return f'too many requests, at every retry ({said}); {where}; {remedy}'
    if status:
        return f'the service failed at every retry ({said}); {where}; run again: it goes on from its last checkpoint'
    curl = re.search(r"libcurl code \d+ meaning '([^']+)'(?:, error details: (?!\(none\))([^\n]{1,100}))?", message)
    if curl:
        return (
            f'the connection failed at every retry ({": ".join(filter(None, curl.groups()))}); {where}; '
            'see to the network, https_proxy and CURL_CA_BUNDLE, and run again: it goes on from its last checkpoint'
        )
    return f'{" ".join(message.split())[:_MAX_MESSAGE]}; {where}'


def _find_status(message: str, code: int) -> int:
    """HTTP status that the error stands for; 0 when there was no answer."""
    found = re.findall(r'HTTP response code (\d+)', message)
    if found:
        return int(found[-1])
    return {_NOT_FOUND: 404, _PERMISSION_DENIED: 403}.get(code, 0)


def _find_words(message: str) -> str:
    for pattern in _WORDS:
        match = re.search(pattern, message)
        if match:
            return ' '.join(match.group(1).replace('\\"', '"').split())[:_MAX_MESSAGE]
    return ''


def describe_account(environ: Mapping[str, str] = os.environ) -> str:
    """Whose credentials TensorFlow's client uses, looked for where it does: variable, gcloud's file, the machine."""
    if environ.get(TEST_TOKEN):
        return f'that of the token in {TEST_TOKEN}'
    path = environ.get(CREDENTIALS) or _gcloud_file(environ)
    if environ.get(CREDENTIALS) or os.path.exists(path):
        source = f'{CREDENTIALS}={path}' if environ.get(CREDENTIALS) else path
        try:
            return f'{_describe_credentials(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))} ({source})'
        except (OSError, ValueError) as error:
            return f'unknown: {source} cannot be read ({error})'
    email = '' if environ.get('NO_GCE_CHECK') else _ask_machine(environ)
    if email:
        return f'{email} (the service account of this machine)'
    return (
        f'none: no credentials found, requests are anonymous; set {CREDENTIALS} or run: gcloud auth application-default login'
    )


def _gcloud_file(environ: Mapping[str, str]) -> str:
    folder = environ.get('CLOUDSDK_CONFIG') or os.path.join(environ.get('HOME', ''), '.config', 'gcloud')
    return os.path.join(folder, 'application_default_credentials.json')


def _describe_credentials(credentials: Any) -> str:
    kind = credentials.get('type', 'unknown type') if isinstance(credentials, dict) else 'not an object'
    if kind == 'service_account':
        return str(credentials.get('client_email', 'a service account without client_email'))
    impersonated = re.search(r'serviceAccounts/([^:/]+)', str(credentials))
    if impersonated:
        return impersonated.group(1)
    if kind == 'authorized_user':
        return str(credentials.get('account') or 'a user')
    return f'credentials of type {kind}'


def _ask_machine(environ: Mapping[str, str]) -> str:
    """E-mail of the machine's service account; '' where there is no metadata server."""
    host = environ.get('GCE_METADATA_HOST') or METADATA_HOST
    url = f'http://{host}/computeMetadata/v1/instance/service-accounts/default/email'
    request = urllib.request.Request(url, headers={'Metadata-Flavor': 'Google'})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine: no proxy leads there
    try:
        with opener.open(request, timeout=_METADATA_SECS) as response:
            return response.read(_MAX_MESSAGE).decode('utf-8', 'replace').strip()
    except OSError:
        return ''


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


def _code_of(error: Exception) -> Optional[int]:
    return getattr(error, 'error_code', None)
