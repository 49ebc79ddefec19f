"""Entry point of the command `carver`, with its commands serve, status, doctor, completion."""

import argparse
import io
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agent.cli import arguments
from agent.cli.words import SHELLS, CommandLine, Commands, require_root
from agent.core import errors, extras
from agent.daemon import log
from agent.settings import settings
from agent.settings.configuration import Configuration
from agent.volumes.reports import MONITOR_AGE_SECONDS
from mount import mount_errors as mount_errors

if TYPE_CHECKING:
    from agent.operations.preflight import Finding

# The function of each command imports the modules that only this command needs: gRPC, rich and
# shtab load slowly.


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words`, by default that of the process, and return the exit code.

    0 means success, 1 a failure that was reported, 2 wrong usage, 130 an interruption by Ctrl-C.
    """
    with ignoring_failed_writes():
        return _run(words)


@contextmanager
def ignoring_failed_writes() -> Iterator[None]:
    """Keep failed writes to standard output and standard error from changing the exit code.

    A write fails when the reader of a pipe has gone, and a write to the log when the disk is full.
    """
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is getattr(sys, f"__{name}__") and stream is not None:
            setattr(sys, name, _Output(stream, is_log=name == "stderr"))
    try:
        yield
    finally:
        if isinstance(sys.stderr, _Output):
            sys.stderr.end()


def _run(words: Sequence[str] | None) -> int:
    parsed = parser().parse_args(words)
    try:
        return int(parsed.run(parsed))
    except (
        errors.AgentError,
        mount_errors.CommandError,
        mount_errors.MountError,
        OSError,
    ) as error:
        # Advise to run the command as root; the error's own message names the file.
        hint = isinstance(error, PermissionError) and os.geteuid() != 0
        print(f"carver: {error}{'; run it as root (sudo)' * hint}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


class _Output(io.TextIOWrapper):
    """Standard output or error that drops further output once its reader, as head(1), has gone.

    The command goes on, and its exit code is that of its findings. With `is_log`, lines that cannot
    be written for another reason, such as a full disk, are lost; later lines are written once the
    disk has space again.
    """

    def __init__(self, stream: TextIO, *, is_log: bool) -> None:
        self._is_log = is_log
        line_buffering = isinstance(stream, io.TextIOWrapper) and stream.line_buffering
        super().__init__(
            stream.buffer, stream.encoding, stream.errors, line_buffering=line_buffering
        )

    def write(self, text: str) -> int:
        with self._unread():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._unread():
            super().flush()

    def end(self) -> None:
        """Flush the buffer, or drop the buffered output if flushing fails.

        Python exits with the code 120 if its own flush at exit fails.
        """
        try:
            super().flush()
        except OSError:
            self._drop()

    @contextmanager
    def _unread(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._drop()
        except OSError:
            if not self._is_log:
                raise

    def _drop(self) -> None:
        """Redirect the stream to /dev/null: the buffered output, and all later output."""
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.fileno())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with the commands of the installed extras."""
    main_parser = argparse.ArgumentParser(
        prog="carver", description="A CSI driver that carves LVM volumes on the node it runs on."
    )
    main_parser.add_argument("--version", action="version", version=f"carver {version('carver')}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_status(commands)
    volume, snapshot = arguments.add_volume(commands), arguments.add_snapshot(commands)
    arguments.add_group(commands)
    arguments.add_trace(commands)
    line = CommandLine(commands, volume, snapshot, _add_doctor(commands))
    for _, module in extras.modules("command_line"):
        module.add(line)
    _add_completion(commands)
    return main_parser


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve CSI on a unix socket",
        description="Serve CSI on a unix socket. Each flag can also be set in the file, and as"
        " CARVER_<NAME> in the environment; a flag overrides the environment, which overrides the"
        " file.",
    )
    settings.add_arguments(serve)
    serve.set_defaults(run=_serve)


def _add_status(commands: Commands) -> None:
    status_parser = commands.add_parser(
        "status",
        help="show groups, classes and volumes, and where each volume is",
        description="Show groups, classes and volumes, how full they are, where each volume is"
        " mounted, and what is wrong with it. Looks at LVM and the kernel: the service need not"
        " run.",
    )
    output_form = status_parser.add_mutually_exclusive_group()
    output_form.add_argument("--json", action="store_true", help="one JSON object")
    output_form.add_argument(
        "--watch", type=_seconds, metavar="SECONDS", help="refresh at this interval, until Ctrl-C"
    )
    settings.add_arguments(status_parser, ("endpoint",))
    status_parser.set_defaults(run=_status)


def _add_doctor(commands: Commands) -> argparse.ArgumentParser:
    doctor = commands.add_parser(
        "doctor",
        help="check what this node must have, and say how to fix what it lacks",
        description="Check what this node must have for Carver: programs, kernel, mounts, groups."
        " Each check passes, warns or fails; a warning or failure comes with its remedy. Takes the"
        " same settings as serve, and changes nothing: the service may run or not. The exit code"
        " is 1 if a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    settings.add_arguments(doctor)
    doctor.set_defaults(run=_doctor, findings=_node_findings)
    return doctor


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
    from agent.daemon import service_process
    from agent.daemon.host import this_host

    config = settings.load(parsed, os.environ)
    log.configure(config.log_format, config.log_level)
    # Forbid core dumps of this process and of its programs: secrets of requests may be in memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    service_process.run(config, this_host(config), lambda: settings.load(parsed, os.environ))
    return 0


def _status(parsed: argparse.Namespace) -> int:
    from agent.cli import status, terminal
    from agent.daemon.host import this_host

    require_root()
    config = settings.load(parsed, os.environ)
    host = this_host(config)
    if parsed.json:
        print(json.dumps(asdict(status.read(config, host)), indent=2, ensure_ascii=False))
    elif parsed.watch:
        terminal.watch(lambda: terminal.status(status.read(config, host)), parsed.watch)
    else:
        terminal.console().print(terminal.status(status.read(config, host)))
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from agent.cli import terminal
    from agent.operations import preflight

    findings: Sequence[Finding] = parsed.findings(settings.load(parsed, os.environ))
    is_healthy = all(finding.verdict != preflight.FAIL for finding in findings)
    if parsed.json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"well": is_healthy, "checks": checks}, indent=2, ensure_ascii=False))
    else:
        terminal.console().print(terminal.doctor(findings))
    return 0 if is_healthy else 1


def _node_findings(config: settings.Config) -> "Sequence[Finding]":
    from agent.cli import status
    from agent.daemon.host import this_host
    from agent.operations import preflight
    from agent.volumes.reports import Reports

    require_root()
    host = this_host(config)
    reports = cache(lambda: Reports(status.volume_groups(config, host)))
    node = preflight.Node(
        Configuration(config),
        host.kernel,
        host.run,
        lambda: reports().seen(MONITOR_AGE_SECONDS),
        refused=lambda: reports().refused,
        ignored=lambda: reports().ignored,
    )
    return preflight.all_findings(node)


def _completion(parsed: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(parser(), shell=parsed.shell, preamble=SHELLS[parsed.shell]))
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds, 0.1 to 3600")
    return seconds
