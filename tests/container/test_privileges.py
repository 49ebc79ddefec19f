"""Each privilege of the DaemonSet's pod has a reason: without it something that users need fails.

The pod of each manifest does every deed as it is, and then, without one privilege, cannot do one of
them. Needs what test_life_cycle needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from container import containerd, pod, privileges
from container.pod import Pod
from container.privileges import Case

from vagrant import guest

pytestmark = pytest.mark.timeout(1800)

PODS = {
    name: pod.of(containerd.ROOT / "deploy" / "kubernetes" / f"{name}.yaml")
    for name in containerd.MANIFESTS
}
CASES = [
    pytest.param(name, case, id=f"{name}: {case.privilege}")
    for name, this in PODS.items()
    for case in privileges.CASES
    if case.privilege in this.granted()
]


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    with containerd.image():
        yield
    # By the service, which is there again.
    assert program("clean") == 0


def program(*words: str) -> int:
    """What the program privileges.py ends with, in the guest."""
    path = f"{guest.TREE}/tests/container/privileges.py"
    ended = guest.run([*guest.PYTHON, path, *words], check=False)
    print(ended.stdout, ended.stderr)
    return ended.returncode


@contextmanager
def with_classes(this: Pod, classes: str) -> Iterator[Pod]:
    """The pod with classes in the place of its own, whose group is removed when it has ended."""
    if not classes:
        yield this
        return
    try:
        yield this.configured(classes)
    finally:
        assert program("clean") == 0


@pytest.mark.parametrize("name", PODS)
def test_the_pod_can_do_what_users_need(name: str) -> None:
    cases = [one for one in privileges.CASES if one.privilege in PODS[name].granted()]
    for classes in sorted({one.classes for one in cases}):
        wanted = {one.deed.__name__ for one in cases if one.classes == classes}
        with with_classes(PODS[name], classes) as this, containerd.running(this):
            containerd.wait_until_ready()
            failed = [one for one in sorted(wanted) if program(one) != 0]
            assert not failed, containerd.log()[-8000:]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_without_a_privilege_something_that_users_need_fails(name: str, case: Case) -> None:
    with (
        with_classes(PODS[name], case.classes) as this,
        containerd.running(this.without(case.privilege)),
    ):
        assert program(case.deed.__name__) == privileges.FAILED, containerd.log()[-8000:]
