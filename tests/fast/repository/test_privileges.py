"""Unit and pod are granted what docs/security.md lists, each with a case that fails without it."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from container import pod
from container import privileges as privileges_of_pod
from vm import privileges

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "systemd" / "carver.service"
# Lists of what is allowed; what they do not name is refused.
ALLOWING = {"CapabilityBoundingSet", "RestrictAddressFamilies", "SystemCallFilter"}
# What a service has of the machine unless its unit says otherwise: systemd.exec(5),
# systemd.resource-control(5).
UNLESS_TAKEN = {"User", "PrivateMounts", "DevicePolicy", "PrivateNetwork"}


def rows(heading: str) -> dict[str, str]:
    """A table of docs/security.md: what stands in its first column, and in its last."""
    text = (ROOT / "docs" / "security.md").read_text()
    [part] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    found = re.findall(r"^\| `([^`]+)` \|.+\| `([^`]+)` \|$", part, re.M)
    assert len(found) == len(dict(found)) == len(re.findall(r"^\| `", part, re.M))
    return dict(found)


def granted_to_the_unit() -> list[str]:
    """Each single thing that the unit allows, raises, or leaves as it is."""
    text = UNIT.read_text()
    settings = re.findall(r"^(\w+)=(.*)$", text, re.M)
    found = [word for key, value in settings if key in ALLOWING for word in value.split()]
    # A limit of nothing is no privilege.
    found += [f"{key}=" for key, value in settings if key.startswith("Limit") and value != "0"]
    found += [f"{key}=" for key in UNLESS_TAKEN - {key for key, _ in settings}]
    return found


def pods() -> dict[str, pod.Pod]:
    found = (ROOT / "deploy" / "kubernetes").glob("*.yaml")
    return {path.stem: pod.of(path) for path in found}


def granted_to_pods() -> set[str]:
    return {one for this in pods().values() for one in this.granted()}


@pytest.mark.parametrize(
    ("granted", "cases", "heading"),
    [
        (granted_to_the_unit, privileges.CASES, "What the unit is granted"),
        (granted_to_pods, privileges_of_pod.CASES, "What the pod is granted"),
    ],
    ids=["unit", "pod"],
)
def test_each_privilege_is_documented_with_a_case_that_fails_without_it(
    granted: Callable[[], Iterable[str]],
    cases: Sequence[privileges.Case | privileges_of_pod.Case],
    heading: str,
) -> None:
    where = f"CASES of {type(cases[0]).__module__}"
    assert sorted(granted()) == sorted(one.privilege for one in cases), where
    assert rows(heading) == {one.privilege: one.deed.__name__ for one in cases}, heading


def test_all_that_is_granted_is_seen_by_these_tests() -> None:
    for this in pods().values():
        # All else that a container may be given would stand here.
        assert set(this.container["securityContext"]) == {"privileged", "readOnlyRootFilesystem"}
        assert "securityContext" not in this.spec
        assert {"privileged", "/dev"} <= set(this.granted())
    assert {"CAP_SYS_ADMIN", "AF_UNIX", "@mount", "User="} <= set(granted_to_the_unit())
