"""Calls of every kind, and what was done before each: to be made while something goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from model import operations as do
from model.expected import Model
from model.machine import Machine
from model.operations import MIB, Use

EXT4 = Use("mount", do.MULTI_WRITER, "ext4")
XFS = Use("mount", do.MULTI_WRITER, "xfs")
READER = Use("mount", do.READER_ONLY, "ext4")
BLOCK = Use("block", do.MULTI_WRITER)
EXTENTS = 300

AHEAD = (("carver/readAhead", "1MiB"),)
LIMIT, OTHER_LIMIT = (("carver/writeIOPS", "50"),), (("carver/writeIOPS", "60"),)
NO_LIMIT = (("carver/writeIOPS", "0"),)
CREATE = do.Create("a", 320 * MIB, 0, EXT4)
ATTACH = do.Attach("a", do.HERE, EXT4)
DETACH = do.Detach("a", do.HERE)
STAGE = do.Stage("a", "staging", EXT4)
UNSTAGE = do.Unstage("a", "staging")
PUBLISH = do.Publish("a", "staging", "target", EXT4)
UNPUBLISH = do.Unpublish("a", "target")
SNAPSHOT = do.Snapshot("a", "snap")
RESTORE = do.Create("copy", 400 * MIB, 0, EXT4, source=(do.OF_SNAPSHOT, "snap"))
CLONE = do.Create("copy", 324 * MIB, 0, EXT4, source=(do.OF_VOLUME, "a"))
BTRFS = Use("mount", do.MULTI_WRITER, "btrfs")
BTRFS_CREATE = do.Create("a", 256 * MIB, 0, BTRFS)
BTRFS_STAGE = do.Stage("a", "staging", BTRFS)
BTRFS_CLONE = do.Create("copy", 260 * MIB, 0, BTRFS, source=(do.OF_VOLUME, "a"))
RAW = do.Create("a", 32 * MIB, 0, BLOCK)
RAW_STAGE = do.Stage("a", "staging", BLOCK)
RAW_PUBLISH = do.Publish("a", "staging", "target", BLOCK, read_only=True)
RAW_WRITER = do.Publish("a", "staging", "other", BLOCK)

SEALED = (("carver/encryption", "luks2"),)
SEALED_CREATE = replace(CREATE, parameters=SEALED)
SEALED_STAGE = replace(STAGE, key="sesame")
SEALED_RAW = replace(RAW, parameters=SEALED)
SEALED_CLONE = replace(CLONE, parameters=SEALED)
SEALED_RAW_STAGE = replace(RAW_STAGE, key="sesame")

EXPAND = do.Expand("a", 400 * MIB)
LATER = do.NodeExpand("a", "staging", 400 * MIB)
TOO_LARGE = do.NodeExpand("a", "staging", 1 << 42)
RAW_LATER = do.NodeExpand("a", "target", 64 * MIB)
STAGE_COPY = do.Stage("copy", "staging", EXT4)
STAGE_SEALED_COPY = replace(STAGE_COPY, key="sesame")
LIMITED = replace(CREATE, mutable=LIMIT)
LIMITED_RAW = replace(RAW, mutable=LIMIT)
LIMITED_SEALED = replace(SEALED_CREATE, mutable=LIMIT)
# What was done before a call.
STAGED = (CREATE, STAGE)
USED = (*STAGED, UNSTAGE)
RAW_STAGED = (RAW, RAW_STAGE)
RAW_READ = (*RAW_STAGED, RAW_PUBLISH)
SEALED_STAGED = (SEALED_CREATE, SEALED_STAGE)
SEALED_USED = (*SEALED_STAGED, UNSTAGE)
READS = replace(do.READS, fs_type="ext4")
RESTORED = (*USED, SNAPSHOT, replace(RESTORE, use=READS))
STAGE_RESTORED = replace(STAGE_COPY, use=READS)
READ = do.Publish("copy", "staging", "target", READS)
ON_RECORD = (*STAGED, SNAPSHOT, LATER, UNSTAGE)
INLINE = do.PublishInline("csi-1", "target", 320 * MIB, EXT4)
END = do.Unpublish("csi-1", "target")


def deactivate(machine: Machine, model: Model) -> None:
    """The volume's device is taken away before the call."""
    machine.deactivate("a")
    model.deactivate("a")


def reboot(machine: Machine, model: Model) -> None:
    """The node boots before the call."""
    machine.reboot()
    model.reboot()


def nothing(machine: Machine, model: Model) -> None:
    """Nothing happens before the call."""


@dataclass(frozen=True)
class Case:
    """A call, and what was done before it."""

    call: do.Call
    before: tuple[do.Call, ...] = ()
    arrange: Callable[[Machine, Model], None] = field(default=nothing)
    # A wipe that takes longer than its caller waits, so that it is put on record first.
    long_wipe: bool = False
    # Its last step is behind its answer.
    behind: bool = False
    code: str = "OK"


