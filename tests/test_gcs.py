"""The words for errors of gs://, and whose credentials are in use; `test_storage_gcs.py` has the rest, on a server."""

from __future__ import annotations

import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import pytest

from trainer import gcs

DENIED_JSON = (
    'Error executing an HTTP request: HTTP response code 403 with body \'{ "error": { "code": 403, "message": '
    '"sa@p.iam does not have storage.objects.get access.", "errors": [ { "message": "other" } ] } }\'\n'
    '\t when reading metadata of gs://b/a/x'
)
DENIED_XML = (
    "Error executing an HTTP request: HTTP response code 403 with body '<?xml version='1.0'?><Error><Code>AccessDenied</Code>"
    "<Message>Access denied.</Message><Details>sa@p.iam does not have storage.objects.get access.</Details></Error>'\n"
    '\t when reading gs://b/a/x\n\t [[{{node IteratorGetNext}}]]'
)
EXHAUSTED = 'All 10 retry attempts failed. The last failure: Error executing an HTTP request: HTTP response code {}'
BROKEN = (
    'All 10 retry attempts failed. The last failure: Error executing an HTTP request: libcurl code 56 meaning '
    "'Failure when receiving data from the peer', error details: Recv failure: Connection reset by peer\n\t when reading gs://b/x"
)
ACCOUNT = {'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'x'}


@pytest.mark.parametrize(
    ('message', 'code', 'parts'),
    [
        (
            DENIED_JSON,
            7,
            ['permission denied (HTTP 403: sa@p.iam does not have storage.objects.get access);', 'roles/storage.objectUser on gs://b'],
        ),
        (DENIED_XML, 7, ['(HTTP 403: sa@p.iam does not have storage.objects.get access);']),
        (EXHAUSTED.format(503), 10, ['the service failed at every retry (HTTP 503);', 'run again']),
        (EXHAUSTED.format(429), 10, ['too many requests, at every retry (HTTP 429);', 'GCS_RETRY_CONFIG_MAX_RETRIES']),
        ('The specified path gs://b/a/x was not found.', 5, ['not found (HTTP 404);', 'gcloud storage ls gs://b']),
        ('Could not find directory gs://b/a/x', 5, ['not found (HTTP 404);']),
        (
            BROKEN,
            10,
            ['the connection failed at every retry (Failure when receiving data from the peer: Recv failure: Connection reset'],
        ),
        ('something\nelse', 13, ['something else;']),
    ],
)  # fmt: skip
def test_error_names_reason_bucket_object_account_and_remedy(message: str, code: int, parts: list[str]) -> None:
    text = gcs.explain(message, code, 'gs://b/a/x', ACCOUNT)
    assert '\n' not in text
    for part in [*parts, 'bucket b, object a/x, account: that of the token in GOOGLE_AUTH_TOKEN_FOR_TESTING']:
        assert part in text


@pytest.mark.parametrize(
    ('message', 'path'),
    [
        (DENIED_XML, 'gs://b/a/x'),
        (BROKEN, 'gs://b/x'),
        ('Error executing an HTTP request: HTTP response code 503\n\t when renaming gs://b/y to gs://b/z', 'gs://b/y'),
        ('corrupted record at 0 of gs://b/x', None),
        ('HTTP response code 403 of some other service', None),
    ],
)
def test_path_of_a_failed_request_is_found(message: str, path: str) -> None:
    assert gcs.find_failed_path(message) == path


def write_credentials(folder: pathlib.Path, content: object) -> dict[str, str]:
    (folder / 'key.json').write_text(content if isinstance(content, str) else json.dumps(content))
    return {'GOOGLE_APPLICATION_CREDENTIALS': str(folder / 'key.json'), 'NO_GCE_CHECK': 'true'}


@pytest.mark.parametrize(
    ('content', 'account'),
    [
        ({'type': 'service_account', 'client_email': 'sa@p.iam'}, 'sa@p.iam'),
        ({'type': 'authorized_user', 'refresh_token': 'x'}, 'a user'),
        ({'type': 'authorized_user', 'account': 'me@example.com'}, 'me@example.com'),
        (
            {
                'type': 'impersonated_service_account',
                'service_account_impersonation_url': 'https://iam/v1/projects/-/serviceAccounts/sa@p.iam:generateAccessToken',
            },
            'sa@p.iam',
        ),
        ({'type': 'external_account'}, 'credentials of type external_account'),
        ([], 'credentials of type not an object'),
    ],
)
def test_account_is_that_of_the_credentials_file(tmp_path: pathlib.Path, content: object, account: str) -> None:
    environ = write_credentials(tmp_path, content)
    assert gcs.describe_account(environ) == f'{account} (GOOGLE_APPLICATION_CREDENTIALS={tmp_path}/key.json)'


def test_credentials_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    broken = gcs.describe_account(write_credentials(tmp_path, '{'))
    assert broken.startswith(f'unknown: GOOGLE_APPLICATION_CREDENTIALS={tmp_path}/key.json cannot be read (Expecting')
    missing = gcs.describe_account({'GOOGLE_APPLICATION_CREDENTIALS': f'{tmp_path}/nosuch', 'NO_GCE_CHECK': 'true'})
    assert 'nosuch cannot be read ([Errno 2]' in missing


def test_account_of_gcloud_login_is_found(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / '.config' / 'gcloud'
    folder.mkdir(parents=True)
    path = folder / 'application_default_credentials.json'
    path.write_text(json.dumps({'type': 'authorized_user', 'account': 'me@example.com'}))
    expected = f'me@example.com ({path})'
    assert gcs.describe_account({'HOME': str(tmp_path), 'NO_GCE_CHECK': 'true'}) == expected
    assert gcs.describe_account({'CLOUDSDK_CONFIG': str(folder), 'NO_GCE_CHECK': 'true'}) == expected


def test_no_credentials_are_said(tmp_path: pathlib.Path) -> None:
    account = gcs.describe_account({'HOME': str(tmp_path), 'NO_GCE_CHECK': 'true'})
    assert account.startswith('none: no credentials found, requests are anonymous; set GOOGLE_APPLICATION_CREDENTIALS')


@pytest.fixture
def machine() -> Iterator[str]:
    """A metadata server as a machine on Compute Engine has it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_right = self.path.endswith('/service-accounts/default/email') and self.headers['Metadata-Flavor'] == 'Google'
            self.send_response(200 if is_right else 404)
            self.end_headers()
            self.wfile.write(b'machine@p.iam\n')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02})
        thread.start()
        yield f'127.0.0.1:{server.server_port}'
        server.shutdown()
        thread.join()


def test_account_of_the_machine_is_asked_for(machine: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')  # no proxy leads there
    environ = {'HOME': str(tmp_path), 'GCE_METADATA_HOST': machine}
    assert gcs.describe_account(environ) == 'machine@p.iam (the service account of this machine)'
    assert gcs.describe_account({**environ, 'NO_GCE_CHECK': 'true'}).startswith('none: ')


@pytest.mark.parametrize(
    ('path', 'bucket', 'name'),
    [('gs://b', 'b', ''), ('gs://b/', 'b', ''), ('gs://b/x/y', 'b', 'x/y'), ('gs://b/x/', 'b', 'x/')],
)
def test_bucket_and_object_of_a_path(path: str, bucket: str, name: str) -> None:
    assert gcs.split_bucket(path) == (bucket, name)
    assert gcs.is_bucket(path) == (not name)
