"""Mutable parameters: given at creation, changed while a volume is in use, all of them or none."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import chosen
import configured
import expect
import grpc
import pytest
from real.any import AnyHost
from real.host import RealHost

from agent.csi.client import Client, block, of_snapshot, of_volume
from agent.settings.classes import DeviceClass
from lvm import report, volumes
from lvm.caches import Cache
from lvm.tuning import AUTO, PLAIN, Tuning
from proto import csi_pb2 as csi

KIB, MIB = 1 << 10, 1 << 20
SIZE = 24 * MIB
RAIDS = configured.RAIDS
# Classes of every kind.
KINDS = ("linear", "striped", "thin", "cache", "writecache", *RAIDS)
OF_RECOVERY = {"minimumRecoveryRate": "100KiB", "maximumRecoveryRate": "2MiB"}


@pytest.fixture
def group(host: AnyHost) -> str:
    """A disk more than the widest layout takes, and a fast one."""
    name = host.new_group(*[18] * (configured.MOST_DISKS + 1), 9)
    disks = report.read(host.lvm).group(name).disks
    host.lvm("pvchange", "--addtag", report.FAST, "--", disks[-1].name)
    return name


pytestmark = pytest.mark.settings(
    classes=(
        replace(configured.PLAIN, name="linear"),
        configured.STRIPED,
        configured.THIN,
        DeviceClass("cache", "data", cache=Cache()),
        DeviceClass("writecache", "data", cache=Cache("writecache", "writeback")),
        *(DeviceClass(name, "data", layout=shape) for name, shape in RAIDS.items()),
    )
)


def tuned(*said: Any) -> Tuning:
    """These settings, and no others."""
    return Tuning(*said).applied_to(PLAIN)


def tuning(host: AnyHost, group: str, name: str = "vol-pvc-1") -> Tuning:
    """What LVM has of a volume; what the kernel has is the same."""
    found = report.read(host.lvm).group(group).volume(name).tuning
    device = host.devices.find(group, name)
    if isinstance(host, RealHost) and device is not None and found.read_ahead_bytes != AUTO:
        number = ":".join(map(str, device.number))
        queue = Path(f"/sys/dev/block/{number}/queue/read_ahead_kb")
        assert int(queue.read_text()) * KIB == found.read_ahead_bytes
    return found


def create(
    client: Client, kind: str = "linear", mutable: Mapping[str, str] | None = None, **asked: Any
) -> csi.Volume:
    """Create `pvc-1`, a raw block volume of a class."""
    name = asked.pop("name", "pvc-1")
    return client.create(
        name, SIZE, block(), parameters={"class": kind}, mutable=mutable or {}, **asked
    )


def cost(host: AnyHost) -> list[str]:
    commands, host.commands = host.commands[:], []
    return [" ".join(words[:2]) for words in commands]


@pytest.mark.variation
@pytest.mark.parametrize("name", KINDS)
def test_read_ahead_is_set_at_creation_and_changed_while_mounted(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    staging = host.directory / "staging"
    volume = client.create(
        "pvc-1", SIZE, parameters={"class": name}, mutable={"carver/readAhead": "1MiB"}
    )
    assert tuning(host, group) == tuned(MIB)
    client.stage(volume, staging)
    (staging / "data").write_bytes(b"data" * KIB)

    for text, changed in {"256KiB": tuned(256 * KIB), "0": tuned(0, 0, 0)}.items():
        client.modify(volume.volume_id, {"readAhead": text})
        assert tuning(host, group) == changed
    client.modify(volume.volume_id, {"readAhead": "auto"})
    assert tuning(host, group) == PLAIN
    assert (staging / "data").read_bytes() == b"data" * KIB
    client.unstage(volume.volume_id, staging)
    client.delete(volume.volume_id)


@pytest.mark.parametrize("name", chosen.kinds(RAIDS, usual=["raid1"]))
@pytest.mark.long_on_lvm
def test_recovery_rates_of_a_raid_are_changed_and_removed(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    volume = create(client, name, OF_RECOVERY)
    assert tuning(host, group) == tuned(AUTO, 100, 2048)
    # Above what was the maximum before.
    higher = {"minimumRecoveryRate": "3MiB", "maximumRecoveryRate": "4MiB", "readAhead": "8KiB"}
    client.modify(volume.volume_id, higher)
    assert tuning(host, group) == tuned(8 * KIB, 3072, 4096)
    for key, maximum in (("minimumRecoveryRate", 4096), ("maximumRecoveryRate", 0)):
        client.modify(volume.volume_id, {key: "0"})
        assert tuning(host, group) == tuned(8 * KIB, 0, maximum)


@pytest.mark.variation
def test_parameters_take_no_command_at_creation_and_one_later(
    client: Client, host: AnyHost, group: str
) -> None:
    mutable = {"readAhead": "1MiB", **OF_RECOVERY}
    host.commands = []
    volume = create(client, "raid1", mutable)
    assert cost(host) == ["lvm fullreport", "lvm lvcreate"]
    client.modify(volume.volume_id, mutable)
    # What CreateVolume did is read once; then nothing was written.
    assert cost(host) == ["lvm fullreport"]
    for _ in range(2):
        client.modify(volume.volume_id, {**mutable, "readAhead": "2MiB"})
    assert cost(host) == ["lvm lvchange", "lvm fullreport"]
    rates = {"minimumRecoveryRate": "0", "maximumRecoveryRate": "8MiB"}
    client.modify(volume.volume_id, {"readAhead": "0", **rates})
    assert cost(host) == ["lvm lvchange"]
    assert tuning(host, group) == tuned(0, 0, 8192)


@pytest.mark.variation
def test_a_minimum_alone_takes_one_more_command_at_creation(
    client: Client, host: AnyHost, group: str
) -> None:
    mutable = {"minimumRecoveryRate": "1MiB"}
    host.commands = []
    made = create(client, "raid1", mutable)
    assert cost(host) == ["lvm fullreport", "lvm lvcreate", "lvm lvchange"]
    assert create(client, "raid1", mutable) == made
    assert cost(host) == ["lvm fullreport"]
    assert tuning(host, group) == tuned(AUTO, 1024, 0)


@pytest.mark.parametrize(
    ("mutable", "words"),
    [
        ({"readahead": "1MiB"}, ("'readahead'", "carver/readAhead", "carver/maximumRecoveryRate")),
        ({"fsType": "xfs"}, ("'fsType'", "allowed")),
        ({"readAhead": "much"}, ("readAhead", "'much'", "auto", "512MiB")),
        ({"readAhead": ""}, ("readAhead", "auto")),
        ({"readAhead": "-1"}, ("readAhead", "auto")),
        ({"readAhead": "1000"}, ("readAhead", "4KiB")),
        ({"readAhead": "2GiB"}, ("readAhead", "1GiB")),
        ({"readAhead": "1MiB", "carver/readAhead": "1MiB"}, ("readAhead", "prefix")),
        ({"maximumRecoveryRate": "fast"}, ("maximumRecoveryRate", "'fast'")),
        ({"maximumRecoveryRate": "1000"}, ("maximumRecoveryRate", "KiB")),
        ({"minimumRecoveryRate": "3TiB"}, ("minimumRecoveryRate", "2147483647KiB")),
        (
            {"minimumRecoveryRate": "3MiB", "maximumRecoveryRate": "2MiB"},
            ("minimum recovery rate, 3072KiB", "maximum, 2048KiB"),
        ),
    ],
)
@pytest.mark.variation
def test_invalid_parameters_are_refused_by_name_and_change_nothing(
    client: Client, host: AnyHost, group: str, mutable: Mapping[str, str], words: tuple[str, ...]
) -> None:
    with expect.code("INVALID_ARGUMENT", "mutable_parameters", *words):
        create(client, "raid1", mutable)
    assert client.volumes() == []
    volume = create(client, "raid1")
    host.commands = []
    # A valid parameter beside it is not applied either.
    with expect.code("INVALID_ARGUMENT", "mutable_parameters", *words):
        client.modify(volume.volume_id, {"readAhead": "2MiB", **mutable})
    assert cost(host) == []
    assert tuning(host, group) == PLAIN


@pytest.mark.parametrize(
    "name", chosen.kinds(["linear", "striped", "thin", "cache"], usual=["linear"])
)
@pytest.mark.variation
def test_rates_are_for_raids_only(client: Client, host: AnyHost, group: str, name: str) -> None:
    rate = {"readAhead": "1MiB", "maximumRecoveryRate": "1MiB"}
    words = ("[maximumRecoveryRate]", "RAID", "carver/readAhead")
    with expect.code("INVALID_ARGUMENT", *words):
        create(client, name, rate)
    assert client.volumes() == []
    volume = create(client, name)
    with expect.code("INVALID_ARGUMENT", *words):
        client.modify(volume.volume_id, rate)
    assert tuning(host, group) == PLAIN


@pytest.mark.variation
def test_a_minimum_above_the_present_maximum_is_refused(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = create(client, "raid1", OF_RECOVERY)
    with expect.code("INVALID_ARGUMENT", "minimum recovery rate, 4096KiB", "maximum, 2048KiB"):
        client.modify(volume.volume_id, {"minimumRecoveryRate": "4MiB", "readAhead": "1MiB"})
    with expect.code("INVALID_ARGUMENT", "minimum recovery rate, 100KiB", "maximum, 50KiB"):
        client.modify(volume.volume_id, {"maximumRecoveryRate": "50KiB"})
    assert tuning(host, group) == tuned(AUTO, 100, 2048)


@pytest.mark.variation
def test_a_volume_and_parameters_are_required(client: Client, group: str) -> None:
    usual = {"readAhead": "1MiB"}
    volume = create(client)
    for volume_id, mutable, code in (
        ("", usual, "INVALID_ARGUMENT"),
        (volume.volume_id, {}, "INVALID_ARGUMENT"),
        ("made-up", usual, "NOT_FOUND"),
        (volume.volume_id + "0", usual, "NOT_FOUND"),
        ("nowhere@12345678/vol-pvc-1", usual, "FAILED_PRECONDITION"),
        (f"{group}@00000000/vol-pvc-1", usual, "FAILED_PRECONDITION"),
    ):
        with expect.code(code):
            client.modify(volume_id, mutable)


@pytest.mark.variation
def test_a_repeated_create_applies_its_parameters(
    client: Client, host: AnyHost, group: str
) -> None:
    first = create(client, mutable={"readAhead": "1MiB"})
    host.commands = []
    assert create(client, mutable={"readAhead": "1MiB"}) == first
    assert create(client) == first
    assert cost(host) == ["lvm fullreport"]
    assert tuning(host, group) == tuned(MIB)
    host.commands = []

    assert create(client, mutable={"readAhead": "2MiB"}) == first
    assert cost(host) == ["lvm lvchange"]
    assert tuning(host, group) == tuned(2 * MIB)


@pytest.mark.parametrize("name", chosen.kinds(["linear", "thin"], usual=["linear"]))
@pytest.mark.variation
def test_a_copy_has_parameters_of_its_own(
    client: Client, host: AnyHost, group: str, name: str
) -> None:
    origin = create(client, name, {"readAhead": "1MiB"})
    snapshot = client.snapshot("snap", origin.volume_id)
    restored = of_snapshot(snapshot.snapshot_id)
    for copy, source in (("pvc-2", restored), ("pvc-3", of_volume(origin.volume_id))):
        create(client, name, {"readAhead": "8KiB"}, name=copy, source=source)
        assert tuning(host, group, f"vol-{copy}") == tuned(8 * KIB)
    create(client, name, name="pvc-4", source=restored)
    assert tuning(host, group, "vol-pvc-4") == PLAIN
    assert tuning(host, group) == tuned(MIB)


@pytest.mark.variation
def test_copy_on_write_snapshots_forbid_only_a_change_of_the_read_ahead(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = create(client, "raid1")
    snapshot = client.snapshot("snap", volume.volume_id)
    client.modify(volume.volume_id, {"maximumRecoveryRate": "2MiB", "readAhead": "auto"})
    with expect.code("FAILED_PRECONDITION", "snap", "read-ahead"):
        client.modify(volume.volume_id, {"maximumRecoveryRate": "3MiB", "readAhead": "1MiB"})
    assert tuning(host, group) == tuned(AUTO, 0, 2048)
    client.delete_snapshot(snapshot.snapshot_id)
    client.modify(volume.volume_id, {"maximumRecoveryRate": "3MiB", "readAhead": "1MiB"})
    assert tuning(host, group) == tuned(MIB, 0, 3072)


@pytest.mark.variation
def test_an_inactive_volume_gets_its_read_ahead_when_it_is_staged(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = create(client)
    host.deactivate(group, "vol-pvc-1")
    client.modify(volume.volume_id, {"readAhead": "1MiB"})
    assert host.devices.find(group, "vol-pvc-1") is None
    client.stage(volume, host.directory / "staging", block())
    assert host.devices.find(group, "vol-pvc-1") is not None
    assert tuning(host, group) == tuned(MIB)


@pytest.mark.parametrize("kind", ["cache", "writecache"])
@pytest.mark.variation
def test_a_repeated_create_attaches_a_missing_cache_and_keeps_parameters(
    client: Client, host: AnyHost, group: str, kind: str
) -> None:
    made = create(client, kind, {"readAhead": "1MiB"})
    # What a killed lvcreate leaves.
    host.lvm("lvconvert", "--yes", "--splitcache", "--", f"{group}/vol-pvc-1")
    volumes.remove(host.lvm, group, "vol-pvc-1_cache")
    assert create(client, kind, {"readAhead": "2MiB"}) == made
    assert report.read(host.lvm).group(group).volume("vol-pvc-1").layout == {kind}
    assert tuning(host, group) == tuned(2 * MIB)


@pytest.mark.variation
def test_parameters_are_confirmed_where_the_volume_can_have_them(client: Client) -> None:
    def validate(volume: csi.Volume, mutable: Mapping[str, str]) -> str:
        request = csi.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id, volume_capabilities=[block()], mutable_parameters=mutable
        )
        answer = client.controller.ValidateVolumeCapabilities(request)
        if not answer.HasField("confirmed"):
            return answer.message
        assert dict(answer.confirmed.mutable_parameters) == mutable
        return ""

    linear = create(client)
    raid = create(client, "raid1", OF_RECOVERY, name="pvc-2")
    assert validate(linear, {"readAhead": "1MiB"}) == ""
    assert "RAID" in validate(linear, {"minimumRecoveryRate": "1MiB"})
    assert validate(raid, {"minimumRecoveryRate": "1MiB"}) == ""
    assert "more than the maximum" in validate(raid, {"minimumRecoveryRate": "4MiB"})
    assert "'unheard'" in validate(raid, {"unheard": "of"})


@pytest.mark.variation
def test_of_two_changes_at_once_one_is_aborted_or_both_are_made(
    client: Client, host: AnyHost, group: str
) -> None:
    volume = create(client)

    def modify(size: str) -> str:
        try:
            client.modify(volume.volume_id, {"readAhead": size})
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    with ThreadPoolExecutor(4) as pool:
        codes = set(pool.map(modify, ["1MiB", "2MiB"] * 4))
    assert "OK" in codes
    assert codes <= {"OK", "ABORTED"}
    assert tuning(host, group).read_ahead_bytes in (MIB, 2 * MIB)


@pytest.mark.variation
def test_the_controller_offers_modify_volume(client: Client) -> None:
    answer = client.controller.ControllerGetCapabilities(csi.ControllerGetCapabilitiesRequest())
    offered = {one.rpc.type for one in answer.capabilities}
    assert csi.ControllerServiceCapability.RPC.MODIFY_VOLUME in offered
