"""Subcommands of `carver volume`, `snapshot` and `group`, and `carver trace`; their arguments."""

import argparse
from collections.abc import Mapping

from agent.cli.words import Argument, Commands, flag, name_of, noun, verb
from agent.requests.parameters import LIMITS
from agent.settings import values
from agent.volumes.other_drivers import DRIVERS
from mount.filesystem import FILE_SYSTEMS

NAME = name_of("volume")
JSON = flag("--json", "as JSON")
NAMES = flag("--names", "their names alone, one a line")
YES = flag("--yes", "do not ask")
STORAGE_CLASS = Argument("--storage-class", default="carver", help="of the claim; else carver")
KEY_FILE = Argument(
    "--key-file",
    metavar="FILE",
    default="",
    help="with the key of an encrypted volume, all of its bytes; - is standard input",
)
FILE = Argument("file", metavar="FILE", help="where the copy is")


def add_volume(commands: Commands) -> Commands:
    """Add `carver volume` with its subcommands; return the object that takes more subcommands."""
    verbs = noun(
        commands,
        "volume",
        "make, use and delete volumes by hand",
        "Make, use and delete volumes by hand, through the socket of the service, on a"
        " node without Kubernetes. In a cluster, Kubernetes does this.",
    )
    verb(
        verbs,
        "create",
        "make a volume",
        lambda service, parsed: service.create(
            parsed.name,
            parsed.size,
            _parameters(parsed),
            raw=parsed.block,
            snapshot=parsed.from_snapshot,
            volume=parsed.from_volume,
        ),
        Argument("name", metavar="NAME", help="its name on this node"),
        Argument(
            "--size",
            type=_size,
            default=0,
            help="such as 512MiB, 10GiB (1024) or 10GB (1000); for a copy else the source's",
        ),
        Argument("--class", dest="device_class", help="a class; else the default one"),
        Argument("--fs-type", help=f"{', '.join(FILE_SYSTEMS)}; else the class's"),
        Argument(
            "--encryption", choices=("luks2",), help="encrypt it; it needs a key to be published"
        ),
        flag("--block", "a raw block volume"),
        (
            name_of("snapshot", "--from-snapshot", "to copy"),
            name_of("volume", "--from-volume", "to copy"),
        ),
    )
    verb(
        verbs,
        "list",
        "show all volumes",
        lambda service, parsed: service.show_all(as_json=parsed.json, names_only=parsed.names),
        (JSON, NAMES),
    )
    verb(
        verbs,
        "show",
        "show one volume, and where it is",
        lambda service, parsed: service.show(parsed.name, as_json=parsed.json),
        NAME,
        JSON,
    )
    verb(
        verbs,
        "publish",
        "have a volume appear at a path; the first time, format it",
        lambda service, parsed: service.publish(
            parsed.name,
            parsed.path,
            read_only=parsed.read_only,
            shared=parsed.shared,
            key_file=parsed.key_file,
        ),
        KEY_FILE,
        NAME,
        Argument(
            "path", metavar="PATH", help="where; created, below one of the service's kubelet_dir"
        ),
        flag("--read-only", "to be read only"),
        flag("--shared", "also if it is published elsewhere"),
    )
    verb(
        verbs,
        "unpublish",
        "take a volume from a path, which is removed",
        lambda service, parsed: service.unpublish(parsed.name, parsed.path, confirmed=parsed.yes),
        NAME,
        Argument("path", metavar="PATH", nargs="?", help="else from everywhere"),
        flag("--yes", "do not ask, also not for a pod's"),
    )
    verb(
        verbs,
        "expand",
        "make a volume larger, also while it is in use",
        lambda service, parsed: service.expand(parsed.name, parsed.size, parsed.key_file),
        NAME,
        KEY_FILE,
        Argument("size", metavar="SIZE", type=_size, help="the new size"),
    )
    verb(
        verbs,
        "modify",
        "limit a volume's I/O, or change its read-ahead or how fast its RAID is rebuilt",
        lambda service, parsed: service.modify(parsed.name, dict(parsed.parameters)),
        NAME,
        Argument(
            "parameters",
            metavar="KEY=VALUE",
            nargs="+",
            type=_parameter,
            help="readAhead (a size, 0 or auto); of a RAID minimumRecoveryRate,"
            " maximumRecoveryRate (a size each second and disk, 0 for none); the limits of I/O"
            f" {', '.join(row.key for row in LIMITS)} (a number or a size each second, 0 for none)",
        ),
    )
    verb(
        verbs,
        "repair",
        "repair a volume that lost a disk, or whose pool is damaged; wait until it is whole",
        lambda service, parsed: service.repair(
            parsed.name, pool_metadata=parsed.pool_metadata, confirmed=parsed.yes
        ),
        NAME,
        flag(
            "--pool-metadata", "of a thin volume: rebuild its pool's metadata, if they are damaged"
        ),
        flag("--yes", "do not ask, also where images of a RAID differ and one is overwritten"),
    )
    verb(
        verbs,
        "rekey",
        "give an encrypted volume another key, or one more for recovery",
        lambda service, parsed: service.headers(parsed.name).rekey(
            parsed.key_file, parsed.new_key_file, recovery=parsed.recovery
        ),
        NAME,
        KEY_FILE,
        Argument(
            "--new-key-file",
            metavar="FILE",
            default="",
            help="with the new key; else it is asked for",
        ),
        flag("--recovery", "a recovery key beside the volume's own"),
    )
    _add_header(
        noun(
            verbs,
            "header",
            "show, keep or put back the header of an encrypted volume",
            "Show, keep or put back the header of an encrypted volume, without which it is lost.",
        )
    )
    _add_adopt(verbs)
    verb(
        verbs,
        "manifest",
        "print a volume's PersistentVolume and claim, where the cluster has lost them",
        lambda service, parsed: service.show_manifest(
            parsed.name, parsed.claim, parsed.storage_class
        ),
        NAME,
        Argument(
            "--claim",
            default="",
            metavar="NAMESPACE/NAME",
            help="else the one that the volume was made for",
        ),
        STORAGE_CLASS,
    )
    verb(
        verbs,
        "delete",
        "erase and remove a volume",
        lambda service, parsed: service.delete(parsed.name, confirmed=parsed.yes),
        NAME,
        YES,
    )
    return verbs


