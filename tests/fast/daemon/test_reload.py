"""SIGHUP: the file is taken over while calls are served, or a reason is logged."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import expect
import grpc
import pytest
import serving
from csi_client import Client
from fakes.host import FakeHost
from fast.daemon.conftest import Start
from started import Started

from agent.core import sockets
from agent.csi.client import block, mounted
from agent.daemon import log
from agent.extras.orphans.look import Finder
from agent.settings.classes import DeviceClass
from agent.settings.settings import SETTINGS, BackingFile, Config, GroupDefinition
from agent.settings.values import Address
from agent.volumes.luks_mappings import Mappings
from lvm.layout import NO_RESERVE, Layout, Reserve
from lvm.thin import Policy
from mount.command import Result

MIB = 1 << 20
HERE = Path(__file__).parent
PLAIN = DeviceClass("plain", "data", default=True)
OTHER = DeviceClass("other", "more")
THIN = DeviceClass("thin", "more", layout=Layout("thin"), pool=Policy())

pytestmark = [
    pytest.mark.usefixtures("well"),
    pytest.mark.groups(data=[200], more=[200]),
    pytest.mark.settings(
        classes=(PLAIN,), metrics_address=Address("127.0.0.1", 0), kubelet_dir=("/",)
    ),
]


@pytest.fixture
def running(start: Start, caplog: pytest.LogCaptureFixture) -> Started:
    caplog.set_level(logging.INFO)
    return start()


def reload(running: Started, config: Config) -> None:
    """As SIGHUP does; wait until it is done."""
    before = running.service.configuration.taken_seconds
    running.reload(config)
    expect.soon(lambda: running.service.configuration.taken_seconds > before)


def looked_at(running: Started) -> set[str]:
    """The groups in which work is repeated."""
    return {job.key for one in running.service.scans for job in one._jobs.unfinished()}


# What is asked of objects that were made at the start, for each setting that may change: two
# configurations with what they answer.
def _stage(running: Started, client: Client) -> str:
    """Where a volume may be staged."""
    volume = client.create("a", 16 * MIB, block())
    path = running.config.endpoint.parent / "outside" / "staging"
    try:
        client.stage(volume, path, block())
    except grpc.RpcError as error:
        return str(error.code())
    client.unstage(volume.volume_id, path)
    return "staged"


def _inline(running: Started, client: Client) -> bool:
    """Whether an inline volume of 64 MiB may be made."""
    target = running.config.endpoint.parent / "inline"
    try:
        client.publish_inline("csi-1", target, {"size": "64Mi"}, mounted())
    except grpc.RpcError:
        return False
    client.unpublish("csi-1", target)
    return True


def _deleted(running: Started, client: Client) -> bool:
    """Whether a deleted volume's data are overwritten."""
    group = running.fake.lvm2.groups["data"]
    volume = client.create("b", 16 * MIB, block())
    media = group.volumes["vol-b"].media
    media.write(0, b"secret".ljust(4096, b"\0"))
    client.delete(volume.volume_id)
    return not media.blocks


def _log(_running: Started, _client: Client) -> tuple[int, type[logging.Formatter]]:
    formatters = [one.formatter for one in logging.getLogger().handlers]
    known = [one for one in formatters if isinstance(one, log.JsonFormatter | log.TextFormatter)]
    return logging.getLogger().level, type(known[0]) if known else log.TextFormatter


class Kept:
    """Objects that a test makes before the reload, as extras and operations do."""

    def __init__(self, running: Started) -> None:
        service = running.service
        self.mappings = Mappings(service.context)
        self.finder = Finder(service.configuration, service.context.kernel, service.reports)
        self.pace = service.context.paces.of("data")


