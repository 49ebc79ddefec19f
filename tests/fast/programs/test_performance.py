"""`make bench`, but for its times: arithmetic, rounds, document, tables, picture, own code."""

import contextlib
import io
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import configured
import nodes
import pytest
from fakes.host import FakeHost
from nodes import Node
from performance import (
    document,
    group,
    measure,
    own,
    plot,
    rows,
    run,
    service,
    streamed,
    tables,
    throughput,
)
from performance.document import Document, Run
from performance.measure import Time
from performance.rows import Commands, Row, Samples
from rich.console import Console

from agent.csi.client import Client

MACHINE = {
    "cores": 2,
    "memory_mib": 2048,
    "architecture": "x86_64",
    "virtualization": "qemu",
    "kernel": "6.1.0",
    "python": "3.11.2",
    "grpcio": "1.85.1",
    "lvm2": "2.03.16",
}
SECTION = """
\t\t{name} {{
\t\t\tid = "bbbbbb-0000-0000-0000-0000-0000-{uuid}"
\t\t\ttags = ["carver.name={tag}"]
\t\t\tsegment1 {{
\t\t\t\textent_count = {extents}
\t\t\t\t{segment}
\t\t\t}}
\t\t}}
"""
VOLUME = SECTION.format(
    name="vol-many-0000",
    uuid="bbbbbb",
    tag="many-0000",
    extents=2,
    segment='stripes = ["pv0", 5]',
)
AREA = SECTION.format(
    name="snap-shot-0000",
    uuid="aaaaaa",
    tag="shot-0000",
    extents=1,
    segment='stripes = ["pv0", 7]',
)
TIE = SECTION.format(
    name="snapshot0",
    uuid="cccccc",
    tag="",
    extents=2,
    segment='cow_store = "snap-shot-0000"',
)


def metadata(*sections: str) -> str:
    return f"contents = 1\ncarver_bench {{\n\tlogical_volumes {{\n{''.join(sections)}\t}}\n}}\n"


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sampled(**seconds: list[float]) -> Samples:
    return Samples({getattr(rows, name): values for name, values in seconds.items()})


def row(name: str, value: float, commands: Commands | None = None) -> Row:
    promise = rows.promised(name)
    return Row(
        *(name, promise.beside, promise.unit, value, promise.target, 3),
        carver_ms=100.0,
        beside_ms=50.0,
        commands=commands,
    )


@pytest.fixture
def measured() -> Run:
    """A run that keeps one target and misses another."""
    found = [row(rows.CREATE, 0.5, Commands(0, 1)), row(rows.STAGE, 2.5), row(rows.PROBE, 20)]
    return Run("as configured", "", MACHINE, found)


# Arithmetic


def test_a_ratio_is_that_of_the_medians() -> None:
    samples = sampled(CREATE=[0.5, 9.0, 0.4], LVCREATE=[1.0, 1.0, 0.1])
    samples.commands[rows.CREATE] = Commands(1, 2)

    [found] = rows.of_pairs(samples)

    assert (found.name, found.beside, found.value) == (rows.CREATE, rows.LVCREATE, 0.5)
    assert (found.samples, found.carver_ms, found.beside_ms) == (3, 500, 1000)
    assert found.commands == Commands(1, 2)
    assert found.is_met
    # A call without its bare commands has no ratio.
    assert list(rows.of_pairs(sampled(CREATE=[1.0], VGS=[1.0]))) == []


def test_a_life_is_the_sum_of_its_calls_without_repeats_and_growth() -> None:
    samples = Samples()
    for call in rows.LIVED:
        samples.seconds[call], samples.seconds[rows.BESIDE[call]] = [3.0], [2.0]
    samples.seconds[rows.REPEATED] = samples.seconds[rows.EXPAND] = [100.0]

    [found] = rows.of_life(samples)

    assert found.value == 1.5
    assert found.is_met is False
    del samples.seconds[rows.STATS]
    assert list(rows.of_life(samples)) == []


def test_growth_is_compared_to_lvcreate_s_own() -> None:
    empty = sampled(CREATE=[1.0], CAPACITY=[0.1], LVCREATE=[0.5])
    full = sampled(CREATE=[3.0], CAPACITY=[0.1], LVCREATE=[1.0])

    found = {one.name: one for one in rows.of_growth(400, empty, full)}

    assert found[rows.grown(rows.CREATE, 400)].value == 1.5
    assert found[rows.grown(rows.CREATE, 400)].is_met is False
    assert found[rows.grown(rows.CAPACITY, 400)].value == 0.5
    assert rows.grown(rows.STAGE, 400) not in found


