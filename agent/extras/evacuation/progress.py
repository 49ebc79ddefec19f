"""How far each evacuation is: per node, per unit and per volume, with rates and times left.

The evacuator writes the progress from several threads; the RPC Evacuations reads snapshots of it.
Nothing here is stored: after a restart of the controller the progress begins anew with what the
nodes and the cluster's objects say.
"""

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.extras.evacuation.plan import Plan, Unit

# Time, in seconds, over which the rate of a transfer is averaged. Samples that are older by this
# time count half.
_AVERAGE_SECONDS = 60.0
# Time, in seconds, that the samples of a round must cover before the round's own rate counts.
_OWN_RATE_SECONDS = 20.0
# Duration of a round, in seconds, up to which a move counts as caught up after the round: the next
# round, which is sent while the volume is not in use, is then short (CAUGHT_UP_SECONDS in
# agent/extras/transfer/move.py).
_CAUGHT_UP_SECONDS = 30.0
# Maximum number of rounds that are computed ahead. With so many, what changes is not sent in time.
_MOST_ROUNDS = 100
# Number of passes of a round over the data: they are sent, and then both nodes read them again.
_PASSES = 2
# Number of units that move at the same time (evacuator.py).
AT_ONCE = 2


class Stage(enum.StrEnum):
    """The stage of a unit or of a volume in an evacuation."""

    # It waits for other units, or for a node that does not answer.
    WAITING = "waiting"
    # Snapshots are sent while the volume is in use.
    COPYING = "copying"
    # All but the last changes are sent. The other volumes of the unit are copied.
    CAUGHT_UP = "caught up"
    # More is written than can be sent, so that the rounds do not become shorter.
    FOLLOWING = "following"
    # The pods are being evicted, or an eviction was refused and is tried again.
    EVICTING = "evicting"
    # The last round is sent, and the volume becomes the other node's.
    HANDING_OVER = "handing over"
    # The claim is being bound to the volume on the other node.
    REBINDING = "rebinding"
    # The claim is bound on the other node. What is left on the source node is under quarantine.
    MOVED = "moved"
    # What was left on the source node is erased.
    FINISHED = "finished"
    # It stays on the source node, for the reason in `problem`.
    STAYS = "stays"
    # It is being taken back, and was taken back.
    UNDOING = "undoing"
    UNDONE = "undone"


@dataclass(frozen=True)
class VolumeProgress:
    """How far a volume is.

    `done_bytes` is the offset that the present pass of the present round has reached, and
    `total_bytes` its end. `rounds` is the number of rounds that were begun, by this process. `rate`
    is in bytes of the volume per second, also those that need not be sent. `seconds_left` is the
    time until the volume is moved, without the wait for an eviction; None if it is not known, or if
    more is written than is sent. `problem` is the last problem; empty if none or if it is over.
    """

    volume_id: str
    claim: str
    stage: Stage
    size_bytes: int
    done_bytes: int = 0
    total_bytes: int = 0
    rounds: int = 0
    rate: float = 0.0
    seconds_left: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class UnitProgress:
    """How far a unit is. `pods` are the names of those that use its volumes."""

    name: str
    target: str
    stage: Stage
    volumes: tuple[VolumeProgress, ...]
    pods: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds_left: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class NodeProgress:
    """How far the evacuation of a node is.

    `kind` is what was requested: evacuate, stop or undo. `is_complete` is whether nothing is left
    to do but to erase what is under quarantine. `problem` is that of the evacuation as a whole,
    such as a request that cannot be parsed, or a node that does not answer.
    """

    node: str
    kind: str
    units: tuple[UnitProgress, ...] = ()
    is_complete: bool = False
    seconds_left: float | None = None
    problem: str = ""


