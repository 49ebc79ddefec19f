"""Where two nodes may have a group, an id's own PersistentVolume decides, or nothing is called.

Node `a` has the group FIRST. Node `b` has a copy of it, as by a machine template, or the holder of
its stolen key claims it.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from enrolled import spec_of
from member_histories import FIRST, GRACE, Clock, History, owner
from simulated import uuid_of

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.extras.controller import questions, routes
from agent.extras.controller.answer_rules import Row, Untrue
from agent.extras.controller.node_answers import Answers
from agent.extras.controller.nodes import Forgotten, Node, Refused
from agent.extras.kubernetes.objects import CONTENTS, GROUP_CONTENTS, NODES, Listing
from agent.settings.settings import DRIVER_NAME
from mount import command
from proto import csi_pb2 as csi

VOLUME = f"data@{FIRST}/vol-pvc-{FIRST}"
SNAPSHOT = "snap-snapshot-uid-1"
DELETE = "/csi.v1.Controller/DeleteVolume"


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def history(runner: asyncio.Runner) -> History:
    return History(runner.run)


def node(history: History, name: str) -> Node:
    found = history.known.get(name)
    assert found is not None
    return found


def outlives(history: History) -> None:
    """A snapshot of `a`, as of a thin volume, whose volume and PersistentVolume are gone."""
    history.removes("a")
    history._memory.contents["snapcontent-uid-1"] = {
        "spec": {"driver": DRIVER_NAME, "source": {"volumeHandle": f"data@{FIRST}/vol-pvc-old"}}
    }
    history.settle()


def copies(history: History) -> None:
    history.claims["b"].add(FIRST)
    history.settle()


def waits(history: History) -> None:
    """Two minutes go by, after which new volumes no longer wait for silent members."""
    for one in history.known:
        one.joined_seconds -= 121


@pytest.mark.parametrize("restarts", [False, True])
def test_a_snapshot_is_deleted_on_its_node_or_nowhere(history: History, restarts: bool) -> None:
    """DeleteSnapshot is OK where there is none: then nothing would ever erase it."""
    outlives(history)
    assert owner(history, FIRST, SNAPSHOT) == "a"
    history.act("breaks", "a")
    if restarts:
        history.act("restart")
    copies(history)
    waits(history)
    assert owner(history, FIRST, SNAPSHOT).startswith("UNAVAILABLE: ")
    if not history.known.why_no_new_volumes(node(history, "b")):
        # The next claim is scheduled to b, and has its volume in b's copy.
        history.volumes[FIRST] = "b"
        history._write()
        history.record.doubt()
        history.settle()
        assert owner(history, FIRST, f"vol-pvc-{FIRST}") == "b"
    assert owner(history, FIRST, SNAPSHOT).startswith("UNAVAILABLE: ")
    history.act("mends", "a")
    assert owner(history, FIRST, SNAPSHOT).startswith("UNAVAILABLE: ")
    history.claims["b"].discard(FIRST)
    history.removes("a")
    history.settle()
    assert owner(history, FIRST, SNAPSHOT) == "a"


def test_a_silent_node_keeps_its_snapshots_though_another_group_of_its_is_named(
    history: History,
) -> None:
    outlives(history)
    history._memory.volumes["pvc-h"] = {"spec": spec_of("other@hhhhhhhh/vol-pvc-h", "a")}
    history.act("breaks", "a")
    history.act("restart")
    copies(history)
    assert owner(history, FIRST, SNAPSHOT).startswith("UNAVAILABLE: ")


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("copied_before", [True, False])
def test_the_volumes_of_a_deleted_node_go_to_no_node_that_claims_its_group(
    history: History, runner: asyncio.Runner, forgets: bool, copied_before: bool
) -> None:
    """A Node that is deleted may be made again by its kubelet, with its data."""
    if not forgets:
        history.record._grace_seconds, history.record.forgets = None, False
    if copied_before:
        copies(history)
        assert owner(history, FIRST, f"vol-pvc-{FIRST}") == "a"
    begun = history.clock.now
    history.act("node_goes", "a")
    if not copied_before:
        history.claims["b"].add(FIRST)
        history.clock.now += 21
        runner.run(history._ask())
        history.record.look()
    assert history.clock.now - begun < GRACE
    said = owner(history, FIRST, f"vol-pvc-{FIRST}")
    assert said.startswith("UNAVAILABLE: ")
    assert "write its PersistentVolumes anew" in said
    # Nor what no PersistentVolume names, while the group's others name a deleted node.
    assert owner(history, FIRST, "vol-new").startswith("UNAVAILABLE: ")
    history.volumes[FIRST] = "b"
    history._write()
    history.record.doubt()
    history.settle()
    assert owner(history, FIRST, f"vol-pvc-{FIRST}") == "b"
    assert owner(history, FIRST, "vol-new") == "b"


def test_the_answer_about_a_volume_passes_that_was_asked_for_by_its_own_persistentvolume(
    history: History, runner: asyncio.Runner
) -> None:
    """Also while the group does not count as the node's for lists and new volumes."""
    for one in ("b", "c"):
        history.removes(one)
    history.settle()
    history.act("breaks", "c")
    history.act("restart")
    volume = f"data@{uuid_of(1)}/vol-pvc-1"
    # Made at another controller, after this one read PersistentVolumes.
    history._memory.volumes["pvc-1"] = {"spec": spec_of(volume, "b")}
    assert owner(history, uuid_of(1), "vol-pvc-1") == "b"
    answers, request = Answers(history.known), csi.DeleteVolumeRequest(volume_id=volume)
    asked = answers.asked(node(history, "b"), request, [volume])
    runner.run(answers.read(node(history, "b"), DELETE, asked, b""))
    asked = answers.asked(node(history, "b"), request)
    with pytest.raises(Refused):
        runner.run(answers.read(node(history, "b"), DELETE, asked, b""))


