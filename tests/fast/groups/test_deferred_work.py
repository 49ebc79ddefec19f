"""Tags that are written after a call has returned are known at once, and written soon."""

import itertools
import threading
from collections.abc import Iterator, Sequence

import configured
import expect
import pytest
from fakes.host import FakeHost

from agent.core import tag
from agent.groups.node_groups import VolumeGroups
from lvm import lvm_errors as lvm_errors
from lvm import tags, volumes
from mount.command import Result

MIB = 1 << 20
EXT4 = {tag.FORMATTED: "ext4"}


@pytest.fixture(autouse=True)
def nothing_behind() -> None:
    """Here the work is deferred as in production."""


@pytest.fixture
def volume_groups(fake: FakeHost) -> Iterator[VolumeGroups]:
    made = VolumeGroups(fake.lvm, fake.disks, fake.devices, configured.on_groups("data"))
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
    return dict(group.volumes[name].own_tags)


def commands(fake: FakeHost, subcommand: str) -> list[tuple[str, ...]]:
    return [words for words in fake.commands if words[1] == subcommand]


def test_tags_are_known_at_once_and_written_soon(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
        assert known(volume_groups, "a") == EXT4
        assert written(fake, "a") == {}
    expect.soon(lambda: written(fake, "a") == EXT4)
    assert known(volume_groups, "a") == EXT4


def test_equal_tags_of_several_volumes_are_one_command(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    names = ["a", "b", "c"]
    for one in names:
        create(fake, one)
    with volume_groups.hold("data"):
        for one in names:
            volume_groups.add_tags_later("data", one, EXT4)
    expect.soon(lambda: all(written(fake, one) == EXT4 for one in names))
    assert len(commands(fake, "lvchange")) <= 2  # the first may have been alone already


def test_another_volume_of_the_name_gets_no_tags(
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


def test_a_volume_created_since_the_last_read_gets_tags(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    volume_groups.run_deferred()
    create(fake, "new")
    volume_groups.add_tags_later("data", "new", EXT4)
    expect.soon(lambda: written(fake, "new") == EXT4)
    with pytest.raises(lvm_errors.VolumeMissing):
        volume_groups.add_tags_later("data", "gone", EXT4)


def test_a_failure_is_logged_once_and_retried(
    volume_groups: VolumeGroups,
    fake: FakeHost,
    caplog: pytest.LogCaptureFixture,
) -> None:
    volume_group = volume_groups.of("data")
    assert volume_group is not None
    volume_group._deferred.retry_seconds = 0.01
    failures = itertools.count()

    def fail(words: Sequence[str]) -> Result | None:
        if words[1] == "lvchange" and next(failures) < 3:
            return Result(5, "", "a lock is held")
        return None

    create(fake, "a")
    fake.intercept = fail
    volume_groups.add_tags_later("data", "a", EXT4)
    expect.soon(lambda: written(fake, "a") == EXT4)
    assert caplog.text.count("deferred work: ") == 1


def test_a_service_that_ends_writes_the_tags(volume_groups: VolumeGroups, fake: FakeHost) -> None:
    create(fake, "a")
    with volume_groups.hold("data"):
        volume_groups.add_tags_later("data", "a", EXT4)
    volume_groups.stop()
    assert written(fake, "a") == EXT4


def test_a_changed_group_is_refreshed_in_the_background_and_no_other(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    volume_group = volume_groups.of("data")
    assert volume_group is not None
    volume_group.state()
    with volume_groups.hold("data"):
        volumes.create(volume_group.lvm, "data", volumes.New("a", 4 * MIB, {}))
    expect.soon(lambda: len(commands(fake, "fullreport")) == 2)
    expect.soon(lambda: volume_group.cached is not None and "a" in volume_group.cached.volumes)
    with volume_groups.hold("data"):
        volume_group.state()
    volume_group.run_deferred()
    assert len(commands(fake, "fullreport")) == 2


def test_deferred_work_lets_the_calls_be_answered_and_the_end_of_the_service_not_wait(
    volume_groups: VolumeGroups, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.groups.volume_group._SOON_SECONDS", 600.0)
    create(fake, "a")
    for _ in range(3):
        volume_groups.add_tags_later("data", "a", EXT4)
    volume_groups.stop()
    assert written(fake, "a") == EXT4
    # After the end nothing begins.
    create(fake, "b")
    volume_groups.add_tags_later("data", "b", EXT4)
    threading.Event().wait(0.05)
    assert written(fake, "b") == {}


def test_without_a_thread_a_change_is_done_and_its_tags_are_written_later(
    volume_groups: VolumeGroups, fake: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    create(fake, "a")
    with expect.no_threads():
        for _ in range(2):
            with volume_groups.hold("data"):
                volume_groups.add_tags_later("data", "a", EXT4)
                volumes.create(volume_groups.lvm("data"), "data", volumes.New("b", 4 * MIB, {}))
                volumes.remove(volume_groups.lvm("data"), "data", "b")
        volume_groups.catch_up()
    assert sum("can't start new thread" in one for one in caplog.messages) == 1
    volume_groups.catch_up()
    expect.soon(lambda: written(fake, "a") == EXT4)


def test_a_service_that_ends_writes_what_there_was_no_thread_for_if_it_can(
    volume_groups: VolumeGroups, fake: FakeHost
) -> None:
    create(fake, "a")
    with expect.no_threads():
        with volume_groups.hold("data"):
            volume_groups.add_tags_later("data", "a", EXT4)
        volume_groups.stop()
        assert written(fake, "a") == {}
    volume_groups.stop()
    assert written(fake, "a") == EXT4


def test_a_tag_that_lvm2_refuses_keeps_no_other_from_being_written(
    volume_groups: VolumeGroups, fake: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ("ext4", "xfs", "btrfs")
    for one in kinds:
        create(fake, one)
    is_refused = "--addtag carver.formatted=xfs"
    fake.intercept = lambda words: (
        Result(5, "", "what lvm2 says of it") if is_refused in " ".join(words) else None
    )
    with volume_groups.hold("data"):
        for one in kinds:
            volume_groups.add_tags_later("data", one, {tag.FORMATTED: one})
    expect.soon(lambda: "what lvm2 says of it" in caplog.text)
    assert [bool(written(fake, one)) for one in kinds] == [True, False, True]
    assert [known(volume_groups, one)[tag.FORMATTED] for one in kinds] == list(kinds)
    before = len(commands(fake, "lvchange"))
    fake.intercept = lambda _words: None
    volume_groups.run_deferred()
    assert written(fake, "xfs") == {tag.FORMATTED: "xfs"}
    assert len(commands(fake, "lvchange")) == before + 1
