"""A start beside many group snapshots: in proportion to their number."""

import copy
from typing import Any

import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block
from agent.daemon.server import Service
from agent.volumes import records

MIB = 1 << 20


@pytest.fixture
def client(service: Service) -> Any:
    with Client(service.configuration.now.endpoint) as caller:
        yield caller


def multiply(fake: FakeHost, count: int, *, is_recorded: bool) -> None:
    """Have so many group snapshots like the one that is there."""
    volumes = fake.lvm2.groups["data"].volumes
    for one in [one for name, one in volumes.items() if name.startswith("snap")]:
        for number in range(count):
            other = copy.copy(one)
            other.name = f"{one.name[:-6]}{number:06d}"
            other.uuid = f"{one.uuid[:-6]}{number:06d}"
            other.tags = {
                f"{tag}{number}" if tag.startswith("carver.groupSnapshot=") else tag
                for tag in one.tags
                if is_recorded or not tag.startswith(("carver.committed=", "carver.memberGroups="))
            }
            volumes[other.name] = other
    fake.lvm2.groups["data"].seqno += 1


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_start_takes_work_in_proportion_to_the_group_snapshots(
    client: Client,
    service: Service,
    fake: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    is_recorded: bool,
) -> None:
    """Those of the first version are not on record as complete, until a start records it."""
    every = [client.create(f"pvc-{one}", 8 * MIB, block()).volume_id for one in (1, 2)]
    client.group_snapshot("both", every)
    made, real, cost = [0], records.snapshot, dict[int, int]()

    def snapshot(*of: Any) -> Any:
        made[0] += 1
        return real(*of)

    monkeypatch.setattr(records, "snapshot", snapshot)
    for count in (30, 120):
        multiply(fake, count, is_recorded=is_recorded)
        fake.commands.clear()
        made[0] = 0
        assert service.group_snapshotter.resume("data") == 0
        cost[count] = made[0]
        # Reports, and one command for each hundred snapshots to be recorded.
        assert len(fake.commands) <= 2 + 3 * (not is_recorded)
    assert cost[120] <= 5 * cost[30]
    fake.commands.clear()
    assert service.group_snapshotter.resume("data") == 0
    assert len(fake.commands) <= 1
