"""Events about unhealthy volumes: each condition is said once, and none is made up."""

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import api_server
import clustered
import expect
import pytest
from api_server import PODS, VOLUMES, ApiServer, Object
from authority import Authority
from clustered import Loop
from fakes.host import FakeHost
from granted import Rights
from hypothesis import given
from hypothesis import strategies as st
from simulated import SimulatedNode, uuid_of

from agent.core import errors
from agent.csi.client import block
from agent.extras.controller import controller_process, health_events, nodes, routes
from agent.extras.controller.controller_process import ClusterController, Files
from agent.extras.controller.health_events import HealthEvents
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists, Objects
from agent.extras.tls import certificates
from agent.groups import volume_group
from agent.operations import diagnosis
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY, Config
from proto import csi_pb2 as csi

MIB = 1 << 20
CALM, AGAIN = 300.0, 600.0
DEGRADED = ("DEGRADED", "RaidDegraded", "a disk is missing: replace it (seen 3 s ago)")
FULL = ("INACCESSIBLE", "PoolFull", "the pool is full: extend the group")
EVENTS = re.compile(r"/api/v1/namespaces/([^/]+)/events(?:/([^/]+))?$")


class Cluster(ApiServer):
    """An API server that keeps Events, and allows what the chart allows."""

    def __init__(self) -> None:
        super().__init__()
        self.rights = Rights()
        self.events: dict[tuple[str, str], Object] = {}
        # Requests by method and path, and a path's beginning that is refused with 403.
        self.requests: list[tuple[str, str]] = []
        self.forbidden = ""

    def claimed(self, volume_id: str, claim: str = "data", name: str = "", **more: Any) -> Object:
        """A PersistentVolume that is bound to a claim of the namespace shop."""
        reference = {"namespace": "shop", "name": claim, "uid": f"uid-of-{claim}"}
        source = {"driver": more.pop("driver", DRIVER_NAME), "volumeHandle": volume_id}
        place = {"key": TOPOLOGY_KEY, "operator": "In", "values": [more.pop("node", "none")]}
        spec = {
            "csi": source,
            "claimRef": reference,
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [place]}]}},
        }
        name = name or volume_id.partition("/vol-")[2]
        return self.add(VOLUMES, name, spec=spec, status={"phase": "Bound"}, **more)

    def pod(self, name: str, node: str, claim: str = "data", phase: str = "Running") -> Object:
        volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}, {"name": "tmp"}]
        spec = {"nodeName": node, "volumes": volumes}
        return self.add(
            PODS, name, metadata={"namespace": "shop"}, spec=spec, status={"phase": phase}
        )

    def said(self, *kinds: str) -> list[str]:
        """Type, reason, object and number of each Event."""
        return sorted(
            f"{one['type']} {one['reason']} {one['involvedObject']['name']} x{one['count']}"
            for one in self.events.values()
            if not kinds or one["type"] in kinds
        )

    def lists(self, path: str) -> int:
        return self.requests.count(("GET", path))

    def answer(self, path: str, query: Any) -> tuple[int, Object]:
        if refusal := self._refusal("GET", path):
            return refusal
        if path.startswith(f"{VOLUMES}/"):
            # IsValidPathSegmentName of apimachinery.
            if (name := path.removeprefix(f"{VOLUMES}/")) in (".", ".."):
                return 400, {"kind": "Status", "message": f"invalid name {name}"}
            for volume in self.objects[VOLUMES]:
                if volume["metadata"]["name"] == name:
                    return 200, {"kind": "PersistentVolume", **volume}
            return 404, {"kind": "Status", "reason": "NotFound"}
        return super().answer(path, query)

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        if refusal := self._refusal(method, path):
            return refusal
        found = EVENTS.match(path)
        assert found is not None, path
        name = found[2] or body["metadata"]["name"]
        known = self.events.get((found[1], name))
        if method == "POST":
            if known is not None:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            # pkg/apis/core/validation/events.go; apimachinery's IsDNS1123Subdomain.
            assert body["metadata"]["namespace"] == found[1]
            assert found[1] == (body["involvedObject"]["namespace"] or "default")
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name), name
            assert len(name) <= 253
        else:
            assert known is not None
        self.events[found[1], name] = {**(known or {}), **body}
        return 201, self.events[found[1], name]

    def _refusal(self, method: str, path: str) -> tuple[int, Object] | None:
        self.requests.append((method, path))
        if self.forbidden and path.startswith(self.forbidden):
            return 403, {"kind": "Status", "message": "forbidden"}
        if not self.rights.allow(method, path):
            return 403, {"kind": "Status", "message": f"the chart does not allow {method} {path}"}
        return None


