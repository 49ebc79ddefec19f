"""What of a call's time its trace explains: waits, programs, the kernel's operations."""

import json
import logging
import re
import threading
import time
from pathlib import Path

import configured
import grpc
import pytest
import serving
from fakes.host import FakeHost
from serving import machine

from agent.cli.volume_verbs import VolumeVerbs
from agent.core import trace
from agent.core.trace import KERNEL, KINDS, PROGRAM, WAIT, Trace, Traces
from agent.csi.client import Client, mounted
from agent.work.background import DetachedTasks
from agent.work.locks import GroupLock, VolumeLocks
from mount.command import Finished, Result


def traced() -> Trace:
    return Trace("NodeStageVolume", "data@1/vol-a")


def steps(made: Trace) -> list[tuple[str, str]]:
    return [(one.kind, one.what) for one in made.steps]


def test_a_program_is_a_step_by_its_name_without_its_arguments() -> None:
    def run(*_words: str) -> Result:
        time.sleep(0.002)
        return Result(0, "", "")

    made = traced()
    with trace.within(made):
        trace.traced_run(run)("lvm", "lvcreate", "--name", "secret")
        trace.traced_run(run)("env", "A=b", "mkfs.ext4", "/dev/data/vol-a")
        trace.traced_observer(lambda _: None)(Finished(("lvm", "lvs"), 0, 1.5))
    assert steps(made) == [(PROGRAM, "lvm lvcreate"), (PROGRAM, "mkfs.ext4"), (PROGRAM, "lvm lvs")]
    assert made.by_kind[PROGRAM] > 1.5


def test_a_failing_step_is_timed_and_its_error_passed_on() -> None:
    class Kernel:
        def mount(self) -> None:
            time.sleep(0.002)
            raise OSError(5, "Input/output error")

    made = traced()
    with trace.within(made), pytest.raises(OSError, match="Input/output error"):
        trace.traced(Kernel()).mount()
    assert steps(made) == [(KERNEL, "mount")]


def test_work_outside_a_call_is_no_step() -> None:
    with trace.step(WAIT, "volume"):
        pass
    assert trace.traced(Path("/")).is_dir()


