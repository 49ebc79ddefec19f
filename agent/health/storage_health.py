"""What is wrong with this node's storage: its groups, lvm2, and what Carver needs beside them.

By what is known, as for volumes: no process is started, and no disk is waited for.
"""

import time
from collections.abc import Iterator, Sequence

from agent import errors
from agent.admission import Admission
from agent.engine.disks import REMEDY
from agent.engine.engine import Engine
from agent.engine.engines import Engines
from agent.engine.inventory import Inventory
from agent.health import conditions, preflight, reasons
from agent.health.conditions import Diagnosis
from agent.health.reasons import Condition, Reason
from lvm import errors as lvm_errors
from lvm import groups
from lvm.diskerrors import DiskErrors
from lvm.report import Group

# Where lvm2 keeps what it knows of the groups that it wrote to; vgremove(8) removes it.
_BACKUPS = "etc/lvm/backup"


class StorageHealth:
    """Carries out NodeGetStorageHealth."""

    def __init__(
        self,
        engines: Engines,
        known: Inventory,
        diagnosis: Diagnosis,
        node: preflight.Node,
        admission: Admission,
    ) -> None:
        self._engines = engines
        self._inventory = known
        self._diagnosis = diagnosis
        self.node = node
        self._admission = admission
        # For tests.
        self.disk_errors = DiskErrors()

    def conditions(self) -> Sequence[Condition]:
        """Everything that is known against it, each reason once; usually nothing."""
        self._inventory.leave_word()
        until = time.monotonic() + conditions.PATIENCE_SECONDS
        found = [*self._of_start()]
        for engine in self._engines:
            found += self._of_engine(engine, until)
        return reasons.distinct([*found, *self._of_programs()])

    def _of_start(self) -> Iterator[Condition]:
        if (problem := self._admission.problem) is not None:
            yield Condition(
                Reason.LVM_NOT_ANSWERING,
                f"Carver could not begin yet: {problem}; it tries again",
            )

    def _of_engine(self, engine: Engine, until_seconds: float) -> Iterator[Condition]:
        named, problem = f"volume group {engine.name}", engine.problem
        for path, why in engine.ignored:
            yield Condition(
                Reason.DISK_IGNORED,
                f"{path} is not used for {named}: it {why}; {REMEDY}",
                engine.time_seconds,
            )
        if isinstance(problem, errors.GroupRefused):
            yield Condition(Reason.GROUP_REFUSED, str(problem), engine.time_seconds)
            return
        if isinstance(problem, errors.GroupSilent):
            yield Condition(Reason.DISK_NOT_RESPONDING, str(problem), engine.tried_seconds)
        elif isinstance(problem, lvm_errors.LvmError | OSError):
            yield Condition(
                Reason.LVM_NOT_ANSWERING,
                f"{named} could not be looked at: {problem}; look for a disk that hangs (`dmesg`)",
                engine.tried_seconds,
            )
        if engine.last is not None:
            yield from reasons.aged(_of_group(engine.last), engine.time_seconds)
            yield from self._of_kernel(engine.last, until_seconds)
        elif engine.time_seconds and self._was_here(engine):
            yield Condition(
                Reason.GROUP_MISSING,
                f"{named} is not on this node, and was: attach its disks (`pvs --all`), or correct"
                " the classes that name it",
                engine.time_seconds,
            )

    def _was_here(self, engine: Engine) -> bool:
        """Whether the group ever was on this node: many a cluster has nodes without disks.

        This process saw it, or lvm2 still knows of it, or volumes of it are active.
        """
        if engine.seen is not None or self._inventory.is_any_active(engine.name):
            return True
        root = self.node.at(str(self.node.settings.lvm_root))
        return (root / _BACKUPS / engine.name).exists()

    def _of_kernel(self, group: Group, until_seconds: float) -> Iterator[Condition]:
        for one in group.volumes.values():
            if {"thin", "pool"} <= one.layout:
                yield from self._diagnosis.of_pool(group, one.name, until_seconds)
        for disk in group.disks:
            for told in () if disk.missing else self.disk_errors.of(disk.name):
                yield Condition(
                    Reason.MEDIUM_ERRORS,
                    f"a disk of volume group {group.name}: {told}; look at `dmesg` and `smartctl`,"
                    " and replace it (`pvmove`) while it can be read",
                )

    def _of_programs(self) -> Iterator[Condition]:
        settings = self.node.settings
        for fs_type in sorted({one.fs_type for one in settings.classes}):
            if missing := preflight.missing_programs(self.node, fs_type):
                yield Condition(
                    Reason.FILE_SYSTEM_TOOLS_MISSING,
                    f"{', '.join(missing)} is missing, so no volume can have {fs_type}: install"
                    f" {preflight.PACKAGES[fs_type]}",
                )
        if not self.node.at("/dev/loop-control").exists():
            yield Condition(
                Reason.LOOP_DEVICES_MISSING,
                "there are no loop devices, which read-only raw block volumes need: `modprobe"
                " loop`; in a container, mount the host's /dev",
            )


def _of_group(group: Group) -> Iterator[Condition]:
    missing = [one for one in group.disks if one.missing]
    if missing or group.missing_disks:
        gone = ", ".join(one.uuid for one in missing) or f"{group.missing_disks} of them"
        yield Condition(
            Reason.DISK_MISSING,
            f"volume group {group.name} misses a disk ({gone}): attach it again (`pvs`), or see"
            " `A disk is replaced` in docs/operations.md. What lies on it alone cannot be used",
        )
    if groups.is_text_full(group):
        yield Condition(
            Reason.GROUP_METADATA_FULL,
            f"the metadata area of volume group {group.name} is {groups.text_percent(group):.0f} %"
            " full: nothing new is made there. Delete volumes or snapshots, or see `A group's"
            " metadata area is full` in docs/operations.md",
        )
