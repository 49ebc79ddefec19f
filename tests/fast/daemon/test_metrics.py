"""What is counted and measured, what a scrape costs, and the alerts and dashboard on it."""

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import expect
import grpc
import in_background
import pages
import pytest
import yaml
from fakes.disks import FakeDisks
from fakes.lvm import FakePool
from pages import Measured
from prometheus_client.parser import text_string_to_metric_families

from agent.csi.client import block
from agent.daemon import registration
from agent.daemon.node_metrics import Metrics
from agent.daemon.server import Service
from agent.extras.evacuation.progress import Stage
from agent.extras.orphans.candidates import Candidate, Kind
from agent.extras.orphans.look import Orphan, OrphanWatch
from agent.extras.orphans.orphans_service import Orphans
from agent.operations import autoextend
from agent.operations.diagnosis import Reason
from lvm import lvm_errors
from mount import mount_errors as mount_errors
from mount.command import Finished, Result
from proto import carver_pb2, csi_pb2

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
MIB = 1 << 20


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Measured]:
    with pages.measured(tmp_path) as made:
        yield made


# Counted


def test_calls_and_commands_are_counted_and_timed(measured: Measured) -> None:
    measured.client.create("pvc-1", 4 * MIB, block())
    with expect.code("INVALID_ARGUMENT"):
        measured.client.create("", 4 * MIB, block())
    found = measured.samples()
    assert found["carver_calls_total", "OK", "CreateVolume"] == 1
    assert found["carver_calls_total", "INVALID_ARGUMENT", "CreateVolume"] == 1
    assert found["carver_call_duration_seconds_count", "CreateVolume"] == 2
    assert 0 < found["carver_call_duration_seconds_sum", "CreateVolume"] < 60
    assert found["carver_commands_total", "OK", "lvm", "lvcreate"] == 1
    assert found["carver_command_duration_seconds_count", "lvm", "lvcreate"] == 1


@pytest.mark.parametrize(
    ("words", "result", "outcome"),
    [
        (("lvm", "lvcreate"), Result(5, "", "insufficient free space"), "NoSpace"),
        (("lvm", "lvremove"), Result(5, "", "something else"), "CommandFailed"),
        (("blkid", "-p"), Result(2, "", ""), "exit 2"),
    ],
)
def test_a_failure_is_counted_by_its_class_or_exit_code(
    words: Sequence[str], result: Result, outcome: str
) -> None:
    metrics = Metrics()
    assert metrics.counted(lambda *_, stdin=None: result)(*words) == result
    subcommand = words[1] if words[0] == "lvm" else ""
    line = f'program="{words[0]}",subcommand="{subcommand}"}} 1.0'
    assert f'outcome="{outcome}",{line}' in metrics.text().decode()


@pytest.mark.parametrize("error", ["", "NoSpace", "CommandTimedOut"])
def test_a_command_of_the_shell_is_counted_by_its_error(error: str) -> None:
    metrics = Metrics()
    metrics.count_command(Finished(("lvm", "lvcreate"), None if error else 0, 1.0, error))
    line = f'outcome="{error or "OK"}",program="lvm",subcommand="lvcreate"}} 1.0'
    assert line in metrics.text().decode()


def test_a_command_that_times_out_is_counted_and_still_raises() -> None:
    metrics = Metrics()

    def run(*words: str, stdin: bytearray | None = None) -> Result:
        raise mount_errors.CommandTimedOut(words, 1.0)

    with pytest.raises(mount_errors.CommandTimedOut):
        metrics.counted(run)("lvm", "lvs")
    assert 'outcome="CommandTimedOut",program="lvm",subcommand="lvs"} 1.0' in (
        metrics.text().decode()
    )


# Measured


def test_encrypted_volumes_and_snapshots_are_counted_by_their_key_s_name(
    measured: Measured, tmp_path: Path
) -> None:
    client, how = measured.client, {"carver/encryption": "luks2"}
    old = {"passphrase": "old key", "passphraseGeneration": "1"}
    new = {"passphrase": "new key", "previousPassphrase": "old key", "passphraseGeneration": "2"}
    made = [client.create(f"pvc-{n}", 40 * MIB, block(), parameters=how) for n in range(3)]
    for number, one in enumerate(made[:2]):
        client.stage(one, tmp_path / str(number), block(), old)
    client.snapshot("snap-1", made[0].volume_id)

    def named() -> dict[str, float]:
        family = "carver_key_generation_volumes"
        client.capacity()  # refreshes the cached state
        return {key[1]: n for key, n in measured.samples().items() if key[0] == family}

    # Samples have labels in the order of their names.
    assert named() == {"1": 3, "(unnamed)": 1}
    client.publish(made[0], tmp_path / "0", tmp_path / "a", block(), new)
    assert named() == {"2": 1, "1": 2, "(unnamed)": 1}


