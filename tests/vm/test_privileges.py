"""Each privilege of the unit has a reason: without it something that users need fails.

A deed is done under the unit as it is installed, then under the same unit without one privilege,
where it must fail. docs/security.md lists them; the fast tier compares that list, the cases and the
unit.
"""

from pathlib import Path

import pytest
from csi_client import Client
from vm import privileges
from vm.conftest import Restart
from vm.privileges import Case


# `make privileges` runs them: each starts the service twice.
@pytest.mark.variation
@pytest.mark.parametrize("case", privileges.CASES, ids=[one.privilege for one in privileges.CASES])
def test_without_a_privilege_something_that_users_need_fails(
    client: Client, directory: Path, restart: Restart, case: Case
) -> None:
    if case.configuration:
        privileges.CONFIGURATION.write_text(case.configuration)
    if case.setting:
        restart(case.setting)
    case.deed(client, directory)

    def without() -> None:
        restart(f"{case.setting}\n{case.without}")
        case.deed(client, directory)

    with pytest.raises(privileges.FAILURES) as failed:
        without()
    print(f"\n{case.privilege}: {failed.value!r}")
