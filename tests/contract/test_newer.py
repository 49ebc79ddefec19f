"""What a newer version left, after a way back: used as far as it is known, else left alone."""

from collections.abc import Callable, Iterator

import configured
import expect
import in_background
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, names

from agent.csi.client import block, of_snapshot
from agent.daemon.server import Service
from agent.settings.settings import Config
from lvm import report
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

MIB = 1 << 20
NEEDED = "carver.needs=moonlight"
SENTENCE = "newer version of Carver made it, with moonlight"
pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.settings(classes=(configured.PLAIN, configured.THIN)),
]


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    """A raw one."""
    return client.create("pvc-1", 8 * MIB, block())


@pytest.fixture
def snapshot(client: Client, volume: csi.Volume) -> csi.Snapshot:
    return client.snapshot("before", volume.volume_id)


def tag(host: AnyHost, group: str, name: str, *words: str) -> None:
    host.lvm("lvchange", *words, "--", f"{group}/{name}")


def own_tags(host: AnyHost, group: str, name: str) -> dict[str, str]:
    return dict(report.read(host.lvm).group(group).volume(name).own_tags)


@pytest.fixture
def calls(
    client: Client, host: AnyHost, volume: csi.Volume, snapshot: csi.Snapshot
) -> list[Callable[[], object]]:
    """Each call about the volume, and about its snapshot."""
    one, of = volume.volume_id, of_snapshot(snapshot.snapshot_id)
    staging = host.directory / "staging"
    return [
        lambda: client.create("pvc-1", 8 * MIB, block()),
        lambda: client.stage(volume, staging, block()),
        lambda: client.expand(one, 16 * MIB),
        lambda: client.modify(one, {"readAhead": "1MiB"}),
        lambda: client.snapshot("after", one),
        lambda: client.create("copy", 8 * MIB, block(), source=of),
        lambda: client.delete_snapshot(snapshot.snapshot_id),
        lambda: client.delete(one),
    ]


def test_what_only_a_newer_version_knows_is_refused_and_left_alone(
    client: Client,
    host: AnyHost,
    group: str,
    volume: csi.Volume,
    calls: list[Callable[[], object]],
) -> None:
    for name in ("vol-pvc-1", "snap-before"):
        tag(host, group, name, "--addtag", NEEDED)
    before = names(host, group), own_tags(host, group, "vol-pvc-1")
    for call in calls:
        with expect.code("FAILED_PRECONDITION", SENTENCE):
            call()
    assert (names(host, group), own_tags(host, group, "vol-pvc-1")) == before
    assert [one.volume_id for one in client.volumes()] == [volume.volume_id]
    # The newer one again.
    for name in ("vol-pvc-1", "snap-before"):
        tag(host, group, name, "--deltag", NEEDED)
    client.stage(volume, host.directory / "staging", block())


def test_keys_without_which_nothing_is_harmed_are_passed_over_and_kept(
    client: Client, host: AnyHost, group: str, volume: csi.Volume
) -> None:
    tag(host, group, "vol-pvc-1", "--addtag", "carver.shimmer=blue")
    volume.volume_context["carver/shimmer"] = "blue"
    staging, target = host.directory / "staging", host.directory / "target"
    client.stage(volume, staging, block())
    client.publish(volume, staging, target, block())
    client.modify(volume.volume_id, {"readAhead": "1MiB"})
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.expand(volume.volume_id, 16 * MIB)
    assert own_tags(host, group, "vol-pvc-1")["shimmer"] == "blue"


def test_a_parameter_of_a_newer_version_is_refused(client: Client) -> None:
    with expect.code("INVALID_ARGUMENT", "carver/shimmer"):
        client.create("pvc-2", 8 * MIB, block(), parameters={"carver/shimmer": "blue"})


@pytest.fixture
def restart(config: Config, host: AnyHost, service: Service) -> Iterator[Callable[[], Service]]:
    """End the service, and return a new one that went on with what was left."""
    begun: list[Service] = []

    def again() -> Service:
        service.stop()
        begun.append(Service(config, serving.machine(host), host.lvm))
        begun[-1].eraser.grace_seconds = 600
        in_background.resume(begun[-1])
        return begun[-1]

    yield again
    for one in begun:
        one.stop()


def test_a_deleted_volume_that_only_a_newer_version_can_erase_is_not_erased(
    host: AnyHost, group: str, volume: csi.Volume, restart: Callable[[], Service]
) -> None:
    state = ("--deltag", "carver.state=ready", "--addtag", "carver.state=wiping")
    tag(host, group, "vol-pvc-1", *state, "--addtag", NEEDED)
    again = restart()
    in_background.ended(again.eraser.jobs)
    assert "vol-pvc-1" in names(host, group)
    assert again.eraser.jobs.counts()["failed"] == 0


def test_a_copy_that_only_a_newer_version_can_make_is_not_filled(
    client: Client,
    host: AnyHost,
    group: str,
    config: Config,
    snapshot: csi.Snapshot,
    restart: Callable[[], Service],
) -> None:
    client.create("copy", 8 * MIB, block(), source=of_snapshot(snapshot.snapshot_id))
    state = ("--deltag", "carver.state=ready", "--addtag", "carver.state=copying")
    tag(host, group, "vol-copy", *state, "--addtag", NEEDED)
    again = restart()
    assert not again.copier.jobs.unfinished()
    assert own_tags(host, group, "vol-copy")["state"] == "copying"
    # What it is copied from stays, too.
    again.start(config.endpoint)
    with (
        Client(config.endpoint) as caller,
        expect.code("FAILED_PRECONDITION", "copied from it"),
    ):
        caller.delete_snapshot(snapshot.snapshot_id)


