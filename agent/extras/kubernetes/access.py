"""Connections to the Kubernetes API server, by a kubeconfig or as a pod.

Requests have a time limit, and answers a maximum size.
"""

import base64
import binascii
import http.client
import ipaddress
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from agent.core import errors
from agent.requests import secret

# Directory with the service account's token, which kubelet mounts into each pod.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# Keys in a kubeconfig's clusters and users that this module understands. Other keys with a value
# are refused.
_CLUSTER_KEYS = ("server", "certificate-authority", "certificate-authority-data")
_USER_KEYS = (
    *("client-certificate", "client-certificate-data", "client-key", "client-key-data"),
    *("token", "tokenFile"),
)
# Keys in a kubeconfig's clusters and users that are accepted and ignored: other programs write
# them.
_IGNORED = ("extensions",)


@dataclass(frozen=True)
class Server:
    """The address of an API server and the credentials for it.

    `source` is the file or directory that they come from, for errors. `tls` is None for http, which
    is allowed on this machine only. `token` is a function that returns the bearer token. It is
    called for each request because a pod's token changes each hour. None without a token.
    """

    source: str
    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None
    token: Callable[[], str] | None = None


def find(
    kubeconfig: Path | None, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> Server:
    """Return the API server of a kubeconfig; without a kubeconfig, that of this pod's cluster.

    In a pod, the credentials are those of its service account, in the directory `account`. Raises
    BadConfig if this is no pod and no kubeconfig is given, or if a file cannot be used.
    """
    if kubeconfig is not None:
        return of_file(kubeconfig)
    if not environment.get("KUBERNETES_SERVICE_HOST"):
        raise errors.BadConfig(
            "default",
            "kubeconfig",
            "is not set, and this is not a pod with a service account; name a file",
        )
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT")
    source = str(account)
    with _reading_errors(source, "ca.crt"):
        tls = _context((account / "ca.crt").read_text("ascii"))
    read_token = _token_of(source, account / "token")
    read_token()
    return Server(source, host, int(port or 443), tls=tls, token=read_token)


def namespace(account: Path = SERVICE_ACCOUNT) -> str:
    """Return the namespace of this pod. Raises BadConfig if this process does not run in a pod."""
    with _reading_errors(str(account), "namespace"):
        return (account / "namespace").read_text("ascii").strip()


def of_file(file: Path) -> Server:
    """Return the API server of a kubeconfig's current context.

    Raises BadConfig, with the key, if a part of the kubeconfig is missing, invalid or not
    understood.
    """
    source = str(file)
    with _reading_errors(source, "kubeconfig"):
        kubeconfig = yaml.safe_load(file.read_bytes())
    if not isinstance(kubeconfig, dict):
        raise errors.BadConfig(source, "kubeconfig", "is not a kubeconfig")
    current = kubeconfig.get("current-context")
    if not isinstance(current, str) or not current:
        raise errors.BadConfig(source, "current-context", "is required")
    context = _entry_named(source, kubeconfig, "contexts", "context", current)
    name = context.get("cluster")
    cluster = _entry_named(source, kubeconfig, "clusters", "cluster", name)
    _check_keys(source, f"clusters[{name}].cluster", cluster, _CLUSTER_KEYS)
    user: Mapping[str, Any] = {}
    if (name := context.get("user")) is not None:
        user = _entry_named(source, kubeconfig, "users", "user", name)
        _check_keys(source, f"users[{name}].user", user, _USER_KEYS)
    directory, address = file.parent, cluster.get("server")
    try:
        url = urlsplit(str(address))
        port = url.port
    except ValueError as error:
        raise errors.BadConfig(source, "server", f"{address!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query:
        raise errors.BadConfig(source, "server", f"{address!r} is not such as https://HOST:6443")
    token = _token(source, directory, user)
    if url.scheme == "http":
        if not _is_here(url.hostname):
            raise errors.BadConfig(
                source, "server", f"{address!r}: http is for this machine only; use https"
            )
        return Server(source, url.hostname, port or 80, url.path.rstrip("/"), token=token)
    tls = _tls(source, directory, cluster, user)
    return Server(source, url.hostname, port or 443, url.path.rstrip("/"), tls, token)


def _tls(
    source: str, directory: Path, cluster: Mapping[str, Any], user: Mapping[str, Any]
) -> ssl.SSLContext:
    authority = _content(source, directory, cluster, "certificate-authority")
    with _reading_errors(source, "certificate-authority"):
        # Without an authority in the kubeconfig, use the authorities that the machine trusts.
        tls = _context(None if authority is None else authority.decode("ascii"))
    certificate = _content(source, directory, user, "client-certificate")
    key = _content(source, directory, user, "client-key")
    if (certificate is None) is not (key is None):
        missing = "client-key" if key is None else "client-certificate"
        raise errors.BadConfig(source, missing, "is required beside the other")
    if certificate is not None and key is not None:
        pair = certificate + b"\n" + key
        with _reading_errors(source, "client-key"), secret.in_file(pair) as path:
            tls.load_cert_chain(path, password=_no_password)
    return tls


def _context(authorities: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authorities)
    # Clear the flag VERIFY_X509_STRICT, a default since Python 3.13: with it, kubeadm's
    # certificates would be refused, as they have no key identifiers (RFC 5280, 4.2.1.1). The chain
    # and the name are still checked.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _token(source: str, directory: Path, user: Mapping[str, Any]) -> Callable[[], str] | None:
    # Prefer `tokenFile` to `token`, as kubectl does.
    if file := user.get("tokenFile"):
        read_token = _token_of(source, directory / str(file))
        read_token()
        return read_token
    if (token := user.get("token")) is None:
        return None
    text = _as_header(source, "token", str(token))
    return lambda: text


def _token_of(source: str, file: Path) -> Callable[[], str]:
    def read() -> str:
        with _reading_errors(source, "token"):
            text = file.read_text("ascii")
        return _as_header(source, "token", text.strip())

    return read


def _as_header(source: str, key: str, text: str) -> str:
    """Return a token if it can stand in an HTTP header.

    Otherwise BadConfig is raised, without the token's text.
    """
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise errors.BadConfig(source, key, "is not a token")
    return text


def _content(source: str, directory: Path, table: Mapping[str, Any], key: str) -> bytes | None:
    """Return what a kubeconfig's table has under `KEY-data`, in base64, or else in the file `KEY`.

    `key` is KEY. None if the table has neither. Raises BadConfig if the value cannot be decoded, or
    the file cannot be read.
    """
    if data := table.get(f"{key}-data"):
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error:
            raise errors.BadConfig(source, f"{key}-data", "is not base64") from None
    if file := table.get(key):
        with _reading_errors(source, key):
            return (directory / str(file)).read_bytes()
    return None


def _entry_named(
    source: str, kubeconfig: Mapping[str, Any], list_key: str, entry_key: str, name: object
) -> Mapping[str, Any]:
    """Return the entry of that name in a list of a kubeconfig. Raises BadConfig without one."""
    for entry in kubeconfig.get(list_key) or ():
        if (
            isinstance(entry, dict)
            and entry.get("name") == name
            and isinstance(entry.get(entry_key), dict)
        ):
            table: Mapping[str, Any] = entry[entry_key]
            return table
    raise errors.BadConfig(source, list_key, f"has none of the name {name!r}")


def _check_keys(
    source: str, path: str, table: Mapping[str, Any], known_keys: tuple[str, ...]
) -> None:
    for key, value in table.items():
        # Allow any key with an empty value, such as `insecure-skip-tls-verify: false`: the key has
        # no effect.
        if value and key not in (*known_keys, *_IGNORED):
            allowed = ", ".join(known_keys)
            raise errors.BadConfig(
                source, f"{path}.{key}", f"is not understood here; allowed: {allowed}"
            )


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_password() -> str:
    """Raise ValueError: OpenSSL calls this function for the password of a client's key.

    OpenSSL would otherwise ask for the password at the terminal.
    """
    raise ValueError("the key has a password; use one without")


@contextmanager
def _reading_errors(source: str, key: str) -> Iterator[None]:
    """Turn errors within the `with`, of reading a source, into BadConfig.

    The error's text never shows a token or key from the source.
    """
    try:
        yield
    except OSError as error:  # includes ssl.SSLError
        raise errors.BadConfig(source, key, f"cannot be read: {error.strerror or error}") from None
    except yaml.YAMLError:
        raise errors.BadConfig(source, key, "is not YAML") from None
    except ValueError as error:
        why = "is not ASCII" if isinstance(error, UnicodeError) else str(error)
        raise errors.BadConfig(source, key, why) from None


# Maximum size, in bytes, of an answer of the API server, and of a part of it that is read at once.
_LARGEST_ANSWER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16


class Unproved(Exception):
    """Error: an answer of the API server is incomplete or inconsistent; a retry may succeed."""


class TooLong(Unproved):
    """Error: an answer of the API server is too large; a request for less may succeed."""


class Connection:
    """A connection to the API server, with a time limit and a maximum size for each answer.

    A request fails if no further part of its answer comes for `silence_seconds`.
    """

    def __init__(self, server: Server, silence_seconds: float) -> None:
        self._server, self._silence_seconds = server, silence_seconds
        host, port = server.host, server.port
        self._http = http.client.HTTPConnection(host, port, timeout=silence_seconds)
        if (tls := server.tls) is not None:
            self._http = http.client.HTTPSConnection(
                host, port, timeout=silence_seconds, context=tls
            )

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        deadline: float,
        body: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Send a request to the API server, and return the status and the body of its answer.

        `content` are headers of the request, such as Content-Type. The whole request must end by
        `deadline` (monotonic, seconds). Raises TimeoutError if it does not, Unproved if the answer
        is cut off or too large (TooLong), and what http.client raises.
        """
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._http.timeout = min(self._silence_seconds, remaining)
        if self._http.sock is not None:
            self._http.sock.settimeout(self._http.timeout)
        headers = {"Accept": "application/json", "User-Agent": "carver", **(content or {})}
        if self._server.token is not None:
            headers["Authorization"] = f"Bearer {self._server.token()}"
        self._http.request(method, self._server.path + path, body=body, headers=headers)
        response = self._http.getresponse()
        chunks, size, expected_size = [], 0, response.length
        # Read the answer in parts, and check the deadline after each: the socket's timeout does not
        # end a request to a server that sends a byte now and then.
        while expected_size is None or size < expected_size:
            if not (chunk := response.read1(_CHUNK_BYTES)):
                break
            chunks.append(chunk)
            size += len(chunk)
            if size > _LARGEST_ANSWER_BYTES:
                raise TooLong(f"its answer has more than {_LARGEST_ANSWER_BYTES} bytes")
            if time.monotonic() >= deadline:
                raise TimeoutError
        # Check the length of the answer: http.client detects a truncated answer only if the answer
        # is read at once.
        if expected_size is not None and size < expected_size:
            raise Unproved(f"its answer was cut off, {expected_size - size} bytes before its end")
        # Close the response: before Python 3.11.8, read1 leaves it open, and the connection cannot
        # be used again (gh-113199).
        response.close()
        return response.status, b"".join(chunks)
