"""The process is killed at chosen steps of every call; the next one makes it good."""

import signal
import tempfile
from pathlib import Path

from fast.failures.test_killed import steps
from faults.bench import Bench
from faults.process import Fault, Trial
from model.cases import CASES, EXTENTS, Case

# On a real machine its wipe takes as long as it takes.
_LEFT_OUT = {"delete, a long wipe"}


def at_a_step_of_every_call(bench: Bench) -> tuple[int, str]:
    """Kill -9 at a step, each call."""
    cases = {name: case for name, case in CASES.items() if name not in _LEFT_OUT}
    chosen = bench.random.sample(sorted(cases), bench.times(len(cases), 4))
    reached = 0
    with bench.trial(EXTENTS) as trial:
        for name in chosen:
            reached += _killed(bench, trial, cases[name])
    return len(chosen), f"each call succeeded when repeated; {reached} died in a step"


def _killed(bench: Bench, trial: Trial, case: Case) -> bool:
    """Whether the call got as far as the step; a fake machine tells how many there are."""
    with tempfile.TemporaryDirectory() as directory:
        step = bench.random.randrange(len(steps(case, Path(directory))))
    # Given
    for one in case.before:
        # What takes its time is asked for again.
        trial.patiently(one)
    # What went on behind those answers is not what is to be made good.
    trial.compare()
    case.arrange(trial.machine, trial.model)
    # When
    trial.machine.arm(step, before=bench.random.random() < 0.5)
    trial.machine.by_kubelet(case.call)
    # The step may be one behind the answer, or of its end in good order.
    code = trial.machine.end()
    if code not in (0, -signal.SIGKILL):
        raise Fault(f"the process ended with {code}")
    trial.machine.died()
    # Then
    trial.patiently(case.call)
    trial.compare()
    trial.undo()
    return code != 0