@pytest.mark.parametrize(
    ("name", "values", "value", "is_met"),
    [
        (rows.PROBE_COMMANDS, [0], 0, True),
        (rows.PROBE_COMMANDS, [1], 1, False),
        # It has no target.
        (rows.START, [3.0, 5.0, 4.0], 4.0, None),
    ],
)
def test_a_figure_is_the_median_and_compared_with_its_target(
    name: str, values: list[float], value: float, is_met: bool | None
) -> None:
    [found] = rows.of_value(name, values)
    assert (found.value, found.is_met) == (value, is_met)


def test_a_step_that_fails_is_no_sample() -> None:
    samples = Samples()

    def fail() -> None:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        samples.time(rows.CREATE, fail, Clock())
    assert not samples.has(rows.CREATE)


def test_every_promise_has_a_name_of_its_own() -> None:
    names = [one.name for one in (*rows.PROMISES, *rows.OWN)]
    assert len(set(names)) == len(names)
    assert set(rows.BESIDE) <= set(names)


# Throughput


def test_every_kind_of_volume_meets_every_moment_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[tuple[str, str]] = []
    kinds = (rows.PLAIN, rows.ENCRYPTED, rows.BYPASSED, rows.BY_HAND)

    @contextmanager
    def devices(_client: object, _place: Path, _group: str) -> Iterator[dict[str, str]]:
        yield {one: one for one in kinds}

    monkeypatch.setattr(throughput, "devices", devices)
    monkeypatch.setattr(throughput, "write", lambda path: met.append(("written", path)))
    monkeypatch.setattr(throughput, "_read", lambda path: met.append(("read", path)))
    samples = Samples()
    throughput.measure(cast(Client, None), Path(), "data", iter(range(3)), samples)
    assert [kind for action, kind in met[:4] if action == "written"] == list(kinds)
    assert [kind for _, kind in met[8:12]] == [*kinds[1:], kinds[0]]
    found = {one.name: one.beside for one in rows.of_pairs(samples)}
    name = "16 MiB read, encrypted"
    assert found[name] == "16 MiB read, encrypted by hand"
    assert len(samples.seconds[name]) == 3
    assert len(found) == 6


# Rounds


def test_a_round_is_begun_only_if_it_fits_but_for_the_first() -> None:
    assert list(Time(0, Clock()).rounds(5)) == [0]
    clock, made = Clock(), []
    for number in Time(100, clock).rounds(9):
        made.append(number)
        clock.now += 30
    assert made == [0, 1, 2]


def test_a_share_is_no_more_than_what_is_left() -> None:
    clock = Clock()
    whole = Time(100, clock)
    assert whole.share(0.3).left_seconds() == 30
    clock.now = 90
    assert whole.share(0.3).left_seconds() == 10
    clock.now = 200
    assert whole.left_seconds() == 0


# The document


def test_the_document_is_read_again_as_it_was_written(measured: Run) -> None:
    text = Document("2026-01-31", [measured]).text()
    assert Document.parse(text).runs == [measured]
    assert json.loads(text)["runs"][0]["rows"][1]["is_met"] is False


def test_only_the_kernel_s_version_is_recorded_of_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(document, "_said", lambda *_words: "")
    monkeypatch.setattr("platform.release", lambda: "6.18.44-builder-17")
    monkeypatch.setattr(own, "measure", lambda _rounds: [])
    assert document.machine().keys() == MACHINE.keys()
    assert own.run(1).machine["kernel"] == "6.18"
    assert document.machine()["kernel"] == "6.18.44-builder-17"


# Tables


def test_a_missed_target_is_marked(measured: Run) -> None:
    lines = {line.split(" | ")[0]: line for line in tables.markdown([measured]).splitlines()}

    assert "| ≤ 0.8 | 0.5 | 0 + 1 |" in lines[f"| {rows.CREATE}"]
    assert "**2.5, missed**" in lines[f"| {rows.STAGE}"]
    assert "| mkfs.ext4 + mount | ≤ 1.3 |" in lines[f"| {rows.STAGE}"]
    # What no run has measured has no row.
    assert f"| {rows.UNSTAGE}" not in lines


def test_what_one_run_has_not_measured_is_a_hyphen_there(measured: Run) -> None:
    other = Run("sessions off", "", MACHINE, [row(rows.UNSTAGE, 1.0)])
    lines = {line.split(" | ")[0]: line for line in tables.markdown([measured, other]).splitlines()}
    assert lines[f"| {rows.UNSTAGE}"].endswith(f"| {tables.NOTHING} | 1 | {tables.NOTHING} |")


