"""What the API server's objects say about the places of a pod's other volumes."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest

from agent.core import errors, ids
from agent.core.ids import VolumeId
from agent.extras.controller import questions as asking
from agent.extras.controller.claims import ClaimName, ClaimQuestions, Claims, OtherVolume
from agent.extras.controller.nodes import Refused
from agent.extras.kubernetes.objects import Listing, Lists, Object, Objects
from mount import command
from proto import csi_pb2 as csi

DRIVER, KEY = "lvm.csi.carver", "topology.lvm.csi.carver/node"
VOLUME, SNAPSHOT = "data@abcdefgh/vol-pvc-1", "data@abcdefgh/snap-1"
CLAIMS, PODS = "/api/v1/namespaces/shop/persistentvolumeclaims", "/api/v1/namespaces/shop/pods"
SNAPSHOTS = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots"
CONTENTS = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
VOLUMES, NODES = "/api/v1/persistentvolumes", "/api/v1/nodes"
FIELD = "fieldSelector=metadata.name"
FRESH = ClaimName("shop", "wal")


def node(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "uid": name, "labels": labels}}


class Server(Objects, Lists):
    """Objects by their paths, and lists by theirs with the query."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.lists: dict[str, list[Object]] = {}
        self.every_node = [node("own")]
        self.asked: list[str] = []
        self.waits = threading.Event()
        self.waits.set()

    def find(self, path: str, kind: str) -> Object | None:
        self._note(path)
        self.waits.wait(10)
        return self.objects.get(path)

    def whole(self, path: str, kind: str, **query: Any) -> Listing:
        return self._listed(path, query)

    def metadata(self, path: str, **query: str) -> Listing:
        return self._listed(path, query)

    def _listed(self, path: str, query: Mapping[str, Any]) -> Listing:
        asked = "&".join([path, *(f"{key}={value}" for key, value in query.items())])
        self._note(asked)
        if path == NODES and not query:
            return Listing(self.every_node, "1")
        known = {f"{NODES}&{FIELD}={one['metadata']['name']}": one for one in self.every_node}
        named = [known[asked]] if asked in known else []
        return Listing([*self.lists.get(asked, []), *named], "1")

    def _where(self, path: str) -> str:
        return path

    def _note(self, path: str) -> None:
        self.asked.append(path)

    def pod(self, *names: str, **more: Any) -> dict[str, Any]:
        """A pod that waits for a node, with these claims."""
        volumes = [{"name": one, "persistentVolumeClaim": {"claimName": one}} for one in names]
        made = {"metadata": {"name": "db-0", "uid": "1"}, "spec": {"volumes": volumes}, **more}
        self.lists.setdefault(f"{PODS}&fieldSelector=spec.nodeName=", []).append(made)
        return made

    def claim(self, name: str, **spec: Any) -> None:
        about = {"namespace": "shop", "name": name}
        self.objects[f"{CLAIMS}/{name}"] = {"metadata": about, "spec": spec}

    def volume(self, of: str, driver: str = DRIVER, namespace: str = "shop") -> None:
        """The PersistentVolume `pvc-1` of a claim, on node b."""
        term = {"key": KEY, "operator": "In", "values": ["b"]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
        source = {"driver": driver, "volumeHandle": VOLUME}
        bound = {"namespace": namespace, "name": of}
        spec = {"csi": source, "nodeAffinity": {"required": terms}, "claimRef": bound}
        self.objects[f"{VOLUMES}/pvc-1"] = {"spec": spec}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def known(server: Server) -> Claims:
    return Claims(server, server, DRIVER, KEY)


def of_snapshot(name: str = "snap", **more: str) -> dict[str, str]:
    kind = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot"}
    return {**kind, "name": name, **more}


def of_claim(name: str = "old") -> dict[str, str]:
    return {"kind": "PersistentVolumeClaim", "name": name}


def content(
    server: Server, driver: str = DRIVER, taken: str = "", namespace: str = "shop", **source: str
) -> dict[str, Any]:
    """A VolumeSnapshotContent `c`; and the status of a VolumeSnapshot that is bound to it."""
    status = {"snapshotHandle": taken} if taken else {}
    bound = {"namespace": namespace, "name": "snap"}
    spec = {"driver": driver, "source": source, "volumeSnapshotRef": bound}
    server.objects[f"{CONTENTS}/c"] = {"spec": spec, "status": status}
    return {"status": {"boundVolumeSnapshotContentName": "c"}}


def test_a_claim_that_is_bound_is_where_its_volume_s_affinity_says(
    server: Server, known: Claims
) -> None:
    server.pod("wal", "data")
    server.claim("data", volumeName="pvc-1", dataSourceRef=of_snapshot())
    server.volume("data")
    assert known.others(FRESH) == [OtherVolume("db-0", "data", segments=frozenset({"b"}))]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("made", "of"),
    [
        ({"taken": SNAPSHOT, "volumeHandle": VOLUME}, SNAPSHOT),
        ({"snapshotHandle": SNAPSHOT}, SNAPSHOT),
        ({"volumeHandle": VOLUME}, VOLUME),
    ],
    ids=["taken", "provisioned before", "not taken yet"],
)
@pytest.mark.parametrize("field", ["dataSource", "dataSourceRef"])
def test_a_restored_claim_will_be_where_the_snapshot_is(
    field: str, made: Mapping[str, str], of: str, server: Server, known: Claims
) -> None:
    server.pod("data", "wal")
    server.claim("data", **{field: of_snapshot()})
    server.objects[f"{SNAPSHOTS}/snap"] = content(server, **made)
    assert known.others(FRESH) == [OtherVolume("db-0", "data", source=VolumeId.parse(of))]
    assert len(server.asked) == 4


