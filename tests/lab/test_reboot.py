"""From outside the VM: what a reboot, a power cut and a boot that hangs leave."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from vagrant import guest, lab
from vagrant.guest import TREE

SCRIPT = f"{TREE}/tests/lab/across_reboot.py"
PYTHON = "/opt/carver/venv/bin/python"


def in_guest(*words: str) -> None:
    path = f"PYTHONPATH={TREE}:{TREE}/tests:{TREE}/tests/support"
    ended = lab.run(["env", path, PYTHON, SCRIPT, *words], check=False)
    if ended.returncode != 0:
        journal = ["journalctl", "--unit", "carver", "--boot", "--lines", "40", "--output", "cat"]
        log = lab.run(journal, check=False).stdout
        pytest.fail(f"{ended.stdout}\n{ended.stderr}\n{log}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("restart", "volumes"),
    [
        # A cut leaves more to be set right than an orderly reboot does.
        pytest.param(lab.reboot, 4, id="reboot", marks=pytest.mark.long),
        pytest.param(lab.reset, 8, id="power cut"),
    ],
)
def test_volumes_in_use_come_back_with_their_data_after(
    restart: Callable[[], None], volumes: int
) -> None:
    in_guest("before", str(volumes))
    restart()
    in_guest("after", str(volumes))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_guest_that_is_not_in_another_boot_in_time_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    power = guest.LAB_GUEST.power
    again = Mock(side_effect=power.start_again)
    monkeypatch.setattr(power, "start_again", again)
    before = guest.boot_id()
    guest.wait_for_boot(before, stuck_seconds=20)
    assert again.called
    assert guest.boot_id() not in (None, before)
