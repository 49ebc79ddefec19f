"""The API server's database is set back to an older day: what becomes of volumes and objects.

docs/runbooks/database-restored.md has it in words.
"""

from dataclasses import replace

from callers.cluster import Cluster
from callers.controllers import Central
from callers.objects import Claim
from real.any import device

# Longer than any caller waits before it tries again.
_LONG = 900
_KEPT = b"kept" * 1024
_AT = 16 << 20


def written(three: Central, node: str) -> Claim:
    """A claim on a node, with data behind its file system's own blocks; its pod was deleted."""
    cluster = three.cluster
    claim = cluster.claim()
    pod = cluster.start(claim, node)
    assert claim.volume is not None
    host = three.machines[node].host
    path = device(host, claim.volume.id.partition("@")[0], f"vol-pvc-{claim.name}")
    host.write_bytes(path, _AT, _KEPT)
    pod.is_deleted = True
    assert cluster.run_until(lambda: pod not in cluster.pods and has_unstaged(cluster))
    return claim


def has_unstaged(cluster: Cluster) -> bool:
    return all(one.kubelet.knows_nothing() for one in cluster.nodes.values())


def content(three: Central, node: str, claim: Claim) -> bytes:
    """What was written, of a volume that a pod uses."""
    assert claim.volume is not None
    host = three.machines[node].host
    group = claim.volume.id.partition("@")[0]
    return host.read_bytes(device(host, group, f"vol-pvc-{claim.name}"), _AT, len(_KEPT))


def volumes_on(three: Central, node: str) -> list[str]:
    return [one for one in three.machines[node].left() if one.startswith("vol-")]


def test_a_volume_that_was_made_since_stays(three: Central, cluster: Cluster) -> None:
    claim = written(three, "a")
    # The restored database has no such claim, and no PersistentVolume.
    cluster.claims.remove(claim)
    cluster.run_until(lambda: False, _LONG)
    assert volumes_on(three, "a") == [f"vol-pvc-{claim.name}"]
    # The objects that `carver volume manifest` prints: the same claim, with the same volume.
    cluster.claims.append(claim)
    cluster.start(claim)
    assert content(three, "a", claim) == _KEPT


def test_a_claim_that_was_pending_finds_its_volume_with_the_data(
    three: Central, cluster: Cluster
) -> None:
    claim = written(three, "a")
    made = claim.volume
    claim.volume, claim.capacity_bytes, claim.selected_node = None, 0, "a"
    cluster.start(claim)
    assert claim.volume == made
    assert content(three, "a", claim) == _KEPT


def test_a_pending_claim_that_is_scheduled_elsewhere_gets_a_second_empty_volume(
    three: Central, cluster: Cluster
) -> None:
    claim = written(three, "a")
    claim.volume, claim.capacity_bytes, claim.selected_node = None, 0, ""
    cluster.start(claim, "b")
    assert content(three, "b", claim) != _KEPT
    name = f"vol-pvc-{claim.name}"
    assert [volumes_on(three, one) for one in "abc"] == [[name], [name], []]


def test_a_claim_whose_volume_was_deleted_since_can_be_deleted(
    three: Central, cluster: Cluster
) -> None:
    claim = written(three, "a")
    assert claim.volume is not None
    again = replace(claim.volume)
    claim.is_deleted = True
    assert cluster.run_until(lambda: not cluster.claims and not cluster.released)
    assert volumes_on(three, "a") == []
    # The restored database has claim and PersistentVolume; a pod waits with them.
    claim.is_deleted, claim.volume = False, again
    cluster.claims.append(claim)
    pod = cluster.pod(claim)
    assert not cluster.run_until(lambda: pod.is_running, _LONG)
    refused = [one for one in cluster.answers if one.rule.method == "NodeStageVolume"]
    assert refused[-1].code == "NOT_FOUND"
    cluster.delete_everything()
    assert cluster.run_until(cluster.is_empty, _LONG), cluster.report()


def test_a_volume_that_is_released_again_is_deleted(three: Central, cluster: Cluster) -> None:
    claim = written(three, "a")
    assert claim.volume is not None
    # On that day its PersistentVolume was Released, with the policy Delete.
    cluster.claims.remove(claim)
    cluster.released.append(claim.volume)
    assert cluster.run_until(lambda: not cluster.released)
    assert volumes_on(three, "a") == []
