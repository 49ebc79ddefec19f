"""How long pods wait for a limit, by what the kernel counted of them."""

import time

import pytest

from agent.volumes import backing
from agent.volumes.limiter import Limited
from lvm.tuning import Tuning
from mount.cgroups import IoCount


@pytest.mark.parametrize(
    ("done", "is_limited"),
    [
        (IoCount(), False),
        (IoCount(writes=980), True),
        (IoCount(writes=900), False),
        (IoCount(write_bytes=10 << 20), True),
        (IoCount(read_bytes=1 << 40, reads=1 << 20), False),
    ],
)
def test_time_counts_in_which_as_much_was_done_as_a_limit_allows(
    done: IoCount, is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tuning = Tuning(write_iops=100, write_bandwidth=1 << 20)
    one = Limited("vol", backing.of_id("vol"), (252, 0), tuning, 1 << 30)
    one.measure(IoCount())
    now += 10
    one.measure(done)
    assert one.limited_seconds == (10 if is_limited else 0)


def test_the_lower_of_two_limits_holds_and_none_is_below_the_least() -> None:
    tuning = Tuning(read_iops=1000, read_iops_per_gib=100, write_bandwidth_per_gib=1 << 20)
    assert [tuning.io_max(size << 30).reads for size in (2, 20)] == [200, 1000]
    assert tuning.io_max(1 << 20).write_bytes == 64 << 10
    assert tuning.io_max(1 << 20).reads == 10