class Site:
    """Three nodes, a controller, an API server, and a clock that only the test moves."""

    def __init__(self, config: Config, api: Cluster, loop: Loop, authority: Authority) -> None:
        self.config, self.api, self.loop, self.authority = config, api, loop, authority
        self.nodes = [SimulatedNode(number) for number in range(3)]
        # By the clock of the epoch, which may be set, and by the one that only goes on.
        self.wall_seconds, self.seconds = 1_800_000_000.0, 500.0

    def start(self) -> None:
        self.controller, self.events = self._begun()

    def _begun(self) -> tuple[ClusterController, HealthEvents]:
        server = Server("tests", "127.0.0.1", self.api.port)

        async def begin() -> tuple[ClusterController, HealthEvents]:
            controller = ClusterController(self.config, Files(self.config))
            await controller.start()
            await asyncio.gather(*map(controller.nodes.ask, controller.nodes))
            made = HealthEvents(
                self.config,
                controller.nodes,
                Objects(server),
                Lists(server),
                lambda: self.wall_seconds,
                lambda: self.seconds,
            )
            # The test says when it looks.
            made.task.stop()
            made.start()
            return controller, made

        return self.loop.run(begin())

    def write_nodes(self, directory: Path) -> None:
        async def started() -> list[str]:
            return [await one.start(self.authority, directory / "node") for one in self.nodes]

        addresses = self.loop.run(started())
        lines = [f'"{n.name}" = "{a}"\n' for n, a in zip(self.nodes, addresses, strict=True)]
        assert self.config.nodes_file is not None
        self.config.nodes_file.write_text("[nodes]\n" + "".join(lines))

    def ask(self) -> None:
        """Have the controller ask its nodes now."""

        async def ask() -> None:
            await asyncio.gather(*map(self.controller.nodes.ask, self.controller.nodes))

        self.loop.run(ask())

    def restart(self) -> None:
        """Another controller, which knows nothing."""
        self.loop.run(self.controller.stop())
        self.config.endpoint.unlink(missing_ok=True)
        self.start()

    def look(self, after: float = 60.0) -> list[str]:
        """Look once, later; all Events there are."""
        self.wall_seconds += after
        self.seconds += after
        assert self.events.task.run_once() == self.config.health_interval_seconds
        assert self.events.task.failures == 0
        return self.api.said()

    def sick(self, number: int, *conditions: tuple[str, str, str], volume: str = "pvc-1") -> str:
        """Have a volume of a node get these conditions, or be well with none."""
        volume_id = f"data@{uuid_of(number)}/vol-{volume}"
        self.nodes[number].unhealthy.pop(volume_id, None)
        if conditions:
            self.nodes[number].unhealthy[volume_id] = list(conditions)
        return volume_id

    def stop(self) -> None:
        for one in self.nodes:
            self.loop.loop.call_soon_threadsafe(one.answers.set)
        self.loop.run(self.controller.stop())
        for node in self.nodes:
            self.loop.run(node.stop())


