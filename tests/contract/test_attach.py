"""ControllerPublishVolume and ControllerUnpublishVolume where `attach` is set."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import expect
import grpc
import pytest
from csi_client import Client
from real.any import AnyHost, lvm2_commands
from serving import served

from agent.core import errors, tag
from agent.csi.client import Mode, block, mounted
from agent.daemon.server import Service
from agent.groups import volume_group
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes.records import Attachment
from lvm import report, volumes
from mount import table
from mount.command import Result
from mount.mount_errors import CommandTimedOut
from proto import csi_pb2 as csi

MIB = 1 << 20
RPC = csi.ControllerServiceCapability.RPC
OFFERED = {
    RPC.PUBLISH_UNPUBLISH_VOLUME,
    RPC.PUBLISH_READONLY,
    RPC.LIST_VOLUMES_PUBLISHED_NODES,
}
WRITER = Attachment("mount", "SINGLE_NODE_WRITER", read_only=False, node_id="here")
pytestmark = [
    # Carver's record decides here; lvm2 is asked for nothing that other tests do not ask it for.
    pytest.mark.variation,
    pytest.mark.settings(attach=True),
]


def tags_of(host: AnyHost, group: str, name: str = "vol-pvc-1") -> dict[str, str]:
    return dict(report.read(host.lvm).group(group).volume(name).own_tags)


def capabilities(client: Client) -> set[int]:
    request = csi.ControllerGetCapabilitiesRequest()
    answer = client.controller.ControllerGetCapabilities(request)
    return {one.rpc.type for one in answer.capabilities}


def test_a_volume_is_attached_again_and_detached_again(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    assert capabilities(client) >= OFFERED
    for _ in range(2):
        assert client.attach(volume.volume_id) == {}
        assert tags_of(host, group)[tag.ATTACHED] == str(WRITER)
    for _ in range(2):
        client.detach(volume.volume_id)
        assert tag.ATTACHED not in tags_of(host, group)
    client.delete(volume.volume_id)
    client.detach(volume.volume_id)


def changes(host: AnyHost) -> list[str]:
    """The commands since the last look that were no report: one may be read in the background."""
    found = [one for one in lvm2_commands(host) if one != "fullreport"]
    host.commands.clear()
    return found


def test_an_attachment_costs_one_command_and_none_where_it_is_so_already(
    client: Client, volume: csi.Volume, host: AnyHost
) -> None:
    changes(host)
    client.attach(volume.volume_id)
    assert changes(host) == ["lvchange"]
    client.attach(volume.volume_id)
    client.detach(volume.volume_id, "another")
    assert changes(host) == []
    client.detach(volume.volume_id)
    assert changes(host) == ["lvchange"]
    client.detach(volume.volume_id)
    assert changes(host) == []


def test_lists_name_the_node_of_an_attached_volume(client: Client, volume: csi.Volume) -> None:
    other = client.create("pvc-2", 16 * MIB)
    client.attach(volume.volume_id)
    found = {
        entry.volume.volume_id: (entry.HasField("status"), list(entry.status.published_node_ids))
        for entry in client.controller.ListVolumes(csi.ListVolumesRequest()).entries
    }
    assert found == {volume.volume_id: (True, ["here"]), other.volume_id: (True, [])}
    assert client.attached_to(volume.volume_id) == ["here"]
    assert client.attached_to(other.volume_id) == []


def test_another_process_knows_what_is_attached(
    client: Client, volume: csi.Volume, host: AnyHost, config: Config, tmp_path: Path
) -> None:
    client.attach(volume.volume_id, read_only=True)
    again = replace(config, endpoint=tmp_path / "again.sock")
    with served(host, again) as (_, caller):
        assert caller.attached_to(volume.volume_id) == ["here"]
        with expect.code("ALREADY_EXISTS", "ro:here", "rw:here"):
            caller.attach(volume.volume_id)
        assert caller.attach(volume.volume_id, read_only=True) == {"carver/readOnly": "true"}


SINGLE, SHARED = (
    mounted(mode=mode) for mode in (Mode.SINGLE_NODE_SINGLE_WRITER, Mode.SINGLE_NODE_MULTI_WRITER)
)


@pytest.mark.variation
@pytest.mark.parametrize(
    ("capability", "read_only"),
    [(SHARED, False), (block(Mode.SINGLE_NODE_SINGLE_WRITER), False), (SINGLE, True)],
    ids=["for several writers", "as a raw device", "for reading"],
)
def test_a_volume_of_one_writer_is_attached_in_one_way(
    client: Client, volume: csi.Volume, capability: csi.VolumeCapability, read_only: bool
) -> None:
    client.attach(volume.volume_id, capability=SINGLE)
    with expect.code("ALREADY_EXISTS", "SINGLE_NODE_SINGLE_WRITER", "detach it first"):
        client.attach(volume.volume_id, capability=capability, read_only=read_only)
    client.attach(volume.volume_id, capability=SINGLE)
    client.detach(volume.volume_id)
    client.attach(volume.volume_id, capability=capability, read_only=read_only)


@pytest.mark.variation
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda one: one.ClearField("volume_id"), "INVALID_ARGUMENT", ["volume_id"]),
        (lambda one: one.ClearField("node_id"), "INVALID_ARGUMENT", ["node_id"]),
        (lambda one: one.ClearField("volume_capability"), "INVALID_ARGUMENT", ["capability"]),
        (
            lambda one: one.volume_context.update({"carver/mountOptions": "loop"}),
            "INVALID_ARGUMENT",
            ["mountOptions"],
        ),
        (
            lambda one: one.volume_capability.CopyFrom(mounted(mode=Mode.MULTI_NODE_MULTI_WRITER)),
            "INVALID_ARGUMENT",
            ["MULTI_NODE_MULTI_WRITER"],
        ),
        (
            lambda one: setattr(one, "volume_id", one.volume_id + "x"),
            "NOT_FOUND",
            ["no volume"],
        ),
        (lambda one: setattr(one, "volume_id", "made up"), "NOT_FOUND", ["no volume"]),
        (
            lambda one: setattr(one, "volume_id", "other@00000000/vol-x"),
            "FAILED_PRECONDITION",
            ["not on this node"],
        ),
        (lambda one: setattr(one, "node_id", "there"), "NOT_FOUND", ["'there'", "'here'"]),
    ],
    ids=[
        *("no volume id", "no node id", "no capability", "a bad context", "a mode of many nodes"),
        *("a volume that is gone", "no id of ours", "a group that is not here", "another node"),
    ],
)
def test_what_cannot_be_attached_is_refused_and_nothing_changes(
    client: Client,
    volume: csi.Volume,
    host: AnyHost,
    group: str,
    change: Callable[[csi.ControllerPublishVolumeRequest], None],
    code: str,
    words: list[str],
) -> None:
    before = tags_of(host, group)
    request = csi.ControllerPublishVolumeRequest(
        volume_id=volume.volume_id, node_id="here", volume_capability=mounted()
    )
    change(request)
    with expect.code(code, *words):
        client.controller.ControllerPublishVolume(request)
    assert tags_of(host, group) == before


def test_a_volume_is_not_attached_as_what_it_can_never_be(client: Client) -> None:
    raw = client.create("raw", 16 * MIB, block())
    with expect.code("INVALID_ARGUMENT", "volume_capability", "raw block"):
        client.attach(raw.volume_id)
    client.attach(raw.volume_id, capability=block())


def test_a_formatted_volume_is_not_attached_as_another_file_system(
    client: Client, staged: csi.Volume
) -> None:
    with expect.code("INVALID_ARGUMENT", "formatted with ext4"):
        client.attach(staged.volume_id, capability=mounted("xfs"))
    client.attach(staged.volume_id, capability=mounted("ext4"))


@pytest.mark.variation
@pytest.mark.parametrize("identity", ["made up", "other@00000000/vol-x", "gone", "moved"])
def test_what_is_not_here_is_not_attached_here(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, identity: str
) -> None:
    if identity == "moved":
        volumes.mark(
            host.lvm,
            group,
            "vol-pvc-1",
            old_tags={tag.STATE: tag.READY},
            new_tags={tag.STATE: tag.MOVED},
        )
        identity = volume.volume_id
    client.detach(volume.volume_id + "-gone" if identity == "gone" else identity)
    client.detach(volume.volume_id, "")


def test_a_volume_with_damaged_tags_is_detached(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    client.attach(volume.volume_id, capability=SINGLE)
    words = ("--addtag", "carver.state=wiping", "--addtag", f"carver.attached={WRITER}")
    host.lvm("lvchange", *words, "--", f"{group}/vol-pvc-1")
    for _ in range(2):
        client.detach(volume.volume_id)
    host.lvm("lvchange", "--deltag", "carver.state=wiping", "--", f"{group}/vol-pvc-1")
    # No record is left of how it was attached, though there were two.
    client.attach(volume.volume_id, capability=SHARED)


def test_a_volume_of_a_refused_group_is_detached(
    client: Client, host: AnyHost, config: Config, tmp_path: Path
) -> None:
    name = f"attach-{tmp_path.name[-8:]}".replace("_", "-")
    other = replace(
        config,
        endpoint=tmp_path / "again.sock",
        classes=(DeviceClass("other", name, default=True),),
    )
    with host.own_group(name, [host.new_device(33 * MIB)]), served(host, other) as (_, caller):
        volume = caller.create("pvc-1", 16 * MIB)
        caller.attach(volume.volume_id)
        host.deactivate(name, "vol-pvc-1")
        host.lvm("vgexport", "--", name)
        for _ in range(2):
            caller.detach(volume.volume_id)
        with expect.code("FAILED_PRECONDITION", "exported"):
            caller.attach(volume.volume_id)
        host.lvm("vgimport", "--", name)


def test_a_call_without_a_node_detaches_from_every_node(client: Client, volume: csi.Volume) -> None:
    client.attach(volume.volume_id)
    client.detach(volume.volume_id, "another")
    assert client.attached_to(volume.volume_id) == ["here"]
    client.detach(volume.volume_id, "")
    assert client.attached_to(volume.volume_id) == []


def test_an_attachment_stays_behind_where_the_disks_moved_to_another_node(
    client: Client, volume: csi.Volume, host: AnyHost, config: Config, tmp_path: Path
) -> None:
    client.attach(volume.volume_id, capability=SINGLE)
    moved = replace(config, endpoint=tmp_path / "again.sock", node_id="there")
    with served(host, moved) as (_, caller):
        assert caller.attached_to(volume.volume_id) == []
        caller.attach(volume.volume_id, "there", SHARED)
        assert caller.attached_to(volume.volume_id) == ["there"]


@pytest.mark.parametrize("kind", ["mounted", "raw"])
def test_a_volume_that_is_attached_for_reading_is_not_written_to(
    client: Client, host: AnyHost, staging: Path, target: Path, kind: str
) -> None:
    """What a PersistentVolume with `csi.readOnly: true` asks for; kubelet passes the context on."""
    capability = block() if kind == "raw" else mounted("ext4")
    volume = client.create("pvc-1", 64 * MIB, capability)
    context = client.attach(volume.volume_id, capability=capability, read_only=True)
    stage = csi.NodeStageVolumeRequest(
        volume_id=volume.volume_id,
        staging_target_path=str(staging),
        volume_capability=capability,
        volume_context=volume.volume_context,
        publish_context=context,
    )
    publish = csi.NodePublishVolumeRequest(
        volume_id=volume.volume_id,
        staging_target_path=str(staging),
        target_path=str(target),
        volume_capability=capability,
        volume_context=volume.volume_context,
        publish_context=context,
    )
    for _ in range(2):
        client.node.NodeStageVolume(stage)
        client.node.NodePublishVolume(publish)
    now = table.read(host.kernel)
    assert now.at(str(target))[0].read_only
    if kind == "mounted":
        assert now.at(str(staging))[0].read_only
    # kubelet asks for growth without the context, and a reader is no error.
    client.expand(volume.volume_id, 80 * MIB)
    client.node.NodeExpandVolume(
        csi.NodeExpandVolumeRequest(
            volume_id=volume.volume_id,
            volume_path=str(target),
            capacity_range=csi.CapacityRange(required_bytes=80 * MIB),
            volume_capability=capability,
        )
    )
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.detach(volume.volume_id)


@pytest.mark.variation
@pytest.mark.parametrize("method", ["NodeStageVolume", "NodePublishVolume"])
def test_a_publish_context_that_says_neither_is_refused(
    client: Client, volume: csi.Volume, staging: Path, target: Path, method: str
) -> None:
    request = getattr(csi, f"{method}Request")(
        volume_id=volume.volume_id,
        staging_target_path=str(staging),
        volume_capability=mounted(),
        publish_context={"carver/readOnly": "perhaps"},
    )
    if method == "NodePublishVolume":
        request.target_path = str(target)
    with expect.code("INVALID_ARGUMENT", "publish_context[carver/readOnly]", "'perhaps'"):
        getattr(client.node, method)(request)


def test_a_node_has_no_more_volumes_attached_than_it_may(host: AnyHost, config: Config) -> None:
    config = replace(config, max_volumes_per_node=2)
    with served(host, config) as (_, client):
        ids = [client.create(f"pvc-{number}", 16 * MIB).volume_id for number in range(4)]

        def attach(volume_id: str) -> str:
            try:
                client.attach(volume_id)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        with ThreadPoolExecutor(4) as pool:
            found = sorted(pool.map(attach, ids))
        assert found == ["OK", "OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
        attached = [one for one in ids if client.attached_to(one)]
        assert len(attached) == 2
        # Those that are attached stay so, and each that is detached makes room for one.
        assert [attach(one) for one in attached] == ["OK", "OK"]
        client.detach(attached[0])
        rest = [one for one in ids if one not in attached]
        assert [attach(one) for one in rest] == ["OK", "RESOURCE_EXHAUSTED"]


def test_a_group_that_is_slow_to_say_what_was_detached_fails_no_pod(
    host: AnyHost, config: Config, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After RESOURCE_EXHAUSTED kubelet fails the pod, which is not tried again."""
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)
    other = host.new_group(60)
    classes = (DeviceClass("a", group, default=True), DeviceClass("b", other))
    config = replace(config, max_volumes_per_node=1, classes=classes)
    with served(host, config) as (service, client):
        first = client.create("pvc-1", 16 * MIB, parameters={"class": "b"}).volume_id
        second = client.create("pvc-2", 16 * MIB).volume_id
        client.attach(first)
        with expect.code("RESOURCE_EXHAUSTED", "has 1 volume attached"):
            client.attach(second)
        slow = service.volume_groups.of(other)
        assert slow is not None
        with monkeypatch.context() as hanging:

            def hang() -> None:
                raise errors.GroupSilent(other, ("/dev/sdz",))

            hanging.setattr(slow, "refresh_later", lambda: None)
            client.detach(first)
            hanging.setattr(slow, "_report", hang)
            with expect.code("UNAVAILABLE", other):
                client.attach(second)
        assert client.attached_to(first) == []
        client.attach(second)


