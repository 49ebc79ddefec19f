"""tests/cluster/monitoring.py on a Prometheus in memory: what it waits for, asks, says and draws.

Prometheus itself has it in tests/prometheus.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CalledProcessError, CompletedProcess
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from cluster import monitoring
from prometheus import dashboard, picture, programs
from prometheus.picture import Drawn
from prometheus.server import Prometheus, Refused, Series

from agent.core.errors import ClusterSilent

NODE = "node-1"
UP = {
    "labels": {"endpoint": "metrics", "instance": NODE, "pod": "carver-node-a"},
    "health": "up",
    "lastError": "",
    "scrapeUrl": "http://192.0.2.1:9898/metrics",
}
ALERT = {"name": "CarverDiskMissing", "query": "carver_group_missing_disks > 0", "state": "firing"}


class Fake:
    """What a Prometheus answers."""

    def __init__(self) -> None:
        self.targets: list[Mapping[str, Any]] = [UP]
        self.alerts: list[Mapping[str, Any]] = [ALERT]
        # The alerts that have fired, each with a label and what it names.
        self.fired: list[tuple[str, str, str]] = []
        # The queries that have no data, that are no number, and that are refused, by a part.
        self.empty, self.no_number, self.refused = "none", "none", "none"

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[int, Any]:
        if path.endswith("/targets"):
            return 200, {"activeTargets": self.targets}
        if path.endswith("/rules"):
            return 200, {"groups": [{"rules": self.alerts}]}
        asked = query["query"]
        result: list[Any]
        if self.refused in asked:
            return 400, "parse error"
        if asked == "time()":
            return 200, {"resultType": "scalar", "result": [1000, "1000"]}
        if "ALERTS{" in asked:
            fired = [{"alertname": name, key: it} for name, key, it in self.fired]
            result = [{"metric": one, "value": [1000, "1"]} for one in fired]
            return 200, {"resultType": "vector", "result": result}
        labels, value = {"instance": NODE}, "NaN" if self.no_number in asked else "3"
        if path.endswith("/query_range"):
            result = [{"metric": labels, "values": [[900, value], [1000, "4"]]}]
        else:
            result = [{"metric": labels, "value": [1000, value]}]
        return 200, {"resultType": "vector", "result": [] if self.empty in asked else result}


class Clock:
    """Time that passes where it is slept."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def prometheus(fake: Fake) -> Iterator[Prometheus]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            status, data = fake.answer(url.path, query)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"data": data}).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Prometheus(f"http://127.0.0.1:{running.server_address[1]}")
    running.shutdown()
    running.server_close()
    thread.join()


def parsed(*words: str) -> argparse.Namespace:
    return monitoring.parser().parse_args(words)


def nothing() -> None:
    pass


def observed(prometheus: Prometheus, *words: str, refresh: Callable[[], None] = nothing) -> int:
    return monitoring.observe(prometheus, refresh, parsed(*words), Clock())


# What is scraped


def a_pod(**more: Any) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": 9898}, {"containerPort": 9810}]
    return {
        "metadata": {
            "name": "carver-node-a",
            "namespace": "carver-system",
            "labels": {"app.kubernetes.io/name": "carver"},
        },
        "spec": {"nodeName": NODE, "containers": [{"name": "carver", "ports": ports}]},
        "status": {"phase": "Running", "podIP": "192.0.2.1", **more},
    }


def test_a_pod_s_ports_have_the_labels_of_prometheus_discovery() -> None:
    first, second = monitoring.ports(a_pod())
    assert first["targets"] == ["192.0.2.1:9898"]
    assert first["labels"] == {
        "__meta_kubernetes_namespace": "carver-system",
        "__meta_kubernetes_pod_name": "carver-node-a",
        "__meta_kubernetes_pod_phase": "Running",
        "__meta_kubernetes_pod_node_name": NODE,
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": "carver",
        "__meta_kubernetes_pod_labelpresent_app_kubernetes_io_name": "true",
        "__meta_kubernetes_pod_container_name": "carver",
        "__meta_kubernetes_pod_container_port_name": "metrics",
    }
    assert second["labels"]["__meta_kubernetes_pod_container_port_name"] == ""
    [of_ipv6, _] = monitoring.ports(a_pod(podIP="2001:db8::1"))
    assert of_ipv6["targets"] == ["[2001:db8::1]:9898"]


def test_a_pod_without_an_address_is_no_target() -> None:
    assert not [*monitoring.ports(a_pod(podIP=""))]