@pytest.fixture
def site(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(nodes, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(health_events, "_PATIENCE_SECONDS", 1.0)
    authority, loop = Authority(), Loop()
    own = certificates.controller_name(DRIVER_NAME)
    changed = replace(
        config,
        endpoint=tmp_path / "csi.sock",
        tls_directory=authority.write(tmp_path / "controller", own),
        nodes_file=tmp_path / "nodes.toml",
        health_interval_seconds=60,
    )
    with api_server.running(Cluster()) as api:
        made = Site(changed, api, loop, authority)
        made.write_nodes(tmp_path)
        made.start()
        try:
            yield made
        finally:
            made.stop()
            loop.stop()


def test_a_condition_is_said_once_on_the_claim_and_on_its_pods(site: Site) -> None:
    volume_id = site.sick(1, DEGRADED)
    site.api.claimed(volume_id)
    site.api.pod("db-0", site.nodes[1].name)
    site.api.pod("job", site.nodes[1].name, phase="Succeeded")
    site.api.pod("other", site.nodes[1].name, claim="logs")
    site.api.pod("elsewhere", site.nodes[0].name)
    both = ["Warning RaidDegraded data x1", "Warning RaidDegraded db-0 x1"]
    assert site.look() == both
    [claim] = [o for o in site.api.events.values() if o["involvedObject"]["name"] == "data"]
    assert claim["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "namespace": "shop",
        "name": "data",
        "uid": "uid-of-data",
    }
    assert claim["message"] == f"DEGRADED: {DEGRADED[2]}; volume {volume_id} on node node-00001"
    assert claim["source"] == {"component": DRIVER_NAME}
    assert claim["firstTimestamp"] == claim["lastTimestamp"] == "2027-01-15T08:01:00Z"
    written = site.api.requests.copy()
    # Neither the age in its sentence nor an hour makes it another condition.
    site.sick(1, (*DEGRADED[:2], "a disk is missing: replace it (seen 9 s ago)"))
    assert site.look() == site.look() == site.look(3600) == both
    assert site.api.requests == written


@pytest.mark.parametrize(
    "entries",
    [
        [{"name": "v", "healthConditions": [{"status": "Degraded", "reason": "RaidDegraded"}]}],
        # Of another driver's volume, or of a condition that is over.
        [{"name": "tmp"}],
    ],
    ids=["the same condition", "another"],
)
def test_what_a_kubelet_writes_to_pods_itself_is_said_on_the_claim_alone(
    site: Site, entries: list[Object]
) -> None:
    volume_id = site.sick(1, DEGRADED)
    site.api.claimed(volume_id)
    site.api.pod("db-0", site.nodes[1].name)
    told = site.api.pod("db-1", site.nodes[1].name, claim="logs")
    told["status"]["volumeHealth"] = entries
    # A kubelet of an older version, or without the feature.
    site.api.claimed(site.sick(2, FULL, volume="pvc-2"), claim="other")
    site.api.pod("web-0", site.nodes[2].name, claim="other")
    own = ["Warning PoolFull other x1", "Warning PoolFull web-0 x1"]
    assert site.look() == [*own, "Warning RaidDegraded data x1"]
    site.sick(1)
    assert site.look(CALM) == [
        "Normal ConditionEnded data x1",
        *own,
        "Warning RaidDegraded data x1",
    ]


def test_what_a_kubelet_that_asks_has_not_written_yet_is_said_on_the_claim_alone(
    site: Site,
) -> None:
    """It writes the same to the pod within its next minute."""
    site.nodes[1].whole[routes.IS_WATCHED] = routes.YES
    site.ask()
    site.api.claimed(site.sick(1, DEGRADED))
    site.api.pod("db-0", site.nodes[1].name)
    assert site.look() == ["Warning RaidDegraded data x1"]
    site.sick(1)
    assert site.look(CALM) == ["Normal ConditionEnded data x1", "Warning RaidDegraded data x1"]


@pytest.mark.parametrize("status", [None, {"volumeHealth": None}, {"volumeHealth": []}])
def test_a_pod_without_a_health_of_its_volumes_is_told(site: Site, status: object) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    pod = site.api.pod("db-0", site.nodes[1].name)
    site.api.pod("db-1", site.nodes[1].name, claim="logs")["status"] = status
    pod["status"] = {"phase": "Running", "volumeHealth": None}
    assert site.look() == ["Warning RaidDegraded data x1", "Warning RaidDegraded db-0 x1"]


def test_of_a_group_that_moved_a_moment_ago_nothing_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until PersistentVolumes were read again, its former node may be named."""
    one, other = site.nodes[:2]
    record = site.controller.nodes._record
    monkeypatch.setattr(record, "is_newer", lambda _moment: False)
    other.groups |= one.groups
    one.groups = {}
    site.ask()
    known = site.controller.nodes.get(other.name)
    assert known is not None
    assert site.controller.nodes.conflict(known)
    site.look()
    assert not site.api.said()


def test_a_group_that_two_nodes_have_is_said_once_on_both_nodes(site: Site) -> None:
    """They are of one machine template."""
    one, other = site.nodes[:2]
    own = other.groups
    other.groups = one.groups
    site.ask()
    both = [f"Warning VolumeGroupContested {node.name} x1" for node in (one, other)]
    site.api.forbidden = "/api/v1/namespaces/default/events"
    site.seconds += 60
    site.events.task.run_once()
    assert site.events.task.failures == 1
    site.api.forbidden = ""
    site.seconds += 60
    site.events.task.run_once()
    assert site.api.said() == both
    for event in site.api.events.values():
        assert event["involvedObject"]["kind"] == "Node"
        for word in (one.name, other.name, uuid_of(0), "vgchange --uuid", "vgimportclone"):
            assert word in event["message"]
    written = site.api.requests.copy()
    site.seconds += 3600
    site.events.task.run_once()
    assert site.api.requests == written
    # It is over, and begins again.
    other.groups = own
    site.ask()
    site.events.task.run_once()
    other.groups = one.groups
    site.ask()
    site.events.task.run_once()
    assert len(site.api.requests) > len(written)
    assert site.api.said() == both


def test_while_all_is_well_the_api_server_is_not_asked(site: Site) -> None:
    site.api.claimed(f"data@{uuid_of(1)}/vol-pvc-1")
    assert site.look() == site.look() == []
    assert site.api.requests == []
    # One question to each node and look.
    assert [one.calls for one in site.nodes] == [["ControllerListVolumeHealth"] * 2] * 3


def test_one_event_says_that_a_condition_is_over(site: Site) -> None:
    volume_id = site.sick(1, DEGRADED)
    site.api.claimed(volume_id)
    site.api.pod("db-0", site.nodes[1].name)
    site.look()
    site.api.pod("later", site.nodes[1].name)
    site.sick(1)
    site.look()
    assert site.api.said("Normal") == []
    site.look(CALM)
    # Not to a pod that was never told that it began.
    over = ["Normal ConditionEnded data x1", "Normal ConditionEnded db-0 x1"]
    assert site.api.said("Normal") == over
    [message] = {one["message"] for one in site.api.events.values() if one["type"] == "Normal"}
    assert message.startswith("RaidDegraded is over, the volume is healthy; volume data@")
    site.look(CALM)
    assert site.api.said("Normal") == over
    assert site.nodes[1].calls.count(f"ControllerGetVolumeHealth {volume_id}") == 1


def test_a_condition_that_comes_again_is_counted(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    site.look()
    site.sick(1)
    site.look(CALM)
    site.look()
    site.sick(1, DEGRADED)
    again = ["Normal ConditionEnded data x1", "Warning RaidDegraded data x2"]
    assert site.look() == site.look() == again
    [warning] = [one for one in site.api.events.values() if one["type"] == "Warning"]
    assert warning["firstTimestamp"] < warning["lastTimestamp"]
    site.sick(1)
    assert site.look(CALM)[0] == "Normal ConditionEnded data x2"


def test_one_that_comes_and_goes_is_said_once(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    for _ in range(5):
        site.look()
        site.sick(1)
        site.look()
        site.sick(1, DEGRADED)
    assert site.look() == ["Warning RaidDegraded data x1"]


def test_two_conditions_at_once_begin_and_end_each_for_itself(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED, FULL))
    begun = ["Warning PoolFull data x1", "Warning RaidDegraded data x1"]
    assert site.look() == begun
    site.sick(1, DEGRADED)
    assert site.look(CALM) == ["Normal ConditionEnded data x1", *begun]
    [message] = [one["message"] for one in site.api.events.values() if one["type"] == "Normal"]
    assert message.startswith("PoolFull is over, it still has RaidDegraded; ")


def test_a_restart_says_nothing_twice_while_the_event_is_there(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    said, written = site.look(), dict(site.api.events)
    site.restart()
    assert site.look() == site.look() == said
    assert site.api.events == written
    # It knows the condition as its own, and when it is over.
    site.sick(1)
    assert site.look(CALM) == ["Normal ConditionEnded data x1", *said]


def test_a_restart_says_again_what_the_cluster_has_forgotten(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    said = site.look()
    # --event-ttl of the API server.
    site.api.events.clear()
    assert site.look(3600) == []
    site.restart()
    assert site.look() == said


def test_what_returns_after_a_restart_renews_the_event_that_is_there(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    said = site.look()
    [first] = list(site.api.events.values())
    site.sick(1)
    site.restart()
    site.look()
    site.sick(1, DEGRADED)
    assert site.look() == said
    [renewed] = site.api.events.values()
    assert renewed["lastTimestamp"] > first["lastTimestamp"] == renewed["firstTimestamp"]


def test_what_was_over_long_ago_is_counted_anew(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    site.look()
    site.sick(1)
    site.look(CALM)
    site.api.events.clear()
    site.look(3600)
    site.sick(1, DEGRADED)
    assert site.look() == ["Warning RaidDegraded data x1"]


def test_two_controllers_say_it_once(site: Site, tmp_path: Path) -> None:
    first, first_controller = site.events, site.controller
    site.config = replace(site.config, endpoint=tmp_path / "second.sock")
    site.start()
    second = site.events
    site.look()
    site.events = first
    site.look(10)
    for last in (first, second, first, second):
        if last is first:
            site.api.claimed(site.sick(1, DEGRADED))
        site.events = last
        site.look(10)
    assert site.api.said() == ["Warning RaidDegraded data x1"]
    site.sick(1)
    for one in (first, second, first, second):
        site.events = one
        site.look(CALM)
    assert site.api.said("Normal") == ["Normal ConditionEnded data x1"]
    site.loop.run(first_controller.stop())


def test_a_silent_node_s_conditions_neither_begin_nor_end(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    site.look()
    site.sick(1)
    site.sick(1, FULL, volume="pvc-2")
    site.loop.loop.call_soon_threadsafe(site.nodes[1].answers.clear)
    asked = len(site.nodes[1].calls)
    # Before the controller knows, and after.
    said = site.look(CALM)
    site.ask()
    assert site.look(CALM) == said == ["Warning RaidDegraded data x1"]
    assert len(site.nodes[1].calls) == asked + 1


def test_a_node_that_cannot_list_is_logged_once_and_costs_no_other(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    site.nodes[0].refuses = True
    site.look()
    assert site.look() == ["Warning RaidDegraded data x1"]
    [text] = [one.message for one in caplog.records if "which of its volumes" in one.message]
    assert "node-00000" in text
    assert "a disk does not answer" in text


@pytest.mark.parametrize(
    "method", ["ControllerListVolumeHealth", "ControllerGetVolumeHealth", "GetPluginInfo"]
)
def test_a_node_that_answers_nothing_costs_no_other_its_events(site: Site, method: str) -> None:
    site.api.claimed(site.sick(0, FULL), claim="its")
    site.look()
    site.nodes[0].empty = {method}
    site.ask()
    site.sick(0)
    site.api.claimed(site.sick(1, DEGRADED), claim="other", name="other")
    assert "Warning RaidDegraded other x1" in site.look(CALM)
    assert site.look(CALM) == ["Warning PoolFull its x1", "Warning RaidDegraded other x1"]


def many(site: Site, number: int, count: int, salt: int, volumes: int = 1) -> bytes:
    """An answer with so many conditions, a few for each volume."""
    entries = []
    for volume in range(volumes):
        one = csi.VolumeHealth(volume_id=f"data@{uuid_of(number)}/vol-made-up-{volume:04}")
        for at in range(count):
            one.health_statuses.add(reason=f"R{salt}n{at}")
        entries.append(one)
    return csi.ControllerListVolumeHealthResponse(entries=entries).SerializeToString()


def test_what_one_node_says_takes_no_memory_without_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other reasons at each look, and in one page more than are kept."""
    monkeypatch.setattr(health_events, "_MOST_OF_A_NODE", 50)
    site.api.claimed(site.sick(1, DEGRADED), claim="other", name="other")
    for salt in range(6):
        answer = many(site, 0, 30, salt, volumes=4)
        site.nodes[0].forged["ControllerListVolumeHealth"] = answer
        site.look()
        kept = [one.node for one in site.events._conditions.values()]
        assert kept.count("node-00000") <= 50
    assert site.api.said() == ["Warning RaidDegraded other x1"]


def test_conditions_of_one_node_delay_no_other_s(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands, and always the same: what could not be said comes again before others' turn."""
    monkeypatch.setattr(health_events, "_MOST_SAID", 10)
    answer = many(site, 0, 40, 0, volumes=20)
    site.nodes[0].forged["ControllerListVolumeHealth"] = answer
    for _ in range(3):
        site.look()
    site.api.claimed(site.sick(1, DEGRADED), claim="other", name="other")
    assert site.look() == ["Warning RaidDegraded other x1"]
    site.sick(1)
    assert "Normal ConditionEnded other x1" in site.look(CALM)


def test_names_that_no_object_can_have_cost_no_other_its_events(site: Site) -> None:
    """The API server refuses to look some up, and after a few refusals it is left alone."""
    entries = [
        csi.VolumeHealth(
            volume_id=f"data@{uuid_of(0)}/vol-{name}",
            health_statuses=[
                csi.VolumeHealth.VolumeHealthEntry(reason=f"R{at}") for at in range(6)
            ],
        )
        for name in (".", "..")
    ]
    answer = csi.ControllerListVolumeHealthResponse(entries=entries)
    site.nodes[0].forged["ControllerListVolumeHealth"] = answer.SerializeToString()
    wanted = []
    for number in range(8):
        volume = f"pvc-{number}"
        site.api.claimed(site.sick(1, DEGRADED, volume=volume), f"data-{number}")
        wanted.append(f"Warning RaidDegraded data-{number} x1")
    assert site.look() == wanted


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 40))
def test_each_node_s_conditions_have_their_turn(nodes_of: list[int], most: int) -> None:
    every = [
        health_events._Condition(
            health_events._Key(str(at), "R"), str(node), "", "DEGRADED", "", is_new=True
        )
        for at, node in enumerate(nodes_of)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health_events, "_MOST_SAID", most)
        said = health_events._round_robin(every)
    assert len(said) == min(most, len(every))
    counts = Counter(one.node for one in said)
    whole = Counter(one.node for one in every)
    for name, count in counts.items():
        for other, total in whole.items():
            # None has two more than another that has more to say.
            assert counts[other] == total or counts[other] >= count - 1, (name, other)


def test_a_node_that_does_not_say_what_is_over_delays_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question ends in time; a look would have to wait for all that it has not answered."""
    monkeypatch.setattr(health_events, "_AT_ONCE", 2)
    for at in range(12):
        site.api.claimed(site.sick(0, FULL, volume=f"pvc-{at}"), claim=f"its-{at}")
    site.api.claimed(site.sick(1, DEGRADED), claim="other", name="other")
    site.look()
    site.nodes[0].unhealthy.clear()
    site.nodes[0].hangs = {"ControllerGetVolumeHealth"}
    site.sick(1)
    begun = time.monotonic()
    assert "Normal ConditionEnded other x1" in site.look(CALM)
    assert time.monotonic() - begun < 4
    # What it did not say is asked again.
    site.nodes[0].hangs = set()
    assert sum(one.startswith("Normal") for one in site.look(AGAIN)) == 13


def test_a_clock_that_is_set_delays_no_event(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    assert site.look() == ["Warning RaidDegraded data x1"]
    site.sick(1)
    site.wall_seconds -= 24 * 3600
    assert site.look(CALM) == ["Normal ConditionEnded data x1", "Warning RaidDegraded data x1"]


def test_a_node_that_is_asked_for_a_page_says_no_more(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [csi.VolumeHealth(volume_id=f"data@{uuid_of(0)}/vol-{at}") for at in range(501)]
    answer = csi.ControllerListVolumeHealthResponse(entries=entries)
    site.nodes[0].forged["ControllerListVolumeHealth"] = answer.SerializeToString()
    site.look()
    assert "there may be at most 500" in caplog.text


def test_a_node_that_leaves_while_it_is_asked_costs_no_other_its_events(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc.aio ends a call by CancelledError where its channel is closed."""
    site.api.claimed(site.sick(0, FULL), claim="its")
    site.look()
    site.sick(0)
    site.api.claimed(site.sick(1, DEGRADED), claim="other", name="other")
    asked = HealthEvents._asked

    async def closed(events: HealthEvents, node: Any, path: str, request: Any) -> Any:
        if path.endswith("ControllerGetVolumeHealth"):
            raise asyncio.CancelledError
        return await asked(events, node, path, request)

    monkeypatch.setattr(HealthEvents, "_asked", closed)
    site.look(CALM)
    assert "Warning RaidDegraded other x1" in site.look(CALM)


def test_a_group_that_a_restarted_node_has_not_seen_is_not_healthy(site: Site) -> None:
    volume_id = site.sick(1, DEGRADED)
    site.api.claimed(volume_id)
    said = site.look()
    # The node answers, and has neither the group nor, therefore, a word about its volumes.
    site.sick(1)
    site.nodes[1].groups = {}
    site.ask()
    assert site.look(CALM) == site.look(AGAIN) == said


def test_a_condition_is_over_only_if_its_node_says_so(site: Site) -> None:
    volume_id = site.sick(1, DEGRADED)
    site.api.claimed(volume_id)
    said = site.look()
    # As a node that was restarted may have it: the list is short, and the volume as it was.
    site.nodes[1].unlisted.add(volume_id)
    assert site.look(CALM) == said
    site.sick(1)
    site.nodes[1].unanswered.add(volume_id)
    assert site.look(AGAIN) == said
    site.nodes[1].unanswered.clear()
    assert site.look(AGAIN) == ["Normal ConditionEnded data x1", *said]


def test_what_could_not_be_said_is_not_said_of_a_node_that_is_silent_by_then(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    site.api.forbidden = "/api/v1/namespaces/shop/events"
    site.look()
    site.api.forbidden = ""
    site.loop.loop.call_soon_threadsafe(site.nodes[1].answers.clear)
    assert site.look(AGAIN) == []
    site.loop.loop.call_soon_threadsafe(site.nodes[1].answers.set)
    site.ask()
    assert site.look() == ["Warning RaidDegraded data x1"]


def test_a_volume_that_was_deleted_has_no_event_of_health(site: Site) -> None:
    volume_id = site.sick(1, DEGRADED)
    volume = site.api.claimed(volume_id)
    said = site.look()
    site.api.objects[VOLUMES].remove(volume)
    site.sick(1)
    site.nodes[1].gone.add(volume_id)
    assert site.look(CALM) == site.look(CALM) == said
    assert site.nodes[1].calls.count(f"ControllerGetVolumeHealth {volume_id}") == 1


def test_a_claim_that_was_rebound_is_not_told_of_what_another_had(site: Site) -> None:
    volume = site.api.claimed(site.sick(1, DEGRADED))
    said = site.look()
    volume["spec"]["claimRef"] = {"namespace": "shop", "name": "new", "uid": "uid-of-new"}
    site.sick(1)
    assert site.look(CALM) == said


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["status"].update(phase="Released"),
        lambda one: one["spec"].pop("claimRef"),
        lambda one: one["spec"]["csi"].update(driver="other.csi"),
    ],
    ids=["released", "available", "of another driver"],
)
def test_a_volume_without_a_claim_waits_for_one(
    site: Site, change: Callable[[Object], object]
) -> None:
    volume = site.api.claimed(site.sick(1, DEGRADED))
    change(volume)
    assert site.look() == site.look() == []
    assert site.api.lists(f"{VOLUMES}/pvc-1") == 1
    site.api.objects[VOLUMES].remove(volume)
    site.api.claimed(site.sick(1, DEGRADED))
    assert site.look(AGAIN) == ["Warning RaidDegraded data x1"]


