"""Single objects of the API server's: read, and the few that a moved volume's claim needs written.

Each write is for an object as it was read: the server refuses it where that has changed since. One
whose answer is lost is not repeated here; whoever wrote it looks whether it is so.
"""

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from agent import errors
from agent.cluster.access import Server
from agent.cluster.connection import Connection, Unproved

# As they are on the wire; nothing in them is changed in place.
Object = Mapping[str, Any]
_SECONDS = 15.0
# Of a read: what was asked for is asked for again.
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_JSON = {"Content-Type": "application/json"}
# RFC 7386: what is null there is removed.
_MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}
_MOST_CHARACTERS = 1000


class Objects:
    """Asks and tells one API server. All raise ClusterRefused."""

    def __init__(
        self,
        server: Server,
        *,
        seconds: float = _SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server = server
        self._seconds = seconds
        self._sleep = sleep

    def find(self, path: str, kind: str) -> Object | None:
        """The object at a path; None where the server says that there is none."""
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(_PAUSE_SECONDS)
            try:
                status, told = self._ask("GET", path)
            except (OSError, http.client.HTTPException, Unproved) as error:
                problem = _told(error)
                continue
            if status == http.client.NOT_FOUND and told.get("reason") == "NotFound":
                return None
            if status == http.client.OK and told.get("kind") == kind:
                return told
            problem = _refusal(status, told)
            if status < http.client.INTERNAL_SERVER_ERROR:
                break
        raise errors.ClusterRefused("GET", path, problem)

    def create(self, path: str, made: Object) -> None:
        """Make an object in a collection; refused where there is one of its name."""
        self._write("POST", path, made, _JSON)

    def review(self, path: str, asked: Object) -> Object:
        """What the server answers to a question that is put as an object, such as a right."""
        return self._write("POST", path, asked, _JSON)

    def change(self, path: str, change: Object, version: str) -> None:
        """Merge something into the object that was read in that version."""
        about = {**change.get("metadata", {}), "resourceVersion": version}
        self._write("PATCH", path, {**change, "metadata": about}, _MERGE_PATCH)

    def delete(self, path: str, uid: str) -> None:
        """Delete the object that has this UID; what finalizers there are see to it first."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        self._write("DELETE", path, body, _JSON)

    def _write(self, method: str, path: str, body: Object, content: Mapping[str, str]) -> Object:
        try:
            status, told = self._ask(method, path, json.dumps(body).encode(), content)
        except (OSError, http.client.HTTPException, Unproved) as error:
            problem = f"{_told(error)}; whether it was done is not known"
            raise errors.ClusterRefused(method, path, problem) from None
        if not http.client.OK <= status < http.client.MULTIPLE_CHOICES:
            raise errors.ClusterRefused(method, path, _refusal(status, told))
        return told

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        with Connection(self._server, self._seconds) as connection:
            until = time.monotonic() + self._seconds
            status, answer = connection.request(method, path, until, body, content)
        try:
            told = json.loads(answer)
        except ValueError:
            raise Unproved(f"it answers {status}, without JSON") from None
        if not isinstance(told, dict):
            raise Unproved(f"it answers {status}, without an object")
        return status, told


def _told(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _refusal(status: int, told: Object) -> str:
    said = str(told.get("message") or "")[:_MOST_CHARACTERS]
    return f"it answers {status}: {said}".rstrip(": ")