def test_there_is_a_job_for_each_port_and_its_instance_is_the_node() -> None:
    made = monitoring.configuration(parsed("--server", "x"), Path("targets.json"))
    jobs = made["scrape_configs"]
    assert len(jobs) == len(monitoring.PORTS)
    for job, port in zip(jobs, monitoring.PORTS, strict=True):
        assert job["metrics_path"] == "/metrics"
        rules = {one.get("target_label"): one for one in job["relabel_configs"]}
        assert rules["instance"]["source_labels"] == ["__meta_kubernetes_pod_node_name"]
        assert rules["endpoint"]["replacement"] == port
        [chosen] = [
            one["regex"]
            for one in job["relabel_configs"]
            if one.get("source_labels") == ["__meta_kubernetes_pod_container_port_name"]
        ]
        assert chosen == port
    assert Path(made["rule_files"][0]).is_file()


def test_a_kubeconfig_is_made_of_server_and_token(tmp_path: Path) -> None:
    words = parsed("--server", "https://192.0.2.1:6443", "--token-file", "t", "--ca", "ca.pem")
    made = json.loads(monitoring.kubeconfig(words, tmp_path).read_text())
    [cluster] = made["clusters"]
    assert cluster["cluster"]["server"] == "https://192.0.2.1:6443"
    assert Path(cluster["cluster"]["certificate-authority"]).is_absolute()
    [user] = made["users"]
    assert Path(user["user"]["tokenFile"]).name == "t"
    given = monitoring.kubeconfig(parsed("--kubeconfig", "mine"), tmp_path)
    assert given == Path("mine")


def test_a_run_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert monitoring.main([]) == 2
    assert "--kubeconfig or --server" in capsys.readouterr().err


# What is asked


