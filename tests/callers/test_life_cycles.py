"""Volumes' whole lives with kubelet and the sidecars, in memory and, with --real, on LVM.

What was recorded of real callers has neither xfs and btrfs nor thin volumes, inline ones, group
snapshots, changes of a VolumeAttributesClass, nor a kubelet or a node that is started anew.
"""

import errno
from collections.abc import Iterator
from pathlib import Path

import chosen
import configured
import pytest
from callers.cluster import Cluster
from callers.machines import Machine
from callers.objects import Claim, Pod, StorageClass
from callers.plugin import Answer
from callers.rules import Reaction
from real.any import AnyHost

from agent.csi.client import Mode, block, mounted
from agent.settings.classes import DeviceClass
from lvm.layout import Layout
from lvm.thin import Policy
from mount.command import Result
from mount.filesystem import FILE_SYSTEMS
from proto import csi_pb2 as csi

MIB = 1 << 20
RAW = block(Mode.SINGLE_NODE_MULTI_WRITER)
# The least that each file system needs, and some more to grow by.
SIZES = {key: max(32 * MIB, one.minimum_bytes) for key, one in FILE_SYSTEMS.items()}


@pytest.fixture
def cluster() -> Cluster:
    """One node, with a StorageClass for either device class."""
    return Cluster({one: StorageClass(one, {"carver/class": one}) for one in ("plain", "thin")})


@pytest.fixture
def machine(host: AnyHost, tmp_path: Path, cluster: Cluster) -> Iterator[Machine]:
    """The node, with one group for all."""
    group = host.new_group(100, 60)
    thin = DeviceClass(name="thin", group=group, layout=Layout("thin"), pool=Policy())
    plain = DeviceClass(name="plain", group=group, default=True)
    config = configured.carver(tmp_path, controller_expand=False, classes=(plain, thin))
    made = Machine(host, config, cluster)
    yield made
    made.stop()


def take_out_deferred(cluster: Cluster) -> list[Answer]:
    """The answers after which kubelet goes on, and grows the volume later; taken out of all."""
    found = [one for one in cluster.answers if one.reaction is Reaction.STAYS]
    cluster.answers[:] = [one for one in cluster.answers if one not in found]
    return found


def end(cluster: Cluster, machine: Machine) -> None:
    """Take everything away: nothing is left, and no caller met an error."""
    cluster.delete_everything()
    assert cluster.run_until(cluster.is_empty, seconds=600)
    assert machine.left() == []
    assert [str(one) for one in cluster.answers if one.code != "OK"] == []


KINDS = (*chosen.GROWING, "raw", "thin", "thin raw")


@pytest.mark.parametrize("kind", chosen.kinds(KINDS, usual=["thin"]))
def test_a_claim_is_used_by_two_pods_grown_and_gone_without_an_error(
    kind: str, cluster: Cluster, machine: Machine
) -> None:
    size_bytes = SIZES.get(kind, 32 * MIB)
    capability = RAW
    if not kind.endswith("raw"):
        fs_type = kind if kind in SIZES else "ext4"
        capability = mounted(fs_type, mode=Mode.SINGLE_NODE_MULTI_WRITER)
    storage_class = "thin" if kind.startswith("thin") else "plain"
    claim = cluster.claim(storage_class, size_bytes=size_bytes, capability=capability)
    cluster.start(claim)
    cluster.pod(claim)
    cluster.expand(claim, size_bytes + 16 * MIB)
    cluster.settle()
    cluster.pods[0].is_deleted = True
    cluster.settle()
    end(cluster, machine)


