"""The process: its socket, its start and its end, its log."""

import json
import logging
import os
import queue
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import configured
import expect
import grpc
import pytest
from fakes.host import FakeHost
from fakes.known import inventory
from fakes.kubelet import FakeKubelet

from agent.cli import main as cli
from agent.core import errors
from agent.core.host import Host, log_command
from agent.core.locks import Admission
from agent.core.settings import DRIVER_NAME, EMBEDDED_CLASS, BackingFile, Config, GroupDefinition
from agent.csi import interceptor
from agent.csi.client import Client, block
from agent.daemon import log, process
from agent.operations import preflight
from agent.operations.storage_health import Readiness
from mount import errors as mount_errors
from mount import loop
from mount.command import Finished, Result
from mount.filesystem import Signature
from proto import csi_pb2 as csi

MIB = 1 << 20


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> BackingFile:
    return BackingFile(tmp_path / "state" / "carver.img", 256 * MIB)


def on(config: Config, file: BackingFile) -> Config:
    """The configuration with its group on another file."""
    return replace(config, definitions=(GroupDefinition("carver", file=file),))


@pytest.fixture
def config(tmp_path: Path, file: BackingFile) -> Config:
    return configured.carver(
        tmp_path,
        endpoint=tmp_path / "plugins" / "csi.sock",
        kubelet_dir=("/",),
        controller_expand=False,
        max_volumes_per_node=7,
        classes=(EMBEDDED_CLASS,),
        definitions=(GroupDefinition("carver", file=file),),
    )


