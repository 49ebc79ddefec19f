"""Kubernetes Events about objects, each written once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from agent.core import errors
from agent.extras.kubernetes.objects import Object, Objects

# Largest number of characters of the two parts of an Event's name, which is a DNS subdomain: the
# object's name, and a digest.
_NAME_CHARACTERS, _DIGEST_CHARACTERS = 200, 16
# Format of a time in the API.
_TIME = "%Y-%m-%dT%H:%M:%SZ"
# Reason of the API server's refusal to create an object that exists.
_EXISTS = "AlreadyExists"

# Types of Events.
NORMAL, WARNING = "Normal", "Warning"


@dataclass(frozen=True)
class Subject:
    """The object that an Event is about; `namespace` is empty for a cluster-wide object."""

    kind: str
    namespace: str
    name: str
    uid: str

    @property
    def events(self) -> str:
        """The namespace of the object's Events."""
        return self.namespace or "default"


@dataclass(frozen=True)
class Event:
    """An Event: `kind` is NORMAL or WARNING, `times` is how often it occurred.

    Two Events with the same `key` about the same object are one Event, which occurred again.
    """

    kind: str
    reason: str
    message: str
    key: str
    times: int = 1


class Events:
    """Writes Events, with `component` as their source, and reads none.

    The name of an Event follows from the Event's object and key, so another process uses the same
    name. The API server deletes Events after a while (its --event-ttl, an hour by default).
    """

    def __init__(self, objects: Objects, component: str, clock: Callable[[], float]) -> None:
        """Set the API server, the source of Events, and a clock of seconds since the epoch."""
        self._objects, self._component, self._clock = objects, component, clock

    def ensure(self, subject: Subject, event: Event, *, is_new: bool) -> None:
        """Write an Event unless it exists; with `is_new`, renew one that exists.

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
                change: dict[str, object] = {"lastTimestamp": now, "message": event.message}
                if event.times > 1:
                    change["count"] = event.times
                self._objects.merge(f"{path}/{name}", change)

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