@pytest.mark.parametrize("kind", chosen.kinds(["ext4", "raw", "thin", "thin raw"], usual=["thin"]))
def test_a_claim_restored_for_readers_is_read_by_two_pods_grown_and_gone_without_an_error(
    kind: str, cluster: Cluster, machine: Machine
) -> None:
    """ReadOnlyMany; growth of its PersistentVolume is no error, though no file system grows."""
    writer, readers = (
        block(mode) if kind.endswith("raw") else mounted("ext4", mode=mode)
        for mode in (Mode.SINGLE_NODE_MULTI_WRITER, Mode.MULTI_NODE_READER_ONLY)
    )
    storage_class = "thin" if kind.startswith("thin") else "plain"
    claim = cluster.claim(storage_class, capability=writer)
    cluster.start(claim)
    snapshot = cluster.snapshot(claim)
    cluster.settle()
    restored = cluster.claim(storage_class, capability=readers, source=snapshot)
    cluster.start(restored)
    cluster.start(restored, read_only=True)
    cluster.expand(restored, restored.capacity_bytes + 16 * MIB)
    grow_all(cluster, restored)
    end(cluster, machine)


@pytest.mark.variation
def test_a_claim_with_a_snapshot_grows_when_it_is_unstaged_and_not_by_a_rollout(
    cluster: Cluster, machine: Machine
) -> None:
    claim = cluster.claim("plain")
    old = cluster.start(claim)
    snapshot = cluster.snapshot(claim)
    cluster.settle()
    before = claim.capacity_bytes
    cluster.expand(claim, before + 16 * MIB)
    for _ in range(10):
        cluster.step()
    assert old.is_running
    for _ in range(2):
        new = cluster.start(claim)
        old.is_deleted = True
        cluster.settle()
        old = new
    assert claim.capacity_bytes == before
    # Scaled to 0, until it is unstaged, and back.
    old.is_deleted = True
    assert cluster.run_until(machine.node.kubelet.knows_nothing, seconds=600)
    new = cluster.pod(claim)
    grow_all(cluster, claim)
    assert snapshot in cluster.snapshots
    assert claim.volume is not None
    place = machine.node.kubelet.target(new, claim.volume)
    request = csi.NodeGetVolumeStatsRequest(volume_id=claim.volume.id, volume_path=place)
    usage = machine.plugin.ask("NodeGetVolumeStats", request).response.usage[0]
    assert usage.total > before
    snapshot.is_deleted = True
    assert cluster.run_until(lambda: not cluster.snapshots)
    take_out_deferred(cluster)
    end(cluster, machine)


def test_a_shared_raw_claim_grows_after_the_pod_that_came_last_ended(
    cluster: Cluster, machine: Machine
) -> None:
    claim = cluster.claim("plain", capability=RAW)
    pods = [cluster.start(claim) for _ in range(2)]
    pods[1].is_deleted = True
    cluster.settle()
    cluster.expand(claim, claim.size_bytes + 16 * MIB)
    grow_all(cluster, claim)
    end(cluster, machine)


@pytest.mark.parametrize("kind", chosen.kinds(("mounted", "raw"), usual=["raw"]))
@pytest.mark.parametrize("event", chosen.kinds(("kubelet", "carver", "node"), usual=["node"]))
def test_pods_run_on_after_a_restart(
    kind: str, event: str, cluster: Cluster, machine: Machine
) -> None:
    claim = cluster.claim("plain", **({"capability": RAW} if kind == "raw" else {}))
    pods = [cluster.pod(claim), cluster.pod(claim)]
    cluster.settle()
    {"kubelet": machine.node.kubelet.restart, "carver": machine.restart, "node": machine.reboot}[
        event
    ]()
    assert all(pod.is_running for pod in pods) == (event == "carver")
    cluster.settle()
    end(cluster, machine)


@pytest.mark.variation
@pytest.mark.parametrize("of", ["snapshot", "clone"])
def test_a_claim_is_made_of_another_larger_than_it(
    of: str, cluster: Cluster, machine: Machine
) -> None:
    claim = cluster.claim("plain")
    cluster.start(claim)
    source = cluster.snapshot(claim) if of == "snapshot" else claim
    copy = cluster.claim("plain", source=source, size_bytes=48 * MIB)
    cluster.start(copy)
    assert copy.capacity_bytes == 48 * MIB
    # While it is there, its source cannot be deleted.
    for one in cluster.snapshots:
        one.is_deleted = True
    assert cluster.run_until(lambda: not cluster.snapshots)
    end(cluster, machine)