def test_volumes_by_another_name_are_found_by_one_list(site: Site) -> None:
    for number in range(3):
        one = site.sick(number, DEGRADED, volume=f"lost-{number}")
        site.api.claimed(one, f"data-{number}", name=f"adopted-{number}")
    site.sick(0, FULL, volume="no-object")
    assert len(site.look()) == 3
    # In pages of two.
    assert site.api.lists(VOLUMES) == 2
    site.look()
    assert site.api.lists(VOLUMES) == 2


def test_a_claim_that_a_pod_has_for_itself_is_the_pod_s(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED), "db-0-scratch")
    spec = {"nodeName": site.nodes[1].name, "volumes": [{"name": "scratch", "ephemeral": {}}]}
    site.api.add(PODS, "db-0", metadata={"namespace": "shop"}, spec=spec, status={})
    assert [one.split()[2] for one in site.look()] == ["db-0", "db-0-scratch"]


def test_a_claim_with_the_longest_name_gets_its_event(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED), "a" * 199 + ".b" * 27)
    assert len(site.look()) == 1


def test_of_a_group_that_moved_on_the_node_that_has_it_tells(site: Site) -> None:
    volume_id = site.sick(1, DEGRADED)
    site.api.claimed(volume_id, node=site.nodes[1].name)
    # As a node reports volumes of a group that it saw once.
    away = ("INACCESSIBLE", "GroupMissing", "attach its disks")
    site.nodes[1].unhealthy[volume_id] = [away]
    site.nodes[2].groups |= site.nodes[1].groups
    site.nodes[1].groups = {}
    site.ask()
    site.ask()
    assert site.look() == []
    # Nobody has it: then the node tells that it is missing, if the volume is its own.
    site.nodes[2].groups = {uuid_of(2): "data"}
    site.ask()
    assert site.look() == ["Warning GroupMissing data x1"]


