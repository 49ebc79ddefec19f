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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import configured
import expect
import grpc
import pytest
from fakes.host import FakeHost
from fakes.kubelet import FakeKubelet
from fast.daemon.conftest import Start
from serving import machine
from started import Started

from agent.cli import main as cli
from agent.core import errors
from agent.csi import interceptor
from agent.csi.client import Client, block
from agent.daemon import log, service_process
from agent.daemon.host import Host, log_command
from agent.operations import preflight
from agent.settings.settings import (
    DRIVER_NAME,
    EMBEDDED_CLASS,
    BackingFile,
    Config,
    GroupDefinition,
)
from mount import loop
from mount import mount_errors as mount_errors
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


@pytest.fixture
def running(start: Start) -> Started:
    return start()


def test_the_socket_is_root_s_alone_and_goes_with_the_service(
    config: Config, running: Started
) -> None:
    status = config.endpoint.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    with Client(config.endpoint) as client:
        client.create("pvc-1", MIB, block())
    running.end()
    assert running.states == ["READY=1", "STATUS=ready", "STOPPING=1"]
    assert not config.endpoint.exists()


def test_no_command_keeps_copies_in_a_read_only_etc_lvm(
    config: Config, fake: FakeHost, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        if path != Path("/etc/lvm"):
            return of(path)
        fields = list(of("/"))
        fields[8] |= os.ST_RDONLY
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    start()
    with Client(config.endpoint) as client:
        client.create("pvc-1", MIB, block())
    changes = [words for words in fake.commands if words[:2] == ("lvm", "lvcreate")]
    assert changes
    assert all("backup/archive=0 backup/backup=0" in " ".join(words) for words in changes)


def test_the_kernel_is_asked_for_the_targets_that_lvm2_looks_for_before_groups_are_recovered(
    fake: FakeHost, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_loaded: list[bool] = []

    def recover(*_: object) -> bool:
        were_loaded.append(fake.lvm2.targets_are_loaded)
        return True

    monkeypatch.setattr(service_process, "resume", recover)
    start()
    assert were_loaded == [True]


def test_a_deleted_socket_ends_the_service_so_that_it_is_started_again(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(state: str) -> None:
        if state == "READY=1":
            config.endpoint.unlink()

    monkeypatch.setattr(service_process, "notify", delete)
    monkeypatch.setattr(service_process, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(service_process, "_signals", queue.SimpleQueue)
    with pytest.raises(errors.SocketGone, match=r"csi\.sock: it was deleted"):
        service_process.serve(config, machine(fake), lambda: config)


def test_the_service_does_not_start_on_a_kernel_whose_mount_table_may_lack_mounts(
    config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.kernel, "version", lambda: (5, 7))
    with pytest.raises(errors.NotReady, match=r"Linux 5\.7 is too old: before 5\.8"):
        service_process.serve(config, machine(fake), lambda: config)
    assert not config.endpoint.exists()
    assert fake.commands == []


def test_the_service_is_ready_before_slow_checks_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, warnings = threading.Event(), queue.Queue[str]()

    def check(node: preflight.Node) -> Iterator[tuple[str, str, str]]:
        assert answering.wait(60)
        yield preflight.WARN, "it is old", "install a newer one"

    monkeypatch.setattr(preflight, "CHECKS", {"lvm2": check})
    monkeypatch.setattr(
        service_process._log, "warning", lambda text, *words: warnings.put(text % words)
    )
    start()
    answering.set()
    # Beside it the checks of a service that another test started may still warn.
    while warnings.get(timeout=20) != "preflight warn, lvm2: it is old; install a newer one":
        pass


def test_only_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path, data = tmp_path / "csi.sock", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with service_process.claimed(path):
        assert not path.exists()
        # Not even a stale one, by a second instance.
        with (
            pytest.raises(errors.SocketTaken, match="another Carver"),
            service_process.claimed(path),
        ):
            pass
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with (
            pytest.raises(errors.SocketTaken, match="another process"),
            service_process.claimed(path),
        ):
            pass
    assert path.exists()
    data.write_text("data")
    with pytest.raises(errors.SocketTaken, match="not a socket"), service_process.claimed(data):
        pass
    assert data.read_text() == "data"


def test_calls_in_flight_end_before_the_service_does(
    config: Config, fake: FakeHost, running: Started
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
    config: Config, start: Start, file: BackingFile
) -> None:
    first = start()
    status = file.path.stat()
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (256 * MIB, 0o600)
    with Client(config.endpoint) as client:
        made = client.create("pvc-1", MIB, block())
    first.end()

    start(on(config, replace(file, size_bytes=MIB)))
    with Client(config.endpoint) as client:
        assert client.volumes() == [made]
    assert file.path.stat().st_size == 256 * MIB


def of_ext4(fake: FakeHost, file: Path) -> None:
    file.parent.mkdir()
    with file.open("wb") as opened:
        opened.truncate(64 * MIB)
    fake.write(loop.attach(fake.kernel, str(file)), "ext4")


@pytest.mark.parametrize(
    ("arrange", "size_bytes", "word"),
    [
        (of_ext4, 256 * MIB, "holds ext4"),
        # Too large for its file system.
        (lambda *_: None, 1 << 60, "file_size"),
        (lambda _fake, file: file.parent.write_text("a file"), 256 * MIB, "state"),
    ],
    ids=["something else in the file", "too large", "no directory"],
)
def test_a_group_that_cannot_be_made_changes_nothing_and_its_volumes_are_refused(
    config: Config,
    fake: FakeHost,
    file: BackingFile,
    start: Start,
    arrange: Callable[[FakeHost, Path], None],
    size_bytes: int,
    word: str,
) -> None:
    arrange(fake, file.path)
    before = file.path.stat().st_size if file.path.exists() else 0
    start(on(config, replace(file, size_bytes=size_bytes)))
    with Client(config.endpoint) as client:
        # Another node may have the group: a scheduler shall choose again.
        with expect.code("RESOURCE_EXHAUSTED", "carver", word):
            client.create("pvc-1", MIB, block())
        assert client.capacity().available_capacity == 0
    assert fake.lvm2.groups == {}
    assert (file.path.stat().st_size if file.path.exists() else 0) == before


def test_a_file_without_a_size_takes_half_of_what_is_free(
    config: Config, start: Start, file: BackingFile
) -> None:
    start(on(config, replace(file, size_bytes=None)))
    status = os.statvfs(file.path)
    free = status.f_bavail * status.f_frsize
    assert free * 0.4 < file.path.stat().st_size < free * 0.6


def test_capabilities_lack_what_is_switched_off(config: Config, running: Started) -> None:
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
        plugin = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
        services = {one.service.type for one in plugin.capabilities if one.HasField("service")}
        assert csi.PluginCapability.Service.CONTROLLER_SERVICE in services


@pytest.mark.parametrize("name", [DRIVER_NAME, "two.carver"])
def test_the_service_is_registered_under_its_name_until_it_ends(
    config: Config, start: Start, tmp_path: Path, name: str
) -> None:
    kubelet = FakeKubelet(tmp_path / "r")
    running = start(
        replace(
            config,
            driver_name=name,
            registration="self",
            registration_directory=kubelet.directory,
        )
    )
    expect.soon(lambda: kubelet.look() == [name])
    here = {f"topology.{name}/node": config.node_id}
    with Client(config.endpoint) as client:
        info = client.identity.GetPluginInfo(csi.GetPluginInfoRequest())
        assert info.name == name
        assert info.vendor_version
        node = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
        assert dict(node.accessible_topology.segments) == here
        made = client.create("pvc-1", MIB, block())
        assert [dict(one.segments) for one in made.accessible_topology] == [here]
    running.end()
    assert kubelet.look() == []


def test_no_registration_socket_is_made_where_a_sidecar_registers(
    config: Config, start: Start, tmp_path: Path
) -> None:
    registry = tmp_path / "r"
    registry.mkdir()
    start(replace(config, registration="none", registration_directory=registry))
    assert list(registry.iterdir()) == []


def test_probe_answers_without_groups_and_runs_no_command(
    config: Config, fake: FakeHost, well: None, running: Started
) -> None:
    fake.lvm2.groups.clear()
    fake.commands.clear()
    with Client(config.endpoint) as client:
        assert client.probe().ready.value
    assert fake.commands == []


@pytest.mark.parametrize("lvm2", ["direct", "host"])
def test_probe_fails_without_lvm2(
    config: Config, fake: FakeHost, start: Start, well: None, lvm2: str
) -> None:
    def missing(words: Sequence[str]) -> Result | None:
        if lvm2 == "host":
            return Result(127, "", "nsenter: failed to execute lvm: No such file or directory")
        raise mount_errors.ProgramMissing(words[0])

    fake.intercept = missing
    start(recovers=False)
    with Client(config.endpoint) as client:
        with expect.code("UNAVAILABLE", "not installed"):
            client.capacity()
        with expect.code("FAILED_PRECONDITION", "lvm is not installed"):
            client.probe()


def test_each_call_is_one_line_with_its_volume_code_and_time(
    config: Config, running: Started, caplog: pytest.LogCaptureFixture
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


def test_a_message_with_another_s_text_is_one_line_of_the_log() -> None:
    said = "it is full\nerror another line\x1b[2J"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "node %s: %s", ("a", said), None)
    line = log.TextFormatter().format(record)
    assert line == r"warning node a: it is full\nerror another line\u001b[2J"


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
    config: Config, fake: FakeHost, running: Started, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "carver.calls")
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


def test_systemd_is_notified_over_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    for bound, named in ((path, path), ("\0carver-test-notify", "@carver-test-notify")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(bound)
            monkeypatch.setenv("NOTIFY_SOCKET", named)
            service_process.notify("READY=1")
            assert listener.recv(100) == b"READY=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    service_process.notify("READY=1")


def test_signals_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(one) for one in every]
    monkeypatch.setattr(service_process, "_LOOK_SECONDS", 0.01)
    try:
        signals = service_process._signals()
        assert service_process._next_signal(signals) is None
        for one in every:
            signal.raise_signal(one)
        assert [service_process._next_signal(signals) for _ in every] == list(every)
    finally:
        for number, handler in zip(every, before, strict=True):
            signal.signal(number, handler)


def test_commands_are_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log_command(Finished(("lvm", "lvs"), 0, 0.5))
    assert 'command="lvm lvs" exit_code=0 milliseconds=500.0' in log.TextFormatter().format(
        caplog.records[-1]
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/carver.v1.Operator/VolumesHere", ["of the same version", version("carver")]),
        ("/carver.v2.Transfer/Later", ["of the same version", version("carver")]),
        ("/csi.v2.SnapshotMetadata/GetMetadataAllocated", []),
    ],
)
def test_an_unknown_call_is_unimplemented_and_one_of_carver_s_names_the_versions(
    config: Config, running: Started, path: str, words: list[str]
) -> None:
    with grpc.insecure_channel(f"unix://{config.endpoint}") as channel:
        once: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        with expect.code("UNIMPLEMENTED", *words):
            once(b"\n\x04text")
        with expect.code("UNIMPLEMENTED", *words):
            list(stream(b"\n\x04text"))


def test_the_command_line_prints_what_is_wrong(
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

    def run(settings: Config, _host: Host, load: Callable[[], Config]) -> None:
        assert load() == settings
        served.append(settings)

    monkeypatch.setattr(service_process, "run", run)
    # This process lives on.
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    file = tmp_path / "config.toml"
    file.write_text('node_id = "here"')
    assert cli.main(["serve", "--config", str(file), "--log-format", "json"]) == 0
    assert served[0].node_id == "here"
    logging.basicConfig(force=True)


def test_neither_the_service_nor_a_program_of_its_leaves_a_core(tmp_path: Path) -> None:
    script = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
from agent.cli import main
from agent.daemon import service_process
words = [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"]
service_process.serve = lambda *_: subprocess.run(words, check=True)
main.main(["serve", "--config", sys.argv[1]])
"""
    file = tmp_path / "config.toml"
    file.write_text('node_id = "here"')
    words = [sys.executable, "-c", script, str(file)]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "(0, 0)"


def test_a_group_whose_making_was_killed_half_way_is_made_at_the_next_start(
    fake: FakeHost, start: Start, file: BackingFile
) -> None:
    file.path.parent.mkdir()
    with file.path.open("wb") as opened:
        opened.truncate(64 * MIB)
    device = loop.attach(fake.kernel, str(file.path))
    fake.block.get(device).contents = Signature("LVM2_member", "raid")
    start()
    assert list(fake.lvm2.groups) == ["carver"]
