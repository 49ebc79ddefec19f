"""How long external-provisioner takes to write the capacities of a cluster, by its own limits.

Capacities are asked for by some workers, and written as CSIStorageCapacity objects by a client
with a rate limit of its own (v6.4.0: `pkg/capacity/capacity.go`, `cmd/csi-provisioner`). Time is
simulated: nothing waits.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """The flags that bound the provisioner, with its own defaults."""

    # --kube-api-capacity-qps and --kube-api-capacity-burst
    writes_each_second: float = 1
    burst: int = 5
    # --capacity-threads
    workers: int = 1
    # --capacity-poll-interval
    poll_seconds: float = 60

    @classmethod
    def of_flags(cls, flags: Mapping[str, str]) -> "Limits":
        """The limits of a provisioner with these arguments; minutes are the only unit there."""
        defaults = cls()
        poll = flags.get("capacity-poll-interval", "1m").removesuffix("m")
        return cls(
            float(flags.get("kube-api-capacity-qps", defaults.writes_each_second)),
            int(flags.get("kube-api-capacity-burst", defaults.burst)),
            int(flags.get("capacity-threads", defaults.workers)),
            60 * float(poll),
        )


@dataclass
class _RateLimit:
    """client-go's token bucket (`util/flowcontrol/throttle.go`): full at first."""

    limits: Limits
    # When the bucket would be full again.
    _full_seconds: float = 0.0

    def wait(self, now: float) -> float:
        """When a request that comes now is sent."""
        rate = self.limits.writes_each_second
        self._full_seconds = max(self._full_seconds, now) + 1 / rate
        return max(now, self._full_seconds - self.limits.burst / rate)


@dataclass
class Sweep:
    """The provisioner after its start, with no objects yet: one for each node and class."""

    limits: Limits
    # How long GetCapacity takes, and the write of an object.
    answer_seconds: float = 0.01
    write_seconds: float = 0.01
    # How many times nodes were asked.
    questions: int = field(default=0, init=False)

    def written_seconds(self, nodes: int, classes: int) -> Sequence[float]:
        """When each object was written, in the order of writing."""
        items = [(node, one) for node in range(nodes) for one in range(classes)]
        # What is there when the process starts, and at once the first poll. The queue's keys are
        # pointers to new variables (QueueKey), so what is queued already is queued again.
        queue, polled = deque([*items, *items]), 0.0
        workers = [0.0] * self.limits.workers
        written: dict[tuple[int, int], float] = {}
        limit = _RateLimit(self.limits)
        while len(written) < len(items):
            now = heapq.heappop(workers)
            if now >= polled + self.limits.poll_seconds or not queue:
                polled += self.limits.poll_seconds
                now = max(now, polled) if not queue else now
                queue.extend(items)
            item = queue.popleft()
            self.questions += 1
            now += self.answer_seconds
            # Later the object is there and equal, and nothing is written (syncCapacity).
            if item not in written:
                now = limit.wait(now) + self.write_seconds
                written[item] = now
            heapq.heappush(workers, now)
        return sorted(written.values())
