"""The end of a process in which something hangs: in time, with what could be done, and its code."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import expect
import grpc
import pytest

from agent.core import sockets
from agent.csi.client import Client, block, mounted
from agent.work import background

MIB = 1 << 20
HERE = Path(__file__).parent
SUPPORT = HERE.parents[1] / "support"
ROOT = HERE.parents[2]
# What the parts have, in the process below; without a bound it is for ever.
BOUND_SECONDS = 30


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A service in which a wipe hangs in group a, and a tag is promised to a volume of group b."""
    words = (sys.executable, str(HERE / "ending_service.py"), str(tmp_path))
    path = {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    with (tmp_path / "out").open("w") as out, (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(words, env={**os.environ, **path}, stdout=out, stderr=log)
    try:
        socket = tmp_path / "csi.sock"
        # It is there a moment before the service listens.
        expect.soon(lambda: sockets.is_served(socket), (tmp_path / "log").read_text)
        begin(tmp_path)
        yield running
    finally:
        running.kill()
        running.wait()


def begin(directory: Path) -> None:
    with Client(directory / "csi.sock") as client:
        doomed = client.create("doomed", 16 * MIB, block(), parameters={"class": "sick"})
        kept = client.create("kept", 16 * MIB, mounted("ext4"), parameters={"class": "sound"})
        client.stage(kept, directory / "staging", mounted("ext4"))
        with suppress(grpc.RpcError):
            client.delete(doomed.volume_id)
    assert "hangs" in (directory / "out").read_text()
    assert not is_written(directory)


def is_written(directory: Path) -> bool:
    return "carver.formatted=ext4" in (directory / "out").read_text()


@pytest.mark.starts_programs
def test_a_hanging_wipe_does_not_keep_the_process_from_ending(
    process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(BOUND_SECONDS) == 0
    assert is_written(tmp_path), "what was promised is on the disk"
    assert not (tmp_path / "csi.sock").exists()
    log = (tmp_path / "log").read_text()
    assert "volume group a: background work has not ended in time" in log
    # A thread of a loop keeps no process from its end.
    assert "ending the process with threads that hang: " not in log


@pytest.mark.starts_programs
def test_a_hanging_wipe_does_not_keep_a_process_without_a_socket(
    process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    (tmp_path / "csi.sock").unlink()
    assert process.wait(BOUND_SECONDS) == 1
    assert is_written(tmp_path)
    assert "csi.sock: it was deleted" in (tmp_path / "log").read_text()


def test_a_hanging_part_is_logged_and_blocks_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over, done = threading.Event(), threading.Event()

    def fail() -> None:
        raise OSError("no luck")

    began = time.monotonic()
    works = {"the first": lambda: over.wait(60), "the second": done.set, "the third": fail}
    background.run_all(works, 0.2)
    assert time.monotonic() - began < 20
    over.set()
    assert done.is_set()
    assert "the first has not ended after 0.2 s" in caplog.text
    assert "the third has not ended well: no luck" in caplog.text
    assert "the second" not in caplog.text


def test_a_part_without_a_thread_is_logged_as_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    with expect.no_threads():
        background.run_all({"the first": lambda: None}, 60)
    assert "the first has not ended well: can't start new thread" in caplog.text
