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
CREATE = do.Create("a", 320 * MIB, 0, EXT4)
STAGE = do.Stage("a", "staging", EXT4)
PUBLISH = do.Publish("a", "staging", "target", EXT4)
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
REENCRYPTED = (*SEALED, ("carver/reencrypt", "true"))
SEALED_CREATE = replace(CREATE, parameters=SEALED)
SEALED_STAGE = replace(STAGE, key="sesame")
SEALED_RAW = replace(RAW, parameters=SEALED)
SEALED_CLONE = replace(CLONE, parameters=SEALED)
REENCRYPTED_CLONE = replace(CLONE, parameters=REENCRYPTED)
SEALED_RAW_STAGE = replace(RAW_STAGE, key="sesame")

LATER = do.NodeExpand("a", "staging", 400 * MIB)
TOO_LARGE = do.NodeExpand("a", "staging", 1 << 42)
RAW_LATER = do.NodeExpand("a", "target", 64 * MIB)
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
    "modify, in use": Case(do.Modify("a", AHEAD), (CREATE, STAGE, PUBLISH)),
    "modify, inactive": Case(do.Modify("a", AHEAD), (CREATE,), deactivate),
    "delete": Case(do.Delete("a"), (CREATE,)),
    "delete, formatted": Case(do.Delete("a"), (CREATE, STAGE, do.Unstage("a", "staging"))),
    "delete, inactive": Case(do.Delete("a"), (CREATE,), deactivate),
    "delete, a long wipe": Case(do.Delete("a"), (CREATE,), long_wipe=True),
    "expand": Case(do.Expand("a", 400 * MIB), (CREATE,)),
    "expand, without room": Case(do.Expand("a", 1 << 42), (CREATE,), code="OUT_OF_RANGE"),
    "expand, by less than was refused": Case(
        do.Expand("a", 400 * MIB), (CREATE, do.Expand("a", 1 << 42))
    ),
    "stage": Case(STAGE, (CREATE,)),
    "stage, xfs": Case(do.Stage("a", "staging", XFS), (do.Create("a", 320 * MIB, 0, XFS),)),
    "stage, read-only": Case(do.Stage("a", "staging", READER), (CREATE,)),
    "stage, inactive": Case(STAGE, (CREATE,), deactivate),
    "stage, raw": Case(RAW_STAGE, (RAW,), deactivate),
    "unstage": Case(do.Unstage("a", "staging"), (CREATE, STAGE)),
    "publish": Case(PUBLISH, (CREATE, STAGE)),
    "publish, read-only": Case(
        do.Publish("a", "staging", "target", EXT4, read_only=True), (CREATE, STAGE)
    ),
    "publish, raw": Case(do.Publish("a", "staging", "target", BLOCK), (RAW, RAW_STAGE)),
    "publish, raw and read-only": Case(RAW_PUBLISH, (RAW, RAW_STAGE)),
    "publish, raw and read-only, beside a writer": Case(RAW_PUBLISH, (RAW, RAW_STAGE, RAW_WRITER)),
    "unpublish, raw and read-only, beside a writer": Case(
        do.Unpublish("a", "target"), (RAW, RAW_STAGE, RAW_WRITER, RAW_PUBLISH)
    ),
    "unpublish": Case(do.Unpublish("a", "target"), (CREATE, STAGE, PUBLISH)),
    "publish, inline": Case(INLINE),
    "publish, inline, again after a reboot": Case(INLINE, (INLINE,), reboot),
    "unpublish, inline": Case(END, (INLINE,)),
    "unpublish, inline, a long wipe": Case(END, (INLINE,), long_wipe=True),
    "unpublish, raw and read-only": Case(
        do.Unpublish("a", "target"), (RAW, RAW_STAGE, RAW_PUBLISH)
    ),
    "expand on the node": Case(do.NodeExpand("a", "target", 400 * MIB), (CREATE, STAGE, PUBLISH)),
    "expand on the node, raw": Case(
        do.NodeExpand("a", "target", 64 * MIB), (RAW, RAW_STAGE, RAW_PUBLISH)
    ),
    "expand on the node, without room": Case(
        TOO_LARGE, (CREATE, STAGE), code="FAILED_PRECONDITION"
    ),
    "expand on the node, by less than was refused": Case(LATER, (CREATE, STAGE, TOO_LARGE)),
    "stage, with a size that was refused": Case(
        STAGE, (CREATE, STAGE, TOO_LARGE, do.Unstage("a", "staging"))
    ),
    "stage, encrypted, after it grew without its key": Case(
        SEALED_STAGE, (SEALED_CREATE, SEALED_STAGE, LATER, do.Unstage("a", "staging"))
    ),
    "expand, with a snapshot": Case(do.Expand("a", 400 * MIB), (CREATE, SNAPSHOT)),
    "expand on the node, in use with a snapshot": Case(
        LATER, (CREATE, STAGE, SNAPSHOT), code="FAILED_PRECONDITION"
    ),
    "stage, with a size on record": Case(
        STAGE, (CREATE, STAGE, SNAPSHOT, LATER, do.Unstage("a", "staging"))
    ),
    "stage, raw, with a size on record": Case(
        RAW_STAGE,
        (RAW, RAW_STAGE, RAW_PUBLISH, SNAPSHOT, RAW_LATER, do.Unpublish("a", "target")),
    ),
    "expand, to less than is on record": Case(
        do.Expand("a", 360 * MIB),
        (CREATE, STAGE, SNAPSHOT, LATER, do.Unstage("a", "staging")),
    ),
    "snapshot": Case(SNAPSHOT, (CREATE,)),
    "snapshot, formatted": Case(SNAPSHOT, (CREATE, STAGE)),
    "snapshot, btrfs": Case(SNAPSHOT, (BTRFS_CREATE, BTRFS_STAGE)),
    "snapshot, inactive": Case(SNAPSHOT, (CREATE,), deactivate),
    "delete a snapshot": Case(do.DeleteSnapshot("snap"), (CREATE, SNAPSHOT)),
    "create of a snapshot": Case(RESTORE, (CREATE, SNAPSHOT)),
    "create of a snapshot, inactive": Case(RESTORE, (CREATE, SNAPSHOT), deactivate),
    "create of a volume": Case(CLONE, (CREATE,)),
    "create of a btrfs": Case(BTRFS_CLONE, (BTRFS_CREATE, BTRFS_STAGE)),
    "stage a copy": Case(
        do.Stage("copy", "staging", EXT4),
        (CREATE, STAGE, do.Unstage("a", "staging"), CLONE),
    ),
    "delete a copy": Case(do.Delete("copy"), (CREATE, CLONE)),
    "create, encrypted": Case(SEALED_CREATE),
    "stage, encrypted": Case(SEALED_STAGE, (SEALED_CREATE,)),
    "stage, encrypted, again": Case(
        SEALED_STAGE, (SEALED_CREATE, SEALED_STAGE, do.Unstage("a", "staging"))
    ),
    "stage, encrypted, after a reboot": Case(SEALED_STAGE, (SEALED_CREATE, SEALED_STAGE), reboot),
    "stage, encrypted, raw": Case(SEALED_RAW_STAGE, (SEALED_RAW,), behind=True),
    "publish, encrypted, raw and read-only": Case(RAW_PUBLISH, (SEALED_RAW, SEALED_RAW_STAGE)),
    "unstage, encrypted": Case(do.Unstage("a", "staging"), (SEALED_CREATE, SEALED_STAGE)),
    "expand on the node, encrypted": Case(
        do.NodeExpand("a", "staging", 400 * MIB, key="sesame"), (SEALED_CREATE, SEALED_STAGE)
    ),
    "expand on the node, encrypted, without the key": Case(
        do.NodeExpand("a", "staging", 400 * MIB),
        (SEALED_CREATE, SEALED_STAGE),
        code="FAILED_PRECONDITION",
    ),
    "snapshot, encrypted": Case(SNAPSHOT, (SEALED_CREATE, SEALED_STAGE)),
    "create of an encrypted volume": Case(
        replace(CLONE, parameters=SEALED), (SEALED_CREATE, SEALED_STAGE)
    ),
    "stage an encrypted copy": Case(
        do.Stage("copy", "staging", EXT4, "sesame"),
        (SEALED_CREATE, SEALED_STAGE, do.Unstage("a", "staging"), SEALED_CLONE),
    ),
    "stage an encrypted copy that gets its own master key": Case(
        do.Stage("copy", "staging", EXT4, "sesame"),
        (SEALED_CREATE, SEALED_STAGE, do.Unstage("a", "staging"), REENCRYPTED_CLONE),
    ),
    "unstage an encrypted copy that has its own master key": Case(
        do.Unstage("copy", "staging"),
        (
            *(SEALED_CREATE, SEALED_STAGE, do.Unstage("a", "staging"), REENCRYPTED_CLONE),
            do.Stage("copy", "staging", EXT4, "sesame"),
        ),
    ),
    "delete, encrypted": Case(
        do.Delete("a"), (SEALED_CREATE, SEALED_STAGE, do.Unstage("a", "staging"))
    ),
    "delete, encrypted and open": Case(do.Delete("a"), (SEALED_RAW, SEALED_RAW_STAGE)),
    "list snapshots": Case(do.Snapshots(), (CREATE, SNAPSHOT)),
    "get": Case(do.Get("a"), (CREATE,)),
    "validate": Case(do.Validate("a", EXT4), (CREATE,)),
    "list": Case(do.Volumes(), (CREATE,)),
    "capacity": Case(do.Capacity(), (CREATE,)),
}
