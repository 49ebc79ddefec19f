"""Metadata snapshots of thin pools: a pool's metadata as they were once, to be read meanwhile.

A pool has one at most, and it outlives the process and the node's boot. While it is there nothing
that is deleted gives its blocks back. So whose it is stands on the pool as a tag from before it is
made until after it is gone: what a kill leaves is released by the next start, and one without that
tag is somebody else's and is left alone. It is kept for as long as a program reads by it, and no
longer.
"""

import contextvars
import errno
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent import errors, fact
from agent.engine.means import Means
from lvm import command, report, tags, volumes
from lvm import errors as lvm_errors
from lvm.devicemapper import ThinPool

_log = logging.getLogger(__name__)

_OWN = {fact.METADATA_SNAPSHOT: "reserved"}
_RELEASE_SECONDS = 60.0


@dataclass
class _Turn:
    """Who reads by a pool's metadata snapshot now; `begun` counts those that were made."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    begun: int = 0
    readers: int = 0
    is_changing: bool = False


class Reservations:
    """Reserves, and releases."""

    def __init__(self, means: Means) -> None:
        self._engines, self._inventory = means.engines, means.inventory
        self._devices = means.devices
        self._turns: defaultdict[tuple[str, str], _Turn] = defaultdict(_Turn)

    @contextmanager
    def held(self, group: str, pool: str) -> Iterator[str]:
        """Inside, the device of an active pool's metadata can be read, as they were then.

        As they were not before the call: who comes while others read waits until they have ended,
        and those who wait read together. Two commands, for the tag. Raises MetadataReserved,
        OperationPending where the time is over.
        """
        turn = self._turns[group, pool]
        self._join(turn, group, pool)
        try:
            yield self._devices.pool_metadata(group, pool)
        finally:
            self._leave(turn, group, pool)

    def resume(self, *groups: str) -> int:
        """Release what an earlier process left in these groups, or in all; returns how many."""
        count = 0
        for name in groups or self._engines.names:
            with self._engines.hold(name):
                found = self._inventory.read(name).groups.get(name)
                for pool in _marked(found) if found is not None else ():
                    if not self._turns[name, pool].readers:
                        if not self._inventory.is_active(name, pool):
                            volumes.activate(self._engines.lvm(name), name, pool)
                        self._release(name, pool)
                        count += 1
        return count

    def _join(self, turn: _Turn, group: str, pool: str) -> None:
        with turn.changed:
            wanted = turn.begun + 1
            while True:
                if not turn.is_changing and turn.readers and turn.begun >= wanted:
                    turn.readers += 1
                    return
                if not turn.is_changing and not turn.readers:
                    turn.is_changing = True
                    break
                if not turn.changed.wait(command.remaining_seconds()):
                    raise errors.OperationPending(f"{group}/{pool}")
        try:
            self._reserve(group, pool)
        except BaseException:
            self._changed(turn, readers=0)
            raise
        self._changed(turn, readers=1)

    def _leave(self, turn: _Turn, group: str, pool: str) -> None:
        with turn.changed:
            turn.readers -= 1
            if turn.readers:
                return
            turn.is_changing = True
        try:
            # Whoever leaves has perhaps no time left, nor a place among the calls.
            contextvars.Context().run(self._let_go, group, pool)
        except (errors.AgentError, lvm_errors.LvmError, OSError) as error:
            _log.error("thin pool %s/%s keeps old metadata for now: %s", group, pool, error)
        finally:
            self._changed(turn, readers=0)

    def _let_go(self, group: str, pool: str) -> None:
        with command.time_limit(_RELEASE_SECONDS):
            # At once: the pool pays for as long as it is kept. What is left of it is a tag.
            self._devices.release_metadata(group, pool)
            with self._engines.hold(group):
                volumes.mark(self._engines.lvm(group), group, pool, old=_OWN, new={})

    @staticmethod
    def _changed(turn: _Turn, readers: int) -> None:
        with turn.changed:
            turn.begun += readers
            turn.readers, turn.is_changing = readers, False
            turn.changed.notify_all()

    def _reserve(self, group: str, pool: str) -> None:
        with self._engines.hold(group):
            found = self._inventory.read(group).group(group)
            if pool in _marked(found):
                # Of an earlier reading that could not let go.
                self._release(group, pool)
            elif self._has(group, pool):
                raise errors.MetadataReserved(group, pool)
            volumes.mark(self._engines.lvm(group), group, pool, old={}, new=_OWN)
            try:
                self._devices.reserve_metadata(group, pool)
            except OSError as error:
                volumes.mark(self._engines.lvm(group), group, pool, old=_OWN, new={})
                if error.errno == errno.EBUSY:
                    raise errors.MetadataReserved(group, pool) from error
                raise

    def _release(self, group: str, pool: str) -> None:
        """Let go, if there is something, and then say so; the caller holds the group."""
        if self._has(group, pool):
            self._devices.release_metadata(group, pool)
        volumes.mark(self._engines.lvm(group), group, pool, old=_OWN, new={})

    def _has(self, group: str, pool: str) -> bool:
        told = self._inventory.status(group, pool)
        return any(isinstance(one, ThinPool) and one.has_metadata_snapshot for one in told)


def _marked(group: report.Group) -> list[str]:
    """The pools of a group whose metadata snapshot is Carver's, if there is one."""
    return [
        one.name
        for one in group.volumes.values()
        if fact.METADATA_SNAPSHOT in tags.decode(one.tags)
    ]