class Estimate:
    """Estimates the time until a volume is moved, by the rounds of its transfer.

    A round sends a snapshot while the volume goes on being written, and the next round sends what
    has changed since the snapshot was taken. A round may have several passes over the data: after
    sending, both nodes read what was sent.

    The estimate assumes that data are sent and changed at the rates that were seen. So the duration
    of a round is the time since the snapshot before, times a constant (`growth`). The constant is
    known from the second round on, or once `changed` was called. Until then it counts as 0, and the
    estimate is a lower bound.

    If `sent` is given numbers of bytes of data, the rate of the present round counts from
    _OWN_RATE_SECONDS on, so that a rate that changes is followed within a few minutes. How much the
    round has to send follows from what the round before had to send.

    Times are those of a monotonic clock, in seconds. The methods must not run concurrently.
    """

    def __init__(self, caught_up_seconds: float = _CAUGHT_UP_SECONDS) -> None:
        self._caught_up_seconds = caught_up_seconds
        # Number of rounds that were begun; offset in the volume that the present pass has reached,
        # and the end of the pass; rate of the present pass, in bytes of the volume per second.
        self.rounds = self.done_bytes = self.total_bytes = 0
        self.rate = 0.0
        self._growth: float | None = None
        # Number of bytes that changed in a second, if it was measured, and that were sent in one.
        self._change_rate: float | None = None
        self._byte_rate = 0.0
        # When the present round and the present pass began, and how long the round before took from
        # its begin to the begin of this round. 0 in the first round.
        self._begun = self._pass_begun = self._interval = 0.0
        # Duration of the other passes of a round, as a share of the first pass.
        self._other_passes = 0.0
        self._pass, self._passes, self._is_over = 1, 1, True
        self._first_pass_seconds = 0.0
        # Time and position of the last sample of the rate, and the time that the samples cover,
        # each weighted by its age.
        self._sampled, self._sampled_bytes, self._weight = 0.0, 0, 0.0
        # Number of bytes of data that the present round has sent, and their rate; rate at which
        # they were changed before the last round with an end.
        self._data_bytes, self._data_rate = 0, 0.0
        self._seen_change_rate: float | None = None
        # Rate of the data in the other passes of the last round with an end; 0 if not known.
        self._other_rate = 0.0

    def begin(self, total_bytes: int, now: float, done_bytes: int = 0, passes: int = 1) -> None:
        """Begin a round of so many passes over `total_bytes`, the first from `done_bytes` on.

        Before a round with several passes has ended, each pass counts as long as the first one.
        """
        self._interval = now - self._begun if self.rounds else 0.0
        if self._passes != passes:
            self._passes, self._other_passes = passes, float(passes - 1)
        self.rounds += 1
        self.total_bytes, self._begun, self._pass, self._is_over = total_bytes, now, 1, False
        self._first_pass_seconds = 0.0
        self._data_bytes = 0
        self._begin_pass(done_bytes, now)

    def _begin_pass(self, done_bytes: int, now: float) -> None:
        self.done_bytes = self._sampled_bytes = done_bytes
        self._pass_begun = self._sampled = now
        self.rate = self._weight = 0.0

    def sent(self, done_bytes: int, now: float, data_bytes: int = 0) -> None:
        """Note the offset that the present pass has reached. A smaller offset begins a new pass.

        `data_bytes` is the number of bytes of data that the round has sent; 0 if it is not known.
        """
        if done_bytes < self.done_bytes:
            if self._pass == 1:
                self._first_pass_seconds = self._sampled - self._begun
            self._pass += 1
            # The pass began when the one before was seen to be at its end.
            self._begin_pass(0, self._sampled)
        seconds, sent_bytes = now - self._sampled, done_bytes - self._sampled_bytes
        self.done_bytes = done_bytes
        if seconds <= 0:
            return
        old_weight = self._weight * 0.5 ** (seconds / _AVERAGE_SECONDS)
        self._weight = old_weight + seconds
        self.rate = (self.rate * old_weight + sent_bytes) / self._weight
        if self._pass == 1:
            more_bytes = max(0, data_bytes - self._data_bytes)
            self._data_rate = (self._data_rate * old_weight + more_bytes) / self._weight
            self._data_bytes += more_bytes
        self._sampled, self._sampled_bytes = now, done_bytes
        if self._pass == 1 and done_bytes >= self.total_bytes:
            # The next pass may report nothing.
            self._first_pass_seconds = now - self._begun

    def changed(self, changed_bytes: int, now: float) -> None:
        """Note how much has changed since the snapshot of the present round was taken."""
        if now > self._begun:
            self._change_rate = changed_bytes / (now - self._begun)

    def end(self, now: float) -> None:
        """Note the end of the present round."""
        if self._is_over:
            return
        seconds = now - self._begun
        first_seconds = self._first_pass_seconds or seconds
        if first_seconds > 0:
            self._other_passes = (seconds - first_seconds) / first_seconds
        if self._data_bytes and seconds > first_seconds:
            self._other_rate = self._data_bytes / (seconds - first_seconds)
        if self._interval > 0:
            self._growth = seconds / self._interval
            if self._data_bytes:
                self._seen_change_rate = self._data_bytes / self._interval
        elif first_seconds > 0:
            self._byte_rate = self.total_bytes / first_seconds
        self.done_bytes, self._is_over = self.total_bytes, True

    def seconds_left(self, now: float) -> float | None:
        """Return the time until the volume is moved, if it is not in use at the end; else None.

        None also if no rate is known yet, or if changes are made as fast as they are sent.
        """
        if not self.rounds:
            return None
        if self._is_over:
            seconds, round_seconds = 0.0, now - self._begun
        elif (left := self._round_left(now)) is None:
            return None
        else:
            seconds, round_seconds = left, now - self._begun + left
        growth = self._growth_of(round_seconds)
        for _ in range(_MOST_ROUNDS):
            is_caught_up = round_seconds <= self._caught_up_seconds
            # Add the next round, which is the last one if this round is short.
            round_seconds *= growth
            seconds += round_seconds
            if is_caught_up:
                return seconds
        return None

    def _round_left(self, now: float) -> float | None:
        """Return the time until the end of the present round; None if it is not known yet."""
        elapsed = now - self._begun
        if (left_seconds := self._left_by_data(now)) is not None:
            return left_seconds
        if self._growth is not None:
            left = self._growth * self._interval - elapsed
            if left > 0:
                return left
        if self._pass == 1 and self._first_pass_seconds:
            return max(0.0, self._first_pass_seconds * (1 + self._other_passes) - elapsed)
        if self.rate <= 0:
            return None
        pass_left = max(0, self.total_bytes - self.done_bytes) / self.rate
        # Subtract the time since the rate was last sampled.
        pass_left = max(0.0, pass_left - (now - self._sampled))
        if self._pass > 1:
            return pass_left
        return pass_left + (elapsed + pass_left) * self._other_passes

    def _left_by_data(self, now: float) -> float | None:
        """Return the time until the end of the present round by the data that are left to send.

        None if that is not known: in the first round, and shortly after the begin of a round.
        """
        if self._interval <= 0 or not self._data_bytes:
            return None
        other_rate, elapsed = self._other_rate, now - self._begun
        if self._first_pass_seconds:
            other_seconds = self._data_bytes / other_rate if other_rate else 0.0
            left = self._first_pass_seconds + other_seconds - elapsed
            return left if left > 0 else None
        if not self._has_own_rate or (expected_bytes := self._expected_bytes()) is None:
            return None
        pass_left = (expected_bytes - self._data_bytes) / self._data_rate
        pass_left = max(0.0, pass_left - (now - self._sampled))
        return pass_left + (expected_bytes / other_rate if other_rate else 0.0)

    def _expected_bytes(self) -> float | None:
        """Return the number of bytes of data of the present round; None if it is not known.

        It follows from the round before, or else from the part of the volume that was reached.
        """
        if self._seen_change_rate is not None:
            expected_bytes = self._seen_change_rate * self._interval
            if expected_bytes > self._data_bytes:
                return expected_bytes
        if not self.done_bytes:
            return None
        return max(1.0, self.total_bytes / self.done_bytes) * self._data_bytes

    @property
    def _has_own_rate(self) -> bool:
        """Whether the present pass is the first one, and its rate is known well enough."""
        return self._pass == 1 and self._weight >= _OWN_RATE_SECONDS and self._data_rate > 0

    def _growth_of(self, round_seconds: float) -> float:
        """Return the duration of a round as a share of the time since the snapshot before."""
        if self._interval > 0 and self._has_own_rate and self._change_rate is None:
            expected_bytes = self._expected_bytes()
            if expected_bytes is not None:
                seconds = 1 / self._data_rate + (1 / self._other_rate if self._other_rate else 0.0)
                return expected_bytes / self._interval * seconds
        byte_rate = self._byte_rate or (self.rate if self._pass == 1 else 0.0)
        if self._change_rate is not None and byte_rate:
            return self._change_rate / byte_rate * (1 + self._other_passes)
        if self._growth is not None:
            return self._growth
        return round_seconds / self._interval if self._interval > 0 else 0.0