def test_the_traced_form_of_a_method_is_made_once_and_calls_what_the_object_has_now() -> None:
    class Kernel:
        def __init__(self) -> None:
            self.mounted = 0

        def mount(self) -> str:
            return "first"

    kernel = Kernel()
    traced_kernel = trace.traced(kernel)
    assert traced_kernel.mount is traced_kernel.mount
    made = traced()
    with trace.within(made):
        assert traced_kernel.mount() == "first"
    assert set(made.by_kind) == {KERNEL}
    vars(kernel)["mount"] = lambda: "second"
    kernel.mounted = 1
    assert (traced_kernel.mount(), traced_kernel.mounted) == ("second", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_steps_that_take_next_to_no_time_only_programs_are_listed(kind: str) -> None:
    made = traced()
    made.add(kind, "short", 0.0)
    made.add(kind, "long", 0.5)
    listed = ["short", "long"] if kind == PROGRAM else ["long"]
    assert steps(made) == [(kind, name) for name in listed]


def test_steps_are_bounded_and_their_time_is_not() -> None:
    made = traced()
    for _ in range(1000):
        made.add(PROGRAM, "lvm lvs", 1.0)
    assert len(made.steps) < 100
    assert made.by_kind == {PROGRAM: 1000.0}


def test_the_slowest_of_the_last_calls_come_first() -> None:
    traces = Traces()
    for seconds in range(1000):
        made = Trace("CreateVolume", f"vol-{seconds}")
        made.add(WAIT, "volume", 1.0)
        made.began_seconds -= seconds % 7
        traces.end(made, "OK")
    slowest = traces.slowest(20)
    assert len(slowest) == 20
    assert all(one.seconds >= 6 for one in slowest)
    # Long ago, others may have been slower.
    assert int(slowest[-1].volume.removeprefix("vol-")) > 500


def test_waits_for_the_volume_and_the_group_are_steps() -> None:
    locks, group = VolumeLocks(), GroupLock("volume group data")
    locks.grace_seconds = 20
    held, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with locks.hold("vol-a"), group.hold():
            held.set()
            go_on.wait(20)

    holder = threading.Thread(target=other)
    holder.start()
    assert held.wait(20)
    threading.Timer(0.05, go_on.set).start()
    made = traced()
    with trace.within(made), locks.hold("vol-a"), group.hold():
        pass
    holder.join(20)
    assert (WAIT, "volume") in steps(made)
    again = traced()
    with trace.within(again), locks.hold("vol-a"), group.hold():
        pass
    assert not again.steps


def test_a_call_s_steps_are_kept_logged_on_debug_and_shown_by_carver_trace(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A fake's programs take no time.
    monkeypatch.setattr(trace, "_SHORTEST_SECONDS", 0.0)
    fake = FakeHost(tmp_path)
    config = configured.carver(tmp_path, fake.new_group(100))
    caplog.set_level(logging.DEBUG, "carver.calls")
    service = serving.start(config, fake)
    try:
        with Client(config.endpoint) as client:
            volume = client.create("a", 32 << 20, mounted())
            client.stage(volume, tmp_path / "staging", mounted())
            shown = VolumeVerbs(client, config, machine(fake))
            shown.show_slowest(5, as_json=False)
            text = capsys.readouterr().out
            shown.show_slowest(1, as_json=True)
            [slowest] = json.loads(capsys.readouterr().out)
            shown.show_slowest(1, "CreateVolume", as_json=True)
            [of_method] = json.loads(capsys.readouterr().out)
            with pytest.raises(grpc.RpcError, match="most"):
                client.slowest_calls(0)
    finally:
        service.stop()
    [created] = [one for one in service.traces.slowest(9) if one.method == "CreateVolume"]
    assert created.code == "OK"
    assert (PROGRAM, "lvm lvcreate") in steps(created)
    [staged] = [one for one in service.traces.slowest(9) if one.method == "NodeStageVolume"]
    assert (WAIT, "mkfs") in steps(staged)
    assert created.seconds >= sum(one.seconds for one in created.steps)
    lines = [one.fields for one in caplog.records if one.msg == "call"]  # type: ignore[attr-defined]
    assert any("lvm lvcreate" in json.dumps(one.get("steps", "")) for one in lines)
    assert of_method["method"] == "CreateVolume"
    assert " CreateVolume " in text
    assert ": program lvm lvcreate " in text
    assert slowest["steps"]
    assert slowest["seconds"] >= max(one["seconds"] for one in slowest["steps"])


def test_mkfs_is_a_wait_of_the_call_that_needs_it() -> None:
    made, work = traced(), DetachedTasks()
    with trace.within(made):
        work.do("vol-a", "data", "mkfs", lambda: time.sleep(0.05), lambda: None)
    assert steps(made) == [(WAIT, "mkfs")]


def test_every_wait_is_in_the_table_with_its_file_and_function() -> None:
    root, table = Path(__file__).parents[3], str(trace.__doc__)
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    listed = {one for row in rows for one in re.findall(r"[\w/]+\.py", row)}
    files = {str(one.relative_to(root)): one.read_text() for one in root.glob("agent/**/*.py")}
    waiting = {name: text for name, text in files.items() if "trace.WAIT" in text}
    assert waiting.keys() - {"agent/core/trace.py"} <= listed <= files.keys()
    for name, text in waiting.items():
        for what in re.findall(r'trace\.WAIT, "([^"]+)"', text):
            assert re.search(rf"^\| {what} ", table, re.M), f"{name}: {what}"
    for row in rows:
        for name, kind, function in re.findall(r"([\w/]+\.py): (?:(\w+)\.)?(\w+)", row):
            assert not kind or f"class {kind}" in files[name], row
            assert f"def {function}(" in files[name], row
