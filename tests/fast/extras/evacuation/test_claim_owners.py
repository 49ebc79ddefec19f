"""Which claim of a lost node may go next, by the objects of a namespace alone."""

from dataclasses import replace
from typing import Any

import pytest

from agent.core.ids import VolumeId
from agent.extras.evacuation import release_notes
from agent.extras.evacuation.claim_owners import Choice, Claim, Namespace, Owner, Pod, Volume
from agent.extras.evacuation.release_notes import ReleaseNote
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY

EXISTING = frozenset({"n1", "n2", "n3"})
SET = Owner("StatefulSet", "db")


def claim(name: str, owner: Owner | None = None, **more: Any) -> Claim:
    """A bound claim, of the PersistentVolume `pv-NAME`."""
    made = Claim(name, f"uid-{name}", f"pv-{name}", True, False, "", owner, "")
    return replace(made, **more)


def volume(claim_name: str, node: str, **more: Any) -> Volume:
    """The PersistentVolume of a claim."""
    made = Volume(
        name=f"pv-{claim_name}",
        uid=f"uid-pv-{claim_name}",
        version="1",
        identity=VolumeId("data", "hhhhhhhh", f"vol-{claim_name}"),
        segment=node,
        policy="Delete",
        former_policy="",
        storage_class="fast",
        namespace="shop",
        claim=claim_name,
        claim_uid=f"uid-{claim_name}",
        is_bound=True,
        is_going=False,
        is_moving=False,
        target="",
        note=None,
        is_unclear=False,
    )
    return replace(made, **more)


def pod(name: str, node: str, *claims: str, owner: Owner | None = SET, **more: Any) -> Pod:
    made = Pod(name, f"uid-{name}", node, bool(node), False, claims, owner)
    return replace(made, **more)


class Objects:
    """A set of three on n0, n1 and n2, of which n0 is lost; tests change what they are about."""

    def __init__(self) -> None:
        self.existing = EXISTING
        self.claims = {f"data-db-{at}": claim(f"data-db-{at}") for at in range(3)}
        self.volumes = {name: volume(name, f"n{name[-1]}") for name in self.claims}
        self.pods = {
            f"db-{at}": pod(f"db-{at}", f"n{at}" if at else "", f"data-db-{at}") for at in range(3)
        }

    def namespace(self) -> Namespace:
        return Namespace(
            list(self.claims.values()),
            list(self.pods.values()),
            list(self.volumes.values()),
            self.existing,
            {"fast": True},
        )

    def choices(self) -> list[Choice]:
        return list(self.namespace().choices())

    def change(self, what: str, **fields: Any) -> None:
        if what in self.claims:
            self.claims[what] = replace(self.claims[what], **fields)
        else:
            self.pods[what] = replace(self.pods[what], **fields)

    def change_volume(self, what: str, **fields: Any) -> None:
        self.volumes[what] = replace(self.volumes[what], **fields)


@pytest.fixture
def objects() -> Objects:
    return Objects()


def test_the_instance_of_a_lost_node_is_chosen(objects: Objects) -> None:
    [choice] = objects.choices()
    assert (choice.owner, choice.instance, choice.obstacle) == (SET, "db-0", "")
    assert [each.claim.name for each in choice.lost] == ["data-db-0"]
    assert [each.name for each in choice.waiting] == ["db-0"]
    assert choice.known == ("uid-data-db-0", "uid-data-db-1", "uid-data-db-2")


def test_without_a_list_of_nodes_none_is_lost(objects: Objects) -> None:
    objects.existing = frozenset()
    assert objects.choices() == []


def test_a_claim_that_only_names_anothers_volume_is_not_lost(objects: Objects) -> None:
    """Any user may make a claim that names the PersistentVolume of another."""
    objects.change_volume("data-db-0", claim_uid="uid-of-another")
    assert objects.choices() == []
    objects.change_volume("data-db-0", claim_uid="uid-data-db-0", claim="another")
    assert objects.choices() == []


@pytest.mark.parametrize("field", [{"is_going": True}, {"is_bound": False}])
def test_a_claim_that_goes_or_is_not_bound_is_not_lost(
    objects: Objects, field: dict[str, bool]
) -> None:
    objects.change("data-db-0", **field)
    assert objects.choices() == []


NOT_IN_USE: list[tuple[str, dict[str, Any]]] = [
    ("db-1", {"is_ready": False}),
    ("db-1", {"is_going": True}),
    ("db-1", {"node": "n9"}),
    ("db-1", {"claims": ()}),
    ("data-db-1", {"is_bound": False}),
    ("data-db-1", {"is_going": True}),
]