def test_each_query_and_alert_is_in_the_table(
    prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert observed(prometheus) == 0
    said = capsys.readouterr().out
    assert f"scraped: {NODE} carver-node-a metrics" in said
    queries = [query for panel in dashboard.panels("60s") for query, _ in panel.queries]
    assert len(re.findall(r"^query .* has data$", said, re.M)) == len(queries)
    assert re.search(r"^firing +CarverDiskMissing +has what it reads$", said, re.M)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("empty", r"query +Memory +NO DATA: process_resident_memory_bytes"),
        ("no_number", r"query +Memory +NO DATA: process_resident_memory_bytes"),
        ("refused", r"query +Memory +REFUSED: .*parse error"),
    ],
)
def test_a_query_without_data_is_named_and_fails(
    how: str, line: str, fake: Fake, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    setattr(fake, how, "process_resident_memory_bytes")
    assert observed(prometheus) == 1
    assert re.search(line, capsys.readouterr().out)


def test_an_alert_may_read_what_a_healthy_node_has_not(
    fake: Fake, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.alerts = [ALERT | {"query": "carver_volume_health == 1", "state": "inactive"}]
    fake.empty = "count(carver_volume_health)"
    assert observed(prometheus) == 0
    assert "reads nothing now of carver_volume_health" in capsys.readouterr().out


def test_an_alert_that_cannot_be_evaluated_fails(
    fake: Fake, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.alerts = [ALERT | {"lastError": "many-to-many matching"}]
    assert observed(prometheus) == 1
    assert "FAILED: many-to-many matching" in capsys.readouterr().out


def test_an_alert_that_fired_meanwhile_is_said_with_its_nodes(
    fake: Fake, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.alerts = [ALERT | {"state": "inactive"}, ALERT | {"name": "CarverNodeSilent"}]
    name = "CarverDiskMissing"
    fake.fired = [(name, "instance", "two"), (name, "node", "one"), (name, "group", "data")]
    assert observed(prometheus) == 0
    said = capsys.readouterr().out
    assert re.search(r"^fired +CarverDiskMissing +no node, one, two$", said, re.M)
    assert re.search(r"^firing +CarverNodeSilent +has what it reads$", said, re.M)


def test_an_api_server_that_is_silent_meanwhile_ends_nothing(prometheus: Prometheus) -> None:
    looks: list[int] = []

    def refresh() -> None:
        looks.append(1)
        raise ClusterSilent("the list of pods", "no answer")

    assert observed(prometheus, refresh=refresh) == 0
    assert len(looks) > 3


def test_what_was_scraped_is_asked_after_an_interrupt(
    prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    def refresh() -> None:
        raise KeyboardInterrupt

    assert observed(prometheus, refresh=refresh) == 0
    assert re.search(r"^firing +CarverDiskMissing", capsys.readouterr().out, re.M)


def test_prompt_alerts_are_the_same_and_wait_for_nothing(tmp_path: Path) -> None:
    assert monitoring.rules(parsed(), tmp_path) == monitoring.ALERTS
    whole = yaml.safe_load(monitoring.ALERTS.read_text())
    prompt = yaml.safe_load(monitoring.rules(parsed("--prompt"), tmp_path).read_text())
    [group] = whole["groups"]
    assert all(one.pop("for") for one in group["rules"])
    assert prompt == whole


def test_a_page_that_comes_up_late_is_waited_for(fake: Fake, prometheus: Prometheus) -> None:
    fake.targets, looks = [], []

    def refresh() -> None:
        looks.append(1)
        fake.targets = [UP] if len(looks) > 2 else [UP | {"health": "unknown"}]

    assert observed(prometheus, refresh=refresh) == 0
    assert len(looks) > 3


@pytest.mark.parametrize("targets", [[], [UP, UP | {"health": "down", "lastError": "refused"}]])
def test_a_page_that_does_not_come_up_is_named(
    targets: list[Mapping[str, Any]],
    fake: Fake,
    prometheus: Prometheus,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.targets = targets
    assert observed(prometheus) == 1
    said = capsys.readouterr().err
    assert ("(carver-node-a) is down: refused" if targets else "no pod of Carver") in said


def test_a_prometheus_that_is_not_there_is_an_error() -> None:
    with pytest.raises(Refused, match="does not answer"):
        Prometheus("http://127.0.0.1:1").query("up")


# What is drawn


def test_the_picture_has_each_main_panel(prometheus: Prometheus, tmp_path: Path) -> None:
    file = tmp_path / "dashboard.svg"
    assert observed(prometheus, "--picture", str(file)) == 0
    drawn = file.read_text()
    for title in (*monitoring.TILES, *monitoring.LINES):
        assert f">{title}<" in drawn
    assert drawn.count("<polyline") >= len(monitoring.LINES)


def test_every_panel_of_the_picture_is_in_the_dashboard() -> None:
    titles = {panel.title: panel.kind for panel in dashboard.panels("60s")}
    assert {titles[one] for one in monitoring.TILES} == {"stat"}
    assert {titles[one] for one in monitoring.LINES} == {"timeseries"}


def test_a_query_has_no_variable_of_grafana_left() -> None:
    for panel in dashboard.panels("60s"):
        assert panel.queries
        assert not any("$" in query for query, _ in panel.queries)


def test_a_legend_is_made_of_labels() -> None:
    labels = {"instance": NODE, "group": "data"}
    assert picture.legend("{{instance}} {{group}}", labels) == "node-1 data"


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (3 << 20, "bytes", "3 MiB"),
        (5 << 30, "bytes", "5 GiB"),
        (0.25, "percentunit", "25 %"),
        (0.0123, "s", "12.3 ms"),
        (40, "s", "40 s"),
        (0, "s", "0 s"),
        (2, "", "2"),
    ],
)
def test_values_are_written_in_their_unit(value: float, unit: str, words: str) -> None:
    assert picture.shown(value, unit) == words


def test_a_panel_without_data_says_so_and_names_are_escaped() -> None:
    nan = Series({}, [(0.0, float("nan"))])
    drawn = picture.svg("a & b", [], [Drawn("<panel>", "s", [("x", nan)])])
    assert ">no data<" in drawn
    assert "&lt;panel&gt;" in drawn
    assert "a &amp; b" in drawn
    assert "nan" not in drawn


# Where Prometheus comes from


class Apt:
    """apt-get and dpkg-deb; apt knows the package once it has been updated."""

    def __init__(self) -> None:
        self.is_updated, self.is_broken = False, False
        self.said: list[str] = []

    def __call__(self, words: Sequence[str], **how: Any) -> CompletedProcess[str]:
        self.said.append(words[-1] if words[0] == "apt-get" else words[0])
        if words[-1] == "update":
            self.is_updated = True
        elif words[-1] == "prometheus":
            code = 0 if self.is_updated else 100
            if how["check"] and code:
                raise CalledProcessError(code, words)
            if not code:
                (how["cwd"] / "prometheus_2.42.0_amd64.deb").touch()
            return CompletedProcess(words, code)
        else:
            programs_folder = Path(words[-1]) / "usr" / "bin"
            programs_folder.mkdir(parents=True)
            (programs_folder / "prometheus").touch()
            if self.is_broken:
                raise CalledProcessError(2, words)
            (programs_folder / "promtool").touch()
        return CompletedProcess(words, 0)


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apt:
    made = Apt()
    monkeypatch.setattr(programs, "UNPACKED", tmp_path / "cache" / "prometheus")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(subprocess, "run", made)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return made


def test_prometheus_is_unpacked_once_and_its_package_not_installed(apt: Apt) -> None:
    for _ in range(2):
        folder = programs.ensure()
        assert sorted(one.name for one in folder.iterdir()) == sorted(programs.NAMES)
    assert apt.said == ["prometheus", "update", "prometheus", "dpkg-deb"]


def test_a_package_that_was_not_unpacked_whole_is_unpacked_anew(apt: Apt) -> None:
    apt.is_broken = True
    with pytest.raises(CalledProcessError):
        programs.ensure()
    assert not programs.UNPACKED.exists()
    apt.is_broken = False
    assert (programs.ensure() / "promtool").exists()


def test_what_is_installed_is_taken(apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert programs.ensure() == Path("/usr/bin")
    assert apt.said == []
