"""The demo's parts that need no guest: its table, its writer, who takes the machine down."""

import io
from pathlib import Path

import pytest

from agent.cli import terminal
from vagrant import lab
from vagrant.inside import demo, show, witness


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (64 << 20, "64 MiB"), (10_900 << 20, "10.6 GiB")],
)
def test_sizes_are_written_as_people_write_them(size_bytes: int, text: str) -> None:
    assert terminal.human(size_bytes) == text


def test_a_row_in_a_pipe_fits_a_hundred_columns_without_escapes() -> None:
    out = io.StringIO()
    table = show.Show(show.console(out))
    table.heading("the main job")
    with table.step("give it to pod B, read only") as step:
        step.call("NodePublishVolume", lambda: None)
        step.seen = "253:0 / fs-staging rw,relatime - ext4"
    table.closing()

    lines = out.getvalue().splitlines()
    row = next(line for line in lines if line.startswith(" 1 give it to pod B, read only"))
    assert "NodePublishVolume" in row
    assert "253:0 / fs-staging rw,relatime - ext4" in row
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in out.getvalue()
    assert lines[-1].startswith("main job: 1 steps, 1 RPCs, ")


def test_a_step_that_fails_is_shown_and_is_a_surprise() -> None:
    out = io.StringIO()
    table = show.Show(show.console(out))
    with pytest.raises(witness.Surprise) as caught, table.step("write") as step:
        step.time(Path("/nowhere/file").write_bytes, b"")

    table.surprise(caught.value, ["deleted a volume"])
    assert "✗ write" in out.getvalue()
    assert "expected: write: no error" in out.getvalue()
    assert "No such file or directory" in out.getvalue()
    assert out.getvalue().endswith("deleted a volume\n")


def test_the_writer_s_checksum_is_that_of_its_file(tmp_path: Path) -> None:
    with demo.Writer(tmp_path / "log") as writer:
        writer.wait_for_one_more()
        digest = writer.finish()
    assert writer.records > 0
    assert witness.checksum(tmp_path / "log") == digest


def test_a_write_that_fails_while_the_writer_runs_is_a_surprise(tmp_path: Path) -> None:
    with demo.Writer(tmp_path / "missing" / "log") as writer:
        with pytest.raises(witness.Surprise):
            writer.wait_for_one_more()
        with pytest.raises(witness.Surprise):
            writer.finish()


@pytest.mark.parametrize("was_there", [True, False])
def test_a_machine_that_was_up_before_the_demo_stays_up(
    was_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(lab, "_runs", lambda: was_there)
    monkeypatch.setattr(lab, "_session", lambda words: 3)
    for name in ("up", "sync", "down"):
        monkeypatch.setattr(lab, name, lambda name=name: done.append(name))

    assert lab._present("demo.py") == 3
    assert done == ["up", "sync"] + ([] if was_there else ["down"])