@pytest.mark.parametrize(("what", "fields"), NOT_IN_USE)
def test_another_claim_that_is_not_in_use_keeps_it(
    objects: Objects, what: str, fields: dict[str, Any]
) -> None:
    objects.change(what, **fields)
    [choice] = objects.choices()
    assert "claim data-db-1 of StatefulSet db is not in use" in choice.obstacle


def test_another_lost_claim_that_may_not_go_keeps_it(objects: Objects) -> None:
    objects.change_volume("data-db-1", segment="n9", storage_class="slow")
    objects.change("db-1", node="", is_ready=False)
    [choice] = objects.choices()
    assert "claim data-db-1 of StatefulSet db is not in use" in choice.obstacle


@pytest.mark.parametrize("field", ["is_moving", "is_going", "is_unclear"])
def test_a_volume_in_another_change_keeps_its_claim(objects: Objects, field: str) -> None:
    objects.change_volume("data-db-0", **{field: True})
    [choice] = objects.choices()
    assert choice.obstacle.startswith("PersistentVolume pv-data-db-0 ")


def test_a_note_of_another_claim_keeps_it(objects: Objects) -> None:
    """As where the PersistentVolume was bound to its claim again by hand."""
    note = ReleaseNote("uid-earlier", str(SET), "db-0", is_done=True)
    objects.change_volume("data-db-0", note=note)
    [choice] = objects.choices()
    assert "the note of another claim's release" in choice.obstacle


def test_one_that_has_begun_goes_on_before_the_first_by_name(objects: Objects) -> None:
    objects.change_volume("data-db-1", segment="n9")
    objects.change("db-1", node="", is_ready=False)
    assert [each.instance for each in objects.choices()] == ["db-0"]
    objects.change_volume("data-db-1", note=ReleaseNote("uid-data-db-1", str(SET), "db-1"))
    [choice] = objects.choices()
    assert (choice.instance, choice.obstacle) == ("db-1", "")


def test_one_that_was_released_and_is_not_back_keeps_the_others(objects: Objects) -> None:
    note = ReleaseNote("uid-gone", str(SET), "db-1", ("uid-gone",))
    objects.volumes["gone"] = volume("data-db-1", "n9", name="pv-gone", is_bound=False, note=note)
    del objects.claims["data-db-1"]
    objects.change("db-1", node="", is_ready=False)
    [choice] = objects.choices()
    assert "no claim is in use in its place yet" in choice.obstacle


def test_only_claims_of_the_set_count(objects: Objects) -> None:
    """Not that of another set, nor one with a name that is only like it."""
    for name in ("data-my-db-1", "data-db-x", "data-db-", "log-db-1", "data-db-1-old"):
        objects.claims[name] = claim(name, is_bound=False)
    [choice] = objects.choices()
    assert choice.obstacle == ""
    # By a further template of the set it counts.
    objects.change("db-2", claims=("data-db-2", "log-db-2"))
    [choice] = objects.choices()
    assert "log-db-1" in choice.obstacle


@pytest.mark.parametrize("owner", [Owner("ReplicaSet", "db"), Owner("StatefulSet", "d"), None])
def test_a_pod_of_no_set_makes_no_owner(objects: Objects, owner: Owner | None) -> None:
    for name in objects.pods:
        objects.change(name, owner=owner)
    assert objects.choices() == []


def test_all_sets_of_one_elasticsearch_are_one_owner(objects: Objects) -> None:
    """ECK makes it the controller of the claims of its StatefulSets, one for each nodeSet."""
    owner = Owner("Elasticsearch", "logs")
    for name in list(objects.claims):
        objects.change(name, owner=owner)
    objects.claims["data-hot-0"] = claim("data-hot-0", owner)
    objects.volumes["data-hot-0"] = volume("data-hot-0", "n3")
    of_hot = Owner("StatefulSet", "hot")
    objects.pods["hot-0"] = pod("hot-0", "n3", "data-hot-0", owner=of_hot, is_ready=False)
    [choice] = objects.choices()
    assert (choice.owner, choice.instance) == (owner, "db-0")
    assert "data-hot-0" in choice.obstacle


def test_the_claims_of_one_instance_of_cloudnativepg_go_together(objects: Objects) -> None:
    owner = Owner("Cluster", "pg")
    objects.claims = {
        name: claim(name, owner, instance=name.removesuffix("-wal"))
        for name in ("pg-1", "pg-1-wal", "pg-2", "pg-2-wal")
    }
    objects.volumes = {
        name: volume(name, "n0" if name.startswith("pg-1") else "n1") for name in objects.claims
    }
    objects.pods = {
        one: pod(one, node, one, f"{one}-wal", owner=owner)
        for one, node in (("pg-1", ""), ("pg-2", "n1"))
    }
    [choice] = objects.choices()
    assert [each.claim.name for each in choice.lost] == ["pg-1", "pg-1-wal"]
    assert (choice.instance, choice.obstacle) == ("pg-1", "")


