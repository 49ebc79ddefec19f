"""What was left in a group is taken up once it answers."""

import threading
from pathlib import Path

import expect
import pytest
from fakes.host import FakeHost

from agent.engine.engines import Engines
from agent.service.resumption import Resumption


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    fake = FakeHost(tmp_path)
    for one in ("a", "b"):
        fake.lvm2.add_group(one)
    return Engines(fake.lvm, fake.disks, fake.devices, ["a", "b"])


def test_a_group_for_which_there_was_no_thread_is_taken_up_by_the_next_step(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_up: list[str] = []
    resumption = Resumption(engines, taken_up.append)

    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        for attempt in (resumption.begin, resumption.step):
            with pytest.raises(RuntimeError):
                attempt()
    assert taken_up == []
    resumption.step()
    expect.soon(lambda: sorted(taken_up) == ["a", "b"])
