"""`systemctl reload carver`: the installed service takes its file over without a restart."""

import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from csi_client import Client
from real.host import RealHost
from vm import privileges
from vm.conftest import Restart

from agent.csi.client import block

MIB = 1 << 20
GROUP = "carver_reload"
SERVED = (
    f"ExecStart=\nExecStart=/opt/carver/venv/bin/carver serve --config {privileges.CONFIGURATION}"
)
FIRST = f'[[classes]]\nname = "first"\ngroup = "{GROUP}"\ndefault = true\n'
SECOND = f'[[classes]]\nname = "second"\ngroup = "{GROUP}"\nlayout = "raid1"\n'
WRONG = 'wipe = "perhaps"\n'
# Without an answer of the service after so long, the reload is not taken over.
RELOAD_SECONDS = 60
OUTCOME = "carver_config_last_reload_successful"


@pytest.fixture
def group(host: RealHost, restart: Restart) -> Iterator[str]:
    """A group on two of the machine's disks, of which the installed service has one class."""
    disks = [host.new_device(101 * 4 * MIB) for _ in range(2)]
    with host.own_group(GROUP, disks, "--setautoactivation", "n"):
        privileges.CONFIGURATION.write_text(FIRST)
        restart(SERVED)
        yield GROUP


def reload(text: str, outcome: float) -> None:
    """Have the service read another file; wait until its page of metrics has the outcome."""
    privileges.CONFIGURATION.write_text(text)
    subprocess.run(["systemctl", "reload", "carver"], check=True)
    until = time.monotonic() + RELOAD_SECONDS
    while f"{OUTCOME} {outcome}" not in page():
        assert time.monotonic() < until, f"{OUTCOME} is never {outcome}"
        time.sleep(0.2)


def page() -> str:
    with urllib.request.urlopen("http://127.0.0.1:9898/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def create_when_known(client: Client, name: str, of_class: str) -> str:
    """Create a volume in a class, as soon as the service has it."""
    until = time.monotonic() + RELOAD_SECONDS
    while True:
        try:
            return client.create(name, 8 * MIB, block(), parameters={"class": of_class}).volume_id
        except grpc.RpcError as error:
            is_unknown = error.code() is grpc.StatusCode.INVALID_ARGUMENT
            if not is_unknown or time.monotonic() > until:
                raise
        time.sleep(0.2)


def test_a_reload_gives_a_class_and_a_wrong_file_changes_nothing(
    client: Client, group: str, main_pid: Callable[[], int], directory: Path
) -> None:
    process, staging = main_pid(), directory / "staging"
    volume = client.create("test-before", 8 * MIB, block())
    client.stage(volume, staging, block())
    with pytest.raises(grpc.RpcError, match="second"):
        client.create("test-second", 8 * MIB, block(), parameters={"class": "second"})

    reload(FIRST + SECOND, 1)
    mirror = create_when_known(client, "test-second", "second")
    reload(WRONG + FIRST, 0)

    # Both classes are still there, and nothing of the volume in use was touched.
    client.create("test-after", 8 * MIB, block(), parameters={"class": "second"})
    client.unstage(volume.volume_id, staging)
    assert main_pid() == process
    log = subprocess.run(
        ["journalctl", "--unit=carver", f"_PID={process}", "--output=cat"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "the configuration is not reloaded, and stays as it was" in log
    assert "wipe" in log

    reload(FIRST + SECOND, 1)
    client.delete(mirror)