def named_on_two(history: History) -> None:
    """Of one group the volume `pvc-1` is a's, and `pvc-2` is b's, as where half was moved."""
    history.volumes.clear()
    history._memory.volumes = {
        "pvc-1": {"spec": spec_of(f"data@{FIRST}/vol-pvc-1", "a")},
        "pvc-2": {"spec": spec_of(f"data@{FIRST}/vol-pvc-2", "b")},
    }
    history.record.doubt()
    copies(history)


@pytest.mark.parametrize(("name", "its"), [("a", 1), ("b", 2)])
def test_a_node_lists_no_volume_whose_persistentvolume_names_another(
    history: History, name: str, its: int
) -> None:
    named_on_two(history)
    one = node(history, name)
    asked = Answers(history.known).asked(one, csi.ListVolumesRequest())

    def judge(number: int) -> None:
        volume = csi.Volume(
            volume_id=f"data@{FIRST}/vol-pvc-{number}",
            accessible_topology=[csi.Topology(segments=one.segments)],
        )
        entry = csi.ListVolumesResponse.Entry(volume=volume)
        entry.status.SetInParent()
        data = csi.ListVolumesResponse(entries=[entry]).SerializeToString()
        Row.of("csi.v1.Controller", "ListVolumes").judge(asked, data)

    judge(its)
    with pytest.raises(Untrue, match="its PersistentVolume names another node"):
        judge(3 - its)


def test_a_node_says_nothing_of_the_health_of_a_volume_that_is_another_s(history: History) -> None:
    named_on_two(history)
    asked = Answers(history.known).asked(
        node(history, "b"), csi.ControllerListVolumeHealthRequest()
    )
    entries = []
    for number in (1, 2):
        health = csi.VolumeHealth(volume_id=f"data@{FIRST}/vol-pvc-{number}")
        health.health_statuses.add(reason="Lost", message="all is lost")
        entries.append(health)
    data = csi.ControllerListVolumeHealthResponse(entries=entries).SerializeToString()
    answer = Row.of("csi.v1.Controller", "ControllerListVolumeHealth").judge(asked, data)
    assert [one.volume_id for one in answer.entries] == [f"data@{FIRST}/vol-pvc-2"]


