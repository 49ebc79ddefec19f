"""Show the main job on real volumes, driving the installed service as a cluster would.

Runs in the lab's guest, by `make demo`. Each row is a step: what was called, and what the kernel
shows of it. The first surprise ends the demo; whatever happens, nothing is left behind.
"""

import contextlib
import errno
import functools
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, Self

# Behind everything else: Carver is the one that is installed, the tree adds only vagrant/.
sys.path.append(str(Path(__file__).resolve().parents[2]))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import grpc

from agent.cli.terminal import human
from agent.csi import client
from agent.settings.settings import DEFAULT_SOCKET
from proto import csi_pb2 as csi
from vagrant.inside import show, witness
from vagrant.inside.show import Show, Step
from vagrant.inside.witness import Surprise, expect

_MIB = 1 << 20
_SIZE_BYTES, _GROWN_BYTES, _BLOCK_BYTES = 64 * _MIB, 256 * _MIB, 32 * _MIB
_DATA_BYTES, _RECORD_BYTES = 8 * _MIB, 4096
_WIPE_SECONDS = 120
_START_SECONDS = 60
# Two pods on one node, one of which may only read.
_SHARED = client.Mode.SINGLE_NODE_MULTI_WRITER

P = ParamSpec("P")


@dataclass(frozen=True)
class Used:
    """A volume, how it is used and where: pod A may write, pod B may only read."""

    volume: csi.Volume
    capability: csi.VolumeCapability
    node: Path
    staging: Path
    pod_a: Path
    pod_b: Path

    @property
    def id(self) -> str:
        """The volume's id."""
        return self.volume.volume_id

    @property
    def device(self) -> str:
        """The kernel's name of the volume's device."""
        return witness.block_device(self.node)


class Writer:
    """A thread that appends records to a file and syncs each, until it is told to stop."""

    def __init__(self, path: Path) -> None:
        self.records = 0
        self._path = path
        self._digest = hashlib.sha256()
        self._failure: OSError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def wait_for_one_more(self, timeout_seconds: float = 60) -> None:
        """Wait until a record that was not there before is on the disk."""
        before, deadline = self.records, time.monotonic() + timeout_seconds
        while self.records == before:
            if self._failure is not None or time.monotonic() > deadline:
                raise Surprise("one more record written", self._failure or "none")
            time.sleep(0.01)

    def finish(self) -> str:
        """Stop writing; returns the checksum of all that was written."""
        self._end()
        if self._failure is not None:
            raise Surprise("no write fails", self._failure)
        return self._digest.hexdigest()

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            with self._path.open("ab", buffering=0) as file:
                while not self._stop.is_set():
                    record = os.urandom(_RECORD_BYTES)
                    file.write(record)
                    os.fsync(file.fileno())
                    self._digest.update(record)
                    self.records += 1
        except OSError as error:
            self._failure = error