def test_a_snapshot_without_content_will_be_where_its_volume_is(
    server: Server, known: Claims
) -> None:
    server.pod("data", "wal")
    server.claim("data", dataSourceRef=of_snapshot())
    server.objects[f"{SNAPSHOTS}/snap"] = {"spec": {"source": {"persistentVolumeClaimName": "old"}}}
    server.claim("old", volumeName="pvc-1")
    server.volume("old")
    [other] = known.others(FRESH)
    assert str(other.source) == VOLUME


def test_a_cloned_claim_will_be_where_its_source_is(server: Server, known: Claims) -> None:
    server.pod("data", "wal")
    server.claim("data", dataSource=of_claim())
    server.claim("old", volumeName="pvc-1")
    server.volume("old")
    [other] = known.others(FRESH)
    assert str(other.source) == VOLUME


def bound_to_another_driver(server: Server) -> None:
    server.claim("data", volumeName="pvc-1")
    server.volume("data", driver="other")


def bound_to_no_volume(server: Server) -> None:
    server.claim("data", volumeName="pvc-1")


def restored_from_another_driver(server: Server) -> None:
    server.claim("data", dataSourceRef=of_snapshot())
    server.objects[f"{SNAPSHOTS}/snap"] = content(server, driver="other", taken=SNAPSHOT)


def restored_from_nothing(server: Server) -> None:
    server.claim("data", dataSourceRef=of_snapshot())


def cloned_from_what_is_not_bound(server: Server) -> None:
    server.claim("data", dataSourceRef=of_claim("wal"))
    server.claim("wal")


def named_volume_of_another(server: Server) -> None:
    server.claim("data", volumeName="pvc-1")
    server.volume("data", namespace="others")


def named_content_of_another(server: Server) -> None:
    server.claim("data", dataSourceRef=of_snapshot())
    content(server, taken=SNAPSHOT, namespace="others")
    spec = {"source": {"volumeSnapshotContentName": "c"}}
    server.objects[f"{SNAPSHOTS}/snap"] = {"spec": spec}


def named_snapshot_of_another(server: Server) -> None:
    server.claim("data", dataSourceRef=of_snapshot(namespace="others"))
    theirs = SNAPSHOTS.replace("shop", "others")
    server.objects[f"{theirs}/snap"] = content(server, taken=SNAPSHOT, namespace="others")


def populated(server: Server) -> None:
    named = {"apiGroup": "populator.example", "kind": "Image", "name": "debian"}
    server.claim("data", dataSourceRef=named)


