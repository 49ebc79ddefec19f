"""Prometheus metrics of a node: RPCs, programs, volume groups, volumes and thin pools.

RPCs and programs are counted when they end. All other metrics are measured at each scrape; each of
these metrics is a row of `OF_PROCESS`, `OF_GROUPS` or `OF_POOLS`.
"""

import platform
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
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

from agent.core import trace
from agent.core.errors import AgentError, PoolSilent
from agent.core.trace import Trace
from agent.daemon.extra import Gauge
from agent.daemon.registration import Registration, State
from agent.daemon.server import Service
from agent.operations import diagnosis as conditions
from agent.volumes import records
from agent.volumes.report_age import CachedReport
from agent.volumes.reports import MONITOR_AGE_SECONDS
from lvm import groups, lvm_errors, report
from lvm.devicemapper import ThinPool
from lvm.room import Room
from lvm.thin import Pool
from mount import command
from mount import mount_errors as mount_errors
from mount.cgroups import UNLIMITED
from mount.command import Finished, Result, Runner, Stream

# Switch off the series of creation times, which would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Buckets of the histograms of durations, in seconds: from an RPC that runs no program to an RPC
# that waits for a disk.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All Prometheus metrics of this process."""

    # Content type of Prometheus' text format, which all versions of Prometheus read.
    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._calls = Counter(
            "carver_calls", "CSI calls that ended.", ["method", "code"], registry=registry
        )
        self._call_seconds = Histogram(
            "carver_call_duration_seconds",
            "Duration of CSI calls.",
            ["method"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._step_seconds = Counter(
            "carver_call_step_seconds",
            "Time that CSI calls spent waiting, in programs and in the kernel.",
            ["method", "kind"],
            registry=registry,
        )
        self._commands = Counter(
            "carver_commands",
            "Programs that ended, by outcome: OK, the class of lvm2's error, or the exit code.",
            ["program", "subcommand", "outcome"],
            registry=registry,
        )
        self._command_seconds = Histogram(
            "carver_command_duration_seconds",
            "Duration of programs.",
            ["program", "subcommand"],
            buckets=_BUCKETS,
            registry=registry,
        )
        ProcessCollector(registry=registry)

    def count_call(self, rpc_trace: Trace) -> None:
        """Count an RPC that ended, and add its steps to the time spent on each kind of step."""
        self._calls.labels(rpc_trace.method, rpc_trace.code).inc()
        self._call_seconds.labels(rpc_trace.method).observe(rpc_trace.seconds)
        for kind, seconds in rpc_trace.by_kind.items():
            self._step_seconds.labels(rpc_trace.method, kind).inc(seconds)

    def counted(self, run: Runner) -> Runner:
        """Wrap `run` to count each program that it runs, even one that cannot be started."""

        def counting(*words: str, stdin: bytearray | None = None) -> Result:
            with self._counted(words) as results:
                result = run(*words, stdin=stdin)
                results.append(result)
            return result

        return counting

    def counted_stream(self, stream: Stream) -> Stream:
        """Wrap `stream` to count each program that it runs."""

        @contextmanager
        def counting(*words: str) -> Iterator[BinaryIO]:
            with self._counted(words), stream(*words) as output:
                yield output

        return counting

    def count_command(self, finished: Finished) -> None:
        """Count a command that ended in an interactive lvm2 shell."""
        self._count_command(finished.words, finished.error or "OK", finished.seconds)

    @contextmanager
    def _counted(self, words: tuple[str, ...]) -> Iterator[list[Result]]:
        """Count the program that the body of the `with` runs.

        Yields a list, to which the body appends the program's result, if it gets one.
        """
        started, outcome = time.monotonic(), "OK"
        results: list[Result] = []
        try:
            yield results
            for result in results:
                outcome = _outcome(words, result)
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._count_command(words, outcome, time.monotonic() - started)

    def _count_command(self, words: Sequence[str], outcome: str, seconds: float) -> None:
        program, subcommand = trace.program_of(words)
        self._commands.labels(program, subcommand, outcome).inc()
        self._command_seconds.labels(program, subcommand).observe(seconds)

    def watch(self, service: Service, registration: Registration) -> None:
        """Measure the gauges of a service and of its registration at each scrape from now on."""
        self._registry.register(_Gauges(service, registration))

    def text(self) -> bytes:
        """Measure all metrics, and return them in Prometheus' text format."""
        return generate_latest(self._registry)


def _outcome(words: Sequence[str], result: Result) -> str:
    if result.exit_code == 0:
        return "OK"
    if words[0] == "lvm":
        return type(lvm_errors.classify(words, result.exit_code, result.stderr)).__name__
    # Report the exit code as it is, because not every code means failure: blkid exits with 2 for a
    # blank device.
    return f"exit {result.exit_code}"


class Scrape:
    """The state that all rows of one scrape share; each property is computed once, if needed."""

    def __init__(self, service: Service, registration: Registration) -> None:
        self.service, self.registration = service, registration
        self.config = service.configuration.now
        self._reports, self._activator = service.reports, service.context.activator
        self.allocators = service.context.allocators

    @cached_property
    def known(self) -> CachedReport:
        """The cached report of all volume groups, refreshed where it is older than a minute.

        Raises Starting before start-up is complete, and the errors of `Reports.seen`.
        """
        self.service.context.admission.require_open()
        return self._reports.seen(MONITOR_AGE_SECONDS)

    @cached_property
    def groups(self) -> dict[str, report.Group | None]:
        """The configured volume groups by name; None for a group that is not on this node."""
        return {name: self.known.groups.get(name) for name in self.config.groups}

    @cached_property
    def volumes(self) -> list[records.Volume]:
        """All volumes of Carver's on this node."""
        return list(self.known.volumes())

    @cached_property
    def snapshots(self) -> list[records.Snapshot]:
        """All snapshots of Carver's, including temporary ones from which volumes are copied."""
        return list(self.known.snapshots())

    @cached_property
    def pools(self) -> list["PoolState"]:
        """The thin pools of the device classes, without pools that are not created yet."""
        return [
            PoolState((allocator.device_class, group.name), group, pool, self._status(group, pool))
            for group in self.known.groups.values()
            for allocator in self.allocators.thin_allocators(group)
            if (pool := allocator.pool(group)).data_extents
        ]

    def _status(self, group: report.Group, pool: Pool) -> ThinPool | None:
        with suppress(PoolSilent):
            return self._activator.pool_status(group.name, pool.name)
        return None


@dataclass(frozen=True)
class PoolState:
    """A thin pool and the values of its labels: device class and volume group.

    `status` is the kernel's status of the pool; None while the pool is inactive or does not answer.
    """

    labels: tuple[str, str]
    group: report.Group
    pool: Pool
    status: ThinPool | None


# Type of a metric's samples: for each sample the values of the metric's labels, and the number.
Samples = Iterable[tuple[Sequence[str], float]]


@dataclass(frozen=True)
class Row:
    """A metric that is measured at each scrape."""

    name: str
    help: str
    labels: Sequence[str]
    measure: Callable[[Scrape], Samples]
    family: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily

    def measured(self, scrape: Scrape) -> Metric:
        """Measure the metric, and return it with all its samples."""
        metric = self.family(self.name, self.help, labels=self.labels)
        for values, value in self.measure(scrape):
            metric.add_metric(values, value)
        return metric


def _by_state(name: str, help_text: str, counts: Callable[[Service], Mapping[str, int]]) -> Row:
    def measure(scrape: Scrape) -> Samples:
        return (((state,), count) for state, count in counts(scrape.service).items())

    return Row(name, help_text, ("state",), measure)


def _by_group(name: str, help_text: str, measure: Callable[[report.Group], float]) -> Row:
    return Row(name, help_text, ("group",), lambda scrape: _measure_groups(scrape, measure))


def _by_pool(name: str, help_text: str, measure: Callable[[PoolState], float | None]) -> Row:
    def samples(scrape: Scrape) -> Samples:
        for pool in scrape.pools:
            if (value := measure(pool)) is not None:
                yield pool.labels, value

    return Row(name, help_text, ("class", "group"), samples)


def _measure_groups(scrape: Scrape, measure: Callable[[report.Group], float]) -> Samples:
    for name, group in scrape.groups.items():
        if group is not None:
            yield (name,), measure(group)


def _volumes(scrape: Scrape, *, encrypted_only: bool = False) -> Samples:
    volumes = (volume for volume in scrape.volumes if volume.is_encrypted or not encrypted_only)
    counts = Counts(volume.group.name for volume in volumes)
    return _measure_groups(scrape, lambda group: counts[group.name])


def _key_generations(scrape: Scrape) -> Samples:
    encrypted: list[records.Volume | records.Snapshot] = [
        volume for volume in scrape.volumes if volume.is_encrypted and not volume.is_doomed
    ]
    encrypted += (snapshot for snapshot in scrape.snapshots if snapshot.is_encrypted)
    labels = ((record.group.name, records.key_generation(record.own_tags)) for record in encrypted)
    return Counts(labels).items()


def _volume_health(scrape: Scrape) -> Samples:
    diagnosis = scrape.service.diagnosis
    mounts, until_seconds = diagnosis.mounts(), time.monotonic() + conditions.PATIENCE_SECONDS
    for volume in scrape.volumes:
        for condition in diagnosis.of(volume, mounts, until_seconds=until_seconds):
            yield (str(volume.id), condition.reason.volume_status, condition.reason.word), 1


def _snapshots_used(scrape: Scrape) -> Samples:
    for snapshot in scrape.snapshots:
        percent = snapshot.group.volume(snapshot.name).data_percent
        if percent is not None and not snapshot.is_thin:
            yield (str(snapshot.id),), percent / 100


def _available(scrape: Scrape) -> Samples:
    for device_class in scrape.config.classes:
        if (group := scrape.groups[device_class.group]) is not None:
            with suppress(PoolSilent):
                yield (
                    (device_class.name, device_class.group),
                    scrape.allocators.of(device_class).maximum_bytes(group),
                )


def _storage_health(scrape: Scrape) -> Samples:
    for condition in scrape.service.storage.conditions():
        yield (condition.reason.storage_status, condition.reason.word), 1


def _failures(scrape: Scrape) -> Samples:
    for scan in scrape.service.scans:
        for group, count in scan.failures().items():
            yield (scan.kind, group), count


def _io_limits(scrape: Scrape) -> Samples:
    for volume in scrape.service.context.limiter.limited:
        for kind, limit in vars(volume.io_max).items():
            if limit:
                yield (volume.volume_id, kind), limit


def _background_bytes(scrape: Scrape) -> Samples:
    for group, pace in scrape.service.context.paces.every().items():
        for kind, done_bytes in pace.done_bytes.items():
            yield (group, kind), done_bytes


def _background_paused(scrape: Scrape) -> Samples:
    for group, pace in scrape.service.context.paces.every().items():
        yield (group,), pace.paused_seconds


# fmt: off
OF_PROCESS: tuple[Row, ...] = (
    Row("carver_build_info", "Carver's and Python's versions; always 1.", ("version", "python"),
        lambda _: [((version("carver"), platform.python_version()), 1)]),
    Row("carver_config_last_reload_successful",
        "1 if the configuration's file was taken over when it was loaded last.", (),
        lambda scrape: [((), scrape.service.configuration.is_taken)]),
    Row("carver_config_last_reload_success_timestamp_seconds",
        "Time when the configuration's file was taken over last.", (),
        lambda scrape: [((), scrape.service.configuration.taken_seconds)]),
    _by_state("carver_wipes", "Deleted volumes that are not erased and removed yet.",
        lambda service: service.eraser.jobs.counts()),
    _by_state("carver_copies", "Volumes whose contents are not copied completely yet.",
        lambda service: service.copier.jobs.counts()),
    Row("carver_extensions", "Automatic extensions of pools and snapshots.", ("kind", "outcome"),
        lambda scrape: scrape.service.autoextender.counts().items(), CounterMetricFamily),
    Row("carver_background_bytes", "What background I/O did, by the kind of work.",
        ("group", "kind"), _background_bytes, CounterMetricFamily),
    Row("carver_background_paused_seconds", "Time that background I/O was paused for others.",
        ("group",), _background_paused, CounterMetricFamily),
    Row("carver_round_failures", "Failed background scans; they are retried.", ("kind", "group"),
        _failures, CounterMetricFamily),
    Row("carver_registration", "State of the registration with kubelet: 1 for one.", ("state",),
        lambda scrape: (((state.value,), state is scrape.registration.state) for state in State)),
    Row("carver_volume_io_limit",
        f"Limit of a volume in use, a second: {', '.join(vars(UNLIMITED))}.",
        ("volume", "limit"), _io_limits),
    Row("carver_volume_io_limited_seconds",
        "Time in which a volume's pods did as much as one of its limits allows.", ("volume",),
        lambda scrape: (((volume.volume_id,), volume.limited_seconds)
                        for volume in scrape.service.context.limiter.limited), CounterMetricFamily),
    Row("carver_storage_health", "1 for each problem of the node's scrape.", ("status", "reason"),
        _storage_health),
)

OF_GROUPS: tuple[Row, ...] = (
    Row("carver_group_present", "1 if the group is on this node.", ("group",),
        lambda scrape: (((name,), group is not None) for name, group in scrape.groups.items())),
    _by_group("carver_group_size_bytes", "Extents on disks that are present.",
        lambda group: Room(group).extents * group.extent_size_bytes),
    _by_group("carver_group_free_bytes", "Free extents on allocatable disks, with the reserve.",
        lambda group: Room(group).free_extents * group.extent_size_bytes),
    _by_group("carver_group_missing_disks", "Missing disks.", lambda group: group.missing_disks),
    _by_group("carver_group_metadata_used_ratio", "Used part of the metadata area; 1 is full.",
        lambda group: groups.text_percent(group) / 100),
    Row("carver_group_volumes", "Volumes, those being erased included.", ("group",), _volumes),
    Row("carver_group_encrypted_volumes", "Encrypted volumes.", ("group",),
        partial(_volumes, encrypted_only=True)),
    Row("carver_key_generation_volumes",
        "Encrypted volumes and snapshots, by the name of the only key that opens them.",
        ("group", "generation"), _key_generations),
    Row("carver_volume_health", "1 for each problem of a volume.", ("volume", "status", "reason"),
        _volume_health),
    Row("carver_snapshot_used_ratio",
        "Used part of a snapshot's COW store; at 1 the snapshot is lost.",
        ("snapshot",), _snapshots_used),
)

# Metrics of thin pools, for which the kernel is queried; these metrics are measured last.
OF_POOLS: tuple[Row, ...] = (
    Row("carver_class_available_bytes",
        "The largest volume of the class that can be created, as GetCapacity says.",
        ("class", "group"), _available),
    _by_pool("carver_pool_size_bytes", "Size of the data area.",
        lambda state: state.pool.data_extents * state.group.extent_size_bytes),
    _by_pool("carver_pool_promised_bytes", "Sizes of the pool's volumes and their snapshots.",
        lambda state: state.pool.promised_bytes),
    _by_pool("carver_pool_data_percent", "Used part of the data area.",
        lambda state: state.status.data_percent if state.status else None),
    _by_pool("carver_pool_metadata_percent", "Used part of the metadata area.",
        lambda state: state.status.metadata_percent if state.status else None),
)
# fmt: on


class _Gauges(Collector):
    def __init__(self, service: Service, registration: Registration) -> None:
        self._service, self._registration = service, registration

    def collect(self) -> Iterable[Metric]:
        """Measure the metrics that are not counters of RPCs or programs; called at each scrape."""
        scrape = Scrape(self._service, self._registration)
        yield from (row.measured(scrape) for row in OF_PROCESS)
        for extra in self._service.extras.values():
            yield from map(of_extra, extra.gauges())
        lvm_gauge = GaugeMetricFamily("carver_lvm_up", "1 if lvm2 gave a report when last asked.")
        try:
            scrape.known  # noqa: B018
        except (AgentError, mount_errors.CommandError):
            lvm_gauge.add_metric([], 0)
            yield lvm_gauge
            return
        lvm_gauge.add_metric([], 1)
        yield lvm_gauge
        # Leave out the time where no group is present: 0 would be the time of an old report.
        if time_seconds := self._service.reports.time_seconds:
            yield GaugeMetricFamily(
                "carver_report_timestamp_seconds",
                "Time when the report of the groups was read.",
                time_seconds,
            )
        yield from [row.measured(scrape) for row in OF_GROUPS]
        # Leave out pools that do not answer within the time limit; `carver_storage_health` reports
        # these pools.
        with command.time_limit(conditions.PATIENCE_SECONDS):
            of_pools = [row.measured(scrape) for row in OF_POOLS]
        yield from of_pools


def of_extra(gauge: Gauge) -> Metric:
    """Convert a gauge of an extra into a metric of the Prometheus client library."""
    metric = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
    for label_values, number in gauge.values.items():
        metric.add_metric(label_values, number)
    return metric
