"""What was tried in which cluster: a file of outcomes, and the tables that are made of it.

docs/testing.md has a row for each check, README.md one for each cluster. `run.py --record` adds the
outcomes of a run to those of earlier runs in the same configuration, and e2e.py those of the suite
of Kubernetes. A later outcome takes the place of an earlier one. As a program this module writes
both tables anew.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import checks, lab_checks

ROOT = Path(__file__).resolve().parents[2]
TRIALS = Path(__file__).with_name("trials.json")
DOCUMENT = ROOT / "docs" / "testing.md"
FIRST_PAGE = ROOT / "README.md"
# Values that only change what is logged, or what `mode` and `nodes` say already.
_WITHOUT_EFFECT = frozenset({"recording", "sidecars"})
_NOT_TRIED = "not tried"
# The name under which e2e.py records Kubernetes' own suite (its outcome has the numbers of specs).
SUITE = "Kubernetes' e2e suite"
_EVERY = (*checks.ALL, *lab_checks.ALL)


@dataclass(frozen=True)
class Configuration:
    """In what kind of cluster something was tried."""

    kubernetes: str
    mode: str
    nodes: int
    storage_class: str
    # The files of tests/cluster/values with which Carver was installed, and feature gates.
    values: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The head of a column of the table."""
        parts = [
            f"{self.mode}, {self.nodes} nodes, class `{self.storage_class}`, Kubernetes"
            f" {self.kubernetes.removeprefix('v')}",
            *(f"values `{one}`" for one in self.values),
            *(f"`{one}`" for one in self.gates),
        ]
        return ", ".join(parts)


def with_effect(values: Iterable[str]) -> tuple[str, ...]:
    """Return those of the files of values that make another configuration."""
    return tuple(one for one in values if one not in _WITHOUT_EFFECT)


def add(configuration: Configuration, carver: str, day: str, outcomes: Mapping[str, str]) -> None:
    """Record outcomes, by the name of the check, and write the table anew."""
    trials = read()
    found = next((one for one in trials if _of(one) == configuration), None)
    if found is None:
        found = {**vars(configuration), "outcomes": {}}
        trials.append(found)
    for check, outcome in outcomes.items():
        found["outcomes"][check] = {"outcome": outcome, "carver": carver, "day": day}
    TRIALS.write_text(json.dumps(trials, indent=1) + "\n")
    write(trials)


def write(trials: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables of both documents anew."""
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), trials))
    FIRST_PAGE.write_text(with_status(FIRST_PAGE.read_text(), trials))


def read() -> list[dict[str, Any]]:
    """Return what was recorded: one entry for each configuration."""
    trials: list[dict[str, Any]] = json.loads(TRIALS.read_text()) if TRIALS.exists() else []
    return trials


def with_table(document: str, trials: Iterable[Mapping[str, Any]]) -> str:
    """Return docs/testing.md with the table that the trials make; its other text stays."""
    return _with(document, "trials", table([*trials], _EVERY))


def with_status(document: str, trials: Iterable[Mapping[str, Any]]) -> str:
    """Return README.md with the table that the trials make; its other text stays."""
    return _with(document, "status", status([*trials]))


def _with(document: str, mark: str, lines: Iterable[str]) -> str:
    """Return a document with these lines between its two comments of this name."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text = "\n".join([begin, "", *lines, "", end])
    return marked.sub(lambda _: text, document)


def status(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the lines of a table with a row for each configuration: how many checks passed."""
    rows = [["cluster", "checks passed", "failed", SUITE, "last run"], ["---"] * 5]
    for one in trials:
        outcomes: Mapping[str, Mapping[str, str]] = one["outcomes"]
        ended = [outcomes[name]["outcome"] for name in _EVERY if name in outcomes]
        passed = f"{ended.count('passed')} of {len(_EVERY)}"
        suite = outcomes[SUITE]["outcome"] if SUITE in outcomes else _NOT_TRIED
        last = max(it["day"] for it in outcomes.values())
        rows.append([_of(one).title, passed, str(ended.count("FAILED")), suite, last])
    return ["| " + " | ".join(row) + " |" for row in rows]


def table(trials: Sequence[Mapping[str, Any]], every: Iterable[str] = ()) -> list[str]:
    """Write the table's lines: a row for each check, a column for each configuration.

    Those of `every` have a row also where none was tried.
    """
    recorded = (name for one in trials for name in one["outcomes"])
    names = list(dict.fromkeys((*every, *recorded)))
    heads = ["check", *(_of(one).title for one in trials)]
    rows = [heads, ["---"] * len(heads)]
    for name in names:
        cells = [one["outcomes"].get(name) for one in trials]
        rows.append([f"`{name}`", *(_cell(one) for one in cells)])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _cell(outcome: Mapping[str, str] | None) -> str:
    if outcome is None:
        return _NOT_TRIED
    return f"{outcome['outcome']}, {outcome['day']}"


def _of(trial: Mapping[str, Any]) -> Configuration:
    return Configuration(
        trial["kubernetes"],
        trial["mode"],
        trial["nodes"],
        trial["storage_class"],
        tuple(trial.get("values", ())),
        tuple(trial.get("gates", ())),
    )


if __name__ == "__main__":
    write(read())