def test_only_the_text_between_the_marks_is_replaced(measured: Run) -> None:
    page = f"# Title\n\n{tables.BEGIN}\nold\n{tables.END}\n\nmore\n"
    once = tables.recorded(page, [measured])

    assert once.startswith(f"# Title\n\n{tables.BEGIN}\n\n")
    assert once.endswith(f"\n{tables.END}\n\nmore\n")
    assert "old" not in once
    assert tables.recorded(once, [measured]) == once
    with pytest.raises(ValueError, match="figures"):
        tables.recorded("# Title\n", [measured])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.15, "ratio", "0.15"),
        (2.9512, "ratio", "2.95"),
        (1.0, "ratio", "1"),
        (55.04, "MiB", "55 MiB"),
        (12.34, "s", "12.3 s"),
        (1116.2, "µs", "1116 µs"),
        (0.0, "commands", "0"),
    ],
)
def test_numbers_have_no_more_digits_than_count(value: float, unit: str, text: str) -> None:
    assert tables.number(value, unit) == text


def test_the_page_and_its_picture_are_of_what_was_recorded_last() -> None:
    last = document.written(run.RECORD)
    runs = [] if last is None else last.runs
    page = run.PAGE.read_text()
    assert tables.recorded(page, runs) == page
    assert plot.svg(runs) == run.PICTURE.read_text()


# The service that is measured


def test_the_settings_of_a_pass_stand_before_the_classes(tmp_path: Path) -> None:
    text = service.configuration(tmp_path, "data", 'wipe = "none"', "warning")
    assert text.index("wipe") < text.index("[[classes]]")


def test_programs_and_commands_of_a_session_are_counted_apart() -> None:
    events: list[dict[str, object]] = [
        {"message": "command", "command": "mkfs.ext4"},
        {"message": "command", "command": "lvm lvs", "session": True},
        {"message": "call"},
    ]
    log = "\n".join(["no JSON", *map(json.dumps, events)])
    assert service.counted(log) == Commands(1, 1)


@pytest.mark.parametrize(
    ("multiply", "text", "name", "starts"),
    [
        (group.multiplied, metadata(VOLUME), "vol-many", (5, 7, 9)),
        (group.multiplied_snapshot, metadata(VOLUME, AREA, TIE), "snap-shot", (7, 9, 10)),
    ],
    ids=["volume", "snapshot"],
)
def test_metadata_are_multiplied_with_names_uuids_and_extents_of_their_own(
    multiply: Callable[[str, int], str], text: str, name: str, starts: tuple[int, ...]
) -> None:
    many = multiply(text, 3)
    for number, start in enumerate(starts):
        section = many.split(f"\t\t{name}-{number:04} {{")[1].split("\n\t\t}\n")[0]
        assert f"carver.name={name.partition('-')[2]}-{number:04}" in section
        assert f'"pv0", {start}]' in section
        if multiply is group.multiplied_snapshot:
            tie = many.split(f"\t\tsnapshot{number} {{")[1].split("\n\t\t}\n")[0]
            assert f'cow_store = "snap-shot-{number:04}"' in tie
    ids = [line for line in many.splitlines() if "id = " in line]
    assert len(set(ids)) == len(ids)
    assert many.count("{") == many.count("}")
    with pytest.raises(ValueError, match=r"many-0000|shot-0000"):
        multiply(metadata(), 3)


def test_many_snapshots_are_compared_with_none_and_with_an_idle_node() -> None:
    empty, full = Samples(), Samples()
    empty.seconds[rows.CAPACITY] += [0.02, 0.02]
    full.seconds[rows.CAPACITY] += [0.03]
    found = {one.name: one for one in rows.of_snapshots(empty, full, 4.0)}
    assert found[rows.AMONG_SNAPSHOTS].value == pytest.approx(1.5)
    assert found[rows.IDLE].is_met is False
    assert tables.value(found[rows.IDLE]) == "4 %, missed"


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        ("3", "cannot measure group data: it has 3 logical volumes; give an empty group"),
        (None, "cannot measure group data: Volume group"),
    ],
)
def test_a_group_that_is_given_must_be_there_and_empty(
    monkeypatch: pytest.MonkeyPatch, counted: str | None, sentence: str
) -> None:
    def run_(*words: str) -> str:
        assert words[-1] == "data"
        if counted is None:
            raise subprocess.CalledProcessError(5, words, "", '  Volume group "data" not found\n')
        return f"  {counted}\n"

    monkeypatch.setattr(group, "run", run_)
    with pytest.raises(group.NotEmpty, match=sentence):
        group.require_empty("data")
    monkeypatch.setattr(group, "run", lambda *_words: "  0\n")
    group.require_empty("data")


