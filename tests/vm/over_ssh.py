"""Two services with groups of their own, as processes that reach each other by ssh(1)."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from csi_client import wait_until_served
from vm.privileges import within

from agent.csi.client import Client, block
from lvm.active_devices import Devices
from proto import csi_pb2 as csi

TREE = Path(__file__).resolve().parents[2]
SSHD = "/usr/sbin/sshd"
_START_SECONDS = 120
_COMMAND_SECONDS = 300
# Carver on the other node is called so, by the test's ssh_config alone.
HOST = "node-b"
# In place of ssh: it passes so much of a stream, reports that, and continues when it may.
_STALLING = """\
#!{python}
import os, pathlib, subprocess, sys, time

words = ["ssh", "-F", "{config}", *sys.argv[1:]]
line = sys.argv[-1]
verbs = ("status", "abort", "checksum", "finish", "withdraw")
if " receive " not in line or any("--" + one in line for one in verbs):
    os.execvp("ssh", words)
source, left = sys.stdin.buffer, {most_bytes}
with subprocess.Popen(words, stdin=subprocess.PIPE) as ssh:
    try:
        while left and (piece := source.read(min(left, 1 << 16))):
            ssh.stdin.write(piece)
            left -= len(piece)
        ssh.stdin.flush()
        pathlib.Path("{reached}").touch()
        while not os.path.exists("{go}"):
            time.sleep(0.05)
        while piece := source.read(1 << 16):
            ssh.stdin.write(piece)
        ssh.stdin.close()
    except BrokenPipeError:
        pass
sys.exit(ssh.returncode)
"""


@dataclass
class Node:
    """One of them, and a person at its prompt. `carver` is its command."""

    directory: Path
    name: str
    group: str
    devices: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    client: Client = field(init=False)

    @property
    def endpoint(self) -> Path:
        return self.directory / "csi.sock"

    @property
    def carver(self) -> Path:
        return self.directory / "carver"

    def prepare(self) -> None:
        """Write what it reads, and the command that speaks to it."""
        self.directory.mkdir()
        file = self.directory / "config.toml"
        file.write_text(
            f'node_id = "{self.name}"\nendpoint = "{self.endpoint}"\nregistration = "none"\n'
            f'kubelet_dir = "{self.directory}"\ndevices = {json.dumps(list(self.devices))}\n\n'
            f'[[classes]]\nname = "plain"\ngroup = "{self.group}"\ndefault = true\n'
        )
        self.carver.write_text(
            f'#!/bin/sh\ncd "{TREE}" && exec "{sys.executable}" -m agent "$@" --config "{file}"\n'
        )
        self.carver.chmod(0o755)

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen([self.carver, "serve"], stderr=log)
        self.client = Client(self.endpoint)
        wait_until_served(self.endpoint, _START_SECONDS)
        within(_START_SECONDS, self._has_begun, f"{self.name} does not begin")

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(by)
            self.process.wait(_START_SECONDS)
            self.client.__exit__(None, None, None)

    def kill(self) -> None:
        """SIGKILL; another goes on."""
        self.stop(signal.SIGKILL)
        self.start()

    def run(self, *words: str) -> Any:
        """Have `carver` do something; what it prints, where that is JSON."""
        ended = subprocess.run(
            [self.carver, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )
        assert ended.returncode == 0, f"{words}: {ended.stderr}"
        return json.loads(ended.stdout) if "--json" in words else ended.stdout

    def write(self, volume: csi.Volume, data: bytes, at: int = 0) -> None:
        """Write to a volume that is staged."""
        with self.device(volume.volume_id).open("r+b", buffering=0) as device:
            device.seek(at)
            device.write(data)
            os.fsync(device.fileno())

    def content(self, volume: csi.Volume) -> bytes:
        """The content of a volume in no use."""
        staging = self.directory / "staging"
        self.client.stage(volume, staging, block())
        try:
            return self.device(volume.volume_id).read_bytes()
        finally:
            self.client.unstage(volume.volume_id, staging)

    def device(self, identity: str) -> Path:
        name = identity.rpartition("/")[2]
        found = Devices().find(self.group, name)
        assert found is not None, f"{name} is not active"
        return Path(found.path)

    def _has_begun(self) -> bool:
        try:
            self.client.capacity()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


@dataclass
class Line:
    """The way from one to the other: an sshd of the test's own, on this machine alone."""

    directory: Path
    to: Node

    @property
    def config(self) -> Path:
        return self.directory / "ssh_config"

    @property
    def ssh(self) -> str:
        """How the other node is reached, as `--ssh` has it."""
        return f"ssh -F {self.config}"

    def stalling(self, most_bytes: int) -> "Stall":
        """The same, which stops within a stream until `Stall.end`."""
        program, reached, go = (self.directory / one for one in ("stalling", "reached", "go"))
        for one in (reached, go):
            one.unlink(missing_ok=True)
        program.write_text(
            _STALLING.format(
                python=sys.executable,
                config=self.config,
                most_bytes=most_bytes,
                reached=reached,
                go=go,
            )
        )
        program.chmod(0o755)
        return Stall(self, str(program), reached, go)

    def there(self, *words: str) -> list[str]:
        """The command that has the other node's Carver do something."""
        return ["ssh", "-F", str(self.config), "--", HOST, str(self.to.carver), *words]

    def processes(self, *words: str) -> list[psutil.Process]:
        """The test's own processes with these words in their command lines."""
        found = []
        for one in psutil.process_iter():
            try:
                line = " ".join(one.cmdline())
            except psutil.Error:
                continue
            if str(self.directory.parent) in line and all(word in line for word in words):
                found.append(one)
        return found


@dataclass
class Stall:
    """A stream that has come to a place, and waits."""

    line: Line
    ssh: str
    _with_namespace: Path
    _go: Path

    def wait(self) -> None:
        within(_COMMAND_SECONDS, self._with_namespace.exists, "no stream came so far")

    def end(self) -> None:
        """Let it go on; return when nothing of it runs any more."""
        self._go.touch()
        within(
            _COMMAND_SECONDS, lambda: not self.line.processes(" receive "), "a receiver runs still"
        )


@contextmanager
def reached(directory: Path, to: Node, program: str = SSHD) -> Iterator[Line]:
    """Have a node be reached by ssh, with a key of the test's own; nothing of it stays."""
    directory.mkdir()
    for key in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (directory / "keys").write_text((directory / "user.pub").read_text())
    (directory / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {directory}/host\nPidFile none\n"
        f"AuthorizedKeysFile {directory}/keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM yes\n"
    )
    kind, public = (directory / "host.pub").read_text().split()[:2]
    (directory / "known").write_text(f"[127.0.0.1]:{port} {kind} {public}\n")
    line = Line(directory, to)
    line.config.write_text(
        f"Host {HOST}\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  BatchMode yes\n"
        f"  IdentityFile {directory}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {directory}/known\n  StrictHostKeyChecking yes\n"
    )
    # What its children give up their rights in (sshd(8)).
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (directory / "log").open("wb") as log:
        words = [program, "-D", "-e", "-f", str(directory / "sshd_config")]
        sshd = subprocess.Popen(words, stderr=log)
    try:
        within(_START_SECONDS, lambda: _answers(port, sshd), "sshd does not answer")
        yield line
    finally:
        sshd.terminate()
        sshd.wait(_START_SECONDS)


def _answers(port: int, sshd: "subprocess.Popen[bytes]") -> bool:
    assert sshd.poll() is None, "sshd ended"
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as made:
            return made.recv(4) == b"SSH-"
    except OSError:
        return False


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
