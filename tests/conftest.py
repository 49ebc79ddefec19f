"""What every tier shares."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # isort: skip

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import chosen
import pytest
import unheld
from fakes.host import FakeHost
from model import stopping
from real.any import AnyHost
from real.host import Lab, RealHost, lab, real_host

import agent.work.locks
import mount.programs
from agent.groups.volume_group import VolumeGroup
from agent.volumes import users
from agent.work import group_worker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real",
        action="store_true",
        help="contract tests on real LVM, loop devices and mounts; as root, in the lab VM",
    )
    parser.addoption(
        "--every",
        action="store_true",
        help="also the cases marked long, which are much like another, kills after each step"
        " and not only before it, and with --real the variations and what is long on real LVM",
    )
    parser.addoption(
        "--sessions",
        action="store_true",
        help="say lvm2's commands to a shell that is kept open, on the fakes and on real LVM",
    )


def pytest_configure(config: pytest.Config) -> None:
    FakeHost.sessions = RealHost.sessions = config.getoption("--sessions")
    chosen.every = stopping.kills_after_each = config.getoption("--every")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every"):
        return
    marks = {"long", "long_on_lvm", "variation"} if config.getoption("--real") else {"long"}
    left_out = [item for item in items if any(one.name in marks for one in item.iter_markers())]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """As in the service, Python's collector looks seldom, and not at what is there for good."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


@pytest.fixture
def real(request: pytest.FixtureRequest) -> bool:
    """Whether the real tier was chosen. Then what is missing is a failure, never a skip."""
    return bool(request.config.getoption("--real"))


@pytest.fixture(autouse=True)
def refused_at_once(monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    """A call that meets another does not wait, unless a test is about just that."""
    monkeypatch.setattr(agent.work.locks, "GRACE_SECONDS", 0.0)
    if not real:
        monkeypatch.setattr(users, "OPEN_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put off until a call has answered is done before, so that commands can be counted.

    Tests that are about just that have a fixture of this name of their own.
    """

    def do(self: VolumeGroup) -> None:
        thread = threading.Thread(target=try_it, args=[self], name="behind")
        thread.start()
        thread.join()

    def try_it(one: VolumeGroup) -> None:
        # What fails is tried again by the next that asks for it.
        with suppress(BaseException):
            one.run_deferred(is_ending=True)

    monkeypatch.setattr(VolumeGroup, "wake", do)


@pytest.fixture(scope="session", autouse=True)
def overseen() -> Iterator[None]:
    """All loops are overseen, as the service does: a step that waits holds up no other."""
    every = weakref.WeakSet[group_worker.GroupWorkers]()
    guard = threading.Lock()
    is_over = threading.Event()
    init = group_worker.GroupWorkers.__init__

    def add(self: group_worker.GroupWorkers) -> None:
        init(self)
        with guard:
            every.add(self)

    def replace_hanging_threads() -> None:
        while not is_over.wait(0.05):
            with guard:
                present = list(every)
            for one in present:
                one.replace_hanging_threads()

    threading.Thread(target=replace_hanging_threads, name="overseer", daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_worker.GroupWorkers, "__init__", add)
        patch.setattr(group_worker, "_SLOW_SECONDS", 0.2)
        yield
    is_over.set()


@pytest.fixture(autouse=True)
def nothing_hangs_in_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may hang is not done while a volume group is held."""
    unheld.watch(monkeypatch)


@pytest.fixture(autouse=True)
def no_unfaked_commands(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    """In the fast tier no test starts a program, unless it is about just that."""
    if real or request.node.get_closest_marker("starts_programs"):
        return

    def refuse(words: tuple[str, ...], *_how: object) -> None:
        raise AssertionError(f"an unfaked command: {' '.join(words)}")

    monkeypatch.setattr(mount.programs, "_execute", refuse)


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """What the real tier's tests share."""
    with lab(tmp_path_factory.getbasetemp()) as made:
        yield made


@pytest.fixture
def host(request: pytest.FixtureRequest, real: bool, tmp_path: Path) -> Iterator[AnyHost]:
    """A machine without groups."""
    directory = tmp_path / "mounts"
    directory.mkdir()
    if not real:
        yield FakeHost(directory)
        return
    with real_host(request.getfixturevalue("shared_lab"), directory) as this:
        yield this