class Demo:
    """The main job, in the order in which a cluster asks for it."""

    def __init__(self, table: Show, carver: client.Client) -> None:
        self.notes: list[str] = []
        self._show = table
        self._carver = carver
        # Every volume's name holds it, so each can be found whatever became of an answer.
        self._name = f"demo-{uuid.uuid4().hex[:6]}"
        self._folder = Path("/var/lib/kubelet/plugins", f"carver-{self._name}")
        self._cleanup = contextlib.ExitStack()

    def run(self) -> None:
        """Show everything; undo it also when something is not as it must be."""
        with self._cleanup:
            self._folder.mkdir()
            self._in_any_case(self._remove_folders)
            self._in_any_case(self._delete_all)
            free_bytes = self._look()
            mounted = self._file_system()
            raw = self._raw_block()
            self._tear_down(mounted)
            self._tear_down(raw)
            self._prove_nothing_left(mounted, free_bytes)
            # All of it is undone already, in plain sight.
            self._cleanup.pop_all()

    def _look(self) -> int:
        with self._show.step("who is there?") as step:
            info = step.call("GetPluginInfo", self._carver.info)
            step.seen = f"{info.name} {info.vendor_version}"
        with self._show.step("can it work?") as step:
            answer = step.call("Probe", self._carver.probe)
            expect("ready", True, answer.ready.value)
            control = Path("/dev/mapper/control")
            expect(f"{control} is a device", True, control.is_char_device())
            step.seen = f"Linux {os.uname().release}"
        with self._show.step("how much can be made?") as step:
            answer_bytes = step.call("GetCapacity", self._carver.capacity)
            largest_bytes = answer_bytes.maximum_volume_size.value
            if largest_bytes < _GROWN_BYTES + _BLOCK_BYTES:
                raise Surprise(
                    f"room for {human(_GROWN_BYTES + _BLOCK_BYTES)}", human(largest_bytes)
                )
            free_bytes = answer_bytes.available_capacity
            step.seen = f"{human(free_bytes)}; one volume: up to {human(largest_bytes)}"
        return free_bytes

    def _file_system(self) -> Used:
        self._show.part("a volume with a file system, for two pods")
        used = self._create("fs", _SIZE_BYTES, client.mounted(mode=_SHARED))
        with self._show.step("make it again: the same") as step:
            again = self._call_create(step, "fs", _SIZE_BYTES, used.capability)
            expect("the volume's id", used.id, again.volume_id)
            step.seen = f"{used.device}, nothing new"
        with self._show.step("format and mount it") as step:
            self._stage(step, used)
            step.seen = witness.file_system(used.staging, used.device)
        with self._show.step("give it to pod A") as step:
            self._publish(step, used, used.pod_a)
            step.seen = witness.file_system(used.pod_a, used.device)
        with self._show.step("give it to pod B, read only") as step:
            self._publish(step, used, used.pod_b, read_only=True)
            step.seen = witness.file_system(used.pod_b, used.device, read_only=True)
        self._read_and_write(used)
        self._grow(used)
        return used

    def _read_and_write(self, used: Used) -> None:
        data = os.urandom(_DATA_BYTES)
        digest = hashlib.sha256(data).hexdigest()
        with self._show.step(f"A writes {human(len(data))}") as step:
            step.time(_write, used.pod_a / "data", data)
            step.seen = f"sha256 {digest[:12]}…, fsync"
        with self._show.step("B reads it from the disk") as step:
            expect("sha256", digest, step.time(witness.checksum, used.pod_b / "data"))
            step.seen = f"sha256 {digest[:12]}…, the same"
        with self._show.step("B tries to write") as step:
            error = step.time(_failure_of, _write, used.pod_b / "data", b"never")
            expect("how B's write ends", "EROFS", error)
            expect("sha256", digest, witness.checksum(used.pod_a / "data"))
            step.seen = "EROFS, the data as before"
        with self._show.step("how full is it?") as step:
            answer = step.call("NodeGetVolumeStats", self._carver.stats, used.id, used.pod_a)
            usage = next(one for one in answer.usage if one.unit == csi.VolumeUsage.BYTES)
            counted = (usage.total, usage.used, usage.available)
            expect("total, used, available", witness.df(used.pod_a), counted)
            step.seen = _df(used.pod_a)

    def _grow(self, used: Used) -> None:
        log = used.pod_a / "log"
        with Writer(log) as writer:
            writer.wait_for_one_more()
            before = writer.records
            # In a cluster only nodes expand: NodeExpandVolume then grows the volume, too.
            if self._carver.can_expand():
                self._grow_volume(used)
            with self._show.step("… and its file system") as step:
                node_expand = self._carver.node_expand
                step.call("NodeExpandVolume", node_expand, used.id, used.pod_a, _GROWN_BYTES)
                expect(f"bytes of {used.device}", _GROWN_BYTES, witness.size_bytes(used.device))
                total_bytes = witness.df(used.pod_b)[0]
                if total_bytes < _GROWN_BYTES * 3 // 4:
                    raise Surprise(f"df's total near {human(_GROWN_BYTES)}", human(total_bytes))
                step.seen = _df(used.pod_b)
            with self._show.step("A ends; B reads all of it") as step:
                writer.wait_for_one_more()
                digest = writer.finish()
                expect("bytes written", writer.records * _RECORD_BYTES, log.stat().st_size)
                expect("sha256", digest, step.time(witness.checksum, used.pod_b / "log"))
                step.seen = f"{writer.records - before} fsyncs, no error, the same sha256"
        with self._show.step(f"A takes {human(2 * _SIZE_BYTES)}") as step:
            step.time(_allocate, used.pod_a / "room", 2 * _SIZE_BYTES)
            step.seen = _df(used.pod_a)

    def _grow_volume(self, used: Used) -> None:
        total_bytes = witness.df(used.pod_a)[0]
        with self._show.step("grow it while A appends") as step:
            expand = self._carver.expand
            grown = step.call("ControllerExpandVolume", expand, used.id, _GROWN_BYTES)
            expect("capacity_bytes", _GROWN_BYTES, grown.capacity_bytes)
            expect("node_expansion_required", True, grown.node_expansion_required)
            expect(f"bytes of {used.device}", _GROWN_BYTES, witness.size_bytes(used.device))
            expect("df's total, still", total_bytes, witness.df(used.pod_a)[0])
            step.seen = f"{used.device} {human(_GROWN_BYTES)}, df still {human(total_bytes)}"

    def _raw_block(self) -> Used:
        self._show.part("a raw block volume, for two pods")
        used = self._create("raw", _BLOCK_BYTES, client.block(_SHARED))
        with self._show.step("make it ready") as step:
            self._stage(step, used)
            expect(f"mounts at {used.staging}", 0, len(witness.mounts().at(str(used.staging))))
            step.seen = f"{used.device}, mounted nowhere"
        with self._show.step("give it to pod A") as step:
            self._publish(step, used, used.pod_a)
            expect("the device at pod A", used.device, witness.block_device(used.pod_a))
            step.seen = witness.raw_block(used.pod_a)
        with self._show.step("give it to pod B, read only") as step:
            self._publish(step, used, used.pod_b, read_only=True)
            loop = witness.block_device(used.pod_b)
            expect(f"loop devices over {used.device}", [loop], witness.loops_over(used.device))
            expect(f"{loop} is read only", True, witness.is_read_only(loop))
            step.seen = f"{witness.raw_block(used.pod_b)}, over {used.device}"
        self._dd(used)
        with self._show.step("how large is it?") as step:
            answer = step.call("NodeGetVolumeStats", self._carver.stats, used.id, used.pod_a)
            expect("totals", [_BLOCK_BYTES], [usage.total for usage in answer.usage])
            expect(f"bytes of {used.device}", _BLOCK_BYTES, witness.size_bytes(used.device))
            step.seen = f"{used.device} {human(_BLOCK_BYTES)}"
        return used

    def _dd(self, used: Used) -> None:
        data = os.urandom(_BLOCK_BYTES)
        with self._show.step(f"A: dd writes {human(len(data))}") as step:
            done = step.time(_dd, f"of={used.pod_a}", "conv=fsync", data=data)
            expect("dd's exit code", 0, done.returncode)
            step.seen = f"dd: {done.stderr.decode().strip().rpartition(', ')[2]}"
        with self._show.step("A: dd reads from the disk") as step:
            done = step.time(_dd, f"if={used.pod_a}", "iflag=direct")
            expect("dd's exit code", 0, done.returncode)
            expect("what is read is what was written", True, done.stdout == data)
            step.seen = f"{len(done.stdout)} bytes, the same"
        with self._show.step("B: dd tries to write") as step:
            done = step.time(_dd, f"of={used.pod_b}", "conv=fsync", data=b"never")
            expect("dd's exit code", 1, done.returncode)
            step.seen = done.stderr.decode().splitlines()[0].rpartition(": ")[2]
        with self._show.step("B: dd reads the same") as step:
            done = step.time(_dd, f"if={used.pod_b}", "iflag=direct")
            expect("what is read is what was written", True, done.stdout == data)
            step.seen = f"{len(done.stdout)} bytes, the same"

    def _tear_down(self, used: Used) -> None:
        kind = "raw block" if used.capability.HasField("block") else "file system"
        self._show.part(f"back again: the {kind}")
        device = used.device
        for pod, path in (("B", used.pod_b), ("A", used.pod_a)):
            with self._show.step(f"take it from pod {pod}") as step:
                step.call("NodeUnpublishVolume", self._carver.unpublish, used.id, path)
                step.seen = witness.absent(path)
        with self._show.step("let go of it") as step:
            step.call("NodeUnstageVolume", self._carver.unstage, used.id, used.staging)
            expect(f"mounts of {device}", [], witness.mounts_of(device))
            expect(f"loop devices over {device}", [], witness.loops_over(device))
            step.seen = f"no mount of {device}, no loop over it"
        with self._show.step("wipe and remove it") as step:
            step.call("DeleteVolume", self._carver.delete, used.id)
            # A wipe that takes long goes on behind the answer.
            step.seen = f"{device} is being wiped" if used.node.exists() else f"no {device}"

    def _prove_nothing_left(self, used: Used, free_bytes: int) -> None:
        self._show.part("as if nothing had been")
        with self._show.step("as much room as before") as step:
            deadline = time.monotonic() + _WIPE_SECONDS
            while True:
                again = step.call("GetCapacity", self._carver.capacity).available_capacity
                if again == free_bytes or time.monotonic() > deadline:
                    break
                time.sleep(1)
            expect("available_capacity", free_bytes, again)
            step.seen = f"{human(again)}, to the byte"
        with self._show.step("nothing is left") as step:
            volumes = step.time(_logical_volumes, used.id.partition("@")[0])
            expect("logical volumes left", [], [one for one in volumes if self._name in one])
            expect("mounts left", (), witness.mounts().under(str(self._folder)))
            self._remove_folders()
            step.seen = "no LV, mount, loop device or target"

    def _create(self, kind: str, size_bytes: int, capability: csi.VolumeCapability) -> Used:
        with self._show.step(f"make {human(size_bytes)}") as step:
            volume = self._call_create(step, kind, size_bytes, capability)
            expect("capacity_bytes", size_bytes, volume.capacity_bytes)
            paths = (self._folder / f"{kind}-{place}" for place in ("staging", "a", "b"))
            used = Used(volume, capability, witness.node(volume.volume_id), *paths)
            expect(f"bytes of {used.device}", size_bytes, witness.size_bytes(used.device))
            step.seen = f"{used.device} {human(size_bytes)} {_logical_volume(used.id)}"
        return used

    def _call_create(
        self, step: Step, kind: str, size_bytes: int, capability: csi.VolumeCapability
    ) -> csi.Volume:
        name = f"{self._name}-{kind}"
        return step.call("CreateVolume", self._carver.create, name, size_bytes, capability)

    def _stage(self, step: Step, used: Used) -> None:
        used.staging.mkdir()  # kubelet makes it
        self._in_any_case(self._carver.unstage, used.id, used.staging)
        step.call("NodeStageVolume", self._carver.stage, used.volume, used.staging, used.capability)

    def _publish(self, step: Step, used: Used, path: Path, *, read_only: bool = False) -> None:
        self._in_any_case(self._carver.unpublish, used.id, path)
        publish = functools.partial(self._carver.publish, read_only=read_only)
        step.call("NodePublishVolume", publish, used.volume, used.staging, path, used.capability)

    def _in_any_case(self, undo: Callable[P, object], *words: P.args, **named: P.kwargs) -> None:
        """Have something undone if the demo ends early; registered before it is done."""

        def attempt() -> None:
            try:
                undo(*words, **named)
            except grpc.RpcError as error:
                self.notes.append(f"not undone: {show.told(error)}")
            except OSError as error:
                self.notes.append(f"not undone: {error}")

        self._cleanup.callback(attempt)

    def _delete_all(self) -> None:
        for volume in self._carver.volumes():
            if self._name in volume.volume_id:
                self._carver.delete(volume.volume_id)
                self.notes.append(f"deleted {volume.volume_id}")

    def _remove_folders(self) -> None:
        """Remove what kubelet makes; what the service has to remove is found, not removed."""
        for path in self._folder.glob("*-staging"):
            path.rmdir()
        self._folder.rmdir()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def _failure_of(function: Callable[P, object], *words: P.args, **named: P.kwargs) -> str:
    """The errno's name with which a call fails."""
    try:
        function(*words, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "no error"


def _allocate(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)


def _dd(*words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["dd", "bs=1M", *words],
        input=data,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )


def _df(path: Path) -> str:
    total, used, _ = map(human, witness.df(path))
    return f"df: {used} of {total} used"


def _logical_volume(volume_id: str) -> str:
    """The group and the name, as lvs(8) shows them."""
    group, _, rest = volume_id.partition("@")
    return f"{group}/{rest.partition('/')[2]}"


def _logical_volumes(group: str) -> list[str]:
    command = ["lvs", "--noheadings", "--options", "lv_name", "--", group]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _await_begun(carver: client.Client) -> None:
    """A service that was just started is served before it has asked lvm2."""
    deadline = time.monotonic() + _START_SECONDS
    while not carver.probe().ready.value and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> int:
    """Show the main job; 0 if there was no surprise."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As an exception, so that what is half done is undone.
        signal.signal(number, _end)
    table = Show(show.console())
    table.heading(f"Carver's main job, called over {DEFAULT_SOCKET}")
    with client.Client(DEFAULT_SOCKET) as carver:
        _await_begun(carver)
        demo = Demo(table, carver)
        try:
            demo.run()
        except Surprise as surprise:
            table.surprise(surprise, demo.notes)
            return 1
        except KeyboardInterrupt:
            return 130
    table.closing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
