"""The command `carver`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias

from agent import config, errors, log
from lvm import errors as lvm_errors
from mount import errors as mount_errors

if TYPE_CHECKING:
    from agent.manual import Manual

# Each command's function imports what it needs: gRPC takes a while, rich and shtab are for people.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 is success, 1 a failure that is told, 2 a wrong command line."""
    parsed = parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (
        *(errors.AgentError, lvm_errors.LvmError, mount_errors.MountError),
        PermissionError,
    ) as error:
        print(f"carver: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    if os.geteuid() != 0:
        print(
            "carver: LVM, mounts and the socket are root's alone: run it as root", file=sys.stderr
        )
    return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="carver", description="A CSI driver that carves LVM volumes on the node it runs on."
    )
    top.add_argument("--version", action="version", version=f"carver {version('carver')}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_status(commands)
    _add_volume(commands)
    _add_doctor(commands)
    _add_completion(commands)
    return top


# The shells that are completed, and how each finds the names of volumes: root's, as all of this is.
SHELLS = {
    "bash": '_carver_volumes() { compgen -W "$(carver volume list --names 2>/dev/null)" -- "$1"; }',
    "zsh": '_carver_volumes() { compadd -- ${(f)"$(carver volume list --names 2>/dev/null)"} }',
}

# argparse has no public name for what add_subparsers returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve CSI on a unix socket",
        description="Serve CSI on a unix socket. Each flag can also be set in the file, and as"
        " CARVER_<NAME> in the environment; a flag outweighs the environment, that the file.",
    )
    config.add_arguments(serve)
    serve.set_defaults(run=_serve)


def _add_status(commands: Commands) -> None:
    status = commands.add_parser(
        "status",
        help="show groups, classes and volumes, and where each volume is",
        description="Show groups, classes and volumes, how full they are, where each volume is"
        " mounted, and what is wrong with it. Looks at LVM and the kernel: the service need not"
        " run.",
    )
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument(
        "--watch",
        type=_seconds,
        metavar="SECONDS",
        help="look again every so many seconds, until Ctrl-C",
    )
    config.add_arguments(status, ("endpoint",))
    status.set_defaults(run=_status)


def _add_volume(commands: Commands) -> None:
    volume = commands.add_parser(
        "volume",
        help="make, use and delete volumes by hand",
        description="Make, use and delete volumes by hand, through the socket of the service, on a"
        " node without Kubernetes. In a cluster these are the cluster's to do.",
    )
    verbs = volume.add_subparsers(required=True, metavar="VERB")

    create = _verb(
        verbs,
        "create",
        "make a volume",
        lambda manual, parsed: manual.create(
            parsed.name, parsed.size, _parameters(parsed), raw=parsed.block
        ),
    )
    create.add_argument("name", metavar="NAME", help="its name on this node")
    create.add_argument(
        "--size", type=_size, required=True, help="such as 512MiB, 10GiB (1024) or 10GB (1000)"
    )
    create.add_argument("--class", dest="device_class", help="a class; else the default one")
    create.add_argument("--fs-type", help="ext4, xfs or btrfs; else the class's")
    create.add_argument("--block", action="store_true", help="a raw block volume")

    listing = _verb(
        verbs,
        "list",
        "show all volumes",
        lambda manual, parsed: manual.show_all(as_json=parsed.json, names_only=parsed.names),
    )
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--names", action="store_true", help="their names alone, one a line")

    show = _verb(
        verbs,
        "show",
        "show one volume, and where it is",
        lambda manual, parsed: manual.show(parsed.name, as_json=parsed.json),
    )
    _add_name(show)
    show.add_argument("--json", action="store_true", help="as JSON")

    publish = _verb(
        verbs,
        "publish",
        "have a volume appear at a path; the first time, format it",
        lambda manual, parsed: manual.publish(
            parsed.name, parsed.path, read_only=parsed.read_only, shared=parsed.shared
        ),
    )
    _add_name(publish)
    publish.add_argument(
        "path", metavar="PATH", help="where; it is made, below one of the service's kubelet_dir"
    )
    publish.add_argument("--read-only", action="store_true", help="to be read only")
    publish.add_argument(
        "--shared", action="store_true", help="also where it is published elsewhere already"
    )

    unpublish = _verb(
        verbs,
        "unpublish",
        "take a volume from a path, which is removed",
        lambda manual, parsed: manual.unpublish(parsed.name, parsed.path),
    )
    _add_name(unpublish)
    unpublish.add_argument("path", metavar="PATH", nargs="?", help="else from everywhere")

    expand = _verb(
        verbs,
        "expand",
        "make a volume larger, also while it is in use",
        lambda manual, parsed: manual.expand(parsed.name, parsed.size),
    )
    _add_name(expand)
    expand.add_argument("size", metavar="SIZE", type=_size, help="the size that it shall have")

    delete = _verb(
        verbs,
        "delete",
        "overwrite and remove a volume",
        lambda manual, parsed: manual.delete(parsed.name, confirmed=parsed.yes),
    )
    _add_name(delete)
    delete.add_argument("--yes", action="store_true", help="do not ask")