@pytest.mark.parametrize("wrong", ["half", "a:b:c:here", "mount:X:rw:"])
def test_a_record_that_is_none_counts_for_nothing_and_is_replaced(
    client: Client, volume: csi.Volume, host: AnyHost, group: str, wrong: str
) -> None:
    volumes.mark(host.lvm, group, "vol-pvc-1", old_tags={}, new_tags={tag.ATTACHED: wrong})
    assert client.attached_to(volume.volume_id) == []
    client.attach(volume.volume_id)
    assert tags_of(host, group)[tag.ATTACHED] == str(WRITER)


def test_a_volume_is_attached_and_detached_where_lvm2_refuses_every_tag(
    client: Client, volume: csi.Volume, host: AnyHost, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the group's metadata are full: pods must start and end all the same."""
    client.attach(volume.volume_id)
    host.intercept = lambda words: Result(5, "", "  no") if "lvchange" in words else None
    client.detach(volume.volume_id)
    host.intercept = lambda words: None
    assert client.attached_to(volume.volume_id) == ["here"]
    client.detach(volume.volume_id)
    host.intercept = lambda words: Result(5, "", "  no") if "lvchange" in words else None
    for _ in range(2):
        assert client.attach(volume.volume_id) == {}
    host.intercept = lambda words: None
    assert client.attached_to(volume.volume_id) == []
    assert caplog.text.count("its tag `attached` is not changed") == 3


def test_an_attachment_of_unknown_outcome_is_asked_for_again(
    client: Client, volume: csi.Volume, host: AnyHost
) -> None:
    def silent(words: Sequence[str]) -> Result | None:
        if "lvchange" in words:
            raise CommandTimedOut(tuple(words), 1.0)
        return None

    host.intercept = silent
    with expect.code("DEADLINE_EXCEEDED"):
        client.attach(volume.volume_id)
    host.intercept = lambda words: None
    client.attach(volume.volume_id)
    assert client.attached_to(volume.volume_id) == ["here"]


def test_a_copy_is_not_attached(client: Client, volume: csi.Volume) -> None:
    client.attach(volume.volume_id)
    source = csi.VolumeContentSource(
        volume=csi.VolumeContentSource.VolumeSource(volume_id=volume.volume_id)
    )
    copy = client.create("pvc-2", 64 * MIB, mounted("ext4"), source=source)
    assert client.attached_to(copy.volume_id) == []


def test_without_the_setting_nothing_is_offered(
    host: AnyHost, config: Config, service: Service, tmp_path: Path
) -> None:
    other = replace(config, attach=False, endpoint=tmp_path / "other.sock")
    with served(host, other) as (_, client):
        assert not capabilities(client) & OFFERED
        volume = client.create("pvc-1", 16 * MIB)
        for call in (client.attach, client.detach):
            with expect.code("UNIMPLEMENTED", "`attach`"):
                call(volume.volume_id)
        for entry in client.controller.ListVolumes(csi.ListVolumesRequest()).entries:
            assert not entry.HasField("status")


def test_a_volume_whose_tags_were_damaged_is_detached_from_what_it_is_recorded_at(
    client: Client, volume: csi.Volume, host: AnyHost, group: str
) -> None:
    client.attach(volume.volume_id)
    host.lvm("lvchange", "--addtag", "carver.state=wiping", "--", f"{group}/vol-pvc-1")
    client.detach(volume.volume_id)
