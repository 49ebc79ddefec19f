"""From outside the VM: what a reboot, and a power cut, leave of volumes that were in use."""

from collections.abc import Callable

import pytest

from vagrant import lab
from vagrant.guest import TREE

SCRIPT = f"{TREE}/tests/lab/across_reboot.py"
PYTHON = "/opt/carver/venv/bin/python"


def in_guest(*words: str) -> None:
    path = f"PYTHONPATH={TREE}:{TREE}/tests:{TREE}/tests/support"
    ended = lab.run(["env", path, PYTHON, SCRIPT, *words], check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("restart", "kind", "volumes"),
    [(lab.reboot, "reboot", 4), (lab.reset, "cut", 8)],
    ids=["reboot", "power cut"],
)
def test_volumes_in_use_come_back_with_their_data_after(
    restart: Callable[[], None], kind: str, volumes: int
) -> None:
    in_guest("before", kind, str(volumes))
    restart()
    in_guest("after", kind, str(volumes))
