"""Each privilege of the unit has a reason: without it something that users need fails.

A deed is done under the unit as it is installed, then under the same unit without one privilege,
where it must fail. docs/security.md lists them; the fast tier compares that list, the cases and the
unit.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vm import deeds
from vm.deeds import Case

from agent.csi.client import Client

DROP_IN = Path("/run/systemd/system/carver.service.d/test-privileges.conf")
# The rest is like these, and each case starts the service twice.
USUAL = {"CAP_SYS_RESOURCE", "CAP_SYS_PTRACE"}

Restart = Callable[[str], None]


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
    start("")
    deeds.CONFIGURATION.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            one,
            id=one.privilege,
            marks=[] if one.privilege in USUAL else [pytest.mark.variation],
        )
        for one in deeds.CASES
    ],
)
def test_without_a_privilege_something_that_users_need_fails(
    client: Client, directory: Path, restart: Restart, case: Case
) -> None:
    if case.configuration:
        deeds.CONFIGURATION.write_text(case.configuration)
    if case.setting:
        restart(case.setting)
    case.deed(client, directory)

    def without() -> None:
        restart(f"{case.setting}\n{case.without}")
        case.deed(client, directory)

    with pytest.raises(deeds.FAILURES) as failed:
        without()
    print(f"\n{case.privilege}: {failed.value!r}")