def new(server: Server) -> None:
    server.claim("data")


def gone(_server: Server) -> None:
    pass


# What is done to a server; each is a claim whose place is not known, or none of Carver's.
NOWHERE: Sequence[Callable[[Server], None]] = (
    *(bound_to_another_driver, bound_to_no_volume, restored_from_another_driver),
    *(named_volume_of_another, named_content_of_another, named_snapshot_of_another),
    *(restored_from_nothing, cloned_from_what_is_not_bound, populated, new, gone),
)


@pytest.mark.parametrize("prepare", NOWHERE, ids=lambda one: one.__name__)
def test_what_is_not_known_or_no_volume_of_carver_s_has_no_place(
    prepare: Callable[[Server], None], server: Server, known: Claims
) -> None:
    server.pod("wal", "data")
    prepare(server)
    assert known.others(FRESH) == []


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"name": "db-0", "uid": "1", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"status": {"phase": "Failed"}},
    ],
    ids=["deleted", "failed"],
)
def test_a_pod_that_will_not_run_does_not_count(
    more: Mapping[str, Any], server: Server, known: Claims
) -> None:
    server.pod("wal", "data", **more)
    server.claim("data", volumeName="pvc-1")
    server.volume("data")
    assert known.others(FRESH) == []


def test_pods_without_the_claim_cost_nothing(server: Server, known: Claims) -> None:
    server.pod("other", "data")
    server.pod("wal")
    assert known.others(FRESH) == []
    assert server.asked == [f"{PODS}&fieldSelector=spec.nodeName="]


def test_no_more_than_64_other_claims_are_looked_up(server: Server, known: Claims) -> None:
    server.pod("wal", *(f"data-{number}" for number in range(1000)))
    assert known.others(FRESH) == []
    assert len(server.asked) == 1 + 64


def test_a_claim_made_for_a_pod_s_ephemeral_volume_counts(server: Server, known: Claims) -> None:
    pod = server.pod("wal")
    pod["spec"]["volumes"].append({"name": "scratch", "ephemeral": {}})
    server.claim("db-0-scratch", volumeName="pvc-1")
    server.volume("db-0-scratch")
    assert [one.claim for one in known.others(FRESH)] == ["db-0-scratch"]


def test_the_name_of_a_source_is_one_part_of_a_path(server: Server, known: Claims) -> None:
    server.pod("wal", "data")
    server.claim("data", dataSourceRef=of_snapshot("../../secrets/a?b"))
    assert known.others(FRESH) == []
    [path] = [one for one in server.asked if "volumesnapshots" in one]
    assert path.endswith("/namespaces/shop/volumesnapshots/..%2F..%2Fsecrets%2Fa%3Fb")


@pytest.mark.parametrize(
    ("annotations", "is_scheduled"),
    [({"volume.kubernetes.io/selected-node": "a"}, True), ({}, False), (None, False)],
)
def test_a_claim_with_a_selected_node_was_scheduled(
    annotations: Mapping[str, str] | None, is_scheduled: bool, server: Server, known: Claims
) -> None:
    server.objects[f"{CLAIMS}/wal"] = {"metadata": {"name": "wal", "annotations": annotations}}
    assert known.is_scheduled(FRESH) is is_scheduled


def test_a_claim_that_is_gone_is_not_made_anywhere(known: Claims) -> None:
    assert known.is_scheduled(FRESH)


@pytest.mark.parametrize("name", ["b", "node-b.example.com", "n" * 70, f"{'n' * 46}-{'0' * 16}"])
def test_a_node_is_known_by_the_segment_that_follows_from_its_name(
    name: str, server: Server, known: Claims
) -> None:
    """Also before it has the label; and whether it is shortened, as it may look, or not."""
    segment = ids.node_segment(name)
    server.every_node = [node("other")]
    assert not known.has_node(segment, time.monotonic())
    server.every_node.append(node(name))
    server.asked.clear()
    assert known.has_node(segment, time.monotonic())
    assert len(server.asked) == 1


