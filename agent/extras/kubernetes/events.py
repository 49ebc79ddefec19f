"""Write Kubernetes Events about objects, each once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from agent.core import errors
from agent.extras.kubernetes.objects import Object, Objects

# Of an Event's name, which is a DNS subdomain: the object's name, then the digest.
_NAME_CHARACTERS, _DIGEST_CHARACTERS = 200, 16
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_EXISTS = "AlreadyExists"

NORMAL, WARNING = "Normal", "Warning"


@dataclass(frozen=True)
class Subject:
    """An object that an Event is about; `namespace` is empty for one that is in none."""

    kind: str
    namespace: str
    name: str
    uid: str

    @property
    def events(self) -> str:
        """The namespace of its Events."""
        return self.namespace or "default"


@dataclass(frozen=True)
class Event:
    """What is to be said: `kind` is NORMAL or WARNING, `times` how often it occurred.

    Two Events of the same `key` about the same object are one, which occurred again.
    """

    kind: str
    reason: str
    message: str
    key: str
    times: int = 1


class Events:
    """Writes Events, which name `component` as their source; reads none.

    An Event's name follows from its object and key, so that another process writes the same one,
    until the API server deletes it (its --event-ttl, an hour by default).
    """

    def __init__(self, objects: Objects, component: str, clock: Callable[[], float]) -> None:
        """`clock` returns the seconds of the epoch."""
        self._objects, self._component, self._clock = objects, component, clock

    def ensure(self, subject: Subject, event: Event, *, is_new: bool) -> None:
        """Write an Event, unless it is there; one that is there is renewed if this `is_new`.

        Raises ClusterRefused.
        """
        path = f"/api/v1/namespaces/{subject.events}/events"
        digest = hashlib.sha256(f"{subject.uid} {event.key}".encode()).hexdigest()
        prefix = subject.name[:_NAME_CHARACTERS].rstrip("-.")
        name = f"{prefix}.{digest[:_DIGEST_CHARACTERS]}"
        now = datetime.fromtimestamp(self._clock(), UTC).strftime(_TIME)
        try:
            self._objects.create(path, self._made(subject, event, name, now))
        except errors.ClusterRefused as error:
            if error.reason != _EXISTS:
                raise
            if is_new:
                again: dict[str, object] = {"lastTimestamp": now, "message": event.message}
                if event.times > 1:
                    again["count"] = event.times
                self._objects.merge(f"{path}/{name}", again)

    def _made(self, subject: Subject, event: Event, name: str, now: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": subject.events},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
            "type": event.kind,
            "reason": event.reason,
            "message": event.message,
            "count": event.times,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": self._component},
            "reportingComponent": self._component,
        }
