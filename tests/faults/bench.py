"""What the faults share: groups of their own, trials on them, and a row of the table for each."""

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from faults.process import Process, Trial
from model.expected import EXTENT_BYTES, Model
from real.host import Lab, RealHost

# All paths are below a short one: a socket's is limited to 108 bytes.
PLACE = Path("/var/tmp/carver-faults")


@dataclass
class Bench:
    """Where faults are tried. `cut` asks for a few of the times only."""

    shared: Lab
    random: random.Random
    cut: bool
    trials: list[Trial] = field(default_factory=list)
    lost: int = 0
    leaked: int = 0

    def times(self, usual: int, cut: int) -> int:
        return cut if self.cut else usual

    @contextmanager
    def host(self) -> Iterator[RealHost]:
        """A machine without groups, in a directory of its own."""
        directory = Path(tempfile.mkdtemp(dir=self.shared.directory)) / "mounts"
        directory.mkdir()
        host = RealHost(self.shared, directory)
        try:
            yield host
        finally:
            host.clean_up()

    @contextmanager
    def served(
        self,
        host: RealHost,
        group: str,
        extents: int,
        classes: str = "",
        *,
        sessions: bool = True,
    ) -> Iterator[Trial]:
        """A trial on that group; in the end everything is undone, and nothing may be left."""
        machine = Process(host, group, host.directory.parent, classes=classes, sessions=sessions)
        trial = Trial(machine, Model(extents * EXTENT_BYTES))
        self.trials.append(trial)
        try:
            yield trial
            trial.undo()
        except Exception:
            print(machine.said(), file=sys.stderr)
            raise
        finally:
            machine.stop()

    @contextmanager
    def trial(self, *disk_extents: int, sessions: bool = True) -> Iterator[Trial]:
        """A trial on a group with so many extents on each of its disks."""
        with self.host() as host:
            group, extents = host.new_group(*disk_extents), sum(disk_extents)
            with self.served(host, group, extents, sessions=sessions) as trial:
                yield trial


Fault = Callable[[Bench], tuple[int, str]]