def test_a_node_tells_nothing_of_another_s_volume(site: Site) -> None:
    volume_id = f"data@{uuid_of(1)}/vol-pvc-1"
    site.api.claimed(volume_id, node=site.nodes[1].name)
    site.nodes[0].unhealthy[volume_id] = [DEGRADED]
    assert site.look() == []
    # Also while no node is known to have the group.
    site.nodes[1].groups = {}
    site.ask()
    assert site.look() == []


def test_a_refusal_is_logged_once_and_tried_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(8):
        volume = f"pvc-{number}"
        site.api.claimed(site.sick(1, DEGRADED, volume=volume), f"data-{number}")
    site.api.forbidden = "/api/v1/namespaces/shop/events"
    assert site.look() == []
    # It is not asked without end: a few at each look, and each of them seldom.
    assert sum(path.startswith(site.api.forbidden) for _, path in site.api.requests) == 5
    assert site.look() == site.look() == []
    assert sum(path.startswith(site.api.forbidden) for _, path in site.api.requests) == 8
    [refused] = [one for one in caplog.records if "cannot write Events" in one.message]
    assert refused.levelno == logging.ERROR
    assert "403: forbidden" in refused.message
    site.api.forbidden = ""
    assert len(site.look(AGAIN)) == 8
    assert "can be written again" in caplog.text
    site.look()
    assert caplog.text.count("can be written again") == 1


