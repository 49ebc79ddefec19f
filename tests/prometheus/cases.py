"""What each alert is about: series by which it fires, and the nearest ones by which it does not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.daemon.registration import State
from agent.operations import diagnosis, inline, repair
from agent.operations.diagnosis import Reason

NODE, VOLUME = "node-1", "data@0f0f0f0f/vol-pvc-1"


@dataclass(frozen=True)
class Rate:
    """A counter that grows by so much a minute; it starts at 0, with Carver."""

    a_minute: float


@dataclass(frozen=True)
class Turns:
    """A gauge that has one value for two minutes, and then the other, in turns."""

    first: float
    other: float


# A gauge's value or values, a counter's growth, or None: there is no such series.
Value = float | Rate | Turns | None
# By a metric's name and the labels that Carver gives it, as a page has them.
Series = Mapping[str, Value]


@dataclass(frozen=True)
class Case:
    """An alert: of a node on which all is `good`, what is `bad`, and what is said of it."""

    bad: Series
    good: Series
    # How long it must be bad.
    minutes: int
    summary: str
    labels: Mapping[str, str]
    # Beside `good`: what is near, and no alert.
    harmless: Sequence[Series] = ()
    severity: str = "critical"
    # Whether it fires by one bad value, as a counter is seen for as long as its window.
    of_counters: bool = False
    # The label that has the node's name.
    node: str = "instance"


def series(name: str, **labels: str) -> str:
    """A series' name, as Prometheus writes it."""
    written = [f'{label}="{value}"' for label, value in labels.items()]
    return f"{name}{{{','.join(written)}}}"


def _of(**labels: str) -> str:
    """The series of a problem of a volume or of the storage."""
    what = "volume" if "volume" in labels else "storage"
    return series(f"carver_{what}_health", **labels)


def _evacuated(stage: str, waits: str) -> str:
    return series("carver_evacuation_volumes", node=NODE, stage=stage, waits=waits)


def _in(state: str) -> str:
    return series("carver_registration", state=state)


def _registration(state: str) -> Series:
    return {_in(one): one == state for one in State}


def _buckets(method: str, slow: float, fast: float) -> Series:
    """The histogram of calls of which so many a minute take 40 seconds, and so many one."""
    name = "carver_call_duration_seconds_bucket"
    counts = {"0.5": 0.0, "1": fast, "10": fast, "30": fast, "60": fast + slow, "+Inf": fast + slow}
    return {f'{name}{{method="{method}",le="{le}"}}': Rate(count) for le, count in counts.items()}


def _pool(data: float, metadata: float, size: float, promised: float) -> Series:
    values = {"data_percent": data, "metadata_percent": metadata}
    values |= {"size_bytes": size, "promised_bytes": promised}
    return {
        f'carver_pool_{name}{{class="thin",group="data"}}': value for name, value in values.items()
    }


def _calls(code: str, method: str = "NodeStageVolume") -> str:
    return f'carver_calls_total{{method="{method}",code="{code}"}}'


def _commands(outcome: str, subcommand: str = "lvcreate") -> str:
    labels = f'program="lvm",subcommand="{subcommand}",outcome="{outcome}"'
    return f"carver_commands_total{{{labels}}}"


def _failures(kind: str) -> str:
    return f'carver_round_failures_total{{kind="{kind}",group="data"}}'


def _extensions(outcome: str) -> str:
    return f'carver_extensions_total{{kind="data",outcome="{outcome}"}}'


def _answers(controller: str, metric: str = "answers") -> str:
    # A controller's page is that of the node that it runs on.
    labels = f'node="{NODE}",pod="controller-{controller}",instance="node-9"'
    return f"carver_controller_node_{metric}{{{labels}}}"


_REFUSED = _answers("a").replace("_node_answers", "_refused_answers_total")

# What is looked at once in so long, at most: the interval, and lvm2's answer that never comes.
_STUCK_SECONDS = 60.0
_LOOKS = {
    "grow": 2.0 + _STUCK_SECONDS,
    "repair": repair._LOOK_SECONDS + _STUCK_SECONDS,
    "inline": inline._TURN_SECONDS + _STUCK_SECONDS,
}
PRESENT, LACKING = 'carver_group_present{group="data"}', 'carver_group_missing_disks{group="data"}'
FREE, SIZE = 'carver_group_free_bytes{group="data"}', 'carver_group_size_bytes{group="data"}'
FAILED, QUEUED = 'carver_wipes{state="failed"}', 'carver_wipes{state="queued"}'
RUNNING = 'carver_wipes{state="running"}'
GROUP = {"instance": NODE, "group": "data"}