def _verb(
    verbs: Commands, name: str, text: str, act: Callable[["Manual", argparse.Namespace], None]
) -> argparse.ArgumentParser:
    made = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    config.add_arguments(made, ("endpoint",))
    made.set_defaults(run=lambda parsed: _by_hand(parsed, act))
    return made


def _add_name(verb: argparse.ArgumentParser) -> None:
    action = verb.add_argument("name", metavar="NAME", help="a volume's name or id")
    # Read by shtab: the functions that complete it.
    vars(action)["complete"] = dict.fromkeys(SHELLS, "_carver_volumes")


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check what this node must have, and tell how to mend what it lacks",
        description="Check what this node must have for Carver: programs, kernel, mounts, groups."
        " Each check passes, warns or fails; what is not well comes with its remedy. Takes the"
        " same settings as serve, and changes nothing: the service may run or not. The exit code"
        " is 1 if a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    config.add_arguments(doctor)
    doctor.set_defaults(run=_doctor)


def _add_completion(commands: Commands) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script that completes this command in a shell",
        description="Print a script that completes this command in a shell:"
        " `carver completion bash > /etc/bash_completion.d/carver`, or"
        " `carver completion zsh > /usr/local/share/zsh/site-functions/_carver`.",
    )
    completion.add_argument("shell", choices=tuple(SHELLS))
    completion.set_defaults(run=_completion)


def _serve(parsed: argparse.Namespace) -> int:
    from agent import server

    settings = config.load(parsed, os.environ)
    log.configure(settings.log_format, settings.log_level)
    server.serve(settings, server.this_host(settings))
    return 0


def _status(parsed: argparse.Namespace) -> int:
    from agent import overview, screen, server

    settings = config.load(parsed, os.environ)
    host = server.this_host(settings)
    if parsed.json:
        print(json.dumps(asdict(overview.read(settings, host)), indent=2, ensure_ascii=False))
    elif parsed.watch:
        screen.watch(lambda: screen.status(overview.read(settings, host)), parsed.watch)
    else:
        screen.console().print(screen.status(overview.read(settings, host)))
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from agent import overview, preflight, screen, server

    settings = config.load(parsed, os.environ)
    host = server.this_host(settings)
    node = preflight.Node(
        settings, host.kernel, host.run, lambda: overview.known_to(settings, host).read()
    )
    found = preflight.everything(node)
    well = all(one.verdict != preflight.FAIL for one in found)
    if parsed.json:
        checks = [asdict(one) for one in found]
        print(json.dumps({"well": well, "checks": checks}, indent=2, ensure_ascii=False))
    else:
        screen.console().print(screen.doctor(found))
    return 0 if well else 1


def _by_hand(
    parsed: argparse.Namespace, act: Callable[["Manual", argparse.Namespace], None]
) -> int:
    from agent import manual, server

    settings = config.load(parsed, os.environ)
    with manual.connected(settings, server.this_host(settings)) as verbs:
        act(verbs, parsed)
    return 0


def _completion(parsed: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(parser(), shell=parsed.shell, preamble=SHELLS[parsed.shell]))
    return 0


def _parameters(parsed: argparse.Namespace) -> Mapping[str, str]:
    """What a StorageClass would say."""
    given = {"class": parsed.device_class, "fsType": parsed.fs_type}
    return {key: value for key, value in given.items() if value}


def _size(text: str) -> int:
    try:
        return config.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds, 0.1 to 3600")
    return seconds
