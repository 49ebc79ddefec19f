"""A RAID volume with a minimum rate alone is made in two commands: killed around each of them."""

from pathlib import Path

from fakes.host import FakeHost
from model import operations as do
from model.machine import Machine
from model.operations import MIB, Use
from model.stopping import Switch

from agent.core.classes import DeviceClass
from lvm.layout import Layout
from lvm.tuning import AUTO, Tuning

RATE = (("carver/minimumRecoveryRate", "1MiB"), ("carver/readAhead", "auto"))
CREATE = do.Create("a", 32 * MIB, 0, Use("block", do.MULTI_WRITER), mutable=RATE)
STEPS = ("lvm lvcreate", "lvm lvchange")


def machine(directory: Path, switch: Switch) -> Machine:
    (directory / "mounts").mkdir(parents=True)
    host = FakeHost(directory / "mounts")
    group = host.new_group(40, 40)
    raid = DeviceClass("plain", group, default=True, layout=Layout("raid1", mirrors=1))
    return Machine(host, group, directory, switch, settings={"classes": (raid,)})


def test_a_volume_that_was_killed_before_its_minimum_gets_it_at_the_repeated_call(
    tmp_path: Path,
) -> None:
    whole = Switch()
    counted = machine(tmp_path / "count", whole)
    assert counted.call(CREATE).code == "OK"
    counted.stop()
    assert tuple(one for one in whole.taken if one != "lvm fullreport") == STEPS
    for stop_at in range(len(whole.taken)):
        for before in (True, False):
            switch = Switch(stop_at, before=before)
            trial = machine(tmp_path / f"{stop_at}{before}", switch)
            trial.call(CREATE)
            assert switch.dead.wait(10), f"step {stop_at} was never taken: {switch.taken}"
            trial.revive()
            assert trial.call(CREATE).code == "OK", (stop_at, before)
            made = trial._report().volume("vol-a")
            assert made.tuning == Tuning(AUTO, 1024, 0)
            assert trial.call(do.Delete("a")).code == "OK"
            assert trial._report().volumes == {}
            trial.stop()
