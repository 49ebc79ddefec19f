#!/usr/bin/env python3
"""Have Prometheus scrape the Carver of a cluster, and ask all that dashboard and alerts ask.

Runs on a machine that reaches the API server and the pods' addresses, and changes nothing in the
cluster. Finds nodes, controller and sidecars as the chart's PodMonitor would; `instance` is the
node's name. Prints one table: each query and alert, and whether it has data. Debian builds its
Prometheus without Kubernetes' discovery, so this program lists the pods, and gives Prometheus each
port with the labels that the discovery of pods has; the chart's relabelings do the rest.

    .venv/bin/python tests/cluster/monitoring.py --kubeconfig FILE --picture dashboard.svg
    .venv/bin/python tests/cluster/monitoring.py --server URL --ca FILE --token-file FILE
    vagrant/cluster.py monitor --picture docs/images/dashboard.svg     # in the lab's cluster

Beside checks that provoke alerts (`--prompt`: each fires at once) it tells which have fired, and
for which nodes. Ctrl-C ends the scraping, and what was scraped is asked.

Exit codes: 0 all well; 1 a query of the dashboard has no data, an alert cannot be evaluated, or a
page is not scraped; 2 it could not be tried. An alert may read what a healthy node does not have.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This file is a program, and Python would look beside it only, where it would find this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

from cluster.site import Clock
from prometheus import dashboard, picture, programs
from prometheus.dashboard import Panel
from prometheus.picture import Drawn
from prometheus.server import Prometheus, Refused, Series, running

from agent.core.errors import AgentError
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists

ALERTS = programs.ROOT / "deploy" / "monitoring" / "alerts.yaml"
WELL, WRONG, UNUSABLE = 0, 1, 2

# The PodMonitor that the chart makes, with all its ports (tests/chart holds it to that).
MONITOR_NAME = "carver-node"
PORTS = ("metrics", "provisioner", "resizer", "snapshotter", "attacher", "cbt-metrics")
NODE_LABELS = [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"}]

# The panels of the picture: numbers, and lines.
TILES = (
    "lvm2 answers",
    "Registered with kubelet",
    "Groups missing",
    "Disks missing",
    "Volumes with a problem",
)
LINES = (
    "Groups: used",
    "Classes: largest volume",
    "Volumes",
    "Background I/O",
    "Calls",
    "Duration of calls, 95 %",
    "Commands",
    "Duration of commands, 95 %",
    "Memory",
    "Provisioning: duration of CreateVolume",
)
_STEPS = 120
_REFRESH_SECONDS = 5.0


@dataclass(frozen=True)
class Row:
    """A query of a panel, or an alert: how it came out, and whether that is well."""

    kind: str
    name: str
    outcome: str
    is_well: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run Prometheus and ask it; the exit code."""
    parsed = parser().parse_args(arguments)
    if not parsed.kubeconfig and not parsed.server:
        print("monitoring.py: give --kubeconfig or --server", file=sys.stderr)
        return UNUSABLE
    try:
        program = parsed.prometheus or programs.ensure() / "prometheus"
        with tempfile.TemporaryDirectory(prefix="carver-prometheus-") as name:
            folder = Path(name)
            lists = Lists(access.of_file(kubeconfig(parsed, folder)))
            discovery = Discovery(lists, parsed.namespace, folder / "targets.json")
            discovery.refresh()
            made = configuration(parsed, folder / "targets.json", rules(parsed, folder))
            with running(Path(program), folder, made) as prometheus:
                return observe(prometheus, discovery.refresh, parsed)
    except (Refused, AgentError, OSError, subprocess.CalledProcessError) as error:
        print(f"monitoring.py: {error}", file=sys.stderr)
        return UNUSABLE


