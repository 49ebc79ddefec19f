"""The words of `carver volume` and `carver snapshot`, and which verb each is."""

import argparse
from collections.abc import Mapping

from agent.cli.words import Commands, add_name, verb
from agent.core import values


def add_volume(commands: Commands) -> Commands:
    """Add `carver volume`; return its verbs."""
    volume = commands.add_parser(
        "volume",
        help="make, use and delete volumes by hand",
        description="Make, use and delete volumes by hand, through the socket of the service, on a"
        " node without Kubernetes. In a cluster these are the cluster's to do.",
    )
    verbs = volume.add_subparsers(required=True, metavar="VERB")

    create = verb(
        verbs,
        "create",
        "make a volume",
        lambda verbs, parsed: verbs.create(
            parsed.name,
            parsed.size,
            _parameters(parsed),
            raw=parsed.block,
            snapshot=parsed.from_snapshot,
            volume=parsed.from_volume,
        ),
    )
    create.add_argument("name", metavar="NAME", help="its name on this node")
    create.add_argument(
        "--size",
        type=_size,
        default=0,
        help="such as 512MiB, 10GiB (1024) or 10GB (1000); for a copy else the source's",
    )
    create.add_argument("--class", dest="device_class", help="a class; else the default one")
    create.add_argument("--fs-type", help="ext4, xfs or btrfs; else the class's")
    create.add_argument(
        "--encryption", choices=("luks2",), help="encrypt it; it needs a key to be published"
    )
    create.add_argument(
        "--reencrypt", action="store_true", help="give an encrypted copy its own master key"
    )
    create.add_argument("--block", action="store_true", help="a raw block volume")
    source = create.add_mutually_exclusive_group()
    for noun in ("snapshot", "volume"):
        add_name(source, noun, f"--from-{noun}", "that it shall be a copy of")

    listing = verb(
        verbs,
        "list",
        "show all volumes",
        lambda verbs, parsed: verbs.show_all(as_json=parsed.json, names_only=parsed.names),
    )
    _add_forms(listing)

    show = verb(
        verbs,
        "show",
        "show one volume, and where it is",
        lambda verbs, parsed: verbs.show(parsed.name, as_json=parsed.json),
    )
    add_name(show)
    show.add_argument("--json", action="store_true", help="as JSON")

    publish = verb(
        verbs,
        "publish",
        "have a volume appear at a path; the first time, format it",
        lambda verbs, parsed: verbs.publish(
            parsed.name,
            parsed.path,
            read_only=parsed.read_only,
            shared=parsed.shared,
            key_file=parsed.key_file,
        ),
    )
    _add_key_file(publish)
    add_name(publish)
    publish.add_argument(
        "path", metavar="PATH", help="where; it is made, below one of the service's kubelet_dir"
    )
    publish.add_argument("--read-only", action="store_true", help="to be read only")
    publish.add_argument(
        "--shared", action="store_true", help="also where it is published elsewhere already"
    )

    unpublish = verb(
        verbs,
        "unpublish",
        "take a volume from a path, which is removed",
        lambda verbs, parsed: verbs.unpublish(parsed.name, parsed.path, confirmed=parsed.yes),
    )
    add_name(unpublish)
    unpublish.add_argument("path", metavar="PATH", nargs="?", help="else from everywhere")
    unpublish.add_argument("--yes", action="store_true", help="do not ask, also not for a pod's")

    expand = verb(
        verbs,
        "expand",
        "make a volume larger, also while it is in use",
        lambda verbs, parsed: verbs.expand(parsed.name, parsed.size, parsed.key_file),
    )
    add_name(expand)
    _add_key_file(expand)
    expand.add_argument("size", metavar="SIZE", type=_size, help="the size that it shall have")

    modify = verb(
        verbs,
        "modify",
        "change how a volume is read ahead, or how fast its RAID is rebuilt",
        lambda verbs, parsed: verbs.modify(parsed.name, dict(parsed.parameters)),
    )
    add_name(modify)
    modify.add_argument(
        "parameters",
        metavar="KEY=VALUE",
        nargs="+",
        type=_parameter,
        help="readAhead (a size, 0 or auto); of a RAID minimumRecoveryRate, maximumRecoveryRate"
        " (a size each second and disk, 0 for none)",
    )

    repair = verb(
        verbs,
        "repair",
        "make a volume whole again that lost a disk, or whose pool is damaged; wait until it is",
        lambda verbs, parsed: verbs.repair(parsed.name, pool_metadata=parsed.pool_metadata),
    )
    add_name(repair)
    repair.add_argument(
        "--pool-metadata",
        action="store_true",
        help="of a thin volume: have its pool's metadata written anew, if they are damaged",
    )

    rekey = verb(
        verbs,
        "rekey",
        "give an encrypted volume another key, or one more for recovery",
        lambda verbs, parsed: verbs.headers(parsed.name).rekey(
            parsed.key_file, parsed.new_key_file, recovery=parsed.recovery
        ),
    )
    add_name(rekey)
    _add_key_file(rekey)
    rekey.add_argument(
        "--new-key-file", metavar="FILE", default="", help="with the new key; else it is asked for"
    )
    rekey.add_argument(
        "--recovery", action="store_true", help="beside the volume's own, in place of one like it"
    )

    _add_header(verbs)

    delete = verb(
        verbs,
        "delete",
        "overwrite and remove a volume",
        lambda verbs, parsed: verbs.delete(parsed.name, confirmed=parsed.yes),
    )
    add_name(delete)
    delete.add_argument("--yes", action="store_true", help="do not ask")
    return verbs