def test_a_claim_that_is_there_is_withdrawn_and_one_that_goes_is_not(objects: Objects) -> None:
    """With its former policy the volume would be deleted when the claim is gone."""
    note = ReleaseNote("uid-data-db-0", str(SET), "db-0")
    objects.change_volume("data-db-0", note=note)
    assert objects.namespace().withdrawn == []
    objects.existing |= {"n0"}
    assert [each.claim for each in objects.namespace().withdrawn] == ["data-db-0"]
    objects.change("data-db-0", is_going=True)
    assert objects.namespace().withdrawn == []
    objects.change("data-db-0", is_going=False)
    objects.change_volume("data-db-0", note=replace(note, is_done=True))
    assert objects.namespace().withdrawn == []
    objects.change_volume("data-db-0", note=note, segment="n9")
    objects.change("data-db-0", wish="false")
    assert [each.claim for each in objects.namespace().withdrawn] == ["data-db-0"]
    objects.existing = frozenset()
    assert objects.namespace().withdrawn == []


def test_a_released_claim_is_replaced_by_one_that_was_made_since(objects: Objects) -> None:
    known = ("uid-gone", "uid-data-db-1", "uid-data-db-2")
    note = ReleaseNote("uid-gone", str(SET), "db-0", known)
    gone = volume("data-db-0", "n9", name="pv-gone", claim_uid="uid-gone", note=note)
    objects.volumes["gone"] = gone
    objects.change_volume("data-db-0", segment="n3")
    # It is there, and not in use yet.
    assert objects.namespace().replacement(gone) is None
    objects.change("db-0", node="n3", is_ready=True)
    found = objects.namespace().replacement(gone)
    assert found is not None
    assert found.name == "data-db-0"
    # A further claim of the set is not in its place.
    del objects.claims["data-db-0"]
    objects.claims["data-db-3"] = claim("data-db-3")
    objects.pods["db-3"] = pod("db-3", "n3", "data-db-3")
    assert objects.namespace().replacement(gone) is None
    # That of before is not, either.
    again = replace(note, known=("uid-data-db-0", *known))
    objects.claims["data-db-0"] = claim("data-db-0")
    assert objects.namespace().replacement(replace(gone, note=again)) is None


def test_a_claim_is_read_from_its_object() -> None:
    metadata = {
        "name": "pg-1",
        "uid": "1",
        "labels": {"cnpg.io/instanceName": "pg-1"},
        "annotations": {release_notes.wish_key(DRIVER_NAME): "true"},
        "ownerReferences": [
            {"kind": "Other", "name": "x"},
            {"kind": "Cluster", "name": "pg", "controller": True},
        ],
    }
    read = Claim.of({"metadata": metadata, "spec": {"volumeName": "pv"}}, DRIVER_NAME)
    assert read.owner == Owner("Cluster", "pg")
    assert (read.wish, read.instance, read.volume, read.is_bound) == ("true", "pg-1", "pv", False)
    metadata["ownerReferences"] = [{"kind": "Pod", "name": "x", "controller": True}]
    assert Claim.of({"metadata": metadata}, DRIVER_NAME).owner is None


@pytest.mark.parametrize(
    ("driver", "handle", "nodes", "is_read"),
    [
        (DRIVER_NAME, "data@hhhhhhhh/vol-1", ["n0"], True),
        ("other.csi", "data@hhhhhhhh/vol-1", ["n0"], False),
        (DRIVER_NAME, "vol-1", ["n0"], False),
        (DRIVER_NAME, "data@hhhhhhhh/vol-1", ["n0", "n1"], False),
        (DRIVER_NAME, "data@hhhhhhhh/vol-1", [], False),
    ],
)
def test_a_volume_of_one_node_of_the_driver_is_read(
    driver: str, handle: str, nodes: list[str], is_read: bool
) -> None:
    expression = {"key": TOPOLOGY_KEY, "operator": "In", "values": nodes}
    terms = [{"matchExpressions": [expression]}]
    read = Volume.of(
        {
            "metadata": {"name": "pv", "uid": "1"},
            "spec": {
                "csi": {"driver": driver, "volumeHandle": handle},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            },
        },
        DRIVER_NAME,
        TOPOLOGY_KEY,
    )
    assert (read is not None) is is_read
