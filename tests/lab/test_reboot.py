"""From outside the VM: what a reboot, and a power cut, leave of volumes that were made before."""

from collections.abc import Callable

import pytest

from vagrant import lab

SCRIPT = "/carver/tests/lab/across_reboot.py"
PYTHON = "/opt/carver/venv/bin/python"


def in_guest(step: str) -> None:
    ended = lab.run(["env", "PYTHONPATH=/carver", PYTHON, SCRIPT, step])
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("restart", [lab.reboot, lab.reset], ids=["reboot", "power cut"])
def test_volumes_stage_with_their_data_after(restart: Callable[[], None]) -> None:
    in_guest("before")
    restart()
    in_guest("after")
