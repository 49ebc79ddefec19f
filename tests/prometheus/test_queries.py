"""Each query of the dashboard, and each alert, over pages that Prometheus itself has scraped.

The pages are those of a node on the fakes and of a controller, by Carver's own server of pages; a
sidecar's are made by its documented names.
"""

import re
from collections.abc import Iterator

import expect
import pages
import pytest
from prometheus import dashboard, programs
from prometheus.server import Prometheus, free_port, running

from agent.daemon import monitor
from agent.daemon.node_metrics import Metrics
from agent.settings.values import Address

NODE = "node-1"
ALERTS = programs.ROOT / "deploy" / "monitoring" / "alerts.yaml"
PANELS = dashboard.panels("1m")
QUERIES = [(panel.title, query) for panel in PANELS for query, _legend in panel.queries]
# What the alerts read.
METRICS = sorted(set(re.findall(r"\bcarver_\w+", ALERTS.read_text())))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped each page before and after some calls."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "mounts").mkdir()
    controller, sidecar = pages.of_the_controller(), pages.Sidecar()
    with pages.measured(folder / "mounts") as node:
        texts = {"metrics": node.metrics.text, "provisioner": sidecar.text}
        ports = {name: free_port() for name in (*texts, "controller")}
        served = [
            monitor.Monitor(
                Address("127.0.0.1", ports[name]),
                {"/metrics": monitor.Page(text, Metrics.CONTENT_TYPE)},
            )
            for name, text in {**texts, "controller": controller.text}.items()
        ]
        configuration = {
            "global": {"scrape_interval": "2s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": name,
                    "static_configs": [
                        {
                            "targets": [f"127.0.0.1:{port}"],
                            # As the chart's monitors have them.
                            "labels": {"instance": NODE, "pod": f"carver-{name}", "endpoint": name},
                        }
                    ],
                }
                for name, port in ports.items()
            ],
        }
        pages.fill(node)
        _call(node, sidecar)
        for one in served:
            one.start()
        try:
            with running(programs.ensure() / "prometheus", folder, configuration) as started:
                _scraped(started, 1)
                _call(node, sidecar)
                pages.spoil(node)
                _scraped(started, 3)
                yield started
        finally:
            for one in served:
                one.stop()


def _call(node: pages.Measured, sidecar: pages.Sidecar) -> None:
    pages.call(node)
    sidecar.call()


def _scraped(prometheus: Prometheus, more: int) -> None:
    """Wait until each page was read so often more; a scrape that was given up counts as none."""
    had = _fewest(prometheus)
    expect.soon(lambda: _fewest(prometheus) >= had + more)


def _fewest(prometheus: Prometheus) -> float:
    counts = prometheus.query("sum_over_time(up[1h])")
    return min((one.values[0][1] for one in counts), default=0) if len(counts) == 3 else 0


def test_prometheus_reads_every_page(prometheus: Prometheus) -> None:
    problems = [(one["scrapeUrl"], one["lastError"]) for one in prometheus.targets()]
    assert [problem for _, problem in problems] == [""] * 3, problems
    assert {one["health"] for one in prometheus.targets()} == {"up"}


def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus) -> None:
    """What the last scrape found is gone for as long as a busy machine misses the next one."""

    def without() -> list[tuple[str, str]]:
        return [(panel, query) for panel, query in QUERIES if not _has_number(prometheus, query)]

    assert len(QUERIES) > 20
    expect.soon(lambda: without() == [], without)


def _has_number(prometheus: Prometheus, query: str) -> bool:
    """Whether any value is a number, which a quantile of nothing is not."""
    return any(value == value for one in prometheus.query(query) for _, value in one.values)


def test_every_alert_is_evaluated(prometheus: Prometheus) -> None:
    expect.soon(lambda: all(one["health"] != "unknown" for one in prometheus.alerts()))
    found = prometheus.alerts()
    assert [one["name"] for one in found if one["health"] != "ok"] == []
    assert len(found) == len(re.findall(r"- alert:", ALERTS.read_text()))


def test_what_the_alerts_read_is_scraped(prometheus: Prometheus) -> None:
    def without() -> list[str]:
        return [one for one in METRICS if not prometheus.query(f"count({one})")]

    expect.soon(lambda: without() == [], without)


def test_what_is_wrong_with_the_node_is_pending_as_an_alert(prometheus: Prometheus) -> None:
    """A disk is missing, and so a volume and the storage are affected."""
    expect.soon(lambda: _pending(prometheus) >= {"CarverDiskMissing", "CarverVolumeInaccessible"})
    labels = [
        alert["labels"]
        for rule in prometheus.alerts()
        for alert in rule["alerts"]
        if rule["name"] == "CarverVolumeInaccessible"
    ]
    assert {one["instance"] for one in labels} == {NODE}
    assert all(one["volume"].endswith("/vol-pvc-1") for one in labels)
    assert not any("pod" in one for one in labels)


def _pending(prometheus: Prometheus) -> set[str]:
    return {one["name"] for one in prometheus.alerts() if one["state"] == "pending"}