def test_the_answer_passes_of_a_volume_whose_persistentvolume_was_just_written_anew(
    history: History, runner: asyncio.Runner
) -> None:
    """The call goes by the new one; the last reading still names the other node."""
    named_on_two(history)
    volume = f"data@{FIRST}/vol-pvc-1"
    history._memory.volumes["pvc-1"] = {"spec": spec_of(volume, "b")}
    assert owner(history, FIRST, "vol-pvc-1") == "b"
    answers, request = Answers(history.known), csi.DeleteVolumeRequest(volume_id=volume)
    asked = answers.asked(node(history, "b"), request, [volume])
    runner.run(answers.read(node(history, "b"), DELETE, asked, b""))


@pytest.mark.parametrize("has_looked", [True, False])
def test_a_node_with_a_disk_that_cannot_be_read_has_reported_its_groups(
    history: History, has_looked: bool
) -> None:
    """It says all that it can say; one that has not looked at its disks yet does not."""
    history.removes("b")
    history.settle()
    history.act("restarts", "c")
    history.act("restart")
    if has_looked:
        said = csi.GetPluginInfoResponse(name=DRIVER_NAME)
        said.manifest.update(
            {
                routes.NODE_ID: "c",
                routes.SEGMENTS: json.dumps(dict(node(history, "c").segments)),
                routes.GROUPS: "{}",
                routes.IS_WHOLE: routes.IN_PART,
            }
        )
        history.known._believe(node(history, "c"), said)
    found = owner(history, uuid_of(1), "snap-imported")
    assert (found == "b") is has_looked


GROUP_SNAPSHOT = "gsnap-groupsnapshot-uid-7"


def member(volume: str) -> str:
    """The member of the group snapshot that is of a volume; its name has a digest."""
    return ids.group_member("groupsnapshot-uid-7", volume)


def taken(history: History, *volumes: str, driver: str = DRIVER_NAME, uid: str = "uid-7") -> None:
    """The content of a group snapshot, as the snapshot-controller makes it."""
    source = {"volumeHandles": list(volumes)}
    spec = {"driver": driver, "source": source, "volumeGroupSnapshotRef": {"uid": uid}}
    history._memory.group_contents = {f"groupsnapcontent-{uid}": {"spec": spec}}


def silent_since_the_start(history: History, name: str) -> None:
    history.act("breaks", name)
    history.act("restart")


def test_a_group_snapshot_is_on_its_volumes_node_while_a_member_is_silent(
    history: History,
) -> None:
    silent_since_the_start(history, "c")
    for name in (GROUP_SNAPSHOT, member(VOLUME)):
        assert owner(history, FIRST, name).startswith("UNAVAILABLE: ")
    # What is in another group says nothing of this one.
    elsewhere = "other@hhhhhhhh/vol-pvc-h"
    history._memory.volumes["pvc-h"] = {"spec": spec_of(elsewhere, "b")}
    taken(history, elsewhere, VOLUME)
    for name in (GROUP_SNAPSHOT, member(VOLUME)):
        assert owner(history, FIRST, name) == "a"
    history.act("breaks", "a")
    for name in (GROUP_SNAPSHOT, member(VOLUME)):
        said = owner(history, FIRST, name)
        assert said.startswith("UNAVAILABLE: node a ")


@pytest.mark.parametrize(
    "change",
    [
        {"driver": "another"},
        {"uid": ""},
        {"uid": "uid-8"},
    ],
)
def test_a_content_says_nothing_of_a_group_snapshot_that_is_not_its_own(
    history: History, change: dict[str, str]
) -> None:
    silent_since_the_start(history, "c")
    taken(history, VOLUME, **change)
    for name in (GROUP_SNAPSHOT, member(VOLUME), "snap-imported"):
        assert owner(history, FIRST, name).startswith("UNAVAILABLE: ")