def test_a_hundred_claims_for_a_node_that_is_gone_share_one_list_of_the_nodes(
    server: Server, known: Claims
) -> None:
    """Of one namespace, where one claim is asked about after the other, or of several."""
    questions = ClaimQuestions(known)

    async def asked() -> list[bool | None]:
        begun = time.monotonic()
        names = [f"tenant-{number % 5}" for number in range(100)]
        every = (questions.ask(one, known.has_node, "gone", begun) for one in names)
        return await asyncio.gather(*every)

    assert asyncio.run(asked()) == [False] * 100
    questions.stop()
    assert server.asked.count(NODES) == 1
    # One that is there by now is seen by the next call.
    server.every_node.append(node("g" * 70))
    assert known.has_node(ids.node_segment("g" * 70), time.monotonic())


@pytest.mark.parametrize("name", ["b", "n" * 70])
def test_an_api_server_without_any_node_does_not_say_that_a_node_has_left(
    name: str, server: Server, known: Claims
) -> None:
    """It has lost its data: the scheduler would choose again, and the volume be made twice."""
    server.every_node = []
    with pytest.raises(errors.ClusterSilent, match="it has no Node"):
        known.has_node(ids.node_segment(name), time.monotonic())


@pytest.mark.parametrize("gone", ["b", "n" * 70])
@pytest.mark.parametrize("key", [KEY, "kubernetes.io/hostname"])
def test_no_node_s_label_keeps_claims_waiting_for_a_node_that_is_gone(
    key: str, gone: str, server: Server, known: Claims
) -> None:
    """Root on a node can write the labels of its own Node."""
    segment = ids.node_segment(gone)
    thief = node("thief", **{key: segment})
    server.every_node = [thief]
    server.lists[f"{NODES}&labelSelector={key}={segment}"] = [thief]
    assert not known.has_node(segment, time.monotonic())


def test_the_provisioner_names_the_claim() -> None:
    names = {"csi.storage.k8s.io/pvc/name": "wal", "csi.storage.k8s.io/pvc/namespace": "shop"}
    request = csi.CreateVolumeRequest(parameters=names)
    assert ClaimName.of(request) == FRESH
    del request.parameters["csi.storage.k8s.io/pvc/namespace"]
    assert ClaimName.of(request) is None


class Refusing(Server):
    """One whose lists cannot be had."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def whole(self, path: str, kind: str, **query: Any) -> Listing:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        errors.ClusterSilent("pods", "it answers 403", is_refusal=True),
        errors.ClusterRefused("GET", "/api", "forbidden", "Forbidden", is_refusal=True),
        TypeError("a list in place of a table"),
    ],
)
def test_what_the_api_server_refuses_is_not_known_and_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = Refusing(error)
    questions = ClaimQuestions(Claims(refusing, refusing, DRIVER, KEY))
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(questions.ask("shop", questions.claims.others, FRESH)) is None
    assert "cannot look up shop/wal" in caplog.text
    questions.stop()


@pytest.mark.parametrize(
    "error",
    [
        errors.ClusterSilent("pods", "its answer was cut off"),
        errors.ClusterRefused("GET", "/api", "it is off"),
    ],
)
def test_what_the_api_server_does_not_answer_is_asked_again(error: Exception) -> None:
    refusing = Refusing(error)
    questions = ClaimQuestions(Claims(refusing, refusing, DRIVER, KEY))
    with pytest.raises(Refused, match="cannot look up shop/wal") as raised:
        asyncio.run(questions.ask("shop", questions.claims.others, FRESH))
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    questions.stop()


def test_a_slow_api_server_is_asked_again(
    server: Server, known: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE_SECONDS", 0.0)
    server.waits.clear()
    questions = ClaimQuestions(known)
    with pytest.raises(Refused, match="does not answer in time") as raised:
        asyncio.run(questions.ask("shop", known.is_scheduled, FRESH))
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    server.waits.set()
    questions.stop()


class Slow:
    """Questions that end once they may: how many are asked, and of which namespaces."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self._guard = threading.Lock()
        self.asked: list[str] = []
        self.now = self.most = 0

    def __call__(self, namespace: str) -> str:
        with self._guard:
            self.asked.append(namespace)
            self.now += 1
            self.most = max(self.most, self.now)
        self.end.wait(30)
        with self._guard:
            self.now -= 1
        return namespace