@dataclass
class _Volume:
    volume_id: str
    claim: str
    size_bytes: int
    stage: Stage
    problem: str = ""
    estimate: Estimate = field(default_factory=Estimate)


@dataclass
class _Unit:
    unit: Unit
    stage: Stage
    volumes: dict[str, _Volume]
    problem: str = ""


@dataclass
class _Node:
    kind: str
    units: dict[str, _Unit] = field(default_factory=dict)
    is_complete: bool = False
    problem: str = ""


class Progress:
    """The progress of all evacuations; each method may be called by any thread.

    A call about a node, a unit or a volume that is not known does nothing: the evacuation may have
    been replaced meanwhile.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}

    def begin(self, node: str, kind: str, plan: Plan | None = None) -> None:
        """Begin or go on with the evacuation of a node by a new plan.

        Units that the evacuation had before keep their stages and rates, also if the plan does not
        have them any more: they moved. Without a plan, only the request is noted.
        """
        with self._lock:
            known = self._nodes.setdefault(node, _Node(kind))
            if known.kind != kind or (plan is not None and plan.going):
                known.kind, known.is_complete = kind, False
            known.problem = ""
            for unit in (*plan.going, *plan.staying) if plan else ():
                stage = Stage.WAITING if unit.target else Stage.STAYS
                old = known.units.get(unit.name)
                volumes = {
                    volume.volume_id: (old.volumes.get(volume.volume_id) if old else None)
                    or _Volume(
                        volume.volume_id,
                        str(volume.claim) if volume.claim else "",
                        volume.size_bytes,
                        stage,
                    )
                    for volume in unit.volumes
                }
                if old is None or Stage.STAYS in (old.stage, stage):
                    known.units[unit.name] = _Unit(unit, stage, volumes, unit.reason)
                    for entry in volumes.values():
                        entry.stage = stage
                else:
                    old.unit, old.volumes = unit, volumes

    def end(self, node: str, *, forget: bool = False) -> None:
        """Note that nothing is left to do for a node; with `forget`, forget the evacuation."""
        with self._lock:
            if forget:
                self._nodes.pop(node, None)
            elif node in self._nodes:
                self._nodes[node].is_complete = True

    def problem(self, node: str, problem: str) -> None:
        """Note the problem of an evacuation as a whole; an empty text if it is over."""
        with self._lock:
            if node in self._nodes:
                self._nodes[node].problem = problem

    def unit(self, node: str, unit: str, stage: Stage, problem: str = "") -> None:
        """Set the stage and the last problem of a unit, and the stage of all its volumes."""
        with self._lock:
            if found := self._unit(node, unit):
                found.stage, found.problem = stage, problem
                for volume in found.volumes.values():
                    volume.stage = stage

    def volume(
        self, node: str, volume_id: str, stage: Stage | None = None, problem: str = ""
    ) -> None:
        """Set the last problem of a volume, and its stage if one is given."""
        with self._lock:
            for volume in self._volumes(node, volume_id):
                volume.problem = problem
                volume.stage = stage or volume.stage

    def begin_round(self, node: str, volume_id: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Note that a round of a volume's transfer begins, after its snapshot was taken.

        `total_bytes` is what the round sends, of which `done_bytes` were sent by an earlier
        attempt. Both nodes then read again what was sent: the second pass.
        """
        with self._lock:
            for volume in self._volumes(node, volume_id):
                volume.estimate.begin(total_bytes, self._monotonic(), done_bytes, _PASSES)

    def sent(self, node: str, volume_id: str, done_bytes: int, data_bytes: int = 0) -> None:
        """Note how much of the present round was sent, as Estimate.sent."""
        with self._lock:
            for volume in self._volumes(node, volume_id):
                volume.estimate.sent(done_bytes, self._monotonic(), data_bytes)

    def changed(self, node: str, volume_id: str, changed_bytes: int) -> None:
        """Note how much has changed since the snapshot of the present round was taken."""
        with self._lock:
            for volume in self._volumes(node, volume_id):
                volume.estimate.changed(changed_bytes, self._monotonic())

    def end_round(self, node: str, volume_id: str) -> None:
        """Note that the present round has ended: all is sent, and both nodes hold the same."""
        with self._lock:
            for volume in self._volumes(node, volume_id):
                volume.estimate.end(self._monotonic())

    def snapshot(self) -> Sequence[NodeProgress]:
        """Return the progress of all evacuations as of now, in the order of the nodes' names."""
        with self._lock:
            now = self._monotonic()
            return tuple(_of_node(name, node, now) for name, node in sorted(self._nodes.items()))

    def _unit(self, node: str, unit: str) -> _Unit | None:
        known = self._nodes.get(node)
        return known.units.get(unit) if known else None

    def _volumes(self, node: str, volume_id: str) -> Sequence[_Volume]:
        known = self._nodes.get(node)
        units = known.units.values() if known else ()
        return [unit.volumes[volume_id] for unit in units if volume_id in unit.volumes]


