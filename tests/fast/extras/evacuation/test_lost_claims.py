"""A claim of a lost node is released once that is certain, one instance at a time; no data go."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import api_server
import pytest
import releasing
from api_server import CLAIMS, NODES, PODS, VOLUMES
from hypothesis import given, settings
from hypothesis import strategies as st
from releasing import Clock, Controller, Killed, Shop

from agent.core import errors
from agent.extras.evacuation import lost_claims
from agent.extras.evacuation.claim_owners import Volume
from agent.extras.evacuation.release_notes import ReleaseNote, note_key
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY

WISH = f"release.{DRIVER_NAME}/on-node-loss"
# For so long a deleted Node's volumes are not forgotten, and then a claim is not released.
LONG = int(releasing.FORGET_SECONDS + lost_claims.GRACE_SECONDS)


class Site:
    """A shop, a clock, and controllers that look each half a minute."""

    def __init__(self, shop: Shop) -> None:
        self.shop, self.clock = shop, Clock()
        self.controllers = [Controller(shop, self.clock)]

    def wait(self, seconds: int, *, step: int = 30, is_settled: bool = True) -> None:
        """Let time go by."""
        for _ in range(0, seconds, step):
            self.clock.now += step
            if is_settled:
                self.shop.settle()
            for controller in self.controllers:
                with suppress(errors.AgentError):
                    controller.look()

    def restart(self) -> None:
        """Other controllers, which know nothing."""
        self.controllers = [Controller(self.shop, self.clock) for _ in self.controllers]

    def require_safe(self) -> None:
        assert (self.shop.deleted, self.shop.dangers) == ([], [])

    def require_untouched(self) -> None:
        assert [one for one in self.shop.writes if "/events" not in one] == []
        self.require_safe()

    def require_whole(self) -> None:
        """All instances run, on Nodes that exist, and nothing is on the way."""
        running = [one for one in self.shop.names(PODS) if self.shop.is_running(one)]
        assert len(running) == self.shop.replicas
        assert all(note["is_done"] for note in self.shop.notes().values())
        self.require_safe()


@pytest.fixture(params=["StatefulSet", "Cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def site(kind: str) -> Iterator[Site]:
    shop = Shop(kind)
    with releasing.directly(shop):
        made = Site(shop)
        made.wait(60)
        made.shop.writes.clear()
        yield made


def first(shop: Shop) -> str:
    """The first instance."""
    return shop.names(PODS)[0]


def lose(shop: Shop, *instances: str) -> list[str]:
    """Delete the Nodes of these instances, by default of the first; the Nodes' names."""
    nodes = [shop.node_of(one) for one in instances or (first(shop),)]
    for node in nodes:
        shop.leave(node)
    return nodes


def test_a_lost_instance_begins_anew_on_another_node(site: Site) -> None:
    shop, lost = site.shop, first(site.shop)
    claims = shop.instance_claims(lost)
    volumes = [shop.volume_of(name)["metadata"]["name"] for name in claims]
    [node] = lose(shop)
    site.wait(LONG + 300)
    site.require_whole()
    assert node not in {shop.node_of(one) for one in shop.names(PODS)}
    for name in volumes:
        volume = shop.one(VOLUMES, name)
        assert volume["status"]["phase"] == "Released"
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert (
            volume["metadata"]["annotations"][f"release.{DRIVER_NAME}/reclaim-policy"] == "Delete"
        )
    # Each claim was deleted once, and nothing is done again.
    deleted = [one for one in shop.writes if one.startswith("DELETE")]
    assert sorted(one.rpartition("/")[2] for one in deleted) == sorted(claims)
    shop.writes.clear()
    site.wait(3600)
    site.require_untouched()


def test_events_say_what_was_done_and_how_it_is_taken_back(site: Site) -> None:
    [node] = lose(site.shop)
    site.wait(LONG + 300)
    assert site.shop.reasons() == {
        lost_claims.WAITS,
        lost_claims.KEPT,
        lost_claims.RELEASED,
        lost_claims.REPLACED,
    }
    for event in site.shop.events.values():
        involved = event["involvedObject"]
        is_volume = event["reason"] == lost_claims.KEPT
        assert involved["kind"] == ("PersistentVolume" if is_volume else "PersistentVolumeClaim")
        assert involved["uid"].startswith("uid-")
        assert ("Take a released claim back" in event["message"]) is is_volume
        if event["reason"] == lost_claims.RELEASED:
            assert node in event["message"]
            assert "is kept" in event["message"]