def test_one_claim_that_is_refused_costs_no_other(site: Site) -> None:
    site.api.claimed(site.sick(0, DEGRADED), "data")
    ending = site.api.claimed(site.sick(1, DEGRADED), name="pvc-2", claim="ending")
    ending["spec"]["claimRef"]["namespace"] = "ending"
    site.api.forbidden = "/api/v1/namespaces/ending"
    assert site.look() == ["Warning RaidDegraded data x1"]


def test_claims_of_a_namespace_that_takes_no_events_delay_no_other_s(site: Site) -> None:
    """As of one that is being deleted and never ends, which its users can have."""
    for number in range(30):
        volume = site.sick(0, DEGRADED, volume=f"pvc-{number:02}")
        ending = site.api.claimed(volume, f"ending-{number}")
        ending["spec"]["claimRef"]["namespace"] = "ending"
    site.api.claimed(site.sick(0, DEGRADED, volume="pvc-99"), "data")
    site.api.claimed(site.sick(1, DEGRADED), "logs")
    site.api.forbidden = "/api/v1/namespaces/ending"
    assert site.look() == ["Warning RaidDegraded data x1", "Warning RaidDegraded logs x1"]
    # It is not asked for each of them at each look.
    assert site.api.requests.count(("POST", "/api/v1/namespaces/ending/events")) == 5
    site.api.forbidden = ""
    assert len(site.look(AGAIN)) == 32


