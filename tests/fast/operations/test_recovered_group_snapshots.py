"""Recovery of one group, while another group was read before its snapshots were complete."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import expect
import pytest
from csi_client import Client
from fakes.host import FakeHost

from agent.csi.client import block
from agent.daemon import server
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass

MIB = 1 << 20
CLASSES = (
    DeviceClass("first", "a", default=True),
    DeviceClass("second", "b"),
    DeviceClass("third", "c"),
)
pytestmark = [
    pytest.mark.groups(a=[100], b=[100], c=[100]),
    pytest.mark.settings(classes=CLASSES),
]
# The class of the second source; the first one is in group a.
SECOND = {"in one group": "first", "in two groups": "second"}
# The command of Carver before which another call reads group a: the last moments at which the
# snapshots are not all there, and at which they are not recorded as complete.
CREATED, RECORDED = "lvcreate", "carver.committed"
MOMENTS = {"between two snapshots": CREATED, "before they are recorded": RECORDED}


def snapshots(fake: FakeHost) -> list[str]:
    return sorted(
        name
        for group in fake.lvm2.groups.values()
        for name in group.volumes
        if name.startswith("snap")
    )


def before(moment: str, act: Callable[[], object]) -> Callable[[Sequence[str]], None]:
    """Do something once: before the last lvcreate of a snapshot, or before the tag is written."""
    seen: list[Sequence[str]] = []

    def intercept(words: Sequence[str]) -> None:
        is_create = "lvcreate" in words and any("snap." in word for word in words)
        if is_create if moment == CREATED else any(moment in word for word in words):
            seen.append(words)
            if len(seen) == (2 if moment == CREATED else 1):
                act()

    return intercept


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_recovery_removes_nothing_by_what_was_read_before(
    service: Service, client: Client, fake: FakeHost, moment: str, second: str
) -> None:
    sources = [
        client.create(name, 32 * MIB, block(), parameters={"class": device_class}).volume_id
        for name, device_class in (("1", "first"), ("2", second))
    ]
    third = {"class": "third"}
    fake.intercept = before(moment, lambda: client.create("3", 32 * MIB, block(), parameters=third))
    taken = client.group_snapshot("nightly", sources)
    members = [one.snapshot_id for one in taken.snapshots]
    there = snapshots(fake)
    assert len(there) == 2
    answers = threading.Event()

    def silent(words: Sequence[str]) -> None:
        text = " ".join(words)
        if "/dev/fake-a-" in text or "/dev/fake-b-" in text:
            answers.wait(expect.PATIENCE_SECONDS)

    fake.intercept = silent
    with ThreadPoolExecutor(1) as pool:
        recovery = pool.submit(server.resume, service, "c")
        # Longer than recovery waits for another group, after which it knows the state before.
        wait([recovery], 6.0)
        answers.set()
        recovery.result(expect.PATIENCE_SECONDS)
    fake.intercept = lambda _words: None
    assert snapshots(fake) == there
    assert client.find_group_snapshot(taken.group_snapshot_id, members).ready_to_use