def _of_volumes(status: str, summary: str, severity: str = "critical") -> Sequence[Case]:
    """A case for each reason of a status of volumes."""
    reasons = {one.word for one in Reason if one.volume_status == status}
    excepted = reasons & {Reason.RAID_RESYNCING.word}
    others = {one.volume_status for one in Reason} - {status, ""}
    near = {_of(volume=VOLUME, status=status, reason=one): 1.0 for one in excepted}
    return [
        Case(
            {_of(volume=VOLUME, status=status, reason=one): 1},
            {_of(volume=VOLUME, status=status, reason=one): None},
            6,
            summary.format(volume=VOLUME, node=NODE, reason=one),
            {"instance": NODE, "volume": VOLUME, "status": status, "reason": one},
            [near | {_of(volume=VOLUME, status=it, reason=one): 1.0 for it in sorted(others)}],
            severity,
        )
        for one in sorted(reasons - excepted)
    ]


def _of_storage(status: str, summary: str, severity: str = "critical") -> Sequence[Case]:
    """A case for each reason of a status of the storage."""
    others = {one.storage_status for one in Reason} - {status, ""}
    return [
        Case(
            {_of(status=status, reason=one): 1},
            {_of(status=status, reason=one): None},
            6,
            summary.format(node=NODE, reason=one),
            {"instance": NODE, "status": status, "reason": one},
            [{_of(status=it, reason=one): 1 for it in sorted(others)}],
            severity,
        )
        for one in sorted({one.word for one in Reason if one.storage_status == status})
    ]


