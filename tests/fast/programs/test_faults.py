"""What `make faults` is made of: the table, and the kill at a chosen step."""

import json
from pathlib import Path

import pytest
from faults.killable import Kill
from faults.row import Row


@pytest.mark.parametrize(
    ("row", "is_well"),
    [
        (Row("disk", 1, "FAILED_PRECONDITION, and all there when it is back", 0, 0), True),
        (Row("disk", 1, "FAILED: no answer", 0, 0), False),
        (Row("disk", 1, "as promised", 1, 0), False),
        (Row("disk", 1, "as promised", 0, 1), False),
    ],
)
def test_a_row_is_well_where_nothing_was_lost_or_leaked_and_it_came_out_as_promised(
    row: Row, is_well: bool
) -> None:
    assert row.is_well is is_well


def test_a_process_is_killed_at_the_planned_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_self: Kill) -> None:
        raise Killed

    monkeypatch.setattr(Kill, "_die", die)
    plan = tmp_path / "plan"
    plan.write_text(json.dumps([1, True]))
    switch, done = Kill(), list[int]()
    switch.arm(plan)
    assert not plan.exists()

    switch._step("first", lambda: done.append(0))
    with pytest.raises(Killed):
        switch._step("second", lambda: done.append(1))
    assert done == [0]