def test_the_data_are_kept_before_the_claim_is_deleted(site: Site) -> None:
    lose(site.shop)
    site.wait(LONG + 300)
    kinds = [one.split("/")[0] + one.split("/")[-2] for one in site.shop.writes[:4]]
    volumes, claims = "PATCH persistentvolumes", "DELETE persistentvolumeclaims"
    assert kinds == [volumes, volumes, claims, claims]


@pytest.mark.parametrize("seconds", [60, 570, LONG - 60])
def test_nothing_is_done_within_the_grace(site: Site, seconds: int) -> None:
    [node] = lose(site.shop)
    site.wait(seconds)
    site.require_untouched()
    site.shop.join(node)
    site.wait(2 * LONG)
    site.require_untouched()
    site.require_whole()


def test_a_node_that_comes_and_goes_begins_the_grace_anew(site: Site) -> None:
    [node] = lose(site.shop)
    site.wait(LONG - 60)
    site.shop.join(node)
    site.wait(60)
    lose_again = site.shop.nodes - {node}
    site.shop.leave(node)
    assert site.shop.nodes == lose_again
    site.wait(LONG - 60)
    site.require_untouched()
    site.wait(600)
    site.require_whole()


def test_a_clock_that_is_set_shortens_nothing(site: Site) -> None:
    lose(site.shop)
    site.wait(int(releasing.FORGET_SECONDS))
    for step in (86400.0, -86400.0, 1e9):
        site.controllers[0].wall += step
        site.wait(30)
    site.require_untouched()


def test_a_controller_that_was_stopped_for_long_begins_the_grace_anew(site: Site) -> None:
    """The node may have come and gone meanwhile."""
    lose(site.shop)
    site.wait(LONG - 120)
    site.clock.now += 3600
    site.wait(30)
    site.require_untouched()
    site.wait(240)
    site.require_untouched()
    site.wait(300)
    site.require_whole()


