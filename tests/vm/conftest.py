"""The service as installed, behind its own socket; or one of a test's own, on disks that fail."""

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from csi_client import Asking, Client, wait_until_served
from faults.bench import Bench
from real.disks import Disk
from real.host import RealHost, lab
from vm import privileges
from vm.reported import EXTENT_BYTES

from agent.settings.settings import DEFAULT_SOCKET, KUBELET_DIRECTORY
from mount import table
from mount.kernel import Kernel

DROP_IN = Path("/run/systemd/system/carver.service.d/test.conf")
Restart = Callable[[str], None]


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    """Fail, rather than skip, without the service: the tier was chosen."""
    active = subprocess.run(["systemctl", "is-active", "--quiet", "carver"])
    assert active.returncode == 0, "the service is not running; see `systemctl status carver`"


@pytest.fixture
def client() -> Iterator[Client]:
    """The installed service; snapshots and volumes that a test leaves are deleted.

    What a run that was cut off left would be found by the next one's calls, which are idempotent.
    """
    with Asking(DEFAULT_SOCKET) as caller:
        left = [one for one in _present(caller) if "test-" in one]
        assert not left, f"an earlier run left {left}: delete them first"
        before = _present(caller)
        yield caller
    with Asking(DEFAULT_SOCKET) as caller:
        for snapshot in caller.snapshots():
            if snapshot.snapshot_id not in before:
                caller.delete_snapshot(snapshot.snapshot_id)
        for volume in caller.volumes():
            if volume.volume_id not in before:
                caller.delete(volume.volume_id)


def _present(caller: Client) -> set[str]:
    """The ids of all volumes and snapshots."""
    volumes = {volume.volume_id for volume in caller.volumes()}
    return volumes | {snapshot.snapshot_id for snapshot in caller.snapshots()}


@pytest.fixture
def directory(client: Client, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A place where kubelet would have mounts made; what a test leaves there is unmounted."""
    place = KUBELET_DIRECTORY / "plugins" / f"test-{request.node.name}"
    place.mkdir(parents=True)
    yield place
    kernel = Kernel()
    for mount in reversed(table.read(kernel).under(str(place))):
        kernel.unmount(mount.path)
    shutil.rmtree(place)


@pytest.fixture
def main_pid() -> Callable[[], int]:
    """The service's process, as it is now."""

    def ask() -> int:
        words = ["systemctl", "show", "--value", "--property=MainPID", "carver"]
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    return ask


@pytest.fixture
def answering() -> Callable[[], None]:
    """Wait until the service answers, after it was started anew."""
    return lambda: wait_until_served(DEFAULT_SOCKET)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with lab(tmp_path_factory.mktemp("bench")) as shared:
        yield Bench(shared, random.Random(1), cut=True)


@pytest.fixture
def host(bench: Bench) -> Iterator[RealHost]:
    with bench.host() as made:
        yield made


@pytest.fixture
def disks(bench: Bench) -> Iterator[tuple[Disk, Disk, Disk]]:
    """Three disks; volumes lie on the first, as long as there is room."""
    with (
        Disk.on(bench.shared.new_device(41 * EXTENT_BYTES)) as first,
        Disk.on(bench.shared.new_device(41 * EXTENT_BYTES)) as second,
        Disk.on(bench.shared.new_device(41 * EXTENT_BYTES)) as third,
    ):
        yield first, second, third


@pytest.fixture
def restart(client: Client, directory: Path, answering: Callable[[], None]) -> Iterator[Restart]:
    """Start the service anew with something in its unit beside what is there."""

    def start(drop_in: str) -> None:
        if drop_in:
            DROP_IN.parent.mkdir(parents=True, exist_ok=True)
            DROP_IN.write_text(f"[Service]\n{drop_in}\n")
        else:
            DROP_IN.unlink(missing_ok=True)
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        # One that could not start is tried again, and again.
        subprocess.run(["systemctl", "stop", "carver"], check=True)
        subprocess.run(["systemctl", "reset-failed", "carver"], check=False)
        subprocess.run(["systemctl", "start", "carver"], check=True)
        answering()

    yield start
    privileges.CONFIGURATION.unlink(missing_ok=True)
    start("")
