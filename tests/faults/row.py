"""A row of the table: how a fault came out."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One fault: how often it was tried, what came of it, what was lost or left over."""

    fault: str
    times: int
    outcome: str
    lost: int
    leaked: int
    seconds: float = 0

    @property
    def is_well(self) -> bool:
        return not (self.lost or self.leaked or self.outcome.startswith("FAILED:"))

    def line(self) -> str:
        """The row as a line that another process reads."""
        return json.dumps(asdict(self))