CASES = {
    "create": Case(CREATE),
    "create, raw": Case(RAW),
    "create, with its read-ahead": Case(replace(CREATE, mutable=AHEAD)),
    "create again, with another read-ahead": Case(replace(CREATE, mutable=AHEAD), (CREATE,)),
    "create of a volume, with its read-ahead": Case(replace(CLONE, mutable=AHEAD), (CREATE,)),
    "modify": Case(do.Modify("a", AHEAD), (CREATE,)),
    "modify, in use": Case(do.Modify("a", AHEAD), (*STAGED, PUBLISH)),
    "modify, inactive": Case(do.Modify("a", AHEAD), (CREATE,), deactivate),
    "create, limited": Case(LIMITED),
    "create again, with another limit": Case(
        replace(CREATE, mutable=OTHER_LIMIT), (LIMITED, STAGE, PUBLISH)
    ),
    "modify, limited from now on": Case(do.Modify("a", LIMIT), (*STAGED, PUBLISH)),
    "modify, with another limit": Case(do.Modify("a", OTHER_LIMIT), (LIMITED, STAGE, PUBLISH)),
    "modify, without a limit": Case(do.Modify("a", NO_LIMIT), (LIMITED, STAGE, PUBLISH)),
    "modify, limited and inactive": Case(do.Modify("a", LIMIT), (CREATE,), deactivate),
    "stage, limited": Case(STAGE, (LIMITED,)),
    "stage, encrypted, limited": Case(SEALED_STAGE, (LIMITED_SEALED,)),
    "stage, limited, after a reboot": Case(STAGE, (LIMITED, STAGE), reboot),
    "publish, limited, raw": Case(RAW_WRITER, (LIMITED_RAW, RAW_STAGE)),
    "unpublish, limited, raw": Case(
        do.Unpublish("a", "other"), (LIMITED_RAW, RAW_STAGE, RAW_WRITER)
    ),
    "unstage, limited": Case(UNSTAGE, (LIMITED, STAGE)),
    "snapshot, limited": Case(SNAPSHOT, (LIMITED, STAGE)),
    "expand on the node, limited": Case(LATER, (LIMITED, STAGE)),
    "attach": Case(ATTACH, (CREATE,)),
    "attach, in use": Case(ATTACH, (*STAGED, PUBLISH)),
    "attach, for reading": Case(replace(ATTACH, read_only=True), (CREATE,)),
    "attach, as it is": Case(ATTACH, (CREATE, ATTACH)),
    "attach, otherwise": Case(
        replace(ATTACH, read_only=True), (CREATE, ATTACH), code="ALREADY_EXISTS"
    ),
    "attach, encrypted": Case(ATTACH, SEALED_STAGED),
    "detach": Case(DETACH, (CREATE, ATTACH)),
    "detach, in use": Case(DETACH, (CREATE, ATTACH, STAGE, PUBLISH)),
    "delete, attached": Case(do.Delete("a"), (CREATE, ATTACH)),
    "create of a volume, attached": Case(CLONE, (CREATE, ATTACH)),
    "delete": Case(do.Delete("a"), (CREATE,)),
    "delete, formatted": Case(do.Delete("a"), USED),
    "delete, inactive": Case(do.Delete("a"), (CREATE,), deactivate),
    "delete, a long wipe": Case(do.Delete("a"), (CREATE,), long_wipe=True),
    "expand": Case(EXPAND, (CREATE,)),
    "expand, without room": Case(do.Expand("a", 1 << 42), (CREATE,), code="OUT_OF_RANGE"),
    "expand, by less than was refused": Case(EXPAND, (CREATE, do.Expand("a", 1 << 42))),
    "stage": Case(STAGE, (CREATE,)),
    "stage, xfs": Case(do.Stage("a", "staging", XFS), (do.Create("a", 320 * MIB, 0, XFS),)),
    "stage, read-only": Case(do.Stage("a", "staging", READER), (CREATE,)),
    "stage, inactive": Case(STAGE, (CREATE,), deactivate),
    "stage, raw": Case(RAW_STAGE, (RAW,), deactivate),
    "unstage": Case(UNSTAGE, STAGED),
    "publish": Case(PUBLISH, STAGED),
    "publish, read-only": Case(do.Publish("a", "staging", "target", EXT4, read_only=True), STAGED),
    "publish, not staged": Case(PUBLISH, USED),
    "publish, not staged and inactive": Case(PUBLISH, USED, deactivate),
    "publish, never staged": Case(PUBLISH, (CREATE,)),
    "publish, raw and inactive": Case(RAW_WRITER, (RAW,), deactivate),
    "publish, raw": Case(do.Publish("a", "staging", "target", BLOCK), RAW_STAGED),
    "publish, raw and read-only": Case(RAW_PUBLISH, RAW_STAGED),
    "publish, raw and read-only, beside a writer": Case(RAW_PUBLISH, (*RAW_STAGED, RAW_WRITER)),
    "unpublish, raw and read-only, beside a writer": Case(
        UNPUBLISH, (*RAW_STAGED, RAW_WRITER, RAW_PUBLISH)
    ),
    "unpublish": Case(UNPUBLISH, (*STAGED, PUBLISH)),
    "publish, inline": Case(INLINE),
    "publish, inline, again after a reboot": Case(INLINE, (INLINE,), reboot),
    "unpublish, inline": Case(END, (INLINE,)),
    "unpublish, inline, a long wipe": Case(END, (INLINE,), long_wipe=True),
    "unpublish, raw and read-only": Case(UNPUBLISH, RAW_READ),
    "expand on the node": Case(do.NodeExpand("a", "target", 400 * MIB), (*STAGED, PUBLISH)),
    "expand on the node, raw": Case(RAW_LATER, RAW_READ),
    "expand on the node, without room": Case(TOO_LARGE, STAGED, code="FAILED_PRECONDITION"),
    "expand on the node, by less than was refused": Case(LATER, (*STAGED, TOO_LARGE)),
    "stage, with a size that was refused": Case(STAGE, (*STAGED, TOO_LARGE, UNSTAGE)),
    "stage, encrypted, after it grew without its key": Case(
        SEALED_STAGE, (*SEALED_STAGED, LATER, UNSTAGE)
    ),
    "expand, with a snapshot": Case(EXPAND, (CREATE, SNAPSHOT)),
    "expand on the node, in use with a snapshot": Case(
        LATER, (*STAGED, SNAPSHOT), code="FAILED_PRECONDITION"
    ),
    "stage, with a size on record": Case(STAGE, ON_RECORD),
    "stage, raw, with a size on record": Case(
        RAW_STAGE, (*RAW_READ, SNAPSHOT, RAW_LATER, UNPUBLISH)
    ),
    "expand, to less than is on record": Case(do.Expand("a", 360 * MIB), ON_RECORD),
    "snapshot": Case(SNAPSHOT, (CREATE,)),
    "snapshot, formatted": Case(SNAPSHOT, STAGED),
    "snapshot, btrfs": Case(SNAPSHOT, (BTRFS_CREATE, BTRFS_STAGE)),
    "snapshot, inactive": Case(SNAPSHOT, (CREATE,), deactivate),
    "delete a snapshot": Case(do.DeleteSnapshot("snap"), (CREATE, SNAPSHOT)),
    "create of a snapshot": Case(RESTORE, (CREATE, SNAPSHOT)),
    "create of a snapshot, inactive": Case(RESTORE, (CREATE, SNAPSHOT), deactivate),
    "create of a snapshot, for readers": Case(RESTORED[-1], RESTORED[:-1]),
    "stage a copy for readers": Case(STAGE_RESTORED, RESTORED),
    "publish a copy to a second reader": Case(
        replace(READ, path="other"), (*RESTORED, STAGE_RESTORED, READ)
    ),
    "expand a copy under its reader": Case(
        do.NodeExpand("copy", "target", 440 * MIB, reads=True), (*RESTORED, STAGE_RESTORED, READ)
    ),
    "create of a volume": Case(CLONE, (CREATE,)),
    "create of a btrfs": Case(BTRFS_CLONE, (BTRFS_CREATE, BTRFS_STAGE)),
    "stage a copy": Case(STAGE_COPY, (*USED, CLONE)),
    "delete a copy": Case(do.Delete("copy"), (CREATE, CLONE)),
    "create, encrypted": Case(SEALED_CREATE),
    "stage, encrypted": Case(SEALED_STAGE, (SEALED_CREATE,)),
    "stage, encrypted, again": Case(SEALED_STAGE, SEALED_USED),
    "stage, encrypted, after a reboot": Case(SEALED_STAGE, SEALED_STAGED, reboot),
    "stage, encrypted, raw": Case(SEALED_RAW_STAGE, (SEALED_RAW,), behind=True),
    "publish, encrypted, raw and read-only": Case(RAW_PUBLISH, (SEALED_RAW, SEALED_RAW_STAGE)),
    "unstage, encrypted": Case(UNSTAGE, SEALED_STAGED),
    "expand on the node, encrypted": Case(replace(LATER, key="sesame"), SEALED_STAGED),
    "expand on the node, encrypted, without the key": Case(
        LATER, SEALED_STAGED, code="FAILED_PRECONDITION"
    ),
    "snapshot, encrypted": Case(SNAPSHOT, SEALED_STAGED),
    "create of an encrypted volume": Case(SEALED_CLONE, SEALED_STAGED),
    "stage an encrypted copy": Case(STAGE_SEALED_COPY, (*SEALED_USED, SEALED_CLONE)),
    "delete, encrypted": Case(do.Delete("a"), SEALED_USED),
    "delete, encrypted and open": Case(do.Delete("a"), (SEALED_RAW, SEALED_RAW_STAGE)),
    "list snapshots": Case(do.Snapshots(), (CREATE, SNAPSHOT)),
    "get": Case(do.Get("a"), (CREATE,)),
    "validate": Case(do.Validate("a", EXT4), (CREATE,)),
    "list": Case(do.Volumes(), (CREATE,)),
    "capacity": Case(do.Capacity(), (CREATE,)),
}