class Running:
    """`serve` in a thread, with what it told systemd, until it is ended as SIGTERM ends it."""

    def __init__(
        self,
        config: Config,
        fake: FakeHost,
        monkeypatch: pytest.MonkeyPatch,
        *,
        begins: bool = True,
    ) -> None:
        self.told: list[str] = []
        self._ready, self._ended = threading.Event(), threading.Event()
        self._begun = threading.Event()
        monkeypatch.setattr(process, "notify", self._notify)
        monkeypatch.setattr(process, "_until_signal", lambda: self._ended)
        host = Host(fake.run, fake.kernel, fake.devices, fake.disks)
        self._thread = threading.Thread(target=process.serve, args=(config, host))
        self._thread.start()
        assert (self._begun if begins else self._ready).wait(20)

    def _notify(self, state: str) -> None:
        self.told.append(state)
        (self._begun if state == "STATUS=ready" else self._ready).set()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def running(config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    one = Running(config, fake, monkeypatch)
    yield one
    one.end()


def test_the_socket_is_root_s_alone_and_goes_with_the_service(
    config: Config, running: Running
) -> None:
    status = config.endpoint.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    with Client(config.endpoint) as client:
        client.create("pvc-1", MIB, block())
    running.end()
    assert running.told == ["READY=1", "STATUS=ready", "STOPPING=1"]
    assert not config.endpoint.exists()


def test_where_etc_lvm_is_read_only_no_command_keeps_copies_there(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Path("/etc/lvm")
    of = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        if path != asked:
            return of(path)
        told = list(of("/"))
        told[8] |= os.ST_RDONLY
        return os.statvfs_result(told)

    monkeypatch.setattr(os, "statvfs", statvfs)
    running = Running(config, fake, monkeypatch)
    with Client(config.endpoint) as client:
        client.create("pvc-1", MIB, block())
    running.end()
    changes = [words for words in fake.commands if words[:2] == ("lvm", "lvcreate")]
    assert changes
    assert all("backup/archive=0 backup/backup=0" in " ".join(words) for words in changes)


def test_a_deleted_socket_ends_the_service_so_that_it_is_started_again(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(state: str) -> None:
        if state == "READY=1":
            config.endpoint.unlink()

    monkeypatch.setattr(process, "notify", delete)
    monkeypatch.setattr(process, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(process, "_until_signal", threading.Event)
    with pytest.raises(errors.SocketGone, match=r"csi\.sock: it was deleted"):
        process.serve(config, Host(fake.run, fake.kernel, fake.devices, fake.disks))


def test_the_service_is_ready_before_all_that_it_only_warns_of_is_looked_at(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, told = threading.Event(), queue.Queue[str]()

    def check(node: preflight.Node) -> Iterator[tuple[str, str, str]]:
        assert answering.wait(60)
        yield preflight.WARN, "it is old", "install a newer one"

    monkeypatch.setattr(preflight, "CHECKS", {"lvm2": check})
    monkeypatch.setattr(process._log, "warning", lambda text, *words: told.put(text % words))
    one = Running(config, fake, monkeypatch)
    answering.set()
    one.end()
    assert told.get(timeout=20) == "preflight warn, lvm2: it is old; install a newer one"


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "csi.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with process.claimed(path):
        assert not path.exists()


def test_a_live_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "csi.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with (
            pytest.raises(errors.SocketTaken, match="another process serves"),
            process.claimed(path),
        ):
            pass
    assert path.exists()


def test_a_second_instance_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    path = tmp_path / "csi.sock"
    with (
        process.claimed(path),
        pytest.raises(errors.SocketTaken, match="another Carver"),
        process.claimed(path),
    ):
        pass


def test_what_is_no_socket_is_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "csi.sock"
    path.write_text("data")
    with pytest.raises(errors.SocketTaken, match="not a socket"), process.claimed(path):
        pass
    assert path.read_text() == "data"


def test_calls_in_flight_end_before_the_service_does(
    config: Config, fake: FakeHost, running: Running
) -> None:
    reached, let_go = threading.Event(), threading.Event()

    def slow(words: Sequence[str]) -> None:
        # The checks at the start run commands, too.
        if "lvcreate" in words:
            reached.set()
            assert let_go.wait(20)

    fake.intercept = slow
    answers: list[csi.Volume] = []
    with Client(config.endpoint) as client:
        caller = threading.Thread(
            target=lambda: answers.append(client.create("pvc-1", MIB, block()))
        )
        caller.start()
        assert reached.wait(20)
        ending = threading.Thread(target=running.end)
        ending.start()
        fake.intercept = lambda words: None
        let_go.set()
        caller.join()
        ending.join()
    assert answers[0].capacity_bytes == 4 * MIB


def test_an_embedded_group_is_found_again_at_the_next_start(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, file: BackingFile
) -> None:
    first = Running(config, fake, monkeypatch)
    status = file.path.stat()
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (256 * MIB, 0o600)
    with Client(config.endpoint) as client:
        made = client.create("pvc-1", MIB, block())
    first.end()

    again = Running(on(config, replace(file, size_bytes=MIB)), fake, monkeypatch)
    with Client(config.endpoint) as client:
        assert client.volumes() == [made]
    again.end()
    assert file.path.stat().st_size == 256 * MIB


def refused(config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """The service starts without its group; CreateVolume says why."""
    running = Running(config, fake, monkeypatch)
    try:
        with Client(config.endpoint) as client:
            # Another node may have the group: a scheduler shall choose again.
            with expect.code("RESOURCE_EXHAUSTED", "carver", *words):
                client.create("pvc-1", MIB, block())
            assert client.capacity().available_capacity == 0
    finally:
        running.end()


def test_a_file_that_holds_something_else_is_left_untouched(
    config: Config, fake: FakeHost, file: BackingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.path.parent.mkdir()
    with file.path.open("wb") as opened:
        opened.truncate(64 * MIB)
    fake.write(loop.attach(fake.kernel, str(file.path)), "ext4")
    refused(config, fake, monkeypatch, "holds ext4")
    assert fake.lvm2.groups == {}


def test_a_file_too_large_for_its_file_system_is_not_made(
    config: Config, fake: FakeHost, file: BackingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = on(config, replace(file, size_bytes=1 << 60))
    refused(huge, fake, monkeypatch, "file_size")
    assert file.path.stat().st_size == 0


def test_a_file_without_a_size_takes_half_of_what_is_free(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, file: BackingFile
) -> None:
    half = on(config, replace(file, size_bytes=None))
    Running(half, fake, monkeypatch).end()
    status = os.statvfs(file.path)
    free = status.f_bavail * status.f_frsize
    assert free * 0.4 < file.path.stat().st_size < free * 0.6


def test_a_directory_that_cannot_be_made_is_told(
    config: Config, fake: FakeHost, file: BackingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.path.parent.write_text("a file")
    refused(config, fake, monkeypatch, "state")


def test_capabilities_say_what_is_switched_off(config: Config, running: Running) -> None:
    rpc = csi.ControllerServiceCapability.RPC
    with Client(config.endpoint) as client:
        offered = client.controller.ControllerGetCapabilities(
            csi.ControllerGetCapabilitiesRequest()
        )
        kinds = {one.rpc.type for one in offered.capabilities}
        assert rpc.CREATE_DELETE_VOLUME in kinds
        assert rpc.EXPAND_VOLUME not in kinds
        with expect.code("UNIMPLEMENTED"):
            client.expand("x", 1)
        node = client.node.NodeGetCapabilities(csi.NodeGetCapabilitiesRequest())
        assert csi.NodeServiceCapability.RPC.EXPAND_VOLUME in {
            one.rpc.type for one in node.capabilities
        }
        info = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
        assert info.max_volumes_per_node == 7


def test_the_service_registers_itself_where_kubelet_is_and_takes_that_back_at_its_end(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubelet = FakeKubelet(tmp_path / "r")
    own = replace(config, registration="self", registration_directory=kubelet.directory)
    running = Running(own, fake, monkeypatch)
    end = time.monotonic() + 20
    while kubelet.look() != [DRIVER_NAME]:
        assert time.monotonic() < end
        time.sleep(0.02)
    running.end()
    assert kubelet.look() == []


def test_a_second_driver_of_another_name_is_another_one(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubelet = FakeKubelet(tmp_path / "r")
    second = replace(
        config,
        driver_name="two.carver",
        registration="self",
        registration_directory=kubelet.directory,
    )
    running = Running(second, fake, monkeypatch)
    end = time.monotonic() + 20
    while kubelet.look() != ["two.carver"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    with Client(config.endpoint) as client:
        assert client.info().name == "two.carver"
        info = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
        here = {"topology.two.carver/node": config.node_id}
        assert dict(info.accessible_topology.segments) == here
        made = client.create("pvc-1", MIB, block())
        assert [dict(one.segments) for one in made.accessible_topology] == [here]
    running.end()


def test_a_service_that_leaves_registration_to_others_makes_no_socket(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry = tmp_path / "r"
    registry.mkdir()
    left = replace(config, registration="none", registration_directory=registry)
    Running(left, fake, monkeypatch).end()
    assert list(registry.iterdir()) == []


def test_identity_is_whole(config: Config, running: Running) -> None:
    with Client(config.endpoint) as client:
        info = client.identity.GetPluginInfo(csi.GetPluginInfoRequest())
        assert info.name == "lvm.csi.carver"
        assert info.vendor_version
        answer = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
        services = {one.service.type for one in answer.capabilities if one.HasField("service")}
        assert csi.PluginCapability.Service.CONTROLLER_SERVICE in services
        assert csi.PluginCapability.Service.VOLUME_ACCESSIBILITY_CONSTRAINTS in services


def test_readiness_tells_the_truth(config: Config, fake: FakeHost, tmp_path: Path) -> None:
    control = tmp_path / "dev/mapper/control"
    control.parent.mkdir(parents=True)
    known, admission = inventory(fake.lvm2, "data", lvm=fake.lvm), Admission()
    node = preflight.Node(config, fake.kernel, fake.run, known.state, tmp_path)
    readiness = Readiness(known, node, admission)
    with pytest.raises(errors.NotReady, match="device-mapper does not answer"):
        readiness.check()
    control.write_bytes(b"")
    readiness.check()
    admission.close()
    assert readiness.probe() is False
    with pytest.raises(errors.NotReady, match="has not answered yet"):
        readiness.check()


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on which all is well that lvm2 is not asked about."""
    monkeypatch.setattr(preflight, "CHEAP", ())
    monkeypatch.setattr(preflight, "CHECKS", {})


def test_probe_answers_where_no_group_is_there_and_runs_nothing(
    config: Config, fake: FakeHost, well: None, running: Running
) -> None:
    fake.lvm2.groups.clear()
    fake.commands.clear()
    with Client(config.endpoint) as client:
        assert client.probe().ready.value
    assert fake.commands == []


@pytest.mark.parametrize("lvm2", ["direct", "host"])
def test_probe_fails_where_there_is_no_lvm2(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, well: None, lvm2: str
) -> None:
    def missing(words: Sequence[str]) -> Result | None:
        if lvm2 == "host":
            return Result(127, "", "nsenter: failed to execute lvm: No such file or directory")
        raise mount_errors.ProgramMissing(words[0])

    fake.intercept = missing
    running = Running(config, fake, monkeypatch, begins=False)
    try:
        with Client(config.endpoint) as client:
            with expect.code("UNAVAILABLE", "not installed"):
                client.capacity()
            with expect.code("FAILED_PRECONDITION", "lvm is not installed"):
                client.probe()
    finally:
        running.end()


def test_each_call_is_one_line_with_its_volume_code_and_time(
    config: Config, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Client(config.endpoint) as client:
        client.create("pvc-1", MIB, block())
        with expect.code("INVALID_ARGUMENT"):
            client.create("pvc-2\n", MIB, parameters={"a": "b\nINFO forged"})
        client.delete_snapshot("carver@none/snap-1")
        client.capacity()
    lines = [
        log.TextFormatter().format(record)
        for record in caplog.records
        if record.name == "carver.calls"
    ]
    assert len(lines) == 3
    assert lines[2].startswith("info call method=DeleteSnapshot volume=carver@none/snap-1 code=OK")
    assert lines[0].startswith("info call method=CreateVolume volume=pvc-1 code=OK milliseconds=")
    assert 'volume="pvc-2\\n" code=INVALID_ARGUMENT' in lines[1]
    assert "\n" not in lines[1]


def test_the_json_log_is_one_object_a_line() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "call", None, None)
    record.fields = {"method": "Probe", "code": "OK", "path": Path("/a")}
    try:
        raise ValueError("why\nnot")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = log.JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["message"], found["method"]) == ("info", "call", "Probe")
    assert found["time"].endswith("Z")
    assert "ValueError" in found["exception"]
    assert "\n" not in log.TextFormatter().format(record)


def test_secrets_are_stripped_wherever_the_wire_marks_them() -> None:
    request = csi.CreateVolumeRequest(name="pvc-1", secrets={"key": "hunter2"})
    found = interceptor.stripped(request)
    assert found["secrets"] == {"key": interceptor.STRIPPED}
    assert request.secrets["key"] == "hunter2"
    for message in (
        csi.NodePublishVolumeRequest(secrets={"k": "hunter2"}, volume_context={"a": "b"}),
        csi.NodeStageVolumeRequest(secrets={"k": "hunter2"}),
        csi.CreateVolumeRequest(secrets={"k": "hunter2"}, volume_capabilities=[block()]),
    ):
        assert "hunter2" not in json.dumps(interceptor.stripped(message))


def test_no_secret_reaches_the_log_or_a_command(
    config: Config, fake: FakeHost, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("carver.calls").setLevel(logging.DEBUG)
    with Client(config.endpoint) as client:
        request = csi.CreateVolumeRequest(
            name="pvc-1",
            capacity_range=csi.CapacityRange(required_bytes=MIB),
            volume_capabilities=[block()],
            secrets={"key": "hunter2"},
        )
        client.controller.CreateVolume(request)
    assert any("secrets" in getattr(record, "fields", {}) for record in caplog.records)
    for record in caplog.records:
        assert "hunter2" not in log.JsonFormatter().format(record)
    assert "hunter2" not in str(fake.commands)


def test_systemd_is_told_over_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        process.notify("READY=1")
        assert listener.recv(100) == b"READY=1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0carver-test-notify")
        monkeypatch.setenv("NOTIFY_SOCKET", "@carver-test-notify")
        process.notify("STOPPING=1")
        assert listener.recv(100) == b"STOPPING=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    process.notify("READY=1")


def test_a_signal_ends_the_wait() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        ended = process._until_signal()
        assert not ended.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert ended.is_set()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_commands_are_logged_for_those_who_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log_command(Finished(("lvm", "lvs"), 0, 0.5))
    assert 'command="lvm lvs" exit_code=0 milliseconds=500.0' in log.TextFormatter().format(
        caplog.records[-1]
    )


def test_a_service_that_is_not_there_is_unimplemented(config: Config, running: Running) -> None:
    with grpc.insecure_channel(f"unix://{config.endpoint}") as channel:
        stranger = channel.unary_stream(
            "/csi.v2.SnapshotMetadata/GetMetadataAllocated",
            csi.GetMetadataAllocatedRequest.SerializeToString,
            csi.GetMetadataAllocatedResponse.FromString,
        )
        with expect.code("UNIMPLEMENTED"):
            list(stranger(csi.GetMetadataAllocatedRequest()))


@pytest.mark.parametrize("path", ["/carver.v1.Operator/VolumesHere", "/carver.v2.Transfer/Later"])
def test_a_command_of_another_version_is_refused_with_what_to_do(
    config: Config, running: Running, path: str
) -> None:
    with grpc.insecure_channel(f"unix://{config.endpoint}") as channel:
        once: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        with expect.code("UNIMPLEMENTED", "of the same version", version("carver")):
            once(b"\n\x04text")
        with expect.code("UNIMPLEMENTED", "of the same version"):
            list(stream(b"\n\x04text"))


def test_the_command_line_tells_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["serve", "--config", str(tmp_path / "none.toml")]) == 1
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("carver ")


def test_the_module_runs_as_the_command_does() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "agent", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("carver ")


def test_the_service_is_put_together_and_served(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Config] = []
    monkeypatch.setattr(process, "run", lambda settings, host: served.append(settings))
    # This process lives on.
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    file = tmp_path / "config.toml"
    file.write_text('node_id = "here"')
    assert cli.main(["serve", "--config", str(file), "--log-format", "json"]) == 0
    assert served[0].node_id == "here"
    logging.basicConfig(force=True)


def test_neither_the_service_nor_what_it_starts_leaves_a_core(tmp_path: Path) -> None:
    script = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
from agent.cli import main
from agent.daemon import process
words = [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"]
process.serve = lambda *_: subprocess.run(words, check=True)
main.main(["serve", "--config", sys.argv[1]])
"""
    file = tmp_path / "config.toml"
    file.write_text('node_id = "here"')
    words = [sys.executable, "-c", script, str(file)]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "(0, 0)"


def test_a_group_whose_making_was_killed_half_way_is_made_at_the_next_start(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, file: BackingFile
) -> None:
    file.path.parent.mkdir()
    with file.path.open("wb") as opened:
        opened.truncate(64 * MIB)
    device = loop.attach(fake.kernel, str(file.path))
    fake.block.get(device).contents = Signature("LVM2_member", "raid")
    Running(config, fake, monkeypatch).end()
    assert list(fake.lvm2.groups) == ["carver"]
