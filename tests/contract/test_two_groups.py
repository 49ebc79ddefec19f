"""Decisions about a second group: by what is there now, not by what was read of it last."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import expect
import grpc
import pytest
import serving
from csi_client import Client
from fakes.host import FakeHost
from real.any import AnyHost, device, names

from agent.csi.client import block, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import report_age
from lvm import report
from mount.command import Result
from proto import carver_pb2 as carver
from proto.carver_pb2_grpc import TransferStub

MIB = 1 << 20
SIZE = 16 * MIB


class Slow:
    """lvm2, whose report of one group takes until `go` once it is `on`."""

    def __init__(self, host: AnyHost, group: str) -> None:
        self._run = host.lvm.run
        self._disks = [one.name for one in report.read(host.lvm).group(group).disks]
        self.on, self.asked, self.go = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, *words: str, **more: Any) -> Result:
        if self.on.is_set() and words[1] == "fullreport" and self._disks[0] in " ".join(words):
            self.asked.set()
            assert self.go.wait(expect.PATIENCE_SECONDS)
        return self._run(*words, **more)


pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.groups(data=[100, 60], other=[60]),
    pytest.mark.settings(
        classes=(DeviceClass("a", "data", default=True), DeviceClass("b", "other"))
    ),
]


@pytest.fixture
def slow(host: AnyHost, request: pytest.FixtureRequest) -> Slow:
    """Of the group whose fixture the test names."""
    return Slow(host, request.getfixturevalue(request.param))


@pytest.fixture
def service(host: AnyHost, config: Config, slow: Slow) -> Iterator[Service]:
    with serving.served(host, config, replace(host.lvm, run=slow)) as (running, _):
        yield running


def answer_of(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def during_an_older_read(
    service: Service, slow: Slow, group: str, call: Callable[[], object]
) -> str:
    """What a call answers that comes while a read of that group is under way."""
    volume_group = service.volume_groups.of(group)
    assert volume_group is not None
    slow.on.set()
    # As after a command of Carver's, since which the group was not read.
    volume_group.metadata.forget()
    volume_group._is_stale = True
    answers: list[str] = []
    calling = threading.Thread(target=lambda: answers.append(answer_of(call)))
    reading = threading.Thread(target=volume_group.state)
    reading.start()
    assert slow.asked.wait(expect.PATIENCE_SECONDS)
    calling.start()
    # It waits for a read of its own, or has answered.
    expect.soon(lambda: volume_group._next is not None or answers)
    slow.go.set()
    for one in (reading, calling):
        one.join(expect.PATIENCE_SECONDS)
    return answers[0]


@pytest.mark.parametrize("slow", ["other"], indirect=True)
@pytest.mark.parametrize("together", [False, True])
def test_a_snapshot_from_which_a_volume_of_another_group_is_copied_is_kept(
    client: Client,
    service: Service,
    host: AnyHost,
    group: str,
    other: str,
    slow: Slow,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = client.create("source", SIZE, block())
    contents = b"a tenant's data.".ljust(4096, b"#")
    host.write_bytes(device(host, group, "vol-source"), SIZE - 4096, contents)
    if together:
        made = client.group_snapshot("both", [source.volume_id])
        [snapshot] = made.snapshots
    else:
        snapshot = client.snapshot("s", source.volume_id)
    copy, answers = host.kernel.copy, list[str]()

    def delete() -> None:
        if together:
            ids = [one.snapshot_id for one in made.snapshots]
            client.delete_group_snapshot(made.group_snapshot_id, ids)
        else:
            client.delete_snapshot(snapshot.snapshot_id)

    # The copy may begin a moment before CreateVolume has left the names.
    service.context.locks.grace_seconds = 60

    def copying(*where: Any, **more: Any) -> None:
        if not answers:
            answers.append("")
            answers[0] = during_an_older_read(service, slow, other, delete)
        copy(*where, **more)

    monkeypatch.setattr(host.kernel, "copy", copying)
    restored = of_snapshot(snapshot.snapshot_id)
    client.create("restored", SIZE, block(), parameters={"class": "b"}, source=restored)
    assert answers == ["FAILED_PRECONDITION"]
    path = device(host, other, "vol-restored")
    assert host.read_bytes(path, SIZE - 4096, 4096) == contents


@pytest.mark.parametrize("slow", ["group"], indirect=True)
def test_a_deleted_clone_leaves_no_bridge_in_its_source_s_group(
    client: Client,
    service: Service,
    host: AnyHost,
    group: str,
    other: str,
    slow: Slow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = client.create("source", SIZE, block())
    copy, begun = host.kernel.copy, threading.Event()
    # As above.
    service.context.locks.grace_seconds = 60

    def copying(*where: Any, **more: Any) -> None:
        [job] = service.copier.jobs.unfinished()
        begun.set()
        assert job.cancelled.wait(expect.PATIENCE_SECONDS)
        copy(*where, **more)

    monkeypatch.setattr(host.kernel, "copy", copying)
    where, of = {"class": "b"}, of_volume(source.volume_id)
    clone = partial(client.create, "clone", SIZE, block(), parameters=where, source=of)
    cloning = threading.Thread(target=answer_of, args=[clone])
    cloning.start()
    assert begun.wait(expect.PATIENCE_SECONDS)
    uuid = report.read(host.lvm).group(other).uuid.replace("-", "")[:8]
    delete = partial(client.delete, f"{other}@{uuid}/vol-clone")
    assert during_an_older_read(service, slow, group, delete) == "OK"
    cloning.join(expect.PATIENCE_SECONDS)
    expect.soon(lambda: names(host, group) == {"vol-source"}, lambda: names(host, group))
    client.delete(source.volume_id)
    assert not names(host, group) | names(host, other)


@pytest.mark.parametrize("slow", ["other"], indirect=True)
@pytest.mark.parametrize("what", ["volume", "snapshot", "group snapshot"])
def test_a_name_that_another_group_got_a_moment_ago_is_taken(
    client: Client, service: Service, slow: Slow, other: str, what: str
) -> None:
    here = client.create("here", SIZE, block())
    there = client.create("there", SIZE, block(), parameters={"class": "b"})
    match what:
        case "volume":
            client.create("x", SIZE, block(), parameters={"class": "b"})
            again: Callable[[], object] = partial(
                client.create, "x", SIZE, block(), parameters={"class": "a"}
            )
        case "snapshot":
            client.snapshot("x", there.volume_id)
            again = partial(client.snapshot, "x", here.volume_id)
        case _:
            client.group_snapshot("x", [there.volume_id])
            again = partial(client.group_snapshot, "x", [here.volume_id])
    assert during_an_older_read(service, slow, other, again) == "ALREADY_EXISTS"


def test_a_fresh_state_says_nothing_of_a_group_that_was_not_read(
    host: AnyHost, config: Config, group: str, other: str
) -> None:
    with serving.served(host, config) as (service, client):
        there = client.create("there", SIZE, block(), parameters={"class": "b"})
        known = service.reports.fresh(group)
        assert known.named_groups == {group}
        with pytest.raises(AssertionError, match="was not read"):
            known.volume(there.volume_id)
        every = service.reports.every_group(known)
        assert isinstance(every, report_age.EveryGroup)
        assert not every.silent
        assert every.volume(there.volume_id).name == "vol-there"


def test_an_id_of_another_group_beside_the_one_of_a_call_is_refused(
    host: AnyHost, config: Config
) -> None:
    with serving.served(host, config) as (_, client):
        here = client.create("here", SIZE, block())
        there = client.create("there", SIZE, block(), parameters={"class": "b"})
        one = client.snapshot("s", here.volume_id)
        other = client.snapshot("t", there.volume_id)
        request = carver.OpenSnapshotRequest(
            snapshot_id=one.snapshot_id, base_snapshot_id=other.snapshot_id
        )
        with expect.code("INVALID_ARGUMENT", "another volume group"):
            client.stub(TransferStub).OpenSnapshot(request)


def reports(host: AnyHost, group: str) -> int:
    """How many reports of a group were read, by its first disk."""
    disk = report.read(host.lvm).group(group).disks[0].name
    every = (" ".join(words) for words in host.commands if "fullreport" in words)
    return sum(disk in words for words in every)


def test_a_decision_about_all_groups_reads_those_alone_that_carver_changed(
    host: AnyHost, config: Config, group: str, other: str
) -> None:
    with serving.served(host, config) as (service, client):
        source = client.create("source", SIZE, block())
        there = client.create("there", SIZE, block(), parameters={"class": "b"})
        changes = ((True, lambda: client.snapshot("t", there.volume_id)), (False, list))
        for is_read, change in changes:
            snapshot = client.snapshot("s", source.volume_id)
            service.reports.fresh()
            change()
            host.commands.clear()
            client.delete_snapshot(snapshot.snapshot_id)
            found = reports(host, other)
            # On a real machine udev tells of changes as well, so that a group is read once more.
            assert found if is_read else not found or not isinstance(host, FakeHost)