def test_a_group_is_measured_as_capacity_is(measured: Measured) -> None:
    measured.client.create("pvc-1", 40 * MIB, block())
    free = measured.client.capacity().available_capacity
    found = measured.samples()
    assert found["carver_group_present", "data"] == 1
    assert found["carver_group_present", "gone"] == 0
    assert found["carver_group_size_bytes", "data"] == 160 * 4 * MIB
    assert found["carver_group_free_bytes", "data"] == free == 150 * 4 * MIB
    assert found["carver_group_missing_disks", "data"] == 0
    assert found["carver_group_volumes", "data"] == 1
    assert found["carver_group_encrypted_volumes", "data"] == 0
    assert ("carver_group_size_bytes", "gone") not in found
    assert found["carver_class_available_bytes", "plain", "data"] == free
    kept = measured.client.capacity({"class": "kept"}).available_capacity
    assert found["carver_class_available_bytes", "kept", "data"] == kept < free
    assert ("carver_class_available_bytes", "lost", "gone") not in found
    assert found["carver_lvm_up",] == 1


def test_only_volumes_with_a_problem_are_named(measured: Measured) -> None:
    sick, well = (measured.client.create(name, 4 * MIB, block()) for name in ("sick", "well"))
    measured.host.lvm2.groups["data"].volumes["vol-sick"].health = "partial"
    measured.client.capacity()
    found = measured.samples()
    assert found["carver_volume_health", "DiskMissing", "INACCESSIBLE", sick.volume_id] == 1
    assert not any(well.volume_id in key for key in found)