def parser() -> argparse.ArgumentParser:
    head, _, rest = (__doc__ or "").partition("\n")
    made = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--kubeconfig", metavar="FILE", help="of the cluster; or the next three")
    made.add_argument("--server", metavar="URL", help="of the API server")
    made.add_argument("--token-file", metavar="FILE", help="a bearer token that may list pods")
    made.add_argument("--ca", metavar="FILE", help="who signed the API server's certificate")
    made.add_argument("--namespace", default="carver-system", help="of Carver (%(default)s)")
    made.add_argument("--driver", default="lvm.csi.carver", help="the CSIDriver (%(default)s)")
    made.add_argument(
        "--interval", type=int, default=5, metavar="SECONDS", help="between scrapes (%(default)s)"
    )
    made.add_argument(
        "--limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="how long to wait until every page is scraped (%(default)s)",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=180,
        help="how long to scrape before the queries are asked (%(default)s)",
    )
    made.add_argument(
        "--prompt", action="store_true", help="alerts fire at once, without their `for`"
    )
    made.add_argument("--picture", metavar="FILE", help="draw the main panels, as SVG")
    made.add_argument("--prometheus", metavar="FILE", help="the program; Debian's if not given")
    return made


# What is scraped


def monitor(interval: int) -> Mapping[str, Any]:
    """The `spec` of the chart's PodMonitor."""
    labels = {"app.kubernetes.io/name": "carver", "app.kubernetes.io/instance": "carver"}
    return {
        "selector": {"matchLabels": labels},
        "podMetricsEndpoints": [
            {
                "port": port,
                "path": "/metrics",
                "interval": f"{interval}s",
                "relabelings": NODE_LABELS,
            }
            for port in PORTS
        ],
    }


def rules(parsed: argparse.Namespace, folder: Path) -> Path:
    """The file of alerts; with `--prompt` one in which none waits."""
    if not parsed.prompt:
        return ALERTS
    made = folder / "alerts.yaml"
    made.write_text(re.sub(r"^ +for: .*\n", "", ALERTS.read_text(), flags=re.MULTILINE))
    return made


def configuration(
    parsed: argparse.Namespace, targets: Path, alerts: Path = ALERTS
) -> Mapping[str, Any]:
    """Prometheus' configuration, with a file of targets and one of alerts."""
    every = f"{parsed.interval}s"
    return {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(alerts)],
        "scrape_configs": jobs(monitor(parsed.interval), parsed.namespace, targets),
    }


def kubeconfig(parsed: argparse.Namespace, folder: Path) -> Path:
    """The kubeconfig that was given, or one of what was given in its place."""
    if parsed.kubeconfig:
        return Path(parsed.kubeconfig)
    cluster = {"server": parsed.server}
    if parsed.ca:
        cluster["certificate-authority"] = str(Path(parsed.ca).resolve())
    user = {"tokenFile": str(Path(parsed.token_file).resolve())} if parsed.token_file else {}
    file = folder / "kubeconfig"
    whole = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": user}],
    }
    file.write_text(json.dumps(whole))
    return file


class Discovery:
    """Gives Prometheus the ports of the pods, as its discovery of Kubernetes' pods would."""

    def __init__(self, lists: Lists, namespace: str, file: Path) -> None:
        self._lists, self._namespace, self._file = lists, namespace, file

    def refresh(self) -> None:
        """List the pods anew. Raises ClusterSilent."""
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        # Of each pod all is kept: Carver itself reads neither labels nor ports.
        pods = self._lists.whole(path, "PodList", keep=dict).items
        groups = [one for pod in pods for one in ports(pod)]
        made = self._file.with_suffix(".new")
        made.write_text(json.dumps(groups))
        made.rename(self._file)