def _add_adopt(verbs: Commands) -> None:
    verb(
        verbs,
        "adopt",
        "take a logical volume that Carver did not make as a volume, with what it holds",
        lambda service, parsed: (
            service.undo_adopt(parsed.path, dry_run=parsed.dry_run)
            if parsed.undo
            else service.adopt(
                parsed.path,
                parsed.claim,
                parsed.storage_class,
                device_class=parsed.device_class,
                made_by=parsed.made_by,
                block=parsed.block,
                dry_run=parsed.dry_run,
            )
        ),
        Argument("path", metavar="GROUP/LV", help="a logical volume that is not in use"),
        Argument("--class", dest="device_class", default="", help="a class; else the default one"),
        Argument(
            "--from", dest="made_by", default="", choices=DRIVERS, help="the driver that made it"
        ),
        flag("--block", "a raw block volume, whatever it holds"),
        Argument(
            "--claim",
            default="",
            metavar="NAMESPACE/NAME",
            help="else its own name in the namespace default",
        ),
        STORAGE_CLASS,
        flag("--dry-run", "show what would be done, and change nothing"),
        flag("--undo", "give it its old name back, and remove Carver's tags"),
    )


def _add_header(verbs: Commands) -> None:
    verb(
        verbs,
        "show",
        "show what the header says",
        lambda service, parsed: service.headers(parsed.name).show(),
        NAME,
    )
    verb(
        verbs,
        "backup",
        "write the header, key slots and all, to a new file",
        lambda service, parsed: service.headers(parsed.name).back_up(parsed.file),
        NAME,
        FILE,
    )
    verb(
        verbs,
        "restore",
        "put the header of a file in place of the volume's, which is not open",
        lambda service, parsed: service.headers(parsed.name).restore(
            parsed.file, is_open=lambda: service.is_open(parsed.name), confirmed=parsed.yes
        ),
        NAME,
        FILE,
        YES,
    )


def add_snapshot(commands: Commands) -> Commands:
    """Add `carver snapshot` with its subcommands; return the object that takes further ones."""
    verbs = noun(
        commands,
        "snapshot",
        "take, list and delete snapshots by hand",
        "Take, list and delete snapshots by hand, through the socket of the service,"
        " on a node without Kubernetes.",
    )
    verb(
        verbs,
        "create",
        "keep a volume as it is now",
        lambda service, parsed: service.take_snapshot(parsed.volume, parsed.name, parsed.size),
        name_of("volume", "volume"),
        Argument("name", metavar="NAME", help="the snapshot's name on this node"),
        Argument(
            "--size", default="", help="the COW store, such as 5GiB or 30%%; else the class's"
        ),
    )
    verb(
        verbs,
        "list",
        "show all snapshots",
        lambda service, parsed: service.show_snapshots(
            as_json=parsed.json, names_only=parsed.names
        ),
        (JSON, NAMES),
    )
    verb(
        verbs,
        "delete",
        "delete a snapshot",
        lambda service, parsed: service.delete_snapshot(parsed.name, confirmed=parsed.yes),
        name_of("snapshot"),
        YES,
    )
    return verbs


def add_group(commands: Commands) -> None:
    """Add the command `carver group` with its subcommands."""
    verbs = noun(
        commands,
        "group",
        "put a disk in the place of another",
        "Replace disks of Carver's volume groups, through the socket of the service.",
    )
    verb(
        verbs,
        "replace-disk",
        "replace a disk by another; wait until all that was on it is on the new one",
        lambda service, parsed: service.replace_disk(parsed.old, parsed.new, confirmed=parsed.yes),
        Argument("old", metavar="OLD", help="its path; of a missing disk its UUID"),
        Argument("new", metavar="NEW", help="a vacant block device"),
        YES,
    )


def add_trace(commands: Commands) -> None:
    """Add the command `carver trace`."""
    verb(
        commands,
        "trace",
        "show the slowest of the last calls, with what each waited for and its steps",
        lambda service, parsed: service.show_slowest(
            parsed.most, parsed.method, as_json=parsed.json
        ),
        Argument("--most", type=int, default=10, metavar="N", help="so many; else 10"),
        Argument("--method", default="", help="only of this one, such as NodeStageVolume"),
        JSON,
    )


def _parameters(parsed: argparse.Namespace) -> Mapping[str, str]:
    """The arguments of `carver volume create` as parameters of a StorageClass."""
    parameters = {
        "class": parsed.device_class,
        "fsType": parsed.fs_type,
        "encryption": parsed.encryption,
    }
    return {key: value for key, value in parameters.items() if value}


def _parameter(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: a key, = and a value, such as readAhead=1MiB")
    return key, value


def _size(text: str) -> int:
    try:
        return values.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