def test_scrapes_of_an_idle_service_run_one_command_a_minute(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, group = 1e9, measured.host.lvm2.groups["data"]
    monkeypatch.setattr(time, "time", lambda: now)
    for _ in range(5):
        measured.samples()
    assert len(measured.host.commands) == 1
    group.seqno += 1
    measured.samples()
    assert len(measured.host.commands) == 1
    now += 61
    callers = [threading.Thread(target=measured.samples) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(measured.host.commands) == 2
    now += 61
    assert measured.samples()["carver_report_timestamp_seconds",] == now
    assert len(measured.host.commands) == 2, "nothing was written since"


def test_a_failing_lvm2_is_reported_and_not_asked_again_for_a_minute(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 1e9, []
    monkeypatch.setattr(time, "time", lambda: now)

    def broken(words: Sequence[str]) -> Result:
        asked.append(words)
        return Result(5, "", "broken")

    measured.host.intercept = broken
    for _ in range(3):
        found = measured.samples()
        assert found["carver_lvm_up",] == 0
        assert ("carver_group_present", "data") not in found
    assert len(asked) == 1
    measured.host.intercept = lambda words: None
    now += 61
    assert measured.samples()["carver_lvm_up",] == 1
    # A disk that hangs is reported in the same way.
    disks = measured.host.disks
    assert isinstance(disks, FakeDisks)
    disks.hanging.add("/dev/fake-data-0")
    now += 61
    assert measured.samples()["carver_lvm_up",] == 0


def test_wipes_are_counted_by_state(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, let_go = threading.Semaphore(0), threading.Event()

    def fail(device: str, offset_bytes: int, length_bytes: int, **how: object) -> None:
        reached.release()
        assert let_go.wait(20)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(measured.host.kernel, "zero_out", fail)
    measured.service.eraser.grace_seconds = 0.01
    for name in ("a", "b", "c"):
        measured.client.delete(measured.client.create(name, 4 * MIB, block()).volume_id)
    for _ in range(2):
        assert reached.acquire(timeout=20)
    counts = {state: measured.samples()["carver_wipes", state] for state in ("queued", "running")}
    assert counts == {"queued": 1, "running": 2}
    let_go.set()
    assert reached.acquire(timeout=20)
    in_background.ended(measured.service.eraser.jobs)
    assert measured.samples()["carver_wipes", "failed"] == 3


def test_pools_are_measured_by_the_kernel_s_status(measured: Measured) -> None:
    found = measured.samples()
    assert ("carver_pool_size_bytes", "thin", "data") not in found
    measured.client.create("pvc-1", 100 * MIB, block(), parameters={"class": "thin"})
    pool = measured.host.lvm2.groups["data"].volumes["pool-thin"]
    assert isinstance(pool, FakePool)
    pool.used_data_blocks, pool.used_metadata_blocks = 256, 512
    measured.client.capacity()
    found = measured.samples()
    shown = {
        name: found[f"carver_pool_{name}", "thin", "data"]
        for name in ("size_bytes", "promised_bytes", "data_percent", "metadata_percent")
    }
    assert shown == {
        "size_bytes": 64 * MIB,
        "promised_bytes": 100 * MIB,
        "data_percent": 25,
        "metadata_percent": 50,
    }
    measured.host.deactivate("data", "vol-pvc-1")
    measured.host.deactivate("data", "pool-thin")
    assert ("carver_pool_data_percent", "thin", "data") not in measured.samples()
    assert found["carver_extensions_total", "data", "extended"] == 0


def test_failed_background_scans_are_counted(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("agent.operations.autoextend._LOOK_SECONDS", 0.001)
    monkeypatch.setattr(measured.service.autoextender, "_full", broken)
    assert measured.samples()["carver_round_failures_total", "data", "grow"] == 0
    measured.service.autoextender.scans.start()
    expect.soon(lambda: measured.samples()["carver_round_failures_total", "data", "grow"] > 1)
    assert measured.samples()["carver_round_failures_total", "data", "inline"] == 0
    measured.service.autoextender.scans.stop()


def test_orphans_are_counted_by_kind_where_they_are_looked_for() -> None:
    lost = Candidate(Kind.VOLUME, "data@00000000/vol-1", "uuid", "4 MiB")
    found = [Orphan(lost, 3600, is_sure=True), Orphan(lost, 60, is_sure=False)]
    watch = OrphanWatch(lambda: found, 600, clock=lambda: 42.0)
    watch.task.run_once()
    by_kind, when = Orphans(watch).gauges()
    assert (by_kind.name, by_kind.labels) == ("carver_orphans", ("kind",))
    assert by_kind.values["volume",] == 1
    assert by_kind.values["inline",] == 0
    assert (when.name, when.values) == ("carver_orphans_timestamp_seconds", {(): 42})


def test_the_registration_is_in_one_state(measured: Measured) -> None:
    measured.registration.state = registration.State.REFUSED
    found = measured.samples()
    states = {state: found["carver_registration", state.value] for state in registration.State}
    assert sum(states.values()) == states[registration.State.REFUSED] == 1


# Documents, alerts and dashboard


def exported(measured: Measured) -> dict[str, set[str]]:
    """Every sample's name that a scrape can have, with its labels."""
    pages.fill(measured)
    pages.spoil(measured)
    found: dict[str, set[str]] = {}
    for text in (measured.metrics.text(), pages.of_the_controller().text()):
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


# How a scrape names the parts of a histogram.
PARTS = r"_(bucket|count|sum)$"


def test_every_metric_is_documented_with_its_labels_and_no_other(measured: Measured) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(carver_\w+)` \|([^|]*)\|", text, re.M)
    documented = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    documented |= {name: set() for name in re.findall(r"`(process_\w+)`", text)}
    there = {
        re.sub(PARTS, "", name): labels - {"le"} for name, labels in exported(measured).items()
    }
    assert documented == there


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    document = json.loads((MONITORING / "dashboard.json").read_text())
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    targets = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [rule["expr"] for rule in rules()] + targets


# kubernetes-csi/csi-lib-utils, metrics/metrics.go: what each sidecar has of its calls.
OF_SIDECARS = {
    f"csi_sidecar_operations_seconds_{part}": {"driver_name", "method_name", "grpc_status_code"}
    for part in ("bucket", "sum", "count")
}
OF_SIDECARS["csi_sidecar_operations_seconds_bucket"].add("le")


@pytest.fixture
def names(measured: Measured) -> dict[str, set[str]]:
    return exported(measured) | OF_SIDECARS


def test_alerts_and_dashboard_use_only_metrics_and_labels_that_exist(
    names: dict[str, set[str]],
) -> None:
    for expression in expressions():
        used = re.findall(r"\b(?:carver|process|csi_sidecar)_\w+", expression)
        assert used, expression
        assert set(used) <= set(names), expression
        # Prometheus itself adds instance and job, prometheus-operator the others.
        added = {"instance", "job", "pod", "endpoint", "container"}
        allowed = added.union(*(names[name] for name in used))
        chosen = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)
        listed = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        grouped = [word.strip() for words in listed for word in words.split(",")]
        assert {*chosen, *grouped} <= allowed, expression


STREAMS = {
    method.name
    for file in (csi_pb2, carver_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.client_streaming or method.server_streaming
}


def test_the_alert_of_slow_calls_leaves_out_every_stream() -> None:
    """A stream lasts as long as who reads it likes."""
    [slow] = [one["expr"] for one in rules() if one["alert"] == "CarverCallsSlow"]
    [left_out] = re.findall(r'method!~"([^"]*)"', slow)
    assert set(left_out.split("|")) == STREAMS


def test_the_dashboard_shows_the_time_and_the_failures_of_provisioning() -> None:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    of_sidecars = [one for one in shown if "csi_sidecar_operations_seconds" in one]
    # Other drivers' sidecars have the same metric.
    assert all('driver_name=~"$driver"' in one for one in of_sidecars)
    assert sum("/csi.v1.Controller/CreateVolume" in one for one in of_sidecars) == 2
    assert any('grpc_status_code!="OK"' in one for one in of_sidecars)
    # A sidecar beside Carver has the same instance, and memory of its own.
    for one in shown:
        assert "process_" not in one or "on (instance, pod, endpoint) carver_build_info" in one


def test_each_reason_of_health_has_an_alert_but_that_of_a_repair_that_goes_on() -> None:
    alerts = [
        one["expr"] for one in rules() if re.search("carver_(volume|storage)_health", one["expr"])
    ]
    for kind in ("volume", "storage"):
        wanted = {
            (getattr(one, f"{kind}_status"), one.word)
            for one in Reason
            if getattr(one, f"{kind}_status") and one is not Reason.RAID_RESYNCING
        }
        chosen = [
            (status, excepted)
            for expression in alerts
            for status, excepted in re.findall(
                rf'carver_{kind}_health{{status="(\w+)"(?:, reason!="(\w+)")?}}', expression
            )
        ]
        fired = {
            (status, one.word)
            for status, excepted in chosen
            for one in Reason
            if getattr(one, f"{kind}_status") == status and one.word != excepted
        }
        assert fired == wanted


def scanning(service: Service) -> list[Any]:
    return [service.autoextender, service.auto_repair, service.inline_volumes]


def test_alerts_and_dashboard_use_only_values_that_occur(measured: Measured) -> None:
    occurring = {
        "code": {code.name for code in grpc.StatusCode},
        "outcome": {
            "OK",
            *autoextend.OUTCOMES,
            *(name for name in {**vars(lvm_errors), **vars(mount_errors)} if name[0].isupper()),
        },
        "state": {*registration.State, *measured.service.eraser.jobs.counts()},
        "stage": set(Stage),
        "waits": {"true", "false"},
        "kind": {one.scans.kind for one in scanning(measured.service)},
        "method": STREAMS,
        "status": {status for one in Reason for status in (one.volume_status, one.storage_status)},
        "reason": {one.word for one in Reason},
        # The dashboard's variable.
        "driver_name": {"$driver"},
        "method_name": {"/csi.v1.Controller/CreateVolume"},
        "grpc_status_code": {"OK"},
    }
    for expression in expressions():
        for label, values in re.findall(r"(\w+)(?:=~|!~|!=|=)\"([^\"]*)\"", expression):
            if label != "instance":
                assert set(values.split("|")) <= occurring[label], expression


def test_every_alert_has_a_severity_and_a_description_of_labels_that_exist(
    names: dict[str, set[str]],
) -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description", "runbook"} == set(rule["annotations"])
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        left = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        listed = re.findall(r"by \(([^)]*)\)", rule["expr"])
        used = re.findall(r"\bcarver_\w+", rule["expr"])
        there = (
            {word.strip() for words in listed for word in words.split(",")}
            if listed
            else {"instance"}.union(*(names[name] for name in used))
        )
        assert left <= there, rule["alert"]


def test_every_alert_is_documented_and_every_panel_explained() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert re.findall(r"^\| `(Carver\w+)` \|", text, re.M) == [rule["alert"] for rule in rules()]
    identities = [panel["id"] for panel in panels()]
    assert len(set(identities)) == len(identities)
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")


def test_a_snapshot_s_area_is_measured_and_copies_are_counted(measured: Measured) -> None:
    volume = measured.client.create("pvc-1", 64 * MIB, block())
    snapshot = measured.client.snapshot("1", volume.volume_id, {"size": "16MiB"})
    measured.host.write_bytes("/dev/mapper/data-vol--pvc--1", 0, bytes(4 * MIB))
    measured.service.reports.fresh()
    found = measured.samples()
    assert found["carver_snapshot_used_ratio", snapshot.snapshot_id] == 0.25
    assert [found["carver_copies", one] for one in ("queued", "running", "failed")] == [0, 0, 0]


def test_background_work_is_counted_by_group_and_kind(measured: Measured) -> None:
    volume = measured.client.create("pvc-1", 8 * MIB, block())
    measured.client.delete(volume.volume_id)
    samples = measured.samples()
    assert samples["carver_background_bytes_total", "data", "erase"] == 8 * MIB
    assert samples["carver_background_paused_seconds_total", "data"] == 0
