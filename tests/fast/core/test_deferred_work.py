"""What is put off until a call has answered is known at once, and written soon."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fakes.host import FakeHost

from agent.core import background as module
from agent.core import tag
from agent.core.background import DeferredWork
from agent.core.volume_groups import VolumeGroups
from lvm import errors as lvm_errors
from lvm import tags, volumes
from mount.command import Result

MIB = 1 << 20
EXT4 = {tag.FORMATTED: "ext4"}


@pytest.fixture(autouse=True)
def nothing_behind() -> None:
    """Here it is behind."""


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    made = FakeHost(tmp_path)
    made.lvm2.add_group("data")
    return made


@pytest.fixture
def volume_groups(fake: FakeHost) -> Iterator[VolumeGroups]:
    made = VolumeGroups(fake.lvm, fake.disks, fake.devices, ["data"])
    yield made
    made.stop()


def create(fake: FakeHost, name: str) -> None:
    volumes.create(fake.lvm, "data", volumes.New(name, 4 * MIB, {}))


def written(fake: FakeHost, name: str) -> dict[str, str]:
    """The tags that are on disk."""
    return dict(tags.decode(frozenset(fake.lvm2.groups["data"].volumes[name].tags)))


def known(volume_groups: VolumeGroups, name: str) -> dict[str, str]:
    volume_group = volume_groups.of("data")
    assert volume_group is not None
    group = volume_group.state()
    assert group is not None
    return dict(tags.decode(group.volumes[name].tags))


def comes(true: Callable[[], object]) -> bool:
    """Whether something comes to be soon."""
    for _ in range(2000):
        if true():
            return True
        time.sleep(0.005)
    return False


def commands(fake: FakeHost, subcommand: str) -> list[tuple[str, ...]]:
    return [words for words in fake.commands if words[1] == subcommand]


def test_what_is_promised_is_known_at_once_and_written_soon(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
        # Whoever holds the group is not met by the command.
        assert known(volume_groups, "a") == EXT4
        assert written(fake, "a") == {}
    assert comes(lambda: written(fake, "a") == EXT4)
    assert known(volume_groups, "a") == EXT4


def test_the_same_of_several_volumes_is_one_command(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    names = ["a", "b", "c"]
    for one in names:
        create(fake, one)
    with volume_groups.hold("data"):
        for one in names:
            volume_groups.add_tags_later("data", one, EXT4)
    assert comes(lambda: all(written(fake, one) == EXT4 for one in names))
    assert len(commands(fake, "lvchange")) <= 2  # the first may have been alone already


def test_another_volume_of_the_name_is_promised_nothing(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
        volumes.remove(fake.lvm, "data", "a")
        create(fake, "a")
        assert known(volume_groups, "a") == {}
    volume_groups.run_deferred()
    assert written(fake, "a") == {}
    assert commands(fake, "lvchange") == []


def test_what_was_made_since_the_last_look_can_be_promised(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    volume_groups.run_deferred()
    create(fake, "new")
    volume_groups.add_tags_later("data", "new", EXT4)
    assert comes(lambda: written(fake, "new") == EXT4)
    with pytest.raises(lvm_errors.VolumeMissing):
        volume_groups.add_tags_later("data", "gone", EXT4)


def test_what_fails_is_told_once_and_tried_until_it_is_done(
    volume_groups: VolumeGroups,
    fake: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    failures = itertools.count()

    def fail(words: Sequence[str]) -> Result | None:
        if words[1] == "lvchange" and next(failures) < 3:
            return Result(5, "", "a lock is held")
        return None

    create(fake, "a")
    fake.intercept = fail
    volume_groups.add_tags_later("data", "a", EXT4)
    assert comes(lambda: written(fake, "a") == EXT4)
    assert caplog.text.count("deferred work: ") == 1


def test_a_service_that_ends_writes_what_it_promised(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
    volume_groups.stop()
    assert written(fake, "a") == EXT4


def test_a_change_is_looked_at_behind_the_answer_and_a_look_is_not(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    volume_group = volume_groups.of("data")
    assert volume_group is not None
    volume_group.state()
    with volume_groups.hold("data"):
        volumes.create(volume_group.lvm, "data", volumes.New("a", 4 * MIB, {}))
    assert comes(lambda: len(commands(fake, "fullreport")) == 2)
    assert comes(lambda: volume_group.cached is not None and "a" in volume_group.cached.volumes)
    with volume_groups.hold("data"):
        volume_group.state()
    volume_group.run_deferred()
    assert len(commands(fake, "fullreport")) == 2


def test_nothing_that_is_raised_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    done = threading.Event()
    raised: list[BaseException] = [SystemExit(), KeyError("no reason"), OSError(5, "I/O error")]

    def work(_is_ending: bool) -> None:
        if raised:
            raise raised.pop()
        done.set()

    behind = DeferredWork("data", work)
    behind.wake()
    assert done.wait(20)
    behind.stop()
    # What comes up after the end is not begun.
    done.clear()
    DeferredWork.wake(behind)
    assert not done.wait(0.05)


@pytest.fixture
def no_threads() -> Iterator[pytest.MonkeyPatch]:
    """None can be started, until that is undone."""

    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield patch


def test_where_no_thread_can_be_had_a_change_is_done_and_its_tags_are_written_later(
    volume_groups: VolumeGroups,
    fake: FakeHost,
    no_threads: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    create(fake, "a")
    for _ in range(2):
        with volume_groups.hold("data"):
            volume_groups.add_tags_later("data", "a", EXT4)
            volumes.create(volume_groups.lvm("data"), "data", volumes.New("b", 4 * MIB, {}))
            volumes.remove(volume_groups.lvm("data"), "data", "b")
    volume_groups.catch_up()
    assert caplog.text.count("can't start new thread") == 1
    no_threads.undo()
    volume_groups.catch_up()
    assert comes(lambda: written(fake, "a") == EXT4)


def test_a_service_that_ends_writes_what_there_was_no_thread_for(
    volume_groups: VolumeGroups, fake: FakeHost, no_threads: pytest.MonkeyPatch
) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
    no_threads.undo()
    volume_groups.stop()
    assert written(fake, "a") == EXT4


def test_a_service_ends_also_where_no_thread_can_be_had(
    volume_groups: VolumeGroups, fake: FakeHost, no_threads: pytest.MonkeyPatch
) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
    volume_groups.stop()
    assert written(fake, "a") == {}