# Stages in which a volume is not yet handed over, and may still be copied.
BEFORE = (
    *(Stage.WAITING, Stage.COPYING, Stage.CAUGHT_UP, Stage.FOLLOWING),
    *(Stage.EVICTING, Stage.HANDING_OVER),
)


def _of_node(name: str, node: _Node, now: float) -> NodeProgress:
    typical_rate = _typical_rate(node)
    units = tuple(_of_unit(unit, now, typical_rate) for unit in node.units.values())
    left = [_left(unit) for unit in units if unit.stage is not Stage.STAYS]
    seconds_left: float | None = 0.0
    if None in left:
        seconds_left = None
    else:
        # Let each unit begin, in order, on the worker that is free first.
        workers = [0.0] * AT_ONCE
        for seconds in left:
            workers.sort()
            workers[0] += seconds or 0.0
        seconds_left = max(workers)
    return NodeProgress(name, node.kind, units, node.is_complete, seconds_left, node.problem)


def _left(unit: UnitProgress) -> float | None:
    return unit.seconds_left if unit.stage in BEFORE else 0.0


def _typical_rate(node: _Node) -> float:
    """Return the mean rate of the node's transfers, in bytes per second; 0 if none is known."""
    rates = [
        volume.estimate.rate
        for unit in node.units.values()
        for volume in unit.volumes.values()
        if volume.estimate.rate > 0
    ]
    return sum(rates) / len(rates) if rates else 0.0


def _of_unit(unit: _Unit, now: float, typical_rate: float) -> UnitProgress:
    volumes = tuple(_of_volume(volume, now, typical_rate) for volume in unit.volumes.values())
    left = [volume.seconds_left for volume in volumes]
    seconds_left = None if None in left else sum(filter(None, left))
    return UnitProgress(
        unit.unit.name,
        unit.unit.target,
        unit.stage,
        volumes,
        tuple(map(str, unit.unit.pods)),
        unit.unit.notes,
        seconds_left,
        unit.problem,
    )


def _of_volume(volume: _Volume, now: float, typical_rate: float) -> VolumeProgress:
    estimate = volume.estimate
    seconds_left: float | None = None
    if volume.stage not in BEFORE:
        seconds_left = None if volume.stage is Stage.STAYS else 0.0
    elif estimate.rounds:
        seconds_left = estimate.seconds_left(now)
    elif typical_rate:
        seconds_left = _PASSES * volume.size_bytes / typical_rate
    return VolumeProgress(
        volume.volume_id,
        volume.claim,
        volume.stage,
        volume.size_bytes,
        estimate.done_bytes,
        estimate.total_bytes,
        estimate.rounds,
        estimate.rate,
        seconds_left,
        volume.problem,
    )