@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.parametrize("question", ["others", "is_scheduled", "has_node"])
def test_what_takes_long_in_one_namespace_delays_no_claim_of_another(
    count: int, question: str, known: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE_SECONDS", 2.0)
    questions, slow = ClaimQuestions(known), Slow()
    about = ("b", time.monotonic()) if question == "has_node" else (FRESH,)

    async def asked() -> object:
        theirs = [
            asyncio.ensure_future(questions.ask("tenant", slow, "tenant")) for _ in range(count)
        ]
        await asyncio.sleep(0.05)
        answer = await questions.ask("shop", getattr(known, question), *about)
        for one in theirs:
            one.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)
        return answer

    try:
        assert asyncio.run(asked()) is not None
        assert slow.asked == ["tenant"]
    finally:
        slow.end.set()
        questions.stop()


def test_a_question_that_no_call_waits_for_any_more_keeps_its_turn_until_it_ends(
    known: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of callers that repeat it: the API server is not asked by ever more threads."""
    monkeypatch.setattr(asking, "PATIENCE_SECONDS", 0.1)
    questions, slow = ClaimQuestions(known), Slow()

    async def asked() -> None:
        with pytest.raises(Refused, match="does not answer in time"):
            await questions.ask("shop", slow, "shop")
        with pytest.raises(Refused, match="other questions about namespace 'shop' come first"):
            await questions.ask("shop", slow, "shop")
        waiting = asyncio.ensure_future(questions.ask("shop", slow, "shop"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert slow.asked == ["shop"]
        monkeypatch.setattr(asking, "PATIENCE_SECONDS", 20.0)
        slow.end.set()
        assert await questions.ask("shop", slow, "shop") == "shop"
        assert (slow.asked, slow.most) == (["shop"] * 2, 1)

    asyncio.run(asked())
    questions.stop()


@pytest.mark.parametrize("names", [("shop", "shop"), ("shop", "other")])
def test_a_question_s_time_begins_with_it_and_not_while_others_come_first(
    names: tuple[str, str], known: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(asking, "_AT_ONCE", 1)
    questions = ClaimQuestions(known)

    def takes_long(name: str) -> str:
        time.sleep(1.2)
        return name

    async def asked() -> list[str | None]:
        every = [questions.ask(one, takes_long, str(number)) for number, one in enumerate(names)]
        return await asyncio.gather(*every)

    assert asyncio.run(asked()) == ["0", "1"]
    questions.stop()


@pytest.mark.parametrize("many", [1, 3])
def test_more_namespaces_than_are_asked_at_once_take_turns(
    many: int, known: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_AT_ONCE", 2)
    questions, slow = ClaimQuestions(known), Slow()
    names = [f"tenant-{number}" for number in range(5)] * many

    async def asked() -> list[str | None]:
        every = asyncio.gather(*(questions.ask(one, slow, one) for one in names))
        while len(slow.asked) < 2:
            await asyncio.sleep(0.01)
        assert sorted(slow.asked) == ["tenant-0", "tenant-1"]
        slow.end.set()
        found = await every
        while questions._questions._queues:
            await asyncio.sleep(0.01)
        return found

    assert asyncio.run(asked()) == names
    assert slow.most <= 2
    questions.stop()


@pytest.mark.parametrize("question", ["others", "is_scheduled", "has_node"])
def test_each_request_of_a_question_has_its_time_limit(
    question: str, known: Claims, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it heeds (tests/fast/extras/kubernetes/test_lists.py)."""
    left: list[float | None] = []
    monkeypatch.setattr(
        Server, "_note", lambda _self, path: left.append(command.remaining_seconds())
    )
    questions = ClaimQuestions(known)
    about = ("b", time.monotonic()) if question == "has_node" else (FRESH,)
    asyncio.run(questions.ask("shop", getattr(known, question), *about))
    questions.stop()
    assert left
    assert all(one is not None and 0 < one <= 20 for one in left)
