"""RAID recovery keeps to the group's `background_bandwidth`, and a volume keeps its own rate."""

from dataclasses import replace

import configured
import in_background
import pytest
import serving
from csi_client import Client
from real.any import AnyHost, lvm2_commands

from agent.csi.client import block
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.layout import NO_RESERVE, Reserve
from lvm.tuning import PLAIN, Tuning
from proto import csi_pb2 as csi

MIB = 1 << 20
SIZE = 16 * MIB
BOUND = 3072
pytestmark = [
    pytest.mark.groups(data=[18, 18, 18]),
    pytest.mark.settings(
        classes=(
            replace(configured.RAID, name="raid1", default=True),
            DeviceClass("linear", "data"),
        ),
        background_bandwidth=Reserve(size_bytes=BOUND << 10),
    ),
]


def tuning(host: AnyHost, group: str, name: str = "a") -> Tuning:
    return report.read(host.lvm).group(group).volume(f"vol-{name}").tuning


def rates(maximum: int, bound: int, minimum: int = 0) -> Tuning:
    return replace(
        PLAIN,
        minimum_recovery_kib=minimum,
        maximum_recovery_kib=maximum,
        bound_recovery_kib=bound,
    )


def create(client: Client, name: str = "a", **rates: str) -> csi.Volume:
    mutable = {f"{key}RecoveryRate": text for key, text in rates.items()}
    return client.create(name, SIZE, block(), mutable=mutable)


@pytest.mark.variation
def test_a_new_raid_has_the_bound_by_the_same_command(
    client: Client, host: AnyHost, group: str
) -> None:
    host.commands = []
    made = create(client)
    assert lvm2_commands(host) == ["fullreport", "lvcreate"]
    assert create(client) == made
    assert tuning(host, group) == rates(0, BOUND)
    client.create("b", SIZE, block(), parameters={"class": "linear"})
    assert tuning(host, group, "b") == PLAIN


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param({"maximum": "2MiB"}, rates(2048, 0), marks=pytest.mark.variation),
        pytest.param({"maximum": "3MiB"}, rates(3072, 0), marks=pytest.mark.variation),
        ({"maximum": "4MiB"}, rates(4096, BOUND)),
        pytest.param({"minimum": "1MiB"}, rates(0, BOUND, 1024), marks=pytest.mark.variation),
        # A minimum is what it is to have in any case.
        ({"minimum": "4MiB", "maximum": "8MiB"}, rates(8192, 4096, 4096)),
        pytest.param({"minimum": "4MiB"}, rates(0, 4096, 4096), marks=pytest.mark.variation),
    ],
)
def test_of_a_volumes_own_maximum_and_the_bound_the_lower_holds(
    client: Client, host: AnyHost, group: str, own: dict[str, str], expected: Tuning
) -> None:
    made = create(client, **own)
    assert tuning(host, group) == expected
    mutable = {f"{key}RecoveryRate": text for key, text in own.items()}
    host.commands = []
    client.modify(made.volume_id, mutable)
    assert "lvchange" not in lvm2_commands(host)
    none = {"minimumRecoveryRate": "0", "maximumRecoveryRate": "0"}
    client.modify(made.volume_id, none)
    assert tuning(host, group) == rates(0, BOUND)
    client.modify(made.volume_id, mutable)
    assert tuning(host, group) == expected


@pytest.mark.variation
def test_a_start_has_recovery_keep_to_the_setting_as_it_is_then(
    client: Client, host: AnyHost, group: str, config: Config
) -> None:
    create(client, "a")
    create(client, "b")
    create(client, "c", minimum="1MiB", maximum="4MiB")
    client.create("d", SIZE, block(), parameters={"class": "linear"})
    for bandwidth, own, low in (
        (Reserve(size_bytes=2 * MIB), 2048, 2048),
        (Reserve(size_bytes=8 * MIB), 8192, 0),
        (None, 0, 0),
        (Reserve(percent=30.0), 0, 0),
        (NO_RESERVE, 0, 0),
        (Reserve(size_bytes=BOUND << 10), BOUND, BOUND),
    ):
        now = replace(config, background_bandwidth=bandwidth)
        with serving.served(host, now) as (service, _):
            in_background.resume(service)
            assert tuning(host, group, "a") == tuning(host, group, "b") == rates(0, own)
            assert tuning(host, group, "c") == rates(4096, low, 1024)
            assert tuning(host, group, "d") == PLAIN
            host.commands = []
            in_background.resume(service)
            assert "lvchange" not in lvm2_commands(host)


@pytest.mark.variation
def test_volumes_that_are_alike_are_changed_by_one_command(
    client: Client, host: AnyHost, config: Config
) -> None:
    for name in ("a", "b", "c"):
        create(client, name)
    with serving.served(host, replace(config, background_bandwidth=None)) as (service, _):
        host.commands = []
        in_background.resume(service)
        assert lvm2_commands(host).count("lvchange") == 1