def test_while_the_api_server_is_gone_nothing_else_suffers(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    site.api.stop()
    site.look()
    site.api.start()
    assert site.look(AGAIN) == ["Warning RaidDegraded data x1"]


def test_many_conditions_are_said_in_several_looks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_events, "_MOST_SAID", 2)
    for number in range(5):
        volume = f"pvc-{number}"
        site.api.claimed(site.sick(1, DEGRADED, volume=volume), f"data-{number}")
    assert [len(site.look()) for _ in range(4)] == [2, 4, 5, 5]


def test_a_node_that_left_takes_its_conditions_along(site: Site) -> None:
    site.api.claimed(site.sick(1, DEGRADED))
    said = site.look()
    assert site.config.nodes_file is not None
    lines = site.config.nodes_file.read_text().splitlines(keepends=True)
    site.config.nodes_file.write_text("".join(one for one in lines if "node-00001" not in one))
    site.loop.run(site.controller.look())
    assert site.look(CALM) == said
    # It comes back, and the condition with it; the Event is still there.
    site.config.nodes_file.write_text("".join(lines))
    site.loop.run(site.controller.look())
    site.ask()
    assert site.look() == said


def test_of_nodes_that_left_nothing_is_kept(site: Site) -> None:
    site.look()
    assert len(site.events._listed_nodes) == 3

    async def leave() -> None:
        site.controller.nodes.set({})

    site.loop.run(leave())
    site.look()
    assert not site.events._listed_nodes