def test_a_member_of_a_volume_that_its_content_does_not_name_waits(history: History) -> None:
    silent_since_the_start(history, "c")
    taken(history, VOLUME, "nonsense", f"data@{uuid_of(1)}/vol-pvc-{uuid_of(1)}")
    for name in (member("nonsense"), member(f"data@{FIRST}/vol-pvc-2")):
        assert owner(history, FIRST, name).startswith("UNAVAILABLE: ")
    assert owner(history, FIRST, member(VOLUME)) == "a"


def test_of_two_named_nodes_a_group_snapshot_is_on_that_of_its_volumes(history: History) -> None:
    named_on_two(history)
    ours, theirs = (f"data@{FIRST}/vol-pvc-{one}" for one in (1, 2))
    taken(history, theirs)
    assert owner(history, FIRST, GROUP_SNAPSHOT) == "b"
    assert owner(history, FIRST, member(theirs)) == "b"
    # No group snapshot is of two nodes.
    taken(history, ours, theirs)
    assert owner(history, FIRST, GROUP_SNAPSHOT).startswith("UNAVAILABLE: ")
    assert owner(history, FIRST, member(ours)) == "a"
    # Its volumes are deleted, and with them what says where they were.
    taken(history, f"data@{FIRST}/vol-gone")
    assert owner(history, FIRST, GROUP_SNAPSHOT).startswith("UNAVAILABLE: ")


