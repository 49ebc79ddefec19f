"""A Lease of the API server: of several controllers, at most one holds it and does the work.

The form is that of coordination.k8s.io/v1, as the sidecars use it to elect a leader. A holder
renews its Lease. Another process takes it over once it has seen no renewal for DURATION_SECONDS by
its own monotonic clock, so the clocks of the processes need not agree.

A Lease saves work that is done twice, and proves nothing: a holder counts as one until it sees
another. While it cannot reach the API server it goes on, and another may have begun. So what is
done under a Lease must be right also if two processes do it at once.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from agent.core import errors
from agent.daemon.extra import Extra
from agent.extras.kubernetes.objects import Object, Objects
from agent.work.background import PeriodicTask

# Seconds without a renewal after which another process takes a Lease over.
DURATION_SECONDS = 30
# Seconds between two calls of `keep`.
KEEP_SECONDS = 5.0
# The form of `renewTime` and `acquireTime` (apimachinery, MicroTime).
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_KIND = "Lease"


class Lease:
    """The Lease `name` in a namespace; `keep` is called by one thread, every KEEP_SECONDS.

    `process` begins the name of the holder, such as the name of a pod. `clock` returns the seconds
    since the epoch, `monotonic` those of a clock that is never set. The holder publishes a text
    with the Lease, in the annotation `key`; `text` returns what is to be published.
    """

    def __init__(
        self,
        objects: Objects,
        namespace: str,
        name: str,
        process: str,
        *,
        key: str,
        text: Callable[[], str],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects, self._name, self._key, self._text = objects, name, key, text
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._holder = f"{process}_{secrets.token_hex(4)}"
        self._clock, self._monotonic = clock, monotonic
        # The version of the Lease that was seen last, and when it was seen first.
        self._version, self._seen_seconds = "", 0.0
        # Whether this process holds the Lease, by what it has read or written last.
        self.is_held = False
        # The text that is published with the Lease, as last read.
        self._published_text = ""

    @property
    def other_text(self) -> str:
        """The text that another holder has published, as last read; empty if there is none."""
        return "" if self.is_held else self._published_text

    def keep(self) -> None:
        """Renew the Lease if this process holds it; take it over if no process does.

        Raises ClusterRefused if the API server does not answer, or refuses for another reason than
        that another process was faster.
        """
        lease = self._objects.find(self._path, _KIND)
        if lease is None:
            self._create()
            return
        now, spec = self._monotonic(), lease.get("spec") or {}
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._version:
            self._version, self._seen_seconds = version, now
        self._published_text = (lease["metadata"].get("annotations") or {}).get(self._key, "")
        holder = spec.get("holderIdentity")
        if holder == self._holder:
            self._replace(lease, self._renewed())
        elif not holder or now - self._seen_seconds >= DURATION_SECONDS:
            transitions = int(spec.get("leaseTransitions") or 0) + 1
            self._replace(lease, {**self._renewed(), **self._taken(transitions)})
        else:
            self.is_held = False

    def release(self) -> None:
        """Let another process take the Lease over at once; raises ClusterRefused as `keep` does."""
        if not self.is_held:
            return
        lease = self._objects.find(self._path, _KIND)
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._holder:
            self._replace(lease, {"holderIdentity": ""})
        self.is_held = False

    def _create(self) -> None:
        new_lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": _KIND,
            "metadata": {"name": self._name, "annotations": self._annotations()},
            "spec": {**self._renewed(), **self._taken(0)},
        }
        self._write(lambda: self._objects.create(self._collection, new_lease))

    def _replace(self, lease: Object, new_spec: Object) -> None:
        """Replace what was read of the Lease; its version is the precondition."""
        annotations = {**(lease["metadata"].get("annotations") or {}), **self._annotations()}
        metadata = {**lease["metadata"], "annotations": annotations}
        new_lease = {**lease, "metadata": metadata, "spec": {**lease.get("spec", {}), **new_spec}}
        self._write(lambda: self._objects.replace(self._path, new_lease))

    def _write(self, write: Callable[[], None]) -> None:
        """Write the Lease. If another process has written it meanwhile, it is not held."""
        try:
            write()
        except errors.ClusterRefused as error:
            if error.reason not in ("AlreadyExists", "Conflict"):
                raise
            self.is_held = False
        else:
            self.is_held = True

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self._name}"

    def _annotations(self) -> Object:
        return {self._key: self._text()}

    def _renewed(self) -> Object:
        return {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": self._now(),
        }

    def _taken(self, transitions: int) -> Object:
        return {"acquireTime": self._now(), "leaseTransitions": transitions}

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime(_TIME)


class LeaseTask(Extra):
    """Keeps a Lease while the process runs, and releases it at the end."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.task = PeriodicTask(
            "lease", lease.keep, KEEP_SECONDS, "cannot take or renew the Lease of this work: %s"
        )

    def start(self) -> None:
        """Begin to keep the Lease."""
        self.task.start()

    def stop(self) -> None:
        """Release the Lease, in a thread of its own: an API server that hangs delays no end."""
        self.task.stop()
        threading.Thread(target=self._release, name="release", daemon=True).start()

    def _release(self) -> None:
        # Another process takes over all the same, a while later.
        with suppress(errors.ClusterRefused):
            self._lease.release()
