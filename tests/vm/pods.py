"""Pods as a node has them, in cgroups of systemd's or made by hand, and what they do to a disk."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mount.cgroups import ROOT, Cgroups, IoCount
from mount.kernel import Kernel
from mount.table import DeviceNumber

# kubelet's cgroup drivers.
SYSTEMD, CGROUPFS = "systemd", "cgroupfs"
_LOAD = Path(__file__).with_name("io_load.py")
# A pod's, so that what it writes is on its way to the disk before it fills the node's memory.
_MEMORY_BYTES = 256 << 20
# How often the kernel's counters are read.
_LOOK_SECONDS = 0.02
_PATIENCE_SECONDS = 30
# How many steps of a counter say how fast it is, and how many times as long they are waited for.
_STEPS, _MOST = 6, 5
_POD = "podb5a9"


@dataclass
class Pod:
    """A pod with one container, below the cgroup `top` of all pods, which `layout` makes."""

    layout: str
    top: str
    # The first waits; the cgroup lives as long as it does.
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    @property
    def all_pods(self) -> Path:
        return ROOT / self.top

    @property
    def container(self) -> Path:
        """The container's cgroup."""
        if self.layout == CGROUPFS:
            return self.all_pods / "besteffort" / _POD / "container"
        above = f"{self.all_pods.stem}-besteffort.slice"
        return self.all_pods / above / self._slice / f"{_POD}.scope"

    @property
    def _slice(self) -> str:
        return f"{self.all_pods.stem}-besteffort-{_POD}.slice"

    def begin(self) -> None:
        """Start the container."""
        wait = ("sleep", "infinity")
        if self.layout == CGROUPFS:
            self._make()
            self.run(*wait)
        else:
            unit = (f"--slice={self._slice}", f"--unit={self.container.name}", "--collect")
            words = ("systemd-run", "--quiet", "--scope", *unit, "--", *wait)
            self.processes.append(subprocess.Popen(words, text=True))
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not self.container.is_dir():
                assert time.monotonic() < deadline, f"no {self.container}"
                time.sleep(_LOOK_SECONDS)
        (self.container / "memory.max").write_text(str(_MEMORY_BYTES))

    def _make(self) -> None:
        """As runc does: each cgroup has all controllers that its parent has."""
        for parent in reversed([one for one in self.container.parents if one.is_relative_to(ROOT)]):
            parent.mkdir(exist_ok=True)
            for controller in (parent / "cgroup.controllers").read_text().split():
                with suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        self.container.mkdir()

    def run(self, *words: str) -> "subprocess.Popen[str]":
        """Start a program in the container."""
        into = f'echo $$ > {self.container}/cgroup.procs; exec "$@"'
        words = ("sh", "-c", into, "sh", *words)
        started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.processes.append(started)
        return started

    def load(self, path: Path, deed: str, how: str, *numbers: int) -> None:
        """Start a program that reads or writes until it is stopped; see io_load.py."""
        self.run(sys.executable, "-SE", str(_LOAD), str(path), deed, how, *map(str, numbers))

    def wait_until_ready(self) -> None:
        """Return once all loads go on."""
        for process in self.processes[1:]:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def counted(self) -> tuple[int, int]:
        """How many reads and writes its loads made, as they are counted themselves (proc(5))."""
        done = [0, 0]
        for process in self.processes[1:]:
            said = Path(f"/proc/{process.pid}/io").read_text().split()
            done[0] += int(said[said.index("syscr:") + 1])
            done[1] += int(said[said.index("syscw:") + 1])
        return done[0], done[1]

    def stop(self, *, after: int = 1) -> None:
        """Kill what runs, but for the process that waits, and wait for its end."""
        for process in self.processes[after:]:
            process.kill()
        for process in self.processes[after:]:
            process.communicate(timeout=_PATIENCE_SECONDS)
        del self.processes[after:]

    def end(self) -> None:
        """Remove the pod's cgroups, and that of all pods."""
        self.stop(after=0)
        if self.layout == SYSTEMD:
            subprocess.run(["systemctl", "stop", self.top], check=True)
        remove(self.all_pods)


def remove(cgroup: Path) -> None:
    """Remove a cgroup without processes, and all below it."""
    for one in sorted(cgroup.glob("**/"), reverse=True):
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while one.is_dir():
            # What ended is there for a moment still.
            with suppress(OSError):
                one.rmdir()
            assert time.monotonic() < deadline, f"{one} is not empty"


@contextmanager
def pod(layout: str, top: str = "") -> Iterator[Pod]:
    """A pod, on a node that has no others; by default below a cgroup of kubelet's name."""
    # What another test had for pods.
    subprocess.run(["systemctl", "stop", "kubepods.slice"], check=True)
    remove(ROOT / "kubepods")
    made = Pod(layout, top or {SYSTEMD: "kubepods.slice", CGROUPFS: "kubepods"}[layout])
    try:
        made.begin()
        yield made
    finally:
        made.end()


# What a device did in a second, by the fields of IoCount.
Rates = Mapping[str, float]


def rates(of: Pod, numbers: Iterable[DeviceNumber], seconds: float) -> Mapping[DeviceNumber, Rates]:
    """What pods do to devices in the next seconds, by the counters of the cgroup of all pods.

    From one step of a counter to its last one, so that it does not matter how much comes at once:
    what is written back may be megabytes. Longer, until each counter made some steps.
    """
    cgroups = Cgroups(of.top)
    seen: dict[DeviceNumber, list[tuple[float, IoCount]]] = {one: [] for one in numbers}
    begin = time.monotonic()
    while (now := time.monotonic()) < begin + _MOST * seconds:
        counts = cgroups.counts()
        for number, looks in seen.items():
            looks.append((now, counts.get(number, IoCount())))
        if now > begin + seconds and all(_has_steps(looks) for looks in seen.values()):
            break
        time.sleep(_LOOK_SECONDS)
    return {
        number: {key: _rate([(at, vars(one)[key]) for at, one in looks]) for key in vars(IoCount())}
        for number, looks in seen.items()
    }


def _has_steps(looks: Sequence[tuple[float, IoCount]]) -> bool:
    return all(
        len({getattr(one, key) for _, one in looks}) > _STEPS
        for key in ("read_bytes", "write_bytes")
    )


def _rate(looks: Sequence[tuple[float, int]]) -> float:
    """How fast a counter grew; 0 where it made fewer than two steps."""
    steps = [after for before, after in itertools.pairwise(looks) if before[1] != after[1]]
    if len(steps) < 2:
        return 0.0
    (begin, first), (end, last) = steps[0], steps[-1]
    return (last - first) / (end - begin)


def number_of(path: Path) -> DeviceNumber:
    """The number of a device node."""
    return Kernel().device_number(str(path))