def test_nothing_is_asked_unless_it_is_configured(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    known = site.controller.nodes
    off = replace(site.config, health_interval_seconds=0)
    assert not isinstance(controller_process.health_events(off, known), HealthEvents)
    with pytest.raises(errors.BadConfig, match="kubeconfig"):
        controller_process.health_events(site.config, known)
    file = api_server.kubeconfig(site.config.endpoint.parent / "config", site.api.url)
    made = controller_process.health_events(replace(site.config, kubeconfig=file), known)
    assert isinstance(made, HealthEvents)
    made.stop()


def test_what_a_service_finds_reaches_the_claim(
    fake: FakeHost, config: Config, tmp_path: Path
) -> None:
    with (
        api_server.running(Cluster()) as api,
        clustered.cluster(fake, config, tmp_path, ["a"]) as cluster,
    ):
        node = cluster.nodes["a"]
        volume = node.client.create("pvc-1", 4 * MIB, block(), parameters={"class": "raid1"})
        api.claimed(volume.volume_id, node="a")
        server = Server("tests", "127.0.0.1", api.port)
        made = HealthEvents(
            replace(cluster.config, health_interval_seconds=60),
            cluster.controller.nodes,
            Objects(server),
            Lists(server),
        )
        made.task.stop()

        async def begin() -> None:
            made.start()

        cluster.loop.run(begin())
        made.look()
        assert api.said() == []
        group = fake.lvm2.groups[node.group]
        group.volumes["vol-pvc-1"].health = "partial"
        node.service.reports.fresh()
        made.look()
        assert api.said() == ["Warning RaidDegraded data x1"]


def test_that_lvm2_hangs_on_a_node_reaches_the_claims(
    fake: FakeHost, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(diagnosis, "SILENT_SECONDS", 0.5)
    over = threading.Event()
    with (
        api_server.running(Cluster()) as api,
        clustered.cluster(fake, config, tmp_path, ["a"]) as cluster,
    ):
        node = cluster.nodes["a"]
        volume = node.client.create("pvc-1", 4 * MIB, block())
        api.claimed(volume.volume_id, node="a")
        server = Server("tests", "127.0.0.1", api.port)
        moment = [500.0]
        made = HealthEvents(
            replace(cluster.config, health_interval_seconds=60),
            cluster.controller.nodes,
            Objects(server),
            Lists(server),
            monotonic=lambda: moment[0],
        )
        made.task.stop()

        async def begin() -> None:
            made.start()

        cluster.loop.run(begin())
        node.service.reports.fresh()
        made.look()
        assert api.said() == []

        def hang(words: Sequence[str]) -> None:
            if words[0] == "lvm" and f"/dev/fake-{node.group}-" in " ".join(words):
                over.wait(60)

        fake.lvm2.groups[node.group].seqno += 1
        fake.intercept = hang
        [group] = node.service.volume_groups
        refreshing = group.refresh()
        try:
            expect.soon(lambda: group.silent_seconds > diagnosis.SILENT_SECONDS)
            began = time.monotonic()
            made.look()
            assert time.monotonic() - began < health_events._PATIENCE_SECONDS
            assert api.said() == ["Warning LvmNotAnswering data x1"]
            assert not refreshing.done()
        finally:
            over.set()
        refreshing.result(60)
        moment[0] += CALM
        made.look()
        assert api.said("Normal") == ["Normal ConditionEnded data x1"]
