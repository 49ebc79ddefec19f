"""The table of `make faults`: what in it is well."""

import pytest
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
