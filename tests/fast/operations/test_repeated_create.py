"""CreateVolume again, after a call that failed once the logical volume was there."""

from collections.abc import Sequence

import configured
import grpc
import pytest
from fakes.host import FakeHost

from agent.csi.client import Client, block
from agent.daemon.server import Service
from lvm import lvm_errors as lvm_errors
from mount.command import Result

MIB = 1 << 20
pytestmark = [
    pytest.mark.groups(data=[60, 60]),
    pytest.mark.settings(classes=(configured.PLAIN, configured.RAID)),
]


def test_a_minimum_rate_that_could_not_be_set_is_set_by_the_next_call(
    client: Client, fake: FakeHost, service: Service
) -> None:
    """A minimum without a maximum is not set by lvcreate, and the lvchange after it failed."""
    mutable = {"minimumRecoveryRate": "1MiB"}
    left = [True]

    def intercept(command: Sequence[str]) -> Result | None:
        if left and "--minrecoveryrate" in command:
            left.clear()
            raise lvm_errors.SessionLost(command, "it ended")
        return None

    def create() -> None:
        client.create("a", 64 * MIB, block(), parameters={"class": "raid"}, mutable=mutable)

    fake.intercept = intercept
    with pytest.raises(grpc.RpcError):
        create()
    create()
    group = service.reports.fresh("data").group("data")
    assert group.volume("vol-a").tuning.minimum_recovery_kib == 1024
