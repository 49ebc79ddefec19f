"""What is counted, timed and measured, for Prometheus. The only module that imports its client.

Calls and commands are counted as they end. Everything else is looked up when it is asked for.
"""

import platform
import time
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import BinaryIO

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from agent.core import records
from agent.core.allocation import Allocators
from agent.core.background import GroupTasks
from agent.core.classes import DeviceClass
from agent.core.errors import AgentError, PoolSilent
from agent.core.inventory import MONITOR_AGE_SECONDS, Inventory
from agent.core.locks import Admission
from agent.core.trace import Trace
from agent.daemon.extra import Extra, Gauge
from agent.daemon.registration import Registration, State
from agent.operations import health as conditions
from agent.operations.autoextend import Autoextender
from agent.operations.clone import Copier
from agent.operations.erase import Eraser
from agent.operations.health import Diagnosis
from agent.operations.reencrypt import Reencrypter
from agent.operations.storage_health import StorageHealth
from lvm import errors, groups, report
from mount import command
from mount import errors as mount_errors
from mount.command import Finished, Result, Runner, Stream

# A time of creation for each counter would be as many series again, and nobody asks for it.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From a call that runs nothing to one that waits for a disk. Seconds.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True)
class Parts:
    """What is looked at for each scrape."""

    classes: Sequence[DeviceClass]
    inventory: Inventory
    admission: Admission
    diagnosis: Diagnosis
    storage: StorageHealth
    eraser: Eraser
    copier: Copier
    reencrypter: Reencrypter
    autoextender: Autoextender
    registration: Registration
    extras: Sequence[Extra] = ()
    tasks: Sequence[GroupTasks] = ()