def _add_header(volume: Commands) -> None:
    """The words of `carver volume header`."""
    text = "show, keep or put back the header of an encrypted volume"
    header = volume.add_parser(
        "header", help=text, description=f"{text[0].upper()}{text[1:]}, without which it is lost."
    )
    verbs = header.add_subparsers(required=True, metavar="VERB")
    show = verb(
        verbs,
        "show",
        "show what the header says",
        lambda verbs, parsed: verbs.headers(parsed.name).show(),
    )
    add_name(show)
    backup = verb(
        verbs,
        "backup",
        "write the header, key slots and all, to a new file",
        lambda verbs, parsed: verbs.headers(parsed.name).back_up(parsed.file),
    )
    restore = verb(
        verbs,
        "restore",
        "put the header of a file in place of the volume's, which is not open",
        lambda verbs, parsed: verbs.headers(parsed.name).restore(
            parsed.file, is_open=lambda: verbs.is_open(parsed.name), confirmed=parsed.yes
        ),
    )
    for one in (backup, restore):
        add_name(one)
        one.add_argument("file", metavar="FILE", help="where the copy is")
    restore.add_argument("--yes", action="store_true", help="do not ask")


def add_snapshot(commands: Commands) -> Commands:
    """Add `carver snapshot`; return its verbs."""
    snapshot = commands.add_parser(
        "snapshot",
        help="take, list and delete snapshots by hand",
        description="Take, list and delete snapshots by hand, through the socket of the service,"
        " on a node without Kubernetes.",
    )
    verbs = snapshot.add_subparsers(required=True, metavar="VERB")

    create = verb(
        verbs,
        "create",
        "keep a volume as it is now",
        lambda verbs, parsed: verbs.take(parsed.volume, parsed.name, parsed.size),
    )
    add_name(create, dest="volume")
    create.add_argument("name", metavar="NAME", help="the snapshot's name on this node")
    create.add_argument(
        "--size",
        default="",
        help="the room for what the volume overwrites, such as 5GiB or 30%%; else the class's",
    )

    listing = verb(
        verbs,
        "list",
        "show all snapshots",
        lambda verbs, parsed: verbs.show_snapshots(as_json=parsed.json, names_only=parsed.names),
    )
    _add_forms(listing)

    delete = verb(
        verbs,
        "delete",
        "delete a snapshot",
        lambda verbs, parsed: verbs.drop(parsed.name, confirmed=parsed.yes),
    )
    add_name(delete, "snapshot")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    return verbs


def add_group(commands: Commands) -> None:
    """The words of `carver group`."""
    group = commands.add_parser(
        "group",
        help="put a disk in the place of another",
        description="See to the disks of Carver's volume groups, through the socket of the"
        " service.",
    )
    verbs = group.add_subparsers(required=True, metavar="VERB")
    replace = verb(
        verbs,
        "replace-disk",
        "put a disk in the place of another, and wait until all that was on it is on the new one",
        lambda verbs, parsed: verbs.replace_disk(parsed.old, parsed.new, confirmed=parsed.yes),
    )
    replace.add_argument("old", metavar="OLD", help="its path; of a missing disk its UUID")
    replace.add_argument("new", metavar="NEW", help="a vacant block device")
    replace.add_argument("--yes", action="store_true", help="do not ask")


def _add_key_file(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--key-file",
        metavar="FILE",
        default="",
        help="with the key of an encrypted volume, all of its bytes; - is standard input",
    )


def _add_forms(listing: argparse.ArgumentParser) -> None:
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--names", action="store_true", help="their names alone, one a line")


def _parameters(parsed: argparse.Namespace) -> Mapping[str, str]:
    """What a StorageClass would say."""
    given = {
        "class": parsed.device_class,
        "fsType": parsed.fs_type,
        "encryption": parsed.encryption,
        "reencrypt": "true" if parsed.reencrypt else "",
    }
    return {key: value for key, value in given.items() if value}


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