# The cases of each alert, by its name.
CASES: Mapping[str, Sequence[Case]] = {
    "CarverLvmNotAnswering": [
        Case(
            {"carver_lvm_up": 0},
            {"carver_lvm_up": 1},
            6,
            f"lvm2 does not answer on {NODE}",
            {"instance": NODE},
        )
    ],
    "CarverNotScraped": [
        Case(
            {"up": 0, "carver_lvm_up": None},
            {"up": 1, "carver_lvm_up": 1},
            11,
            f"Carver's metrics on {NODE} cannot be read",
            {"instance": NODE},
            harmless=[
                {"up": 1, "carver_lvm_up": 0},
                # Another program's target on the node is down.
                {"up": 1, "carver_lvm_up": 1, 'up{job="other"}': 0},
            ],
        )
    ],
    "CarverGroupMissing": [
        Case(
            {PRESENT: 0},
            {PRESENT: 1},
            6,
            f"Group data is not on {NODE}",
            GROUP,
            # A node without disks runs Carver too.
            harmless=[{PRESENT.replace("data", "never"): 0}],
        )
    ],
    "CarverDiskMissing": [
        Case({LACKING: number}, {LACKING: 0}, 6, f"Group data on {NODE} lacks {disks}", GROUP)
        for number, disks in ((1, "1 disk"), (2, "2 disks"))
    ],
    "CarverVolumeDataLoss": _of_volumes(diagnosis.DATA_LOSS, "{volume} on {node}: {reason}"),
    "CarverVolumeInaccessible": _of_volumes(
        diagnosis.INACCESSIBLE, "{volume} on {node} is inaccessible: {reason}"
    ),
    "CarverVolumeDegraded": _of_volumes(
        diagnosis.DEGRADED, "{volume} on {node} is degraded: {reason}", severity="warning"
    ),
    "CarverStorageUnreachable": _of_storage(
        diagnosis.STORAGE_UNREACHABLE, "Storage on {node} is unreachable: {reason}"
    ),
    "CarverStorageDegraded": _of_storage(
        diagnosis.STORAGE_DEGRADED, "Storage on {node} is degraded: {reason}", severity="warning"
    ),
    "CarverGroupNearlyFull": [
        Case(
            {FREE: 9 << 30, SIZE: 100 << 30},
            {FREE: 50 << 30, SIZE: 100 << 30},
            16,
            f"Group data on {NODE} has 9% left",
            GROUP,
            severity="warning",
            # A tenth; and a group none of whose disks is there.
            harmless=[{FREE: 10 << 30, SIZE: 100 << 30}, {FREE: 0, SIZE: 0}],
        )
    ],
    "CarverPoolNearlyFull": [
        Case(
            _pool(*full, 100, 200),
            _pool(80, 80, 100, 200),
            6,
            f"The pool of class thin in data on {NODE} is 90 % full",
            GROUP | {"class": "thin"},
            # It has grown to all that it promised; and just below the mark.
            harmless=[_pool(100, 50, 100, 100), _pool(85, 85, 100, 200)],
        )
        for full in [(90, 50), (50, 90)]
    ],
    "CarverCannotExtend": [
        Case(
            {_extensions(outcome): Rate(2)},
            {_extensions(outcome): Rate(0)},
            6,
            f"A data on {NODE} is to be extended and cannot be",
            {"instance": NODE, "kind": "data"},
            severity="warning",
            harmless=[{_extensions("extended"): Rate(1)}],
            of_counters=True,
        )
        for outcome in ("no room", "failed")
    ],
    "CarverReloadFailed": [
        Case(
            {"carver_config_last_reload_successful": 0},
            {"carver_config_last_reload_successful": 1},
            6,
            f"Carver on {NODE} did not take its changed configuration over",
            {"instance": NODE},
            severity="warning",
        )
    ],
    "CarverNotRegistered": [
        Case(
            bad,
            _registration("registered"),
            11,
            f"Kubelet on {NODE} has not registered Carver",
            {"instance": NODE},
            harmless=[_registration("taken"), _registration("off")],
        )
        for bad in (
            _registration("waiting"),
            _registration("refused"),
            # Kubelet is asked again after each refusal.
            {**_registration("none"), _in("waiting"): Turns(1, 0), _in("refused"): Turns(0, 1)},
        )
    ],
    "CarverCallsFail": [
        Case(
            {_calls("INTERNAL"): Rate(0.5)},
            {_calls("INTERNAL"): None},
            31,
            f"NodeStageVolume fails again and again on {NODE}",
            {"instance": NODE, "method": "NodeStageVolume"},
            severity="warning",
            harmless=[{_calls("UNAVAILABLE"): Rate(5)}, {_calls("OK"): Rate(5)}],
            of_counters=True,
        )
    ],
    "CarverCallsSlow": [
        Case(
            _buckets("CreateVolume", 1, 0),
            _buckets("CreateVolume", 0, 1),
            31,
            f"CreateVolume takes 58.5s on {NODE}",
            {"instance": NODE, "method": "CreateVolume"},
            severity="warning",
            # One of fifty; and streams, which last as long as who reads them likes.
            harmless=[
                _buckets("CreateVolume", 1, 49),
                _buckets("TakeTurns", 1, 0),
                _buckets("GetMetadataDelta", 1, 0),
            ],
            of_counters=True,
        )
    ],
    "CarverCommandsTimeOut": [
        Case(
            {_commands(outcome): Rate(0.5)},
            {_commands(outcome): None},
            21,
            f"lvm lvcreate does not end in time on {NODE}",
            {"instance": NODE, "program": "lvm", "subcommand": "lvcreate"},
            severity="warning",
            harmless=[{_commands("NoSpace"): Rate(5)}],
            of_counters=True,
        )
        for outcome in ("CommandTimedOut", "CommandStuck")
    ],
    "CarverRoundsFail": [
        Case(
            {_failures(kind): Rate(60 / seconds)},
            {_failures(kind): Rate(0)},
            75 if kind == "inline" else 31,
            f"{kind} fails for group data on {NODE}",
            {"instance": NODE, "kind": kind, "group": "data"},
            severity="warning",
            harmless=[{_failures(kind): Rate(1 / 60)}],
            of_counters=True,
        )
        for kind, seconds in _LOOKS.items()
    ],
    "CarverWipesFail": [
        Case(
            bad,
            {FAILED: 0, RUNNING: 0},
            20,
            f"2 deleted volumes on {NODE} cannot be wiped",
            {"instance": NODE},
            severity="warning",
            harmless=[{FAILED: 0, RUNNING: 2}],
        )
        # They are tried again, and fail again.
        for bad in ({FAILED: 2, RUNNING: 0}, {FAILED: Turns(2, 0), RUNNING: Turns(0, 2)})
    ],
    "CarverWipesWait": [
        Case(
            {QUEUED: 12},
            {QUEUED: 0},
            61,
            f"12 deleted volumes wait to be wiped on {NODE}",
            {"instance": NODE},
            severity="info",
            harmless=[{QUEUED: 10}],
        )
    ],
    "CarverNodeSilent": [
        Case(
            {_answers("a"): 0, _answers("b"): 0},
            {_answers("a"): 1, _answers("b"): 1},
            11,
            f"Carver on {NODE} does not answer the cluster's controller",
            {"node": NODE},
            # A controller that has just started has not asked yet.
            harmless=[{_answers("a"): 0, _answers("b"): 1}],
            node="node",
        )
    ],
    "CarverAnswerRefused": [
        Case(
            {_REFUSED: Rate(1)},
            {_REFUSED: Rate(0)},
            6,
            f"Carver on {NODE} answers what cannot be true",
            {"node": NODE},
            harmless=[{_REFUSED: Rate(1 / 60)}],
            of_counters=True,
            node="node",
        )
    ],
    "CarverGroupContested": [
        Case(
            # The other has not asked all nodes yet.
            {_answers("a", "contested_groups"): 1, _answers("b", "contested_groups"): 0},
            {_answers("a", "contested_groups"): 0, _answers("b", "contested_groups"): 0},
            6,
            f"A volume group of {NODE} is another node's, too",
            {"node": NODE},
            node="node",
        )
    ],
    "CarverEvacuationWaits": [
        Case(
            {_evacuated("evicting", "true"): 1, _evacuated("copying", "false"): 2},
            {_evacuated("evicting", "false"): 1, _evacuated("copying", "false"): 2},
            61,
            f"The evacuation of {NODE} waits",
            {"node": NODE},
            severity="warning",
            # What stays on the node does not wait.
            harmless=[{_evacuated("stays", "true"): 3}],
            node="node",
        )
    ],
}