Ask = Callable[[Started, Client, Kept], object]
ASKED: dict[str, tuple[dict[str, object], Ask, Sequence[object]]] = {
    "kubelet_dir": (
        {"kubelet_dir": ("/nowhere",)},
        lambda running, client, _: _stage(running, client),
        ["staged", "StatusCode.INVALID_ARGUMENT"],
    ),
    "log_format": (
        {"log_format": "json"},
        lambda running, client, _: _log(running, client)[1],
        [log.TextFormatter, log.JsonFormatter],
    ),
    "log_level": (
        {"log_level": "error"},
        lambda running, client, _: _log(running, client)[0],
        [logging.INFO, logging.ERROR],
    ),
    "inline_volume_limit": (
        {"inline_volume_limit": 32 * MIB},
        lambda running, client, _: _inline(running, client),
        [True, False],
    ),
    "inline_total_limit": (
        {"inline_total_limit": Reserve(size_bytes=32 * MIB)},
        lambda running, client, _: _inline(running, client),
        [True, False],
    ),
    "devices": (
        {"devices": ("/dev/fake-data-0",)},
        lambda running, _client, _: running.service.volume_groups.node.devices,
        [(), ("/dev/fake-data-0",)],
    ),
    "wipe": (
        {"wipe": "none"},
        lambda running, client, _: _deleted(running, client),
        [True, False],
    ),
    "background_bandwidth": (
        {"background_bandwidth": NO_RESERVE},
        lambda _running, _client, kept: kept.pace.is_unlimited,
        [False, True],
    ),
    "oldest_kernel": (
        {"oldest_kernel": (6, 1)},
        lambda running, _client, _: running.service.configuration.now.oldest_kernel,
        [(5, 8), (6, 1)],
    ),
    "header_backups": (
        {"header_backups": Path("/srv/headers")},
        lambda _running, _client, kept: kept.mappings.copies._directory,
        [None, Path("/srv/headers")],
    ),
    "kubeconfig": (
        {"kubeconfig": Path("/srv/kubeconfig")},
        lambda _running, _client, kept: kept.finder._configuration.now.kubeconfig,
        [None, Path("/srv/kubeconfig")],
    ),
    "orphan_grace_seconds": (
        {"orphan_grace_seconds": 60},
        lambda _running, _client, kept: kept.finder._configuration.now.orphan_grace_seconds,
        [3600, 60],
    ),
    "file": (
        {"definitions": (GroupDefinition("data", file=BackingFile(Path("data.img"), 64 * MIB)),)},
        lambda running, _client, _: [*running.service.definitions.pending],
        [[], ["data"]],
    ),
    "file_size": (
        {"definitions": (GroupDefinition("data", file=BackingFile(Path("data.img"), 128 * MIB)),)},
        lambda running, _client, _: [*running.service.definitions.pending],
        [[], ["data"]],
    ),
}


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_each_setting_that_may_change_is_asked_for_anew() -> None:
    assert ASKED.keys() == {key for key, one in SETTINGS.items() if not one.fixed}