@pytest.mark.variation
def test_a_pod_that_may_write_alone_is_mounted_again_by_a_new_kubelet(
    cluster: Cluster, machine: Machine
) -> None:
    alone = mounted("ext4", mode=Mode.SINGLE_NODE_SINGLE_WRITER)
    cluster.start(cluster.claim("plain", capability=alone))
    machine.node.kubelet.restart()
    cluster.settle()
    end(cluster, machine)


@pytest.mark.variation
def test_an_inline_volume_lives_as_long_as_its_pod(cluster: Cluster, machine: Machine) -> None:
    kubelet = machine.node.kubelet
    kubelet.publish_inline("csi-0123", "pod-1", {"carver/class": "plain", "size": "32MiB"})
    assert len(machine.left()) == 2
    kubelet.restart()
    kubelet.publish_inline("csi-0123", "pod-1", {"carver/class": "plain", "size": "32MiB"})
    kubelet.unpublish_inline("csi-0123", "pod-1")
    end(cluster, machine)


@pytest.mark.variation
def test_a_volume_attributes_class_changes_a_volume_or_marks_its_claim(
    cluster: Cluster, machine: Machine
) -> None:
    claim = cluster.claim("plain")
    cluster.start(claim)
    assert claim.volume is not None
    reactions = []
    for value in ("1MiB", "much"):
        request = csi.ControllerModifyVolumeRequest(
            volume_id=claim.volume.id, mutable_parameters={"carver/readAhead": value}
        )
        reactions.append(machine.plugin.ask("ControllerModifyVolume", request).reaction)
    assert reactions == [Reaction.GOES_ON, Reaction.INFEASIBLE]
    cluster.answers.pop()
    end(cluster, machine)


@pytest.mark.variation
def test_a_group_snapshot_is_taken_asked_for_again_and_deleted(
    cluster: Cluster, machine: Machine
) -> None:
    claims = [cluster.claim("plain"), cluster.claim("plain")]
    for one in claims:
        cluster.start(one)
    request = csi.CreateVolumeGroupSnapshotRequest(
        name="groupsnapshot-1", source_volume_ids=[one.volume.id for one in claims if one.volume]
    )
    answers = [machine.plugin.ask("CreateVolumeGroupSnapshot", request) for _ in range(2)]
    assert [str(one) for one in answers if one.code != "OK"] == []
    first, again = (one.response.group_snapshot for one in answers)
    assert first == again
    assert first.ready_to_use
    machine.plugin.ask(
        "DeleteVolumeGroupSnapshot",
        csi.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=first.group_snapshot_id,
            snapshot_ids=[one.snapshot_id for one in first.snapshots],
        ),
    )
    end(cluster, machine)


def replace_pod(cluster: Cluster, claim: Claim) -> Pod:
    """A person scales to 0 and back: the volume is unstaged between."""
    for pod in cluster.pods:
        pod.is_deleted = True
    assert cluster.run_until(lambda: not cluster.pods, seconds=600)
    return cluster.pod(claim)


def run_all(cluster: Cluster) -> None:
    running = cluster.run_until(lambda: all(one.is_running for one in cluster.pods), seconds=600)
    assert running, cluster.report()


def grow_all(cluster: Cluster, claim: Claim) -> None:
    """Wait until a claim has the size that it asks for."""
    grown = cluster.run_until(lambda: claim.capacity_bytes == claim.size_bytes, seconds=600)
    assert grown, cluster.report()


def expansions(cluster: Cluster) -> int:
    """How often a node was asked to expand a volume."""
    return sum(one.rule.method == "NodeExpandVolume" for one in cluster.answers)