def ports(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A pod's ports as targets, with the labels of Prometheus' discovery (role `pod`)."""
    about, status = pod["metadata"], pod.get("status", {})
    if not (address := status.get("podIP")):
        return
    labels = {
        "__meta_kubernetes_namespace": about["namespace"],
        "__meta_kubernetes_pod_name": about["name"],
        "__meta_kubernetes_pod_phase": status.get("phase", ""),
        "__meta_kubernetes_pod_node_name": pod["spec"].get("nodeName", ""),
    }
    for label, value in about.get("labels", {}).items():
        labels[f"__meta_kubernetes_pod_label_{_as_label(label)}"] = value
        labels[f"__meta_kubernetes_pod_labelpresent_{_as_label(label)}"] = "true"
    host = f"[{address}]" if ":" in address else address
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            of_port = {
                "__meta_kubernetes_pod_container_name": container["name"],
                "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
            }
            yield {"targets": [f"{host}:{port['containerPort']}"], "labels": labels | of_port}


def jobs(monitor: Mapping[str, Any], namespace: str, targets: Path) -> Sequence[Mapping[str, Any]]:
    """The scrape jobs of a PodMonitor, one for each endpoint.

    As prometheus-operator makes them: pkg/prometheus/promcfg.go, generatePodMonitorConfig.
    """
    return [
        {
            "job_name": f"podMonitor/{namespace}/{MONITOR_NAME}/{number}",
            "scrape_interval": endpoint["interval"],
            "scrape_timeout": endpoint["interval"],
            "metrics_path": endpoint["path"],
            "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}],
            "relabel_configs": [
                _rule(["phase"], regex="(Failed|Succeeded)", action="drop"),
                *(
                    _rule(
                        [f"label_{_as_label(label)}", f"labelpresent_{_as_label(label)}"],
                        regex=f"({re.escape(value)});true",
                        action="keep",
                    )
                    for label, value in monitor["selector"]["matchLabels"].items()
                ),
                _rule(["container_port_name"], regex=endpoint["port"], action="keep"),
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                _rule(["container_name"], target_label="container"),
                _rule(["name"], target_label="pod"),
                {"target_label": "job", "replacement": f"{namespace}/{MONITOR_NAME}"},
                {"target_label": "endpoint", "replacement": endpoint["port"]},
                *(
                    {"source_labels": one["sourceLabels"], "target_label": one["targetLabel"]}
                    for one in endpoint["relabelings"]
                ),
            ],
        }
        for number, endpoint in enumerate(monitor["podMetricsEndpoints"])
    ]


def _rule(of_pod: Sequence[str], **more: str) -> Mapping[str, Any]:
    return {"source_labels": [f"__meta_kubernetes_pod_{one}" for one in of_pod], **more}


def _as_label(name: str) -> str:
    return re.sub(r"\W", "_", name)


# What is asked


def observe(
    prometheus: Prometheus,
    refresh: Callable[[], None],
    parsed: argparse.Namespace,
    clock: Clock = time,
) -> int:
    """Wait until every page is scraped, ask, print the table, draw; the exit code."""
    panels = dashboard.panels(f"{max(60, 4 * parsed.interval)}s", parsed.driver)
    if problem := _until_scraped(prometheus, refresh, parsed.limit, clock):
        print(f"monitoring.py: {problem}", file=sys.stderr)
        return WRONG
    for one in prometheus.targets():
        labels = one["labels"]
        print(f"scraped: {labels['instance']} {labels['pod']} {labels['endpoint']}")
    print(f"scraping for {parsed.seconds:.0f} s", flush=True)
    began = clock.monotonic()
    try:
        while (left := began + parsed.seconds - clock.monotonic()) > 0:
            clock.sleep(min(left, _REFRESH_SECONDS))
            # A pod that was replaced has another address. An API server that is silent for a while
            # has not moved a pod either.
            with suppress(AgentError):
                refresh()
    except KeyboardInterrupt:
        print("interrupted: what was scraped is asked", flush=True)
    found = rows(prometheus, panels, clock.monotonic() - began)
    for row in found:
        print(f"{row.kind:9} {row.name:40} {row.outcome}")
    if parsed.picture:
        Path(parsed.picture).write_text(drawing(prometheus, panels, parsed.seconds))
        print(f"drawn: {parsed.picture}")
    well = sum(row.is_well for row in found)
    print(f"{well} of {len(found)} well")
    return WELL if well == len(found) else WRONG


def _until_scraped(
    prometheus: Prometheus, refresh: Callable[[], None], limit: float, clock: Clock
) -> str:
    """Wait until each page was scraped well; what is the matter with them at the limit."""
    until = clock.monotonic() + limit
    while problems := _problems(prometheus.targets()):
        if clock.monotonic() > until:
            return "\n".join(problems)
        clock.sleep(1)
        refresh()
    return ""


def _problems(targets: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """What is the matter with the pages."""
    if not any(one["labels"]["endpoint"] == "metrics" for one in targets):
        return [
            "no pod of Carver with a port `metrics` was found: is it in another namespace, or"
            " installed with metrics.enabled=false?"
        ]
    return [
        f"{one['scrapeUrl']} ({one['labels']['pod']}) is {one['health']}: {one['lastError']}"
        for one in targets
        if one["health"] != "up"
    ]


def rows(prometheus: Prometheus, panels: Sequence[Panel], seconds: float) -> Sequence[Row]:
    """Each query of the panels, by whether it has data, and each alert.

    An alert that has fired within so many seconds names the nodes; others say what they read.
    """
    made = []
    for panel in panels:
        for query, _ in panel.queries:
            try:
                is_well = _has_data(prometheus, query)
                outcome = "has data" if is_well else f"NO DATA: {query}"
            except Refused as error:
                is_well, outcome = False, f"REFUSED: {error}"
            made.append(Row("query", panel.title, outcome, is_well))
    fired = _fired(prometheus, seconds)
    for alert in prometheus.alerts():
        if nodes := fired.get(alert["name"]):
            made.append(Row("fired", alert["name"], ", ".join(sorted(nodes)), True))
            continue
        metrics = sorted(set(re.findall(r"\bcarver_\w+", alert["query"])))
        lacking = [one for one in metrics if not _has_data(prometheus, f"count({one})")]
        outcome = f"reads nothing now of {', '.join(lacking)}" if lacking else "has what it reads"
        if problem := alert.get("lastError", ""):
            outcome = f"FAILED: {problem}"
        made.append(Row(alert["state"], alert["name"], outcome, not problem))
    return made


def _fired(prometheus: Prometheus, seconds: float) -> Mapping[str, set[str]]:
    """Return the alerts that have fired within so many seconds, each with what it named."""
    of = f"max_over_time(ALERTS{{alertstate='firing'}}[{max(1, round(seconds))}s])"
    fired: dict[str, set[str]] = {}
    for one in prometheus.query(f"max by (alertname, instance, node) ({of})"):
        named = one.labels.get("instance") or one.labels.get("node") or "no node"
        fired.setdefault(one.labels.get("alertname", ""), set()).add(named)
    return fired


def _has_data(prometheus: Prometheus, query: str) -> bool:
    """Whether any value is a number, which a quantile of nothing is not."""
    found = prometheus.query(query)
    return any(value == value for one in found for _, value in one.values)


def drawing(prometheus: Prometheus, panels: Sequence[Panel], seconds: float) -> str:
    """The picture of the main panels, over so long."""
    [now] = prometheus.query("time()")
    end = now.values[0][0]
    by_title = {panel.title: panel for panel in panels}

    def drawn(title: str) -> Drawn:
        panel = by_title[title]
        series: list[tuple[str, Series]] = []
        for query, template in panel.queries:
            found = prometheus.query_range(query, end - seconds, end, max(1, seconds / _STEPS))
            series += ((picture.legend(template, one.labels), one) for one in found)
        return Drawn(title, panel.unit, series)

    title = "Carver's dashboard, as Prometheus scraped it"
    return picture.svg(title, [*map(drawn, TILES)], [*map(drawn, LINES)])


if __name__ == "__main__":
    sys.exit(main())