class Metrics:
    """One process's counters and gauges."""

    # Prometheus' text format, which every version of it reads.
    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "carver_calls", "CSI calls that ended.", ["method", "code"], registry=self._registry
        )
        self._call_seconds = Histogram(
            "carver_call_duration_seconds",
            "How long CSI calls took.",
            ["method"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._step_seconds = Counter(
            "carver_call_step_seconds",
            "Time that CSI calls spent waiting, in programs and in the kernel.",
            ["method", "kind"],
            registry=self._registry,
        )
        self._commands = Counter(
            "carver_commands",
            "Programs that ended: OK, the error that lvm2's failure was, or the exit code.",
            ["program", "subcommand", "outcome"],
            registry=self._registry,
        )
        self._command_seconds = Histogram(
            "carver_command_duration_seconds",
            "How long programs ran.",
            ["program", "subcommand"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)

    def count_call(self, ended: Trace) -> None:
        """Count a call that ended, and sum its steps by their kinds."""
        self._calls.labels(ended.method, ended.code).inc()
        self._call_seconds.labels(ended.method).observe(ended.seconds)
        for kind, seconds in ended.by_kind.items():
            self._step_seconds.labels(ended.method, kind).inc(seconds)

    def counted(self, run: Runner) -> Runner:
        """The same, with each program counted, also one that could not be started."""

        def counting(*words: str, stdin: bytearray | None = None) -> Result:
            started = time.monotonic()
            try:
                result = run(*words, stdin=stdin)
            except Exception as error:
                self._count_command(words, type(error).__name__, time.monotonic() - started)
                raise
            self._count_command(words, _outcome(words, result), time.monotonic() - started)
            return result

        return counting

    def counted_stream(self, stream: Stream) -> Stream:
        """The same, with each program counted whose output is read as it comes."""

        @contextmanager
        def counting(*words: str, stdin: bytearray | None = None) -> Iterator[BinaryIO]:
            started, outcome = time.monotonic(), "OK"
            try:
                with stream(*words, stdin=stdin) as output:
                    yield output
            except Exception as error:
                outcome = type(error).__name__
                raise
            finally:
                self._count_command(words, outcome, time.monotonic() - started)

        return counting

    def count_command(self, finished: Finished) -> None:
        """Count a command that was carried out without a program of its own."""
        result = Result(finished.exit_code, "", "")
        self._count_command(finished.words, _outcome(finished.words, result), finished.seconds)

    def _count_command(self, words: tuple[str, ...], outcome: str, seconds: float) -> None:
        if words[0] == "env":
            words = words[2:]  # it only sets a variable for the program behind it
        subcommand = words[1] if words[0] in ("lvm", "cryptsetup") else ""
        self._commands.labels(words[0], subcommand, outcome).inc()
        self._command_seconds.labels(words[0], subcommand).observe(seconds)

    def watch(self, parts: Parts) -> None:
        """Measure these from now on."""
        self._registry.register(_Gauges(parts))

    def families(self) -> Iterable[Metric]:
        """Everything as it is now."""
        return self._registry.collect()

    def text(self) -> bytes:
        """Everything as it is now, in the format of CONTENT_TYPE."""
        return generate_latest(self._registry)


def _outcome(words: tuple[str, ...], result: Result) -> str:
    if result.exit_code == 0:
        return "OK"
    if words[0] == "lvm":
        return type(errors.classify(words, result.exit_code, result.stderr)).__name__
    # No failure by itself: blkid's 2, for one, is a blank device.
    return f"exit {result.exit_code}"


class _Gauges(Collector):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._allocators = Allocators(parts.classes, parts.inventory)

    def collect(self) -> Iterable[Metric]:
        """What is looked up at each scrape."""
        build = GaugeMetricFamily(
            "carver_build_info", "What runs here; always 1.", labels=["version", "python"]
        )
        build.add_metric([version("carver"), platform.python_version()], 1)
        yield build

        parts = self._parts
        yield _by_state(
            "carver_wipes",
            "Deleted volumes that are not yet overwritten and removed.",
            parts.eraser.counts(),
        )
        yield _by_state(
            "carver_copies",
            "Volumes whose contents are not complete yet.",
            parts.copier.counts(),
        )
        yield _by_state(
            "carver_reencryptions",
            "Copies of encrypted volumes that are given a master key of their own.",
            parts.reencrypter.counts(),
        )

        extensions = CounterMetricFamily(
            "carver_extensions",
            "How often what fills up was extended, had no room for that, or failed to be.",
            labels=["kind", "outcome"],
        )
        for (kind, outcome), count in parts.autoextender.counts().items():
            extensions.add_metric([kind, outcome], count)
        yield extensions

        failures = CounterMetricFamily(
            "carver_round_failures",
            "Looks behind the answers that failed, and are had again.",
            labels=["kind", "group"],
        )
        for tasks in parts.tasks:
            for group, count in tasks.failures().items():
                failures.add_metric([tasks.kind, group], count)
        yield failures

        registration = GaugeMetricFamily(
            "carver_registration", "How far the registration is: 1 for one.", labels=["state"]
        )
        for one in State:
            registration.add_metric([one.value], one is parts.registration.state)
        yield registration

        storage = GaugeMetricFamily(
            "carver_storage_health",
            "1 for each thing that is wrong with the node's storage.",
            labels=["status", "reason"],
        )
        for told in self._parts.storage.conditions():
            storage.add_metric([told.reason.of_storage, told.reason.word], 1)
        yield storage

        for extra in self._parts.extras:
            yield from map(_of_extra, extra.gauges())

        answers = GaugeMetricFamily("carver_lvm_up", "Whether lvm2 gave a report when last asked.")
        when = GaugeMetricFamily(
            "carver_report_timestamp_seconds", "When the report of the groups was read."
        )
        try:
            self._parts.admission.require_open()
            known = self._parts.inventory.state(max_age=MONITOR_AGE_SECONDS)
        except (AgentError, mount_errors.CommandError):
            answers.add_metric([], 0)
            yield answers
            return
        answers.add_metric([], 1)
        when.add_metric([], self._parts.inventory.time_seconds)
        yield from (answers, when, *self._of_groups(known))

    def _of_groups(self, known: report.Report) -> Iterable[Metric]:
        present = _of_group("present", "Whether the group is on this node.")
        size = _of_group("size_bytes", "The group's extents on disks that are there.")
        free = _of_group(
            "free_bytes",
            "The group's free extents on disks that may be used, the reserve included.",
        )
        missing = _of_group("missing_disks", "The group's disks that are not there.")
        text = _of_group("metadata_used_ratio", "How full the group's metadata area is; 1 is full.")
        volumes = _of_group("volumes", "Carver's volumes, with those that are being wiped.")
        encrypted = _of_group("encrypted_volumes", "Those of them that are encrypted.")
        generations = GaugeMetricFamily(
            "carver_key_generation_volumes",
            "Encrypted volumes and snapshots, by the name of the only key that opens them.",
            labels=["group", "generation"],
        )
        health = GaugeMetricFamily(
            "carver_volume_health",
            "1 for each thing that is wrong with a volume.",
            labels=["volume", "status", "reason"],
        )
        fullness = GaugeMetricFamily(
            "carver_snapshot_used_ratio",
            "How full a copy-on-write snapshot's area is; at 1 the snapshot is lost.",
            labels=["snapshot"],
        )
        named = Counts[tuple[str, str]]()
        for snapshot in self._parts.inventory.all_snapshots(known):
            if snapshot.is_encrypted:
                named[snapshot.group.name, records.key_generation(snapshot.own_tags)] += 1
            percent = snapshot.group.volume(snapshot.name).data_percent
            if percent is not None and not snapshot.is_thin:
                fullness.add_metric([str(snapshot.id)], percent / 100)
        sealed = Counts[str]()
        held, mounts = Counts[str](), self._parts.diagnosis.mounts()
        until = time.monotonic() + conditions.PATIENCE_SECONDS
        for volume in self._parts.inventory.present(known):
            held[volume.group.name] += 1
            sealed[volume.group.name] += volume.is_encrypted
            if volume.is_encrypted and not volume.wiping:
                named[volume.group.name, records.key_generation(volume.own_tags)] += 1
            for told in self._parts.diagnosis.of(volume, mounts, until_seconds=until):
                labels = [str(volume.id), told.reason.of_volume, told.reason.word]
                health.add_metric(labels, 1)
        for label_values, count in named.items():
            generations.add_metric(label_values, count)
        for name in dict.fromkeys(one.group for one in self._parts.classes):
            group = known.groups.get(name)
            present.add_metric([name], group is not None)
            if group is None:
                continue
            size.add_metric([name], group.extents * group.extent_size_bytes)
            free.add_metric([name], group.free_extents * group.extent_size_bytes)
            missing.add_metric([name], group.missing_disks)
            text.add_metric([name], groups.text_percent(group) / 100)
            volumes.add_metric([name], held[name])
            encrypted.add_metric([name], sealed[name])
        # What does not answer by then is left out; `carver_storage_health` tells of it.
        with command.time_limit(conditions.PATIENCE_SECONDS):
            asked = (self._of_classes(known), *self._of_pools(known))
        of_volumes = (volumes, encrypted, generations, health, fullness)
        return present, size, free, missing, text, *of_volumes, *asked

    def _of_pools(self, known: report.Report) -> Iterable[Metric]:
        size = _of_pool("size_bytes", "The data that the pool has now.")
        promised = _of_pool("promised_bytes", "The sizes of its volumes and their snapshots.")
        data = _of_pool("data_percent", "How full its data are.")
        metadata = _of_pool("metadata_percent", "How full its metadata are.")
        for group in self._parts.inventory.own_groups(known):
            for one in self._allocators.thin(group.name):
                pool = one.pool(group)
                if not pool.data_extents:
                    continue
                labels = [one.device_class, group.name]
                size.add_metric(labels, pool.data_extents * group.extent_size_bytes)
                promised.add_metric(labels, pool.promised_bytes)
                status = None
                with suppress(PoolSilent):
                    status = self._parts.inventory.pool_status(group.name, pool.name)
                if status is not None:
                    data.add_metric(labels, status.data_percent)
                    metadata.add_metric(labels, status.metadata_percent)
        return size, promised, data, metadata

    def _of_classes(self, known: report.Report) -> Metric:
        available = GaugeMetricFamily(
            "carver_class_available_bytes",
            "The largest volume of the class that can be made, as GetCapacity says.",
            labels=["class", "group"],
        )
        for one in self._parts.classes:
            if (group := known.groups.get(one.group)) is not None:
                with suppress(PoolSilent):
                    largest = self._allocators.of(one).maximum_bytes(group)
                    available.add_metric([one.name, one.group], largest)
        return available


def _of_extra(gauge: Gauge) -> Metric:
    made = GaugeMetricFamily(gauge.name, gauge.help, labels=[gauge.label] if gauge.label else None)
    for value, measured in gauge.values.items():
        made.add_metric([value] if gauge.label else [], measured)
    return made


def _by_state(name: str, documentation: str, counts: Mapping[str, int]) -> Metric:
    made = GaugeMetricFamily(name, documentation, labels=["state"])
    for state, count in counts.items():
        made.add_metric([state], count)
    return made


def _of_group(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"carver_group_{name}", documentation, labels=["group"])


def _of_pool(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"carver_pool_{name}", documentation, labels=["class", "group"])