def test_a_node_that_carver_has_not_forgotten_keeps_its_claims(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disks may be in a machine that is silent."""
    lose(site.shop)
    monkeypatch.setattr(site.controllers[0].claims, "_why_not_lost", lambda _id: "node b is silent")
    site.wait(3 * LONG)
    site.require_untouched()
    assert "forgotten for five minutes" in site.shop.message(lost_claims.WAITS)


def test_a_node_that_is_forgotten_with_a_break_begins_the_grace_anew(site: Site) -> None:
    lose(site.shop)
    site.wait(LONG - 60)
    claims = site.controllers[0].claims
    forgotten, claims._why_not_lost = claims._why_not_lost, lambda _id: "silent"
    site.wait(30)
    claims._why_not_lost = forgotten
    site.wait(270)
    site.require_untouched()
    site.wait(300)
    site.require_whole()


def test_without_leave_nothing_is_released(site: Site) -> None:
    del site.shop.class_parameters["carver/releaseOnNodeLoss"]
    lose(site.shop)
    site.wait(2 * LONG)
    site.require_untouched()
    assert site.shop.events == {}


@pytest.mark.parametrize(
    ("parameters", "provisioner", "wishes", "is_released"),
    [
        ({"carver/releaseOnNodeLoss": "true"}, DRIVER_NAME, [], True),
        ({"releaseOnNodeLoss": "true"}, DRIVER_NAME, [], True),
        ({"releaseOnNodeLoss": "true"}, "other.csi", [], False),
        ({"releaseOnNodeLoss": "false"}, DRIVER_NAME, [], False),
        ({}, DRIVER_NAME, ["true", "true"], True),
        # Both claims of the pod are on the lost node: one alone is of no use.
        ({}, DRIVER_NAME, ["true"], False),
        ({}, DRIVER_NAME, ["true", "yes"], False),
        ({"carver/releaseOnNodeLoss": "true"}, DRIVER_NAME, ["false"], False),
    ],
)
def test_the_claim_s_annotation_decides_before_its_class(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, str],
    provisioner: str,
    wishes: Sequence[str],
    is_released: bool,
) -> None:
    shop = site.shop
    shop.class_parameters = parameters
    monkeypatch.setattr(releasing, "DRIVER_NAME", provisioner)
    for claim, wish in zip(shop.instance_claims(first(shop)), wishes, strict=False):
        shop.one(CLAIMS, claim)["metadata"]["annotations"] = {WISH: wish}
    lose(shop)
    site.wait(LONG + 300)
    assert bool(shop.released) is is_released
    site.require_safe()


def test_a_claim_without_an_owner_stays(site: Site) -> None:
    """As that of a Deployment: nothing would make it anew."""
    shop = site.shop
    for where in (PODS, CLAIMS):
        for one in shop.objects[where]:
            one["metadata"]["ownerReferences"] = [
                {"kind": "ReplicaSet", "name": "web", "controller": where == PODS}
            ]
    shop.settle = lambda: None  # type: ignore[method-assign]
    node = shop.node_of(first(shop))
    shop.one(PODS, first(shop))["spec"]["nodeName"] = ""
    shop.leave(node)
    site.wait(2 * LONG)
    site.require_untouched()


def test_a_pod_s_own_claim_stays(site: Site) -> None:
    """As of a generic ephemeral volume: it goes with its pod."""
    shop, lost = site.shop, first(site.shop)
    for where in (PODS, CLAIMS):
        for one in shop.objects[where]:
            one["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": lost, "controller": True}]
    shop.settle = lambda: None  # type: ignore[method-assign]
    node = shop.node_of(lost)
    shop.one(PODS, lost)["spec"]["nodeName"] = ""
    shop.leave(node)
    site.wait(2 * LONG)
    site.require_untouched()


def test_a_claim_that_its_user_deletes_is_left_to_him(site: Site) -> None:
    shop, lost = site.shop, first(site.shop)
    lose(shop)
    shop.settle()
    shop.is_asleep = True
    for name in shop.instance_claims(lost):
        shop.one(CLAIMS, name)["metadata"]["deletionTimestamp"] = "now"
    site.wait(2 * LONG)
    site.require_untouched()


def test_before_the_nodes_were_read_nothing_is_asked(site: Site) -> None:
    site.restart()
    site.shop.answer = None  # type: ignore[assignment, method-assign]
    site.controllers[0].claims.look()


def test_a_claim_that_no_pod_waits_for_stays(site: Site) -> None:
    shop = site.shop
    lose(shop)
    shop.settle()
    shop.settle = lambda: None  # type: ignore[method-assign]
    shop.objects[PODS] = [one for one in shop.objects[PODS] if one["spec"]["nodeName"]]
    site.wait(2 * LONG)
    site.require_untouched()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_claim_that_a_pod_with_a_node_uses_stays(site: Site, is_there: bool) -> None:
    """On any node: on a lost one Kubernetes removes it, and until then it is not certain."""
    shop, lost = site.shop, first(site.shop)
    [node] = lose(shop)
    user = shop.add(
        PODS,
        "backup",
        metadata={"namespace": releasing.SHOP},
        spec={
            "nodeName": sorted(shop.nodes)[0] if is_there else node,
            "volumes": [{"persistentVolumeClaim": {"claimName": shop.instance_claims(lost)[0]}}],
        },
        status={"phase": "Running"},
    )
    settle = shop.settle

    def settle_and_keep() -> None:
        settle()
        if user not in shop.objects[PODS]:
            shop.objects[PODS].append(user)

    shop.settle = settle_and_keep  # type: ignore[method-assign]
    site.wait(2 * LONG)
    site.require_untouched()
    assert "pod backup uses the claim" in shop.message(lost_claims.WAITS)
    # A pod that has ended uses nothing.
    user["status"]["phase"] = "Succeeded"
    site.wait(LONG)
    assert shop.released


def test_two_lost_instances_go_one_after_the_other(site: Site) -> None:
    shop = site.shop
    lose(shop, *shop.names(PODS)[:2])
    shop.join("n4")
    site.wait(LONG + 120)
    assert len(set(shop.released.values())) == 1
    site.wait(2 * LONG)
    assert len(set(shop.released.values())) == 2
    site.require_whole()


def test_the_second_waits_until_the_first_is_ready(site: Site) -> None:
    shop = site.shop
    lose(shop, *shop.names(PODS)[:2])
    shop.slow = {"n3", "n4"}
    shop.join("n4")
    site.wait(3 * LONG)
    assert len(set(shop.released.values())) == 1
    site.require_safe()
    shop.slow = set()
    site.wait(LONG)
    site.require_whole()


def test_an_instance_waits_while_another_does_not_run(site: Site) -> None:
    shop = site.shop
    other = shop.names(PODS)[1]
    shop.slow = {shop.node_of(other)}
    lose(shop)
    site.wait(2 * LONG)
    site.require_untouched()
    assert "is not in use by a ready pod" in shop.message(lost_claims.WAITS)
    # Its Event is renewed: the API server deletes it after an hour.
    for _ in range(3):
        shop.events.clear()
        site.wait(3600)
        assert "is not in use by a ready pod" in shop.message(lost_claims.WAITS)
    shop.slow = set()
    site.wait(LONG)
    site.require_whole()


def test_an_owner_whose_pod_cannot_be_evicted_holds_up_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an admission webhook that refuses all evictions of one application."""
    shop = site.shop
    node = {"key": TOPOLOGY_KEY, "operator": "In", "values": ["gone"]}
    note = ReleaseNote("uid-gone", "Cluster web", "web-1", ("uid-gone",), ("uid-web-1",))
    shop.add(
        VOLUMES,
        "pv-web-1",
        metadata={"annotations": {note_key(DRIVER_NAME): note.text}},
        spec={
            "csi": {"driver": DRIVER_NAME, "volumeHandle": "data@hhhhhhhh/vol-web-1"},
            "claimRef": {"namespace": "shop", "name": "web-1", "uid": "uid-gone"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [node]}]}},
            "persistentVolumeReclaimPolicy": "Retain",
        },
        status={"phase": "Released"},
    )
    shop.add(
        PODS,
        "web-1",
        metadata={"namespace": "shop", "uid": "uid-web-1"},
        spec={
            "nodeName": "",
            "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "web-1"}}],
        },
        status={"phase": "Pending"},
    )
    write, refused = shop.write, list[str]()

    def refusing(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/pods/web-1/eviction"):
            refused.append(path)
            return 403, {"kind": "Status", "reason": "Forbidden", "message": "no"}
        return write(method, path, body)

    monkeypatch.setattr(shop, "write", refusing)
    lose(shop)
    site.wait(2 * LONG)
    assert refused
    assert shop.released
    site.require_safe()


def test_the_last_copies_are_not_replaced_by_nothing(site: Site) -> None:
    shop = site.shop
    lose(shop, *shop.names(PODS))
    for number in range(4, 7):
        shop.join(f"n{number}")
    site.wait(2 * LONG)
    site.require_untouched()
    assert "there is no copy to begin with" in shop.message(lost_claims.WAITS)


def test_a_single_instance_that_allows_it_begins_anew(kind: str) -> None:
    shop = Shop(kind, replicas=1)
    with releasing.directly(shop):
        site = Site(shop)
        site.wait(60)
        lose(shop)
        site.wait(LONG + 300)
        site.require_whole()


def test_a_claim_of_the_same_pod_that_may_not_go_keeps_the_others(site: Site) -> None:
    """As one that is mounted beside them, and that nothing would make anew."""
    shop, lost = site.shop, first(site.shop)
    shop._claim("config")
    shop._provision(shop.one(CLAIMS, "config"), shop.node_of(lost))
    pod, make = shop.one(PODS, lost), shop._pod

    def with_config(instance: str) -> Any:
        made = make(instance)
        if instance == lost:
            made["spec"]["volumes"].append({"persistentVolumeClaim": {"claimName": "config"}})
        return made

    shop._pod = with_config  # type: ignore[method-assign]
    pod["spec"]["volumes"].append({"persistentVolumeClaim": {"claimName": "config"}})
    lose(shop)
    site.wait(2 * LONG)
    site.require_untouched()
    assert "needs claim config, too" in shop.message(lost_claims.WAITS)


@pytest.mark.parametrize(
    "annotation",
    [f"move.{DRIVER_NAME}/reclaim-policy", f"release.{DRIVER_NAME}/claim"],
)
def test_a_volume_that_another_change_has_begun_with_stays(site: Site, annotation: str) -> None:
    shop = site.shop
    volume = shop.volume_of(shop.instance_claims(first(shop))[0])
    volume["metadata"]["annotations"] = {annotation: "Delete"}
    lose(shop)
    site.wait(2 * LONG)
    site.require_untouched()
    assert "annotations of another change" in shop.message(lost_claims.WAITS)


def begin_only(site: Site) -> str:
    """Take the first step of a release, and no other; the lost node."""
    [node] = lose(site.shop)
    site.wait(LONG - 60)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(site.controllers[0].claims._objects, "delete", lambda *_: None)
        site.wait(120)
    assert policies(site.shop) == {"Delete", "Retain"}
    return node


def policies(shop: Shop) -> set[str]:
    return {one["spec"]["persistentVolumeReclaimPolicy"] for one in shop.objects[VOLUMES]}


@pytest.mark.parametrize("wish", ["", "true"])
def test_a_node_that_is_back_after_the_first_step_takes_it_back(site: Site, wish: str) -> None:
    shop = site.shop
    for one in shop.objects[CLAIMS] if wish else ():
        one["metadata"]["annotations"] = {WISH: wish}
    shop.join(begin_only(site))
    site.wait(240)
    # Another controller may still be about to delete the claim.
    assert policies(shop) == {"Delete", "Retain"}
    site.wait(120)
    assert policies(shop) == {"Delete"}
    assert shop.notes() == {}
    assert lost_claims.CANCELLED in shop.reasons()
    site.require_whole()


def test_a_claim_that_forbids_it_after_the_first_step_takes_it_back(site: Site) -> None:
    shop = site.shop
    begin_only(site)
    for one in shop.objects[CLAIMS]:
        one["metadata"]["annotations"] = {WISH: "false"}
    site.wait(420)
    assert policies(shop) == {"Delete"}
    site.require_safe()


def test_what_was_read_too_long_ago_takes_nothing_back(site: Site) -> None:
    """As by a controller that was stopped in a look."""
    shop, answer, is_slow = site.shop, site.shop.answer, [False]

    def slowly(path: str, query: Any) -> Any:
        if is_slow[0] and path.endswith("/pods"):
            site.clock.now += 61
        return answer(path, query)

    shop.join(begin_only(site))
    shop.answer = slowly  # type: ignore[method-assign]
    site.wait(240)
    is_slow[0] = True
    site.wait(300)
    assert policies(shop) == {"Delete", "Retain"}
    is_slow[0] = False
    site.wait(400)
    assert policies(shop) == {"Delete"}


def between_the_steps(site: Site, happens: Callable[[], object]) -> None:
    """Release up to the first step; then this happens, once, and the release goes on."""
    lose(site.shop)
    site.wait(LONG - 60)
    write, waiting = site.shop.write, [happens]

    def writing(method: str, path: str, body: Any) -> Any:
        done = write(method, path, body)
        if method == "PATCH" and waiting:
            waiting.pop()()
        return done

    site.shop.write = writing  # type: ignore[method-assign]
    site.wait(120)
    assert not waiting


def test_a_pod_that_comes_between_the_steps_keeps_its_claim(site: Site) -> None:
    shop, lost = site.shop, first(site.shop)
    volume = {"persistentVolumeClaim": {"claimName": shop.instance_claims(lost)[0]}}

    def comes() -> None:
        about = {"namespace": releasing.SHOP}
        spec = {"nodeName": sorted(shop.nodes)[0], "volumes": [volume]}
        shop.add(PODS, "backup", metadata=about, spec=spec, status={"phase": "Running"})

    between_the_steps(site, comes)
    assert shop.released == {}
    site.require_safe()


def test_a_node_that_comes_back_between_the_steps_keeps_its_claims(site: Site) -> None:
    shop, node = site.shop, site.shop.node_of(first(site.shop))

    def comes_back() -> None:
        site.clock.now += 0.1
        shop.join(node)

    between_the_steps(site, comes_back)
    assert shop.released == {}
    site.wait(400)
    assert shop.notes() == {}
    site.require_whole()


def test_a_volume_that_is_to_be_deleted_again_between_the_steps_is_kept_first(site: Site) -> None:
    shop = site.shop

    def is_unkept() -> None:
        for name in shop.instance_claims(first(shop)):
            shop.volume_of(name)["spec"]["persistentVolumeReclaimPolicy"] = "Delete"

    between_the_steps(site, is_unkept)
    site.wait(300)
    assert shop.released
    site.require_whole()


def test_a_pod_that_is_made_anew_between_the_steps_is_noted(site: Site) -> None:
    """The former policy stays as it was noted first."""
    shop, lost = site.shop, first(site.shop)
    names = [shop.volume_of(one)["metadata"]["name"] for one in shop.instance_claims(lost)]

    def is_made_anew() -> None:
        shop.one(PODS, lost)["metadata"]["uid"] += "-another"

    between_the_steps(site, is_made_anew)
    site.wait(300)
    assert shop.released
    site.require_whole()
    for name in names:
        annotations = shop.one(VOLUMES, name)["metadata"]["annotations"]
        assert annotations[f"release.{DRIVER_NAME}/reclaim-policy"] == "Delete"


def test_a_list_that_lacks_a_claim_between_the_steps_holds_it_up(site: Site) -> None:
    shop, answer = site.shop, site.shop.answer
    hidden = shop.instance_claims(shop.names(PODS)[1])

    def shortened(asked: str, query: Any) -> Any:
        status, document = answer(asked, query)
        if asked.endswith("/persistentvolumeclaims"):
            items = [one for one in document["items"] if one["metadata"]["name"] not in hidden]
            document = {**document, "items": items}
        return status, document

    between_the_steps(site, lambda: setattr(shop, "answer", shortened))
    assert shop.released == {}
    site.require_safe()


def test_what_was_read_too_long_ago_is_not_acted_on(site: Site) -> None:
    """As by a controller that was stopped between two requests."""
    claims, lose_time = site.controllers[0].claims, [True]
    asked = claims._why_not_lost

    def asking_long(volume: Volume) -> str:
        if any(one.startswith("PATCH") for one in site.shop.writes) and lose_time:
            lose_time.pop()
            site.clock.now += 90
        return asked(volume)

    claims._why_not_lost = asking_long
    lose(site.shop)
    site.wait(LONG + 30)
    assert not lose_time
    assert site.shop.released == {}
    site.wait(600)
    assert site.shop.released
    site.require_whole()


def test_another_choice_has_a_grace_of_its_own(site: Site) -> None:
    """Two are lost and forgotten. No pod waits for the first by name until later."""
    shop = site.shop
    one, other = shop.names(PODS)[:2]
    shop.join("n4")
    settle = shop.settle

    def settle_without_the_first() -> None:
        settle()
        if one in shop.names(PODS):
            shop.objects[PODS].remove(shop.one(PODS, one))

    shop.settle = settle_without_the_first  # type: ignore[method-assign]
    lose(shop, one, other)
    site.wait(LONG - 90)
    shop.settle = settle  # type: ignore[method-assign]
    site.wait(240)
    assert shop.released == {}
    site.wait(150)
    assert set(shop.released.values()) == {one}
    site.require_safe()


def test_a_node_that_comes_back_while_the_deletion_is_on_its_way_loses_no_data(kind: str) -> None:
    """Another controller must not give the volume its former policy, which is Delete, then."""
    made: list[tuple[Site, str]] = []

    def before(request: str) -> None:
        if made and request.startswith("DELETE"):
            site, node = made.pop()
            site.shop.join(node)
            site.shop.excused = {node}
            for _ in range(2):
                site.clock.now += 30
                site.controllers[1].look()

    shop = Shop(kind)
    with releasing.directly(shop, before):
        site = Site(shop)
        site.controllers.append(Controller(shop, site.clock))
        site.wait(60)
        [node] = lose(shop)
        made.append((site, node))
        site.wait(LONG + 120)
        assert not made
        assert shop.released
        site.wait(2 * LONG)
        site.require_whole()


def test_another_claim_of_the_name_is_not_deleted(site: Site) -> None:
    """The UID is a precondition, for what happens between the last look and the request."""
    shop, lost = site.shop, first(site.shop)
    lose(shop)
    site.wait(LONG - 30)
    objects = site.controllers[0].claims._objects
    delete = objects.delete

    def after_another_was_made(path: str, uid: str) -> None:
        for name in shop.instance_claims(lost):
            shop.one(CLAIMS, name)["metadata"]["uid"] += "-another"
        delete(path, uid)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(objects, "delete", after_another_was_made)
        site.wait(60)
    assert shop.released == {}
    assert any(one.startswith("DELETE") for one in shop.writes)


@pytest.mark.parametrize("where", [CLAIMS, PODS, VOLUMES, NODES])
def test_an_empty_list_proves_nothing(site: Site, where: str) -> None:
    """As of an API server whose database was lost or is another's."""
    shop = site.shop
    lose(shop)
    site.wait(LONG - 60)
    answer, path = shop.answer, where.replace("/v1/", f"/v1/namespaces/{releasing.SHOP}/")

    def emptied(asked: str, query: Any) -> Any:
        status, document = answer(asked, query)
        if asked in (where, path) and "items" in document:
            document = {**document, "items": []}
            document["metadata"] = {"resourceVersion": "7"}
        return status, document

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shop, "answer", emptied)
        site.wait(2 * LONG, is_settled=False)
    site.require_untouched()


