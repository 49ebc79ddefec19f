"""From outside the VM: a guest that does not come up is started again."""

import subprocess

import pytest

from vagrant import guest, host


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_guest_that_is_not_in_another_boot_in_time_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[str, ...]] = []

    def virsh(*words: str) -> subprocess.CompletedProcess[str]:
        given.append(words)
        return host.virsh(*words)

    monkeypatch.setattr(guest, "virsh", virsh)
    before = guest.boot_id()
    guest.wait_for_boot(before, stuck_seconds=20)
    assert ("reset", host.NAME) in given
    assert guest.boot_id() not in (None, before)
