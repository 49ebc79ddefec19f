"""How much of an encrypted volume is its header: whole stripes, whole chunks of a pool."""

import configured
import pytest
from fakes.host import FakeHost

from agent.daemon.server import Service
from agent.operations import plan
from agent.settings.classes import DeviceClass
from agent.volumes.allocation import Allocators
from lvm import report
from lvm.layout import Layout
from lvm.thin import Policy

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("shape", "chunk", "size"),
    [
        (Layout(), 0, 4 * MIB),
        (Layout("raid1", mirrors=1), 0, 4 * MIB),
        (Layout("striped", stripes=2), 0, 4 * MIB),
        # 22 stripes of 3 times lvm2's 64 KiB.
        (Layout("raid5", stripes=3), 0, 22 * 192 * KIB),
        (Layout("striped", stripes=3, stripe_size_bytes=2 * MIB), 0, 6 * MIB),
        (Layout("thin"), 64 * KIB, 4 * MIB),
        (Layout("thin"), 16 * MIB, 16 * MIB),
        # Rounded up to that, it would take more than it saves.
        (Layout("thin"), 1 * GIB, 4 * MIB),
    ],
    ids=str,
)
def test_the_data_begin_where_a_stripe_or_a_chunk_does(
    fake: FakeHost, service: Service, shape: Layout, chunk: int, size: int
) -> None:
    pool = Policy(chunk_size_bytes=chunk) if shape.is_thin else None
    one = DeviceClass("x", "data", layout=shape, pool=pool, encryption="luks2")
    group = report.read(fake.lvm).group("data")
    allocator = Allocators(configured.of_classes(one), service.context.activator).of(one)
    assert plan.header_bytes(one, allocator, group) == size


def test_a_volume_that_is_not_encrypted_has_none(fake: FakeHost, service: Service) -> None:
    one = DeviceClass("x", "data")
    allocator = Allocators(configured.of_classes(one), service.context.activator).of(one)
    assert plan.header_bytes(one, allocator, report.read(fake.lvm).group("data")) == 0