def test_a_claim_that_the_list_lacks_holds_the_namespace_up(site: Site) -> None:
    """It may be that of an instance that does not run."""
    shop, answer = site.shop, site.shop.answer
    hidden = shop.instance_claims(shop.names(PODS)[1])
    lose(shop)

    def shortened(asked: str, query: Any) -> Any:
        status, document = answer(asked, query)
        if asked.endswith("/persistentvolumeclaims"):
            items = [one for one in document["items"] if one["metadata"]["name"] not in hidden]
            document = {**document, "items": items}
        return status, document

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shop, "answer", shortened)
        site.wait(2 * LONG)
        with pytest.raises(errors.ClusterSilent, match="which a PersistentVolume names"):
            site.controllers[0].claims.look()
    site.require_untouched()


def test_an_event_that_is_refused_holds_nothing_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = site.shop.write

    def refusing(method: str, path: str, body: Any) -> Any:
        if "/events" in path:
            return 403, {"kind": "Status", "message": "forbidden"}
        return write(method, path, body)

    monkeypatch.setattr(site.shop, "write", refusing)
    lose(site.shop)
    site.wait(LONG + 300)
    site.require_whole()


def test_a_pod_that_waits_for_a_claim_that_is_gone_is_evicted() -> None:
    """CloudNativePG would leave it alone, and make no other."""
    shop = Shop("Cluster")
    with releasing.directly(shop):
        site = Site(shop)
        site.wait(60)
        lost = first(shop)
        lose(shop)
        site.wait(LONG + 300)
        evictions = [one for one in shop.writes if one.endswith("/eviction")]
        assert evictions == [f"POST /api/v1/namespaces/shop/pods/{lost}/eviction"]
        site.require_whole()