def test_in_a_given_group_nothing_is_measured_that_fills_it_or_needs_a_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    for name in ("_among", "_at_once", "_beside_work", "_beside_snapshots", "_beside_limited"):
        monkeypatch.setattr(measure.Pass, name, lambda *_words, name=name: asked.append(name))
    monkeypatch.setattr(measure.Pass, "_counted", lambda _self: Samples())
    monkeypatch.setattr(measure.Pass, "_alone", lambda _self, _counts: (Samples(), []))
    for name in ("_deltas", "_streams", "_throughput"):
        monkeypatch.setattr(measure.Pass, name, lambda _self, _limit: Samples())
    monkeypatch.setattr(group, "made", Mock(side_effect=AssertionError))
    client, console = Mock(), Console(file=io.StringIO())
    client.volumes.return_value = [Mock(volume_id="data@x/vol-many-0000")]
    served = contextlib.nullcontext(Mock(client=client))
    monkeypatch.setattr(measure.Pass, "_served", lambda _self: served)

    found = list(measure.Pass(tmp_path, "", Time(100), console, "data").rows())

    assert (found, asked) == ([], [])
    client.delete.assert_called_once_with("data@x/vol-many-0000")


def test_further_passes_are_named_with_their_line_of_configuration() -> None:
    assert run.passes(['raw:wipe = "none"'])[1:] == [("raw", 'wipe = "none"')]
    with pytest.raises(ValueError, match="NAME:LINE"):
        run.passes(["wipe"])


# The own code


def test_the_own_code_of_a_whole_life_is_measured_with_its_commands(tmp_path: Path) -> None:
    bench = own.Bench(tmp_path)
    try:
        bench.live(0)
        bench.list(12)
    finally:
        bench.close()

    measured = {name for name, seconds in bench.samples.seconds.items() if seconds}
    assert {one.name for one in rows.OWN if "ListVolumes" not in one.name} <= measured
    assert bench.samples.commands[rows.own(rows.PUBLISH)] == Commands(0, 0)
    assert bench.host.lvm2.groups["data"].volumes.keys() == {
        f"vol-listed-{number:04}" for number in range(12)
    }


def test_the_fakes_time_is_put_aside_once() -> None:
    aside = own.Aside()
    inner = aside.wrapped(lambda: sum(range(10_000)))
    outer = aside.wrapped(lambda: inner())
    outer()
    once = aside.seconds
    assert once > 0
    inner()
    assert aside.seconds > once


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    host = FakeHost(tmp_path)
    with nodes.made(host, configured.carver(tmp_path), tmp_path, "here") as made:
        yield made


@pytest.mark.parametrize("fails", ["", "dd", "the stream"])
def test_a_stream_is_timed_beside_dd_and_nothing_of_it_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    size, changed, at = 32, 24, 4
    monkeypatch.setattr(streamed, "_SIZE_MIB", size)
    monkeypatch.setattr(streamed, "_ROOM", {"size": f"{size}MiB"})
    order: list[str] = []

    def fill(path: str) -> None:
        node.host.write_bytes(path, at << 20, random.Random(1).randbytes(changed << 20))

    def dd(source: str, target: str) -> None:
        order.append("dd")
        if fails == "dd":
            raise RuntimeError("it fails")
        with node.host.kernel.opened(source) as opened:
            data = opened.read(at << 20, 1 << 20)
        node.host.write_bytes(target, at << 20, data)
        assert node.content("vol-bench-copied", size << 20)[at << 20 :][: 1 << 20] == data
        if order == ["settled", "settled", "dd"]:
            # The stream was first: all of it is there.
            sent = node.content("snap-bench-second", size << 20)
            assert node.content("vol-bench-streamed", size << 20) == sent

    monkeypatch.setattr(streamed, "_fill", fill)
    monkeypatch.setattr(streamed, "_dd", dd)
    monkeypatch.setattr(streamed, "_forget", lambda: None)
    if fails == "the stream":
        monkeypatch.setattr("agent.extras.transfer.streams_command.receive", refuse)
    samples = Samples()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        streamed.measure(node.at, range(2), samples, lambda: order.append("settled"))
    if not fails:
        assert [len(samples.seconds[one]) for one in (rows.SENT, rows.DD)] == [2, 2]
        assert len(samples.seconds[rows.COMPARED]) == 2
        one = ["settled", "settled", "dd", "settled"]
        assert order == [*one, *one]
    assert node.names() == set()


def refuse(*_words: object) -> None:
    raise RuntimeError("it wants no more")


def test_a_neighbour_s_latest_writes_are_compared() -> None:
    samples = Samples()
    samples.seconds[rows.WRITES_ALONE] = [0.001] * 98 + [0.002, 0.004]
    samples.seconds[rows.WRITES_ERASING] = [0.001] * 90 + [0.006] * 10
    samples.seconds[rows.ERASED_ALONE], samples.seconds[rows.ERASED_BESIDE] = [2.0], [3.0]
    found = {one.name: one for one in rows.of_neighbour(samples)}
    assert found[rows.WRITES_ERASING].value == pytest.approx(1.5)
    assert found[rows.WRITES_ERASING].is_met is True
    assert found[rows.ERASED_BESIDE].value == pytest.approx(1.5)
    assert rows.WRITES_COPYING not in found
