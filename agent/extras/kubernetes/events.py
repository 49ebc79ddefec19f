"""Kubernetes Events about objects: each Event is created once, and renewed if it occurs again."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from agent.core import errors
from agent.extras.kubernetes.objects import Object, Objects

# Maximum numbers of characters of the two parts of an Event's name: the name of the object that the
# Event is about, and a digest. The name of an Event must be a DNS subdomain.
_NAME_CHARACTERS, _DIGEST_CHARACTERS = 200, 16
# Format of a time in the Kubernetes API, for strftime(3).
_TIME = "%Y-%m-%dT%H:%M:%SZ"
# Reason that the API server gives if it refuses to create an object because the object exists.
_EXISTS = "AlreadyExists"

# Seconds after which the Event of a condition that still holds is written again. The API server
# deletes an Event an hour after it was written last, by default (kube-apiserver, --event-ttl).
_RENEW_SECONDS = 1800.0
# Maximum number of texts that are remembered.
_MOST_REMEMBERED = 10_000

# Types of Kubernetes Events.
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
        """The namespace of Events about the object; `default` for a cluster-wide object."""
        return self.namespace or "default"


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event: `kind` is NORMAL or WARNING, `times` says how often it has occurred.

    Two Events with the same `key` about the same object are one Event that occurred again.
    """

    kind: str
    reason: str
    message: str
    key: str
    times: int = 1


class Said:
    """What the Events about lasting conditions said last, and when.

    The API server deletes an Event after a while, so what still holds is written again before.
    `monotonic` returns the seconds of a clock that is never set. The methods must not run
    concurrently.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last: dict[object, tuple[str, float]] = {}

    def is_due(
        self, key: object, text: str, *, lasts: bool = True, pause_seconds: float = 0.0
    ) -> bool:
        """Return whether a text is to be written, and note that it is.

        It is if it differs from the last one of the key, which was written `pause_seconds` ago or
        earlier; and, if it `lasts`, each _RENEW_SECONDS.
        """
        now = self._monotonic()
        if (known := self._last.get(key)) is not None:
            last, written_seconds = known
            least_seconds = _RENEW_SECONDS if last == text else pause_seconds
            if now - written_seconds < least_seconds or (last == text and not lasts):
                return False
        if len(self._last) >= _MOST_REMEMBERED:
            self._last.clear()
        self._last[key] = text, now
        return True

    def forget(self, key: object) -> None:
        """Have the next text of the key be written, as the last one could not be."""
        self._last.pop(key, None)


class Events:
    """Writes Kubernetes Events, with `component` as their source, and reads none.

    The name of an Event follows from the Event's object and key, so another process uses the same
    name for the same Event. The API server deletes Events after a while (its option --event-ttl, an
    hour by default).
    """

    def __init__(self, objects: Objects, component: str, clock: Callable[[], float]) -> None:
        """Set the API server's client, the source of Events, and a clock for their times.

        `clock` returns the seconds since the epoch.
        """
        self._objects, self._component, self._clock = objects, component, clock

    def ensure(self, subject: Subject, event: Event, *, is_new: bool) -> None:
        """Write an Event about an object, unless the Event exists.

        If the Event exists and `is_new` is true, its time, message and count are renewed. Raises
        ClusterRefused if the API server refuses or does not answer.
        """
        path = f"/api/v1/namespaces/{subject.events}/events"
        digest = hashlib.sha256(f"{subject.uid} {event.key}".encode()).hexdigest()
        prefix = subject.name[:_NAME_CHARACTERS].rstrip("-.")
        name = f"{prefix}.{digest[:_DIGEST_CHARACTERS]}"
        now = datetime.fromtimestamp(self._clock(), UTC).strftime(_TIME)
        try:
            self._objects.create(path, self._event_object(subject, event, name, now))
        except errors.ClusterRefused as error:
            if error.reason != _EXISTS:
                raise
            if is_new:
                change: dict[str, object] = {"lastTimestamp": now, "message": event.message}
                if event.times > 1:
                    change["count"] = event.times
                self._objects.merge(f"{path}/{name}", change)

    def _event_object(self, subject: Subject, event: Event, name: str, now: str) -> Object:
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
