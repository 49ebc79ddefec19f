"""The panels of deploy/monitoring/dashboard.json, and their queries as Grafana would ask them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "dashboard.json"


@dataclass(frozen=True)
class Panel:
    """A panel; `queries` are expressions by the legends of their series."""

    title: str
    kind: str
    unit: str
    queries: Sequence[tuple[str, str]]


def panels(rate_interval: str, driver: str = "lvm.csi.carver") -> Sequence[Panel]:
    """The panels of all nodes, with a rate over so long, as `5m`."""
    chosen = {"$__rate_interval": rate_interval, "$instance": ".*", "$driver": driver}
    return [
        Panel(
            panel["title"],
            panel["type"],
            panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
            [
                (_filled(one["expr"], chosen), one.get("legendFormat", ""))
                for one in panel["targets"]
            ],
        )
        for panel in json.loads(FILE.read_text())["panels"]
        if panel["type"] != "row"
    ]


def _filled(expression: str, chosen: Mapping[str, str]) -> str:
    for variable, value in chosen.items():
        expression = expression.replace(variable, value)
    return expression