def test_a_pod_whose_claim_was_made_anew_is_left_to_the_scheduler() -> None:
    """A StatefulSet makes the claim; there is no node for it yet."""
    shop = Shop("StatefulSet")
    with releasing.directly(shop):
        site = Site(shop)
        site.wait(60)
        shop.leave("n3")
        lose(shop)
        site.wait(LONG + 600)
        assert shop.released
        assert not any(one.endswith("/eviction") for one in shop.writes)
        shop.join("n4")
        site.wait(60)
        site.require_whole()


def test_over_http_it_is_the_same(kind: str) -> None:
    with api_server.running(Shop(kind)) as shop:
        site = Site(shop)
        site.wait(60)
        lose(shop)
        # No more requests than are needed: each has a connection of its own.
        site.wait(LONG + 600, step=100)
        site.require_whole()


@pytest.mark.parametrize("done", [False, True])
def test_a_release_killed_at_any_request_is_continued(kind: str, done: bool) -> None:
    for at in itertools.count():
        shop, left = Shop(kind), [-1]

        def before(request: str, left: list[int] = left) -> object:
            if left[0] < 0 or "/events" in request:
                return None
            left[0] -= 1
            if left[0] >= 0:
                return None
            if done:
                return Killed()
            raise Killed

        with releasing.directly(shop, before):
            site = Site(shop)
            site.wait(60)
            lose(shop)
            site.wait(LONG - 60, step=90)
            site.wait(30)
            left[0] = at
            was_killed = False
            for _ in range(8):
                try:
                    site.wait(30)
                except Killed:
                    was_killed = True
                    break
            site.require_safe()
            left[0] = -1
            site.restart()
            site.wait(2 * LONG, step=90)
            site.require_whole()
        if not was_killed:
            assert at > 20
            return


