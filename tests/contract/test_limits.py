"""Limits of I/O: kept as tags, set for the pods' cgroup while a volume is in use, never without."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import chosen
import configured
import expect
import in_background
import pytest
import serving
from csi_client import Client
from fakes.cgroups import FakeCgroups
from real.any import AnyHost, logical, lvm2_commands, names

from agent.csi.client import block, mounted, of_snapshot
from agent.daemon.server import Service
from agent.settings.settings import Config
from agent.volumes import backing
from mount import mount_errors
from mount.cgroups import ROOT, UNLIMITED, IoMax
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 64 * MIB
KINDS = ("mounted", "raw", "encrypted", "thin")
KEY = {"passphrase": "correct horse battery staple"}
GIVEN = {
    "carver/readIOPS": "200",
    "carver/writeIOPS": "100",
    "carver/readBandwidth": "20MiB/s",
    "carver/writeBandwidth": "10MiB",
}
LIMITED = IoMax(read_bytes=20 * MIB, write_bytes=10 * MIB, reads=200, writes=100)
pytestmark = pytest.mark.settings(
    classes=(replace(configured.PLAIN, name="linear"), configured.THIN)
)


def limits(host: AnyHost, service: Service, volume: csi.Volume) -> IoMax:
    """What the kernel allows the pods on the device that they use."""
    device = service.context.activator.device(backing.of_id(volume.volume_id))
    assert device is not None
    return host.cgroups.limits().get(device.number, UNLIMITED)


def take_away(host: AnyHost) -> None:
    """What systemd does when it reloads."""
    if isinstance(host.cgroups, FakeCgroups):
        host.cgroups.reset()
    else:
        (ROOT / "cgroup.subtree_control").write_text("-io")


@dataclass
class Pod:
    """A volume as a pod has it."""

    client: Client
    host: AnyHost
    volume: csi.Volume
    capability: csi.VolumeCapability
    secrets: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.volume.volume_id

    @property
    def target(self) -> Path:
        return self.host.directory / "target"

    def begin(self) -> None:
        staging = self.host.directory / "staging"
        staging.mkdir(exist_ok=True)
        self.client.stage(self.volume, staging, self.capability, self.secrets)
        self.client.publish(self.volume, staging, self.target, self.capability)

    def end(self) -> None:
        self.client.unpublish(self.id, self.target)
        self.client.unstage(self.id, self.host.directory / "staging")


def pod_of(
    client: Client, host: AnyHost, kind: str = "mounted", mutable: Mapping[str, str] = GIVEN
) -> Pod:
    """A new volume of a kind."""
    capability = block() if kind == "raw" else mounted("ext4")
    is_encrypted = kind == "encrypted"
    parameters = {"encryption": "luks2"} if is_encrypted else {}
    if kind == "thin":
        parameters["class"] = "thin"
    volume = client.create("pvc-1", SIZE, capability, parameters=parameters, mutable=mutable)
    return Pod(client, host, volume, capability, KEY if is_encrypted else {})


@pytest.mark.parametrize("kind", chosen.kinds(KINDS, usual=["encrypted", "raw"]))
def test_limits_hold_from_the_first_pod_to_the_last(
    kind: str, client: Client, host: AnyHost, service: Service
) -> None:
    pod = pod_of(client, host, kind)
    assert not host.cgroups.limits()
    for _ in range(2):
        pod.begin()
        assert limits(host, service, pod.volume) == LIMITED
    assert len(host.cgroups.limits()) == 1
    pod.end()
    assert not host.cgroups.limits()
    assert not service.context.limiter.limited
    client.delete(pod.id)


def test_limits_hold_as_long_as_a_volume_is_in_use_anywhere(
    client: Client, host: AnyHost, service: Service
) -> None:
    pod = pod_of(client, host)
    pod.begin()
    # Not in kubelet's order.
    client.unstage(pod.id, host.directory / "staging")
    assert limits(host, service, pod.volume) == LIMITED
    pod.end()
    assert not host.cgroups.limits()


@pytest.mark.variation
def test_a_raw_volume_that_is_published_nowhere_is_not_limited(
    client: Client, host: AnyHost
) -> None:
    pod = pod_of(client, host, "raw")
    pod.begin()
    client.unpublish(pod.id, pod.target)
    assert not host.cgroups.limits()
    client.publish(pod.volume, host.directory / "staging", pod.target, pod.capability)
    assert list(host.cgroups.limits().values()) == [LIMITED]
    pod.end()


@pytest.mark.parametrize("kind", chosen.kinds(KINDS, usual=["mounted", "raw"]))
def test_limits_change_while_a_pod_has_the_volume(
    kind: str, client: Client, host: AnyHost, service: Service, group: str
) -> None:
    pod = pod_of(client, host, kind, {})
    pod.begin()
    for mutable, wanted in [
        ({"writeIOPS": "50"}, IoMax(writes=50)),
        ({"carver/writeIOPS": "60", "readBandwidth": "1MiB"}, IoMax(read_bytes=MIB, writes=60)),
        ({"readBandwidth": "0"}, IoMax(writes=60)),
        ({"writeIOPSPerGiB": "400", "readAhead": "8KiB"}, IoMax(writes=25)),
        ({"writeIOPS": "0", "writeIOPSPerGiB": "0"}, UNLIMITED),
    ]:
        for _ in range(2):
            client.modify(pod.id, mutable)
            assert limits(host, service, pod.volume) == wanted
    found = logical(host, group, "vol-pvc-1").own_tags
    assert not {"writeIOPS", "readBandwidth", "writeIOPSPerGiB"} & found.keys()
    pod.end()


@pytest.mark.variation
def test_one_command_changes_limits_and_none_repeats_them(
    client: Client, host: AnyHost, group: str
) -> None:
    pod = pod_of(client, host)
    client.modify(pod.id, GIVEN)
    host.commands = []
    client.modify(pod.id, {"readIOPS": "300", "writeIOPS": "0"})
    assert lvm2_commands(host) == ["lvchange"]
    found = logical(host, group, "vol-pvc-1").own_tags
    assert (found["readIOPS"], found.get("writeIOPS")) == ("300", None)


@pytest.mark.variation
@pytest.mark.parametrize("kind", ["mounted", "encrypted"])
def test_limits_for_each_gib_grow_with_the_volume(
    kind: str, client: Client, host: AnyHost, service: Service
) -> None:
    pod = pod_of(client, host, kind, {"readIOPSPerGiB": "1600", "writeIOPSPerGiB": "20"})
    pod.begin()
    size = pod.volume.capacity_bytes
    assert limits(host, service, pod.volume) == IoMax(reads=1600 * size >> 30, writes=10)
    client.expand(pod.id, 2 * SIZE)
    client.node_expand(pod.id, pod.target, 2 * SIZE, secrets=pod.secrets)
    assert limits(host, service, pod.volume).reads == 1600 * 2 * SIZE >> 30
    pod.end()


@pytest.mark.variation
def test_a_volume_has_its_storage_classs_limits_but_for_what_another_class_says(
    client: Client, host: AnyHost, group: str
) -> None:
    parameters = {"readIOPS": "100", "carver/writeIOPS": "100"}
    for _ in range(2):
        client.create("pvc-1", SIZE, block(), parameters=parameters, mutable={"readIOPS": "50"})
    found = logical(host, group, "vol-pvc-1").tuning
    assert (found.read_iops, found.write_iops) == (50, 100)


@pytest.mark.variation
def test_a_repeated_creation_with_other_limits_changes_them_in_use(
    client: Client, host: AnyHost, service: Service
) -> None:
    pod = pod_of(client, host)
    pod.begin()
    client.create("pvc-1", SIZE, pod.capability, mutable={"writeIOPS": "60"})
    assert limits(host, service, pod.volume) == replace(LIMITED, writes=60)
    pod.end()


def test_an_inline_volume_is_limited_as_long_as_its_pod_lives(
    client: Client, host: AnyHost, service: Service
) -> None:
    target = host.directory / "inline"
    attributes = {"carver/size": "64MiB", "carver/writeBandwidth": "1MiB"}
    for _ in range(2):
        client.publish_inline("csi-17", target, attributes)
        assert list(host.cgroups.limits().values()) == [IoMax(write_bytes=MIB)]
    client.unpublish("csi-17", target)
    assert not host.cgroups.limits()


def test_limits_are_set_again_after_a_start_and_those_that_no_tag_says_are_removed(
    client: Client, host: AnyHost, service: Service, config: Config
) -> None:
    pod = pod_of(client, host)
    pod.begin()
    device = service.context.activator.device(backing.of_id(pod.id))
    assert device is not None
    # Killed between the tag and the limit; and between the removal of the tag and that of it.
    host.cgroups.limit(device.number, UNLIMITED)
    after = Service(config, serving.machine(host), host.lvm)
    in_background.resume(after)
    assert limits(host, service, pod.volume) == LIMITED
    client.modify(pod.id, dict.fromkeys(GIVEN, "0"))
    host.cgroups.limit(device.number, LIMITED)
    in_background.resume(Service(config, serving.machine(host), host.lvm))
    assert limits(host, service, pod.volume) == UNLIMITED
    pod.end()


def test_limits_that_others_take_away_are_set_again(
    client: Client, host: AnyHost, service: Service
) -> None:
    pod = pod_of(client, host)
    pod.begin()
    take_away(host)
    assert not host.cgroups.limits()
    service.context.limiter.check()
    assert limits(host, service, pod.volume) == LIMITED
    pod.end()


def test_what_an_operator_deactivates_is_limited_no_more(
    client: Client, host: AnyHost, service: Service, group: str
) -> None:
    pod = pod_of(client, host, "raw")
    pod.begin()
    host.deactivate(group, "vol-pvc-1")
    assert not host.cgroups.limits()
    service.context.limiter.check()
    assert not service.context.limiter.limited


@pytest.mark.parametrize("kind", chosen.kinds(["mounted", "thin"], usual=["mounted"]))
def test_a_snapshot_does_not_wait_for_a_limit(
    kind: str, client: Client, host: AnyHost, service: Service
) -> None:
    pod = pod_of(client, host, kind)
    pod.begin()
    seen: list[IoMax] = []

    def look(words: Sequence[str]) -> None:
        if "lvcreate" in words:
            seen.append(limits(host, service, pod.volume))

    host.intercept = look
    snapshot = client.snapshot("snap-1", pod.id)
    assert seen == [UNLIMITED]
    assert limits(host, service, pod.volume) == LIMITED
    # What is made of it has limits of its own.
    client.create("pvc-2", SIZE, source=of_snapshot(snapshot.snapshot_id))
    group = service.configuration.now.groups[0]
    assert not logical(host, group, "vol-pvc-2").tuning.is_limited
    pod.end()


def test_where_io_cannot_be_limited_no_volume_is_made_so_and_one_that_is_there_is_used(
    client: Client, host: AnyHost, service: Service, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    pod = pod_of(client, host)

    def refuse() -> Path:
        raise mount_errors.NoCgroup("this kernel has none")

    monkeypatch.setattr(host.cgroups, "prepare", refuse)
    with expect.code("FAILED_PRECONDITION", "this kernel has none", "cgroup v2", "pods_cgroup"):
        client.create("pvc-2", SIZE, mutable=GIVEN)
    with expect.code("FAILED_PRECONDITION", "cannot limit I/O"):
        client.modify(pod.id, {"readIOPS": "900"})
    assert names(host, group) == {"vol-pvc-1"}
    assert logical(host, group, "vol-pvc-1").tuning.read_iops == 200
    pod.begin()
    monkeypatch.undo()
    # As soon as it can be.
    service.context.limiter.check()
    assert limits(host, service, pod.volume) == LIMITED
    pod.end()


@pytest.mark.parametrize(
    ("mutable", "words"),
    [
        ({"readIOPS": "9"}, "0 for no limit, or 10 to 4294967295 a second"),
        ({"writeIOPS": "many"}, "whole number"),
        ({"readBandwidth": "1KiB"}, "0 for no limit, or 65536"),
        ({"writeBandwidth": "10Mbit/s"}, "a size is a number of bytes"),
        ({"readIOPSPerGiB": "-3"}, "whole number"),
        ({"readIops": "10"}, "readIOPS"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
@pytest.mark.variation
def test_a_limit_that_none_can_have_is_refused_and_nothing_is_made(
    mutable: Mapping[str, str], words: str, client: Client, host: AnyHost, group: str
) -> None:
    key = next(iter(mutable))
    with expect.code("INVALID_ARGUMENT", "mutable_parameters", key, words):
        client.create("pvc-1", SIZE, mutable=mutable)
    with expect.code("INVALID_ARGUMENT", "parameters", key, words):
        client.create("pvc-1", SIZE, parameters=mutable)
    assert not names(host, group)


@pytest.mark.variation
@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_volume_is_without_limits_until_the_last_of_several_calls_needs_it_no_more(
    client: Client, host: AnyHost, service: Service, ends_first: int
) -> None:
    pod = pod_of(client, host)
    pod.begin()
    limiter, own = service.context.limiter, (ExitStack(), ExitStack())
    for one in own:
        one.enter_context(limiter.lift(backing.of_id(pod.id)))
    own[ends_first].close()
    assert limits(host, service, pod.volume) == UNLIMITED
    # Nor does a change of the limits, or a look at them, end it.
    client.modify(pod.id, {**GIVEN, "carver/readIOPS": "300"})
    limiter.check()
    assert limits(host, service, pod.volume) == UNLIMITED
    own[1 - ends_first].close()
    assert limits(host, service, pod.volume) == replace(LIMITED, reads=300)
    pod.end()