@pytest.mark.parametrize("name", [GROUP_SNAPSHOT, SNAPSHOT])
def test_a_snapshot_waits_while_the_api_server_does_not_list_contents(
    history: History, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    silent_since_the_start(history, "c")

    def fails(*_: object, **__: object) -> None:
        raise errors.ClusterSilent("contents", "it does not answer in time")

    monkeypatch.setattr(history._memory, "whole", fails)
    said = owner(history, FIRST, name)
    assert said.startswith("UNAVAILABLE: the API server does not answer")


def test_a_snapshot_goes_to_no_other_node_while_its_content_cannot_be_read(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volume is on `a`, whose disks are away, and `b` alone claims the group."""
    named_on_two(history)
    history.claims["a"].clear()
    history.settle()
    content = {"driver": DRIVER_NAME, "source": {"volumeHandle": f"data@{FIRST}/vol-pvc-1"}}
    history._memory.contents["snapcontent-uid-1"] = {"spec": content}
    assert owner(history, FIRST, SNAPSHOT).startswith("UNAVAILABLE: volume_id: ")
    whole = history._memory.whole

    def throttled(path: str, *more: Any, **query: Any) -> Listing:
        if path == CONTENTS:
            raise errors.ClusterSilent(path, "it answers 429")
        return whole(path, *more, **query)

    monkeypatch.setattr(history._memory, "whole", throttled)
    assert owner(history, FIRST, SNAPSHOT).startswith("UNAVAILABLE: the API server")


def test_a_node_that_was_made_anew_has_reported_nothing(
    history: History, runner: asyncio.Runner
) -> None:
    """Another machine of that name may have any group: what the earlier one said is not its own."""
    for name in ("a", "b"):
        history.removes(name)
    history.settle()
    assert owner(history, uuid_of(1), "snap-imported") == "b"
    earlier = node(history, "a")
    history.act("breaks", "a")
    history.node_is_made_anew("a")
    history.claims["b"].add(FIRST)
    history.settle()
    assert node(history, "a") is not earlier
    assert not node(history, "a").groups
    said = owner(history, FIRST, "snap-imported")
    assert said.startswith("UNAVAILABLE: ")
    assert "may be that of a, without any report of its groups" in said
    history.claims["a"].clear()
    history.act("mends", "a")
    assert owner(history, FIRST, "snap-imported") == "b"


def test_questions_about_one_volume_group_hold_up_no_other(
    history: History, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what else waits for the API server in the loop's own threads, as the list of Nodes."""
    silent_since_the_start(history, "c")
    others = f"data@{uuid_of(1)}/vol-pvc-{uuid_of(1)}"
    goes_on, asked = threading.Event(), []
    node_of = history.record.node_of

    def slow(identity: VolumeId, begun: float) -> str | None:
        asked.append(str(identity))
        if identity.group_uuid == FIRST:
            goes_on.wait(60)
        return node_of(identity, begun)

    monkeypatch.setattr(history.record, "node_of", slow)

    async def test() -> None:
        name, find = "volume_id", history.known.owner
        many = [f"data@{FIRST}/vol-{number}" for number in range(200)]
        waiting = [asyncio.ensure_future(find(one, name)) for one in many]
        while not asked:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            assert (await find(others, name)).name == "b"
        assert asked == [many[0], others]
        assert await asyncio.to_thread(lambda: "listed") == "listed"
        # Callers that give up and repeat it have nothing more asked.
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.05)
        with pytest.raises(Refused, match=f"questions about volume group {FIRST} come first"):
            await find(VOLUME, name)
        assert asked == [many[0], others]
        monkeypatch.setattr(questions, "PATIENCE_SECONDS", 20.0)
        goes_on.set()
        assert (await find(VOLUME, name)).name == "a"
        await history.known.close()

    try:
        runner.run(test())
    finally:
        goes_on.set()


def reads(history: History, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often all objects at a path are read from now on; each reading takes a second."""
    found = Counter[str]()
    whole, nodes = history._memory.whole, history._memory.nodes

    def counted(path: str, *more: Any, **query: Any) -> Listing:
        if "fieldSelector" not in query:
            found[path] += 1
            history.clock.now += 1
        return whole(path, *more, **query)

    def counted_nodes() -> Listing:
        found[NODES] += 1
        history.clock.now += 1
        return nodes()

    monkeypatch.setattr(history._memory, "whole", counted)
    monkeypatch.setattr(history._memory, "nodes", counted_nodes)
    return found


def test_a_hundred_calls_at_once_share_what_is_read_for_them(
    history: History, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About one volume group, where one is asked after the other, or about several."""
    silent_since_the_start(history, "c")
    taken(history, VOLUME)
    read = reads(history, monkeypatch)
    every = [member(VOLUME), *(member(f"vol-{number}") for number in range(49))]

    async def ask() -> list[Node | BaseException]:
        ids_asked = [f"data@{uuid}/{name}" for uuid in (FIRST, uuid_of(1)) for name in every]
        found = (history.known.owner(one, "snapshot_id") for one in ids_asked)
        return await asyncio.gather(*found, return_exceptions=True)

    first, *others = runner.run(ask())
    assert isinstance(first, Node)
    assert first.name == "a"
    assert all(isinstance(one, Refused) for one in others)
    assert read[GROUP_CONTENTS] < 10
    # A call that begins later goes by what is read later.
    before = read[GROUP_CONTENTS]
    taken(history, VOLUME, uid="uid-8")
    assert owner(history, FIRST, member(VOLUME)).startswith("UNAVAILABLE: ")
    assert read[GROUP_CONTENTS] == before + 1


def test_a_hundred_deletions_of_what_is_forgotten_share_what_is_read_for_them(
    history: History, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.act("node_goes", "a")
    assert "that is believed in" in owner(history, FIRST, f"vol-pvc-{FIRST}")
    history.clock.now += GRACE
    read = reads(history, monkeypatch)

    async def delete(number: int) -> None:
        identity = f"data@{FIRST}/vol-{number}"
        with pytest.raises(Forgotten):
            await history.known.owner(identity, "volume_id")
        await history.known.require_no_snapshots(identity)

    async def delete_all() -> None:
        await asyncio.gather(*map(delete, range(100)))

    runner.run(delete_all())
    assert read[NODES] < 10
    assert read[CONTENTS] < 10


def test_a_reading_that_fails_has_failed_for_all_that_waited_for_it() -> None:
    """Else each of them would wait for an API server that does not answer, one after the other."""
    clock, read = Clock(), list[float]()

    def fail() -> None:
        read.append(clock.now)
        clock.now += 30
        raise errors.ClusterSilent("contents", "it does not answer in time")

    shared, begun = questions.SharedReading(fail, clock), clock.now
    clock.now += 1
    for _ in range(3):
        with pytest.raises(errors.ClusterSilent):
            shared.since(begun)
    assert read == [begun + 1]
    with pytest.raises(errors.ClusterSilent):
        shared.since(clock.now)
    assert read == [begun + 1, begun + 31]


ANOTHER_SNAPSHOT = "snap-snapshot-uid-2"


@pytest.mark.parametrize(
    ("asked", "sources", "of_group"),
    [
        (SNAPSHOT, {"uid-1": SNAPSHOT}, []),
        (SNAPSHOT, {"uid-1": ANOTHER_SNAPSHOT, "uid-2": SNAPSHOT}, []),
        (SNAPSHOT, {"uid-1": GROUP_SNAPSHOT}, [SNAPSHOT]),
        (GROUP_SNAPSHOT, {}, [GROUP_SNAPSHOT]),
        (GROUP_SNAPSHOT, {}, [f"vol-pvc-{FIRST}", GROUP_SNAPSHOT]),
        (member(f"data@{FIRST}/{GROUP_SNAPSHOT}"), {}, [GROUP_SNAPSHOT]),
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_content_that_leads_to_itself_is_named_and_nothing_is_called(
    history: History, asked: str, sources: dict[str, str], of_group: list[str], is_gone: bool
) -> None:
    """As one written by hand: no volume is a snapshot, so nothing is looked up in a circle."""
    if is_gone:
        history.act("node_goes", "a")
        history.clock.now += GRACE
        history.settle()
    else:
        silent_since_the_start(history, "c")
    for uid, name in sources.items():
        spec = {"driver": DRIVER_NAME, "source": {"volumeHandle": f"data@{FIRST}/{name}"}}
        history._memory.contents[f"snapcontent-{uid}"] = {"spec": spec}
    taken(history, *(f"data@{FIRST}/{one}" for one in of_group))
    said = owner(history, FIRST, asked)
    kind = "VolumeSnapshotContent snapcontent" if sources else "VolumeGroupSnapshotContent group"
    assert said.startswith("UNAVAILABLE: ")
    assert f": {kind}" in said
    assert "which is no volume" in said


def test_a_question_that_takes_long_is_unavailable_and_read_on(
    history: History, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads is there for the call that repeats it."""
    silent_since_the_start(history, "c")
    goes_on, limits = threading.Event(), []
    node_of = history.record.node_of

    def slow(identity: VolumeId, begun: float) -> str | None:
        limits.append(command.remaining_seconds())
        goes_on.wait(60)
        return node_of(identity, begun)

    monkeypatch.setattr(history.record, "node_of", slow)
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.05)
    said = owner(history, FIRST, f"vol-pvc-{FIRST}")
    assert said.startswith(f"UNAVAILABLE: cannot look up {VOLUME}: ")
    assert said.endswith("the API server does not answer in time; ask again")
    goes_on.set()
    [limit] = limits
    assert limit is not None
    assert 60 < limit <= 120


def test_a_lie_about_a_group_that_others_contest_is_counted_for_the_liar(
    history: History, runner: asyncio.Runner
) -> None:
    history.claims["c"].add(FIRST)
    history.settle()
    liar = node(history, "b")
    answers = Answers(history.known)
    asked = answers.asked(liar, csi.CreateVolumeRequest(name="evil"))
    made = csi.Volume(
        volume_id=f"data@{FIRST}/vol-evil",
        accessible_topology=[csi.Topology(segments=liar.segments)],
    )
    data = csi.CreateVolumeResponse(volume=made).SerializeToString()
    with pytest.raises(Refused, match="node b") as raised:
        runner.run(answers.read(liar, "/csi.v1.Controller/CreateVolume", asked, data))
    assert (raised.value.code, liar.refused_answers) == (grpc.StatusCode.INTERNAL, 1)