ACTS = st.one_of(
    st.tuples(st.just("leaves"), st.integers(0, 4)),
    st.tuples(st.just("joins"), st.integers(0, 4)),
    st.tuples(st.just("waits"), st.sampled_from([30, 90, 300, 630, 930, 1500])),
    st.tuples(st.just("dies"), st.integers(0, 40)),
    st.tuples(st.just("restarts"), st.just(0)),
    st.tuples(st.just("rests"), st.sampled_from([0, 1])),
    st.tuples(st.just("slows"), st.integers(0, 4)),
    st.tuples(st.just("forbids"), st.integers(0, 5)),
    st.tuples(st.just("fails"), st.integers(0, 40)),
    st.tuples(st.just("interleaves"), st.integers(0, 40)),
    st.tuples(st.just("stalls"), st.integers(0, 40)),
    st.tuples(st.just("joins meanwhile"), st.integers(0, 40)),
)


class History(Site):
    """What happens to a shop with two controllers, one of which may be killed at any request."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self.controllers.append(Controller(shop, self.clock))
        # How many requests come before one at which the process ends, or the API server fails.
        self.until_killed = self.until_failed = -1
        # What happens between two requests of a controller: how many come before, and what it is.
        self.until_meanwhile, self.meanwhile = -1, ""

    def before(self, request: str) -> object:
        self.until_meanwhile -= 1
        if self.until_meanwhile == 0:
            self.other_looks(request)
        self.until_failed -= 1
        if self.until_failed == 0:
            return OSError()
        self.until_killed -= 1
        if self.until_killed == 0:
            raise Killed
        if self.until_killed == -20:
            return Killed()
        return None

    def wait(self, seconds: int, *, step: int = 30, is_settled: bool = True) -> None:
        for _ in range(0, seconds, step):
            self.clock.now += step
            if is_settled:
                self.shop.settle()
            for index, controller in enumerate(self.controllers):
                try:
                    with suppress(errors.AgentError):
                        controller.look()
                except Killed:
                    self.controllers[index] = Controller(self.shop, self.clock)
                self.shop.excused = set()
            self.require_safe()

    def other_looks(self, request: str) -> None:
        """The last controller looks while the first is between two requests, or waits for long."""
        if self.meanwhile == "joins meanwhile":
            gone = {f"n{number}" for number in range(5)} - self.shop.nodes
            for node in gone:
                self.shop.join(node)
            self.shop.excused = gone if request.startswith("DELETE") else set()
        # A request that is on its way for longer than a grace period would be another matter.
        is_long = self.meanwhile == "stalls" and not request.startswith(("DELETE", "POST"))
        for _ in range(60 if is_long else 3):
            self.clock.now += 30 if is_long else 0.1
            with suppress(errors.AgentError):
                self.controllers[-1].look()

    def act(self, name: str, value: int) -> None:
        shop = self.shop
        match name:
            case "interleaves" | "stalls" | "joins meanwhile":
                self.until_meanwhile, self.meanwhile = value + 1, name
            case "leaves":
                if len(shop.nodes) > 1:
                    shop.leave(f"n{value}")
            case "joins":
                shop.join(f"n{value}")
            case "waits":
                self.wait(value)
            case "dies":
                self.until_killed = value + 1
            case "fails":
                self.until_failed = value + 1
            case "restarts":
                self.restart()
            case "rests":
                shop.is_asleep = bool(value)
            case "slows":
                shop.slow ^= {f"n{value}"}
            case "forbids":
                claims = shop.objects[CLAIMS]
                if claims:
                    about = claims[value % len(claims)]["metadata"]
                    wish = about.get("annotations", {}).get(WISH)
                    about["annotations"] = {WISH: "false" if wish != "false" else "true"}
        self.require_safe()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["StatefulSet", "Cluster"]),
    acts=st.lists(ACTS, min_size=3, max_size=12),
)
def test_whatever_happens_no_data_go_and_no_two_at_once(
    kind: str, acts: Sequence[tuple[str, int]]
) -> None:
    shop = Shop(kind)
    made: list[History] = []
    with releasing.directly(shop, lambda request: made and made[0].before(request)):
        history = History(shop)
        made.append(history)
        history.wait(60)
        for name, value in acts:
            history.act(name, value)
        # All is well again but for the lost nodes: what can be brought back is.
        shop.is_asleep, shop.slow = False, set()
        history.until_killed = history.until_failed = history.until_meanwhile = -1
        for one in shop.objects[CLAIMS]:
            one["metadata"].pop("annotations", None)
        for number in range(5, 9):
            shop.join(f"n{number}")
        running = [one for one in shop.names(PODS) if shop.is_running(one)]
        history.wait(5 * LONG)
        if running:
            history.require_whole()
        history.require_safe()
        for volume in shop.objects[VOLUMES]:
            is_bound = volume["status"]["phase"] == "Bound"
            assert is_bound or volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_the_note_is_read_back_or_refused() -> None:
    note = ReleaseNote("uid-1", "StatefulSet db", "db-0", ("uid-1", "uid-2"), ("uid-3",))
    key = note_key(DRIVER_NAME)
    assert ReleaseNote.parse({key: note.text}, DRIVER_NAME) == note
    for text in ("", "x", "[]", "{}", "null", json.dumps({**json.loads(note.text), "known": 7})):
        assert ReleaseNote.parse({key: text}, DRIVER_NAME) is None
    assert ReleaseNote.parse({}, DRIVER_NAME) is None