def test_a_group_snapshot_of_a_newer_version_stops_no_start_and_stays(
    client: Client,
    host: AnyHost,
    group: str,
    config: Config,
    volume: csi.Volume,
    restart: Callable[[], Service],
) -> None:
    made = client.group_snapshot("both", [volume.volume_id])
    [name] = {one for one in names(host, group) if one.startswith("snap")}
    for words in (("--addtag", NEEDED), ("--deltag", "carver.committed=yes")):
        tag(host, group, name, *words)
    before = names(host, group)
    again = restart()
    assert again.unrecovered == {}
    again.start(config.endpoint)
    with Client(config.endpoint) as caller:
        caller.create("pvc-3", 8 * MIB, block())
        caller.delete("none")
        with expect.code("FAILED_PRECONDITION", SENTENCE):
            caller.delete_group_snapshot(made.group_snapshot_id, [made.snapshots[0].snapshot_id])
        with expect.code("FAILED_PRECONDITION", SENTENCE):
            caller.group_snapshot("both", [volume.volume_id])
    assert names(host, group) == before | {"vol-pvc-3"}


def test_an_adoption_by_a_newer_version_is_not_undone(
    client: Client, host: AnyHost, group: str
) -> None:
    words = ("--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y", "--type", "linear")
    host.lvm("lvcreate", *words, "--size", f"{64 * MIB}b", "--name", "raw", "--", group)
    asked = carver.AdoptVolumeRequest(group=group, logical_volume="raw", block=True)
    client.adopt(asked)
    tag(host, group, "vol-raw", "--addtag", NEEDED)
    before = own_tags(host, group, "vol-raw")
    for call in (client.undo_adopt, client.adopt):
        with expect.code("FAILED_PRECONDITION", SENTENCE):
            call(asked)
    assert own_tags(host, group, "vol-raw") == before


def test_a_pool_of_a_newer_version_gets_no_volume_and_loses_none(
    client: Client, host: AnyHost, group: str, service: Service
) -> None:
    thin = {"class": "thin"}
    one = client.create("one", 8 * MIB, block(), parameters=thin)
    tag(host, group, "pool-thin", "--addtag", NEEDED)
    with expect.code("RESOURCE_EXHAUSTED", "does not know"):
        client.create("two", 8 * MIB, block(), parameters=thin)
    with expect.code("FAILED_PRECONDITION", SENTENCE):
        client.delete(one.volume_id)
    assert [each.volume_id for each in client.volumes()] == [one.volume_id]
    # As an operator, or the newer version, would have it.
    tag(host, group, "vol-one", "--deltag", "carver.state=ready", "--addtag", "carver.state=wiping")
    assert service.eraser.jobs.start_due(group) == 0
    assert service.pool_remover.jobs.start_due(group) == 0
    assert {"vol-one", "pool-thin"} <= names(host, group)


def test_the_promise_of_a_pool_of_a_newer_version_is_kept(
    client: Client, host: AnyHost, group: str
) -> None:
    client.create("one", 400 * MIB, block(), parameters={"class": "thin"})
    room = client.capacity().available_capacity
    tag(host, group, "pool-thin", "--addtag", NEEDED)
    assert client.capacity().available_capacity == room


def test_what_lvm2_left_of_a_newer_version_s_is_not_repaired(
    client: Client, host: AnyHost, group: str
) -> None:
    thin = {"class": "thin"}
    for name, parameters in (("plain", {}), ("whole", thin), ("unmade", thin)):
        client.create(name, 8 * MIB, block(), parameters=parameters)
    host.unmake_thin(group, "pool-thin", "vol-unmade")
    for name in ("vol-plain", "vol-unmade"):
        tag(host, group, name, "--addtag", NEEDED)
    host.suspend(group, "vol-plain")
    client.create("other", 8 * MIB, block())
    assert host.is_suspended(group, "vol-plain")
    assert "vol-unmade" in names(host, group)


def test_a_start_leaves_what_a_newer_version_reserved(
    client: Client, host: AnyHost, group: str, restart: Callable[[], Service]
) -> None:
    client.create("one", 8 * MIB, block(), parameters={"class": "thin"})
    client.create("two", 8 * MIB, block())
    tag(host, group, "pool-thin", "--addtag", "carver.metadataSnapshot=reserved")
    tag(host, group, "pool-thin", "--addtag", NEEDED)
    words = ("--yes", "--wipesignatures", "y", "--zero", "y", "--activate", "y", "--type", "linear")
    tags = [
        word
        for one in ("carver.name=two", "carver.state=wiping", NEEDED)
        for word in ("--addtag", one)
    ]
    size = ("--size", f"{8 * MIB}b", "--name", "grow-vol-two")
    host.lvm("lvcreate", *words, *tags, *size, "--", group)
    before = own_tags(host, group, "pool-thin")
    in_background.ended(restart().eraser.jobs)
    assert own_tags(host, group, "pool-thin") == before
    assert "grow-vol-two" in names(host, group)