def health(machine: Machine, claim: Claim) -> dict[str, str]:
    """What is said against a claim's volume, by the reason."""
    assert claim.volume is not None
    request = csi.NodeGetVolumeHealthRequest(volume_id=claim.volume.id)
    found = machine.plugin.ask("NodeGetVolumeHealth", request).response.volume_health
    return {one.reason: one.message for one in found.health_statuses}


@pytest.mark.parametrize(
    "running", chosen.kinds([True, False], usual=[True]), ids=["its pod runs", "it has no pod"]
)
@pytest.mark.parametrize("kind", chosen.kinds(["plain", "thin", "raw", "two pods"], usual=["thin"]))
@pytest.mark.long_on_lvm
def test_a_claim_that_cannot_grow_has_its_pod_run_and_is_set_right_when_it_is_made_smaller(
    kind: str, running: bool, cluster: Cluster, machine: Machine
) -> None:
    more = {"capability": RAW} if kind == "raw" else {}
    claim = cluster.claim("thin" if kind == "thin" else "plain", **more)
    cluster.pod(claim)
    if kind == "two pods":
        cluster.pod(claim)
    cluster.settle()
    if running:
        cluster.expand(claim, 10**12)
        assert cluster.run_until(lambda: "ExpansionPending" in health(machine, claim), seconds=60)
    pod = replace_pod(cluster, claim)
    cluster.expand(claim, 10**12)
    run_all(cluster)
    machine.restart()
    assert "had no room" in health(machine, claim)["ExpansionPending"]
    # kubelet does not ask again and again.
    asked = expansions(cluster)
    cluster.run_until(lambda: False, seconds=3600)
    assert expansions(cluster) == asked
    assert pod.is_running
    cluster.expand(claim, 48 * MIB)
    for _ in range(2):
        replace_pod(cluster, claim)
        run_all(cluster)
    cluster.settle()
    assert claim.capacity_bytes == 48 * MIB
    # The next scan, in the background, finds the request withdrawn.
    assert cluster.run_until(lambda: not health(machine, claim), seconds=600)
    assert {one.code for one in take_out_deferred(cluster)} == {"FAILED_PRECONDITION"}
    end(cluster, machine)


def test_a_file_system_that_cannot_grow_has_its_pod_run(
    cluster: Cluster, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    claim = cluster.claim("plain")
    cluster.start(claim)
    with monkeypatch.context() as refusing:
        refusing.setattr(machine.host.kernel, "grow_ext4", refuse)
        cluster.expand(claim, 48 * MIB)
        for _ in range(2):
            replace_pod(cluster, claim)
            run_all(cluster)
        assert claim.capacity_bytes == 32 * MIB
        assert "file system" in health(machine, claim)["ExpansionPending"]
    replace_pod(cluster, claim)
    cluster.settle()
    assert claim.capacity_bytes == 48 * MIB
    assert all("No space left on device" in one.message for one in take_out_deferred(cluster))
    end(cluster, machine)


def test_a_raw_volume_is_read_by_one_pod_while_another_writes(
    cluster: Cluster, machine: Machine
) -> None:
    claim = cluster.claim("plain", capability=RAW)
    cluster.start(claim)
    cluster.start(claim, read_only=True)
    cluster.pods[0].is_deleted = True
    cluster.settle()
    end(cluster, machine)


@pytest.mark.variation
def test_an_inline_volume_that_cannot_be_published_leaves_nothing(
    cluster: Cluster, machine: Machine
) -> None:
    machine.host.intercept = lambda words: Result(1, "", "no") if words[0] == "mkfs.ext4" else None
    kubelet = machine.node.kubelet
    attributes = {"carver/class": "plain", "size": "32MiB"}
    answer = kubelet.publish_inline("csi-0123", "pod-1", attributes)
    # kubelet unpublishes nothing that it takes for not done.
    assert answer.reaction is Reaction.FORGETS
    assert machine.left() == []
