"""Each alert of deploy/monitoring/alerts.yaml by promtool: when it fires, and what it names.

The series are what Prometheus scrapes each half minute: a page's, with the labels of node and pod.
"""

import math
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import cases, programs
from prometheus.cases import CASES, NODE, Case, Rate, Series, Turns, Value

ALERTS = programs.ROOT / "deploy" / "monitoring" / "alerts.yaml"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]
}
every_alert = pytest.mark.parametrize("alert", RULES)
# Scrapes, two a minute; how long all was good before it was bad; how long a restart takes.
A_MINUTE = 2
GOOD = 30 * A_MINUTE
RESTART = 3 * A_MINUTE - 1
# Longer than any window of an alert.
CURED = 75 * A_MINUTE

# A test of promtool's, as YAML has it.
Judged = dict[str, Any]


@pytest.fixture(scope="module")
def promtool() -> Path:
    return programs.ensure() / "promtool"


Judge = Callable[[Sequence[Judged]], None]


@pytest.fixture
def judge(promtool: Path, tmp_path: Path) -> Judge:
    """Have promtool try some tests, each of which says what must fire when."""

    def check(tests: Sequence[Judged]) -> None:
        assert tests
        file = tmp_path / "tests.yaml"
        whole = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [*tests]}
        file.write_text(yaml.safe_dump(whole, sort_keys=False, width=1 << 20))
        words = [str(promtool), "test", "rules", str(file)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    return check


# What was scraped


def _samples(values: Sequence[Value], restarts: Sequence[int]) -> list[float | None]:
    """What a page has at each scrape; a counter begins at 0 with each start of Carver.

    One that was not there, as it is by a label's value that is new, begins at 1.
    """
    made: list[float | None] = []
    counted, since = 0.0, 0.0
    for number, value in enumerate(values):
        if number in restarts:
            counted, since = 0.0, 0.0
        if isinstance(value, Rate):
            counted += value.a_minute / A_MINUTE
            made.append(math.floor(counted + 1e-9) + since)
        elif isinstance(value, Turns):
            made.append(value.other if number // (2 * A_MINUTE) % 2 else value.first)
        else:
            since = 1.0 if value is None else 0.0
            made.append(value)
    return made


def _scraped(
    values: Mapping[str, Sequence[Value]],
    *,
    restarts: Sequence[int] = (),
    failing: bool = False,
) -> list[Mapping[str, str]]:
    """The series that Prometheus has of what was so at each scrape.

    At a restart the pod is another, after three minutes in which nothing was scraped; at each
    second restart the container is another, and the pod is not. Where scrapes are `failing`, so
    does every other one.
    """
    made: list[Mapping[str, str]] = []
    for series, each in values.items():
        samples, length = _samples(each, restarts), len(each)
        starts = [0, *restarts[::2]]
        for generation, start in enumerate(starts):
            end = starts[generation + 1] - RESTART if start != starts[-1] else length
            words = ["_" if one is None else f"{one:g}" for one in samples]
            for number in range(length):
                # Prometheus marks a series as stale where a scrape has it no more, or fails.
                gone = words[number] == "_" and number and words[number - 1] not in ("_", "stale")
                down = any(0 < restart - number <= RESTART for restart in restarts[1::2])
                if gone or number == end or down or (failing and number % 2):
                    words[number] = "stale"
            words[:start] = ["_"] * start
            words[end + 1 :] = []
            made.append({"series": _labelled(series, generation), "values": " ".join(words)})
    return made


def _labelled(series: str, generation: int) -> str:
    """A series of a page with the labels that the scrape adds."""
    name, _, rest = series.partition("{")
    labels = {"instance": NODE, "pod": "carver", "endpoint": "metrics", "job": "carver"}
    labels |= dict(re.findall(r'(\w+)="([^"]*)"', rest))
    labels["pod"] += f"-{generation}"
    return cases.series(name, **labels)


def _timeline(*phases: tuple[Series, int]) -> Mapping[str, Sequence[Value]]:
    """Phases one after the other, each with so many scrapes."""
    every = {series for phase, _ in phases for series in phase}
    return {
        series: [phase.get(series) for phase, count in phases for _ in range(count)]
        for series in sorted(every)
    }


# What must come of it


def _fires(case: Case, rule: Mapping[str, Any], *minutes: int) -> Iterator[Mapping[str, Any]]:
    for minute in minutes:
        expected = {
            "exp_labels": {**case.labels, "severity": case.severity},
            "exp_annotations": {**rule["annotations"], "summary": case.summary},
        }
        yield {"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": [expected]}


def _is_silent(alert: str, minutes: Sequence[int]) -> Iterator[Mapping[str, Any]]:
    for minute in minutes:
        yield {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}


def test_the_rules_for_what_others_measure_are_right(promtool: Path, tmp_path: Path) -> None:
    text = (programs.ROOT / "docs" / "metrics.md").read_text()
    [shown] = re.findall(r"<!-- further rules: begin -->\n(.*?)<!-- further rules: end", text, re.S)
    rules = tmp_path / "rules.yaml"
    rules.write_text(textwrap.dedent(shown))
    claim = 'namespace="shop",persistentvolumeclaim="{}"'
    info = "kube_persistentvolumeclaim_info{{" + claim + ',volumename="pv-{}"}}'
    volumes = {"full": (5, 50), "raw": (0, 0), "other": (5, 50), "good": (50, 50), "many": (50, 4)}
    series = {
        'kube_deployment_status_replicas_available{namespace="carver-system",'
        'deployment="carver-controller"}': 0,
        'kube_deployment_status_replicas_available{namespace="shop",deployment="web"}': 0,
    }
    for name, (free, inodes) in volumes.items():
        driver = "lvm.csi.carver" if name != "other" else "ebs.csi.aws.com"
        series |= {
            info.format(name, name): 1,
            f'kube_persistentvolume_info{{persistentvolume="pv-{name}",csi_driver="{driver}"}}': 1,
        }
        values = {"available_bytes": free, "capacity_bytes": 100, "inodes_free": inodes}
        values |= {"inodes": 100 if inodes else 0, "used_bytes": 0 if name == "raw" else 50}
        for one, value in values.items():
            labels = claim.format(name)
            series[f'kubelet_volume_stats_{one}{{{labels},instance="10.0.0.1:10250"}}'] = value
    fired = [("full", "5%"), ("many", "4%")]
    wanted = {
        "ClaimNearlyFull": [
            {
                "exp_labels": {
                    "severity": "warning",
                    "instance": "10.0.0.1:10250",
                    "namespace": "shop",
                    "persistentvolumeclaim": name,
                },
                "summary": f"shop/{name} has {left} left",
            }
            for name, left in fired
        ],
        "ControllerDown": [
            {
                "exp_labels": {
                    "severity": "critical",
                    "namespace": "carver-system",
                    "deployment": "carver-controller",
                },
                "summary": "carver-system/carver-controller has no replica that is available",
            }
        ],
    }
    loaded = {one["alert"]: one for one in yaml.safe_load(rules.read_text())["groups"][0]["rules"]}
    assert loaded.keys() == wanted.keys()
    judged = {
        "interval": "1m",
        "input_series": [{"series": one, "values": f"{value}x30"} for one, value in series.items()],
        "alert_rule_test": [
            {
                "eval_time": "20m",
                "alertname": name,
                "exp_alerts": [
                    {
                        "exp_labels": one["exp_labels"],
                        "exp_annotations": loaded[name]["annotations"]
                        | {"summary": one["summary"]},
                    }
                    for one in alerts
                ],
            }
            for name, alerts in wanted.items()
        ],
    }
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": [judged]}))
    check = ["check", "rules", "--lint=all", "--lint-fatal", str(rules)]
    for words in (check, ["test", "rules", str(tests)]):
        ended = subprocess.run([str(promtool), *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def _test(
    name: str, series: Sequence[Mapping[str, str]], *expected: Iterator[Mapping[str, Any]]
) -> Judged:
    rules = [one for part in expected for one in part]
    return {
        "name": name,
        "interval": f"{60 // A_MINUTE}s",
        "input_series": [*series],
        "alert_rule_test": rules,
    }


def _has_series(one: Series) -> bool:
    return any(value is not None for value in one.values())


def _bad(case: Case) -> int:
    return case.minutes * A_MINUTE


def _at(scrapes: int) -> int:
    return scrapes // A_MINUTE


def test_promtool_finds_no_mistake_in_the_rules(promtool: Path) -> None:
    words = [str(promtool), "check", "rules", "--lint=all", "--lint-fatal", str(ALERTS)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"SUCCESS: {len(RULES)} rules found" in ended.stdout


def test_each_alert_has_a_case_and_each_case_an_alert() -> None:
    assert list(CASES) == list(RULES)
    assert all(CASES.values())


@every_alert
def test_an_alert_names_the_node_and_the_volume_and_nothing_of_a_pod(alert: str) -> None:
    for case in CASES[alert]:
        assert case.labels[case.node] in case.summary
        assert case.labels.get("volume", "") in case.summary
        assert not {"pod", "endpoint", "job", "container"} & set(case.labels)
    # The description is the same for all of them.
    assert "{{" not in RULES[alert]["annotations"]["description"]


@every_alert
def test_an_alert_fires_by_what_is_bad_for_long_and_ends_with_it(alert: str, judge: Judge) -> None:
    tests = []
    for case in CASES[alert]:
        end = GOOD + _bad(case)
        values = _timeline((case.good, GOOD), (case.bad, _bad(case)), (case.good, CURED))
        tests.append(
            _test(
                "it is bad, and good again",
                _scraped(values),
                _is_silent(alert, [_at(GOOD) - 1, _at(GOOD), _at(GOOD) + 1]),
                _fires(case, RULES[alert], _at(end) - 1),
                _is_silent(alert, [_at(end + CURED) - 1]),
            )
        )
    judge(tests)


@every_alert
def test_an_alert_is_silent_where_all_is_well_or_something_else_is_not(
    alert: str, judge: Judge
) -> None:
    tests = []
    for case in CASES[alert]:
        for one in filter(_has_series, [case.good, *case.harmless]):
            # Carver restarts at times, as another pod and in the same one.
            length = 2 * (GOOD + _bad(case))
            restarts = [GOOD, GOOD + 20, length - 30, length - 10]
            series = _scraped(_timeline((one, length)), restarts=restarts)
            tests.append(_test(f"{one}", series, _is_silent(alert, range(0, _at(length), 2))))
    judge(tests)


@every_alert
def test_one_bad_value_is_no_alert(alert: str, judge: Judge) -> None:
    tests = []
    for case in CASES[alert]:
        values = _timeline((case.good, GOOD), (case.bad, 1), (case.good, GOOD))
        if case.of_counters:
            # One call, command or look that failed.
            values = _timeline(
                ({one: Rate(0) for one in case.bad}, GOOD),
                ({one: Rate(A_MINUTE) for one in case.bad}, 1),
                ({one: Rate(0) for one in case.bad}, GOOD),
            )
        at = range(_at(GOOD) - 1, _at(2 * GOOD))
        tests.append(_test("one bad value", _scraped(values), _is_silent(alert, at)))
    judge(tests)


@every_alert
def test_a_restart_of_carver_neither_delays_nor_ends_an_alert(alert: str, judge: Judge) -> None:
    tests = []
    for case in CASES[alert]:
        end = GOOD + _bad(case)
        # While it is pending; and when it has fired, in which case it goes on.
        values = _timeline((case.good, GOOD), (case.bad, _bad(case) + 2 * GOOD))
        pending = GOOD + (_bad(case) + RESTART) // 2
        restarts = [pending, end + 20, end + 20 + GOOD]
        at = range(_at(end), _at(end + 2 * GOOD))
        series = _scraped(values, restarts=restarts)
        tests.append(_test("Carver restarts", series, _fires(case, RULES[alert], *at)))
    judge(tests)


@every_alert
def test_scrapes_that_fail_neither_delay_nor_end_an_alert(alert: str, judge: Judge) -> None:
    tests = []
    for case in CASES[alert]:
        end = GOOD + _bad(case)
        values = _timeline((case.good, GOOD), (case.bad, _bad(case) + GOOD))
        at = range(_at(end), _at(end + GOOD))
        series = _scraped(values, failing=True)
        tests.append(_test("scrapes fail", series, _fires(case, RULES[alert], *at)))
    judge(tests)