@pytest.mark.parametrize("key", ASKED)
@pytest.mark.usefixtures("logging_as_before")
def test_what_was_made_at_the_start_asks_for_a_setting_when_it_uses_it(
    config: Config, start: Start, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    # Nothing is recovered meanwhile: what the reload itself leaves is looked at.
    changes, ask, answers = ASKED[key]
    running = start()
    logging.getLogger().setLevel(logging.INFO)
    running.service.eraser.grace_seconds = 20
    kept = Kept(running)
    if key.startswith("file"):
        monkeypatch.setattr(running.service.volume_groups.workers, "of", None)
    with Client(config.endpoint) as client:
        found = [ask(running, client, kept)]
        reload(running, replace(config, **changes))  # type: ignore[arg-type]
        found.append(ask(running, client, kept))
    monkeypatch.undo()
    assert found == answers


def test_a_class_and_its_group_are_there_after_a_reload(
    config: Config, fake: FakeHost, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    earlier = serving.start(replace(config, classes=(PLAIN, OTHER)), fake)
    with Client(config.endpoint) as client:
        client.create("deleted", 16 * MIB, block(), parameters={"class": "other"})
    earlier.stop()
    deleted = fake.lvm2.groups["more"].volumes["vol-deleted"]
    deleted.tags = {one.replace("state=ready", "state=wiping") for one in deleted.tags}
    running = start()
    with Client(config.endpoint) as client:
        with expect.code("INVALID_ARGUMENT"):
            client.create("new", 16 * MIB, block(), parameters={"class": "other"})
        assert 'carver_group_present{group="more"}' not in running.page("/metrics")[1]
        assert "vol-deleted" in fake.lvm2.groups["more"].volumes

        reload(running, replace(config, classes=(PLAIN, OTHER)))
        made = client.create("new", 16 * MIB, block(), parameters={"class": "other"})
        assert [one.volume_id for one in client.every_volume()] == [made.volume_id]
        # Its background work is looked for, and its pools and snapshots are.
        expect.soon(lambda: "vol-deleted" not in fake.lvm2.groups["more"].volumes)
        page = running.page("/metrics")[1]
    assert 'carver_group_present{group="more"} 1.0' in page
    assert 'carver_round_failures_total{group="more",kind="grow"}' in page
    assert "configuration reloaded: classes plain, other, volume groups data, more" in caplog.text


@pytest.mark.settings(classes=(PLAIN, OTHER, THIN))
def test_a_group_of_which_the_last_class_goes_is_as_after_a_restart(
    config: Config, fake: FakeHost, running: Started, caplog: pytest.LogCaptureFixture
) -> None:
    service = running.service
    with Client(config.endpoint) as client:
        made = client.create("a", 16 * MIB, block(), parameters={"class": "other"})
        thin = client.create("b", 16 * MIB, block(), parameters={"class": "thin"})
        kept = client.create("c", 16 * MIB, block())
        reload(running, replace(config, classes=(PLAIN,)))
        with expect.code("INVALID_ARGUMENT"):
            client.create("d", 16 * MIB, block(), parameters={"class": "other"})
        assert [one.volume_id for one in client.every_volume()] == [kept.volume_id]
        assert all("more" not in one.failures() for one in service.scans)
        expect.soon(lambda: "more" not in looked_at(running))
        # By its id a volume is used, expanded and deleted.
        client.expand(made.volume_id, 32 * MIB)
        client.delete(made.volume_id)
        client.delete(thin.volume_id)
        expect.soon(lambda: "vol-a" not in fake.lvm2.groups["more"].volumes)
    assert "volume group more: no class names it any more; it is let go of" in caplog.text


@pytest.mark.settings(classes=(PLAIN, OTHER))
def test_a_class_may_come_back(config: Config, fake: FakeHost, running: Started) -> None:
    with Client(config.endpoint) as client:
        volume = client.create("a", 16 * MIB, block(), parameters={"class": "other"})
        lock = running.service.volume_groups.of("more")
        reload(running, replace(config, classes=(PLAIN,)))
        reload(running, config)
        # A lock is never replaced: a call under way may hold it.
        assert running.service.volume_groups.of("more") is lock
        assert [one.volume_id for one in client.every_volume()] == [volume.volume_id]
        client.delete(volume.volume_id)
        expect.soon(lambda: "vol-a" not in fake.lvm2.groups["more"].volumes)
        assert looked_at(running) == {"data", "more"}


def test_a_class_that_changes_makes_volumes_as_it_is_then(
    config: Config, fake: FakeHost, running: Started
) -> None:
    with Client(config.endpoint) as client:
        before = client.capacity().available_capacity
        reserved = replace(PLAIN, reserve=Reserve(percent=50), layout=Layout("linear"))
        reload(running, replace(config, classes=(reserved,)))
        assert client.capacity().available_capacity < before * 0.6
        moved = replace(PLAIN, group="more")
        reload(running, replace(config, classes=(moved,)))
        client.create("a", 16 * MIB, block())
    assert "vol-a" in fake.lvm2.groups["more"].volumes


@pytest.mark.parametrize("after", [(PLAIN,), (PLAIN, replace(OTHER, group="data"))])
@pytest.mark.settings(classes=(PLAIN, OTHER))
def test_a_call_under_way_keeps_the_class_that_it_began_with(
    config: Config, fake: FakeHost, running: Started, after: tuple[DeviceClass, ...]
) -> None:
    asked, answering = threading.Event(), threading.Event()

    def wait(words: Sequence[str]) -> Result | None:
        if words[:2] == ("lvm", "lvcreate"):
            asked.set()
            assert answering.wait(60)
        return None

    fake.intercept = wait
    with Client(config.endpoint) as client, ThreadPoolExecutor(1) as callers:
        asking = callers.submit(
            client.create, "a", 16 * MIB, block(), parameters={"class": "other"}
        )
        assert asked.wait(60)
        reload(running, replace(config, classes=after))
        answering.set()
        volume = asking.result(60)
        assert "vol-a" in fake.lvm2.groups["more"].volumes
        client.delete(volume.volume_id)


def test_a_file_that_is_not_right_is_logged_and_changes_nothing(
    config: Config, running: Started, caplog: pytest.LogCaptureFixture
) -> None:
    assert "carver_config_last_reload_successful 1.0" in running.page("/metrics")[1]
    running.problem = "'perhaps' is not allowed"
    running.reload(replace(config, classes=(OTHER,)))
    expect.soon(lambda: "stays as it was" in caplog.text)
    assert (
        "the configuration is not reloaded, and stays as it was: config.toml: wipe: 'perhaps' is"
        " not allowed" in caplog.text
    )
    assert running.service.configuration.now == config
    assert "carver_config_last_reload_successful 0.0" in running.page("/metrics")[1]
    with Client(config.endpoint) as client:
        client.create("a", 16 * MIB, block())
    running.problem = ""
    reload(running, config)
    assert "carver_config_last_reload_successful 1.0" in running.page("/metrics")[1]


def test_a_mistake_of_carver_s_own_ends_no_service(
    config: Config, running: Started, caplog: pytest.LogCaptureFixture
) -> None:
    running.service.volume_groups.outdate = None  # type: ignore[assignment,method-assign]
    running.reload(config)
    expect.soon(lambda: "is not reloaded completely" in caplog.text)
    assert "carver_config_last_reload_successful 0.0" in running.page("/metrics")[1]
    with Client(config.endpoint) as client:
        assert client.probe().ready.value
    del running.service.volume_groups.outdate


def test_what_waits_for_a_restart_is_logged_and_the_rest_is_taken_over(
    config: Config, running: Started, caplog: pytest.LogCaptureFixture
) -> None:
    reload(running, replace(config, node_id="another", classes=(PLAIN, OTHER)))
    expect.soon(lambda: "waits for a restart" in caplog.text)
    assert (
        "setting node_id waits for a restart of Carver: kubelet was given it when Carver registered"
        in caplog.text
    )
    assert running.service.configuration.now == replace(config, classes=(PLAIN, OTHER))


def test_a_group_is_made_after_a_reload_and_one_that_failed_is_tried_again(
    config: Config, fake: FakeHost, running: Started
) -> None:
    disk = fake.new_device(33 * MIB)
    fake.write(disk, "ext4")
    made, definition = DeviceClass("made", "new"), GroupDefinition("new", (disk,))
    wanted = replace(config, classes=(PLAIN, made), definitions=(definition,))
    reload(running, wanted)
    definitions = running.service.definitions
    expect.soon(lambda: definitions.failures)
    with Client(config.endpoint) as client:
        with expect.code("RESOURCE_EXHAUSTED", "holds ext4", "SIGHUP"):
            client.create("a", 16 * MIB, block(), parameters={"class": "made"})
        fake.kernel.zero_out(disk, 0, 33 * MIB)
        reload(running, wanted)
        expect.soon(lambda: not definitions.pending)
        client.create("a", 16 * MIB, block(), parameters={"class": "made"})
        reload(running, config)
        assert (definitions.devices, definitions.failures, definitions.pending) == ({}, {}, {})


@pytest.mark.settings(devices=("/dev/fake-data-0",))
def test_lvm2_is_confined_to_the_disks_of_the_setting_from_the_start(running: Started) -> None:
    assert running.service.volume_groups.node.devices == ("/dev/fake-data-0",)


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`carver serve` with a file, in a process of its own."""
    (tmp_path / "config.toml").write_text(FILE)
    words = (sys.executable, str(HERE / "reloaded_service.py"), str(tmp_path))
    path = {"PYTHONPATH": f"{HERE.parents[2]}:{HERE.parents[1] / 'support'}"}
    with (tmp_path / "log").open("w") as out:
        running = subprocess.Popen(words, env={**os.environ, **path}, stderr=out)
    try:
        logged(tmp_path, "serving")
        yield running
    finally:
        running.kill()
        running.wait()


FILE = """
log_format = "json"
classes = [{name = "plain", group = "data", default = true}]
"""
LONGER = FILE.replace("true}", 'true}, {name = "other", group = "more"}') + 'node_id = "another"\n'


def logged(directory: Path, word: str) -> None:
    def text() -> str:
        return (directory / "log").read_text()

    expect.soon(lambda: word in text(), text)


@pytest.mark.starts_programs
def test_a_signal_reloads_the_file_of_a_process(
    process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    socket, file = tmp_path / "csi.sock", tmp_path / "config.toml"
    expect.soon(lambda: sockets.is_served(socket), (tmp_path / "log").read_text)
    with Client(socket) as client:
        client.create("a", 16 * MIB, block())
        with expect.code("INVALID_ARGUMENT"):
            client.create("b", 16 * MIB, block(), parameters={"class": "other"})
        file.write_text("wipe = 'perhaps'")
        process.send_signal(signal.SIGHUP)
        logged(tmp_path, "stays as it was")
        file.write_text(LONGER)
        process.send_signal(signal.SIGHUP)
        logged(tmp_path, "configuration reloaded: classes plain, other")
        client.create("b", 16 * MIB, block(), parameters={"class": "other"})
        assert len(list(client.every_volume())) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    lines = [json.loads(one) for one in (tmp_path / "log").read_text().splitlines()]
    [why] = [one["message"] for one in lines if "stays as it was" in one["message"]]
    assert f"{file}: wipe: 'perhaps' is not allowed" in why
    assert any("setting node_id waits for a restart" in one["message"] for one in lines)
