"""What was left in a group is taken up once it answers."""

import threading
from pathlib import Path

import configured
import expect
import pytest
import serving
from fakes.host import FakeHost

from agent.core.volume_groups import VolumeGroups
from agent.daemon import server, startup
from agent.daemon.startup import Recovery


@pytest.fixture
def volume_groups(tmp_path: Path) -> VolumeGroups:
    fake = FakeHost(tmp_path)
    for one in ("a", "b"):
        fake.lvm2.add_group(one)
    return VolumeGroups(fake.lvm, fake.disks, fake.devices, ["a", "b"])


def test_a_group_for_which_there_was_no_thread_is_taken_up_by_the_next_step(
    volume_groups: VolumeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_up: list[str] = []

    def take_up(name: str) -> bool:
        taken_up.append(name)
        return True

    own = Recovery(volume_groups, take_up)

    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        for attempt in (own.begin, own.step):
            with pytest.raises(RuntimeError):
                attempt()
    assert taken_up == []
    own.step()
    expect.soon(lambda: sorted(taken_up) == ["a", "b"])


def test_a_group_that_comes_while_it_is_looked_for_in_vain_is_taken_up_by_a_later_step(
    volume_groups: VolumeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_RETRY_SECONDS", 0.0)
    tried: list[str] = []

    def take_up(name: str) -> bool:
        tried.append(name)
        was_there = tried.count(name) > 1
        # A call has a look just then, and meets it.
        for one in volume_groups:
            one.state()
        return was_there

    own = Recovery(volume_groups, take_up)
    own.begin()
    expect.soon(lambda: sorted(tried) == ["a", "b"])
    assert all(one.answers for one in volume_groups)

    def step_until_both_are_taken_up() -> bool:
        own.step()
        return sorted(tried) == ["a", "a", "b", "b"]

    expect.soon(step_until_both_are_taken_up)
    own.step()
    assert len(tried) == 4


def test_what_is_left_in_a_group_that_is_away_is_not_taken_for_taken_up(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path)
    config = configured.carver(tmp_path, "late")
    service = serving.start(config, fake)
    try:
        assert not server.resume(service, "late")
        fake.lvm2.add_group("late")
        assert server.resume(service, "late")
    finally:
        service.stop()
