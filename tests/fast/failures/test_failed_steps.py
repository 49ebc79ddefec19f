"""Each step of a call fails in turn: the code that the caller gets fits what is left.

After a code that is final to its caller nothing is left that only the caller would delete; after
any other the repeated call completes it.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import configured
import grpc
import pytest
import serving
from callers import rules
from csi_client import Client
from fakes.host import FakeHost
from fakes.kernel import CHANGING
from real.any import names

from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from lvm.caches import Cache
from lvm.layout import Layout
from lvm.thin import Policy
from mount.command import Result
from mount.kernel import Kernel

MIB = 1 << 20
SIZE = 24 * MIB
READ_AHEAD = {"carver/readAhead": "1MiB"}


class Faults:
    """Has one step of a machine fail: a command, or a change by the kernel.

    The step has done nothing then, or, with `after`, all of it.
    """

    def __init__(self, host: FakeHost, at: int = -1, *, after: bool = False) -> None:
        self.taken: list[str] = []
        self._at, self._after, self._inside = at, after, threading.local()
        self._host, self._kernel, self._is_on = host, host.kernel, False
        host.intercept = self._run
        host.kernel = cast(Kernel, self)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count steps within, and fail at the one that is to fail."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _is_due(self, name: str) -> bool:
        if self._is_on:
            self.taken.append(name)
        return self._is_on and len(self.taken) == self._at + 1

    def _run(self, words: Sequence[str]) -> Result | None:
        is_inside = getattr(self._inside, "is_set", False)
        if is_inside or words[:2] == ("lvm", "fullreport") or not self._is_due(" ".join(words[:2])):
            return None
        if self._after:
            self._inside.is_set = True
            try:
                self._host.run(*words)
            finally:
                self._inside.is_set = False
        return Result(5, "", "  Something went wrong.")

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._kernel, name)
        if name not in CHANGING:
            return operation

        def through(*words: object, **named: object) -> object:
            is_due = self._is_due(name)
            if not is_due or self._after:
                done = operation(*words, **named)
            if is_due:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return done

        return through


def classes(group: str) -> tuple[DeviceClass, ...]:
    return (
        DeviceClass("plain", group, default=True),
        DeviceClass("clean", group, zero="fully"),
        DeviceClass("raid", group, layout=Layout("raid1", mirrors=1)),
        DeviceClass("thin", group, layout=Layout("thin"), pool=Policy()),
        DeviceClass("cached", group, cache=Cache()),
        DeviceClass("sealed", group, encryption="luks2"),
    )


@dataclass(frozen=True)
class Case:
    """A call, what is done before it, and how what it made is deleted."""

    method: str
    call: Callable[[Client, dict[str, str]], object]
    delete: Callable[[Client, Any], object]
    before: Sequence[Callable[[Client, dict[str, str]], object]] = ()
    # How the name of what it makes begins.
    made: str = "vol-pvc-2"


def create(name: str, of: str = "", **more: Any) -> Callable[[Client, dict[str, str]], object]:
    def do(client: Client, made: dict[str, str]) -> object:
        source = {
            "volume": lambda: of_volume(made["pvc-1"]),
            "snapshot": lambda: of_snapshot(made["snap-1"]),
        }.get(of)
        size = more.get("size", SIZE)
        parameters = {"class": more.get("kind", "plain"), **more.get("parameters", {})}
        use = mounted(more["fs_type"]) if "fs_type" in more else block()
        volume = client.create(
            name,
            size,
            use,
            parameters=parameters,
            source=source() if source else None,
            mutable=more.get("mutable", {}),
        )
        made[name] = volume.volume_id
        return volume

    return do


def snapshot(name: str) -> Callable[[Client, dict[str, str]], object]:
    def do(client: Client, made: dict[str, str]) -> object:
        taken = client.snapshot(name, made["pvc-1"])
        made[name] = taken.snapshot_id
        return taken

    return do


def expand(size: int) -> Callable[[Client, dict[str, str]], object]:
    return lambda client, made: client.expand(made["pvc-1"], size)


def group_snapshot(client: Client, made: dict[str, str]) -> object:
    return client.group_snapshot("both", [made["pvc-1"], made["pvc-3"]])


def delete_group_snapshot(client: Client, made: Any) -> None:
    members = [one.snapshot_id for one in made.snapshots]
    client.delete_group_snapshot(made.group_snapshot_id, members)


def delete_volume(client: Client, made: Any) -> None:
    client.delete(made.volume_id)


def made_by(call: Callable[[Client, dict[str, str]], object], *before: Any) -> Case:
    return Case("CreateVolume", call, delete_volume, before)


CASES = {
    "plain": made_by(create("pvc-2")),
    "with read-ahead": made_by(create("pvc-2", mutable=READ_AHEAD)),
    "zeroed": made_by(create("pvc-2", kind="clean")),
    "mirror": made_by(create("pvc-2", kind="raid", mutable={"carver/minimumRecoveryRate": "1MiB"})),
    "first in a pool": made_by(create("pvc-2", kind="thin")),
    "cached": made_by(create("pvc-2", kind="cached")),
    "encrypted": made_by(create("pvc-2", kind="sealed")),
    "restore": made_by(create("pvc-2", "snapshot"), create("pvc-1"), snapshot("snap-1")),
    "larger restore, zeroed": made_by(
        create("pvc-2", "snapshot", kind="clean", size=2 * SIZE),
        create("pvc-1"),
        snapshot("snap-1"),
    ),
    "clone": made_by(create("pvc-2", "volume"), create("pvc-1")),
    "clone of a btrfs": made_by(
        create("pvc-2", "volume", fs_type="btrfs", size=256 * MIB),
        create("pvc-1", fs_type="btrfs", size=256 * MIB),
    ),
    "larger clone in a pool": made_by(
        create("pvc-2", "volume", kind="thin", size=2 * SIZE), create("pvc-1", kind="thin")
    ),
    "clone into a pool": made_by(create("pvc-2", "volume", kind="thin"), create("pvc-1")),
    "snapshot": Case(
        "CreateSnapshot",
        snapshot("snap-2"),
        lambda client, made: client.delete_snapshot(made.snapshot_id),
        [create("pvc-1")],
        "snap-snap-2",
    ),
    "thin snapshot": Case(
        "CreateSnapshot",
        snapshot("snap-2"),
        lambda client, made: client.delete_snapshot(made.snapshot_id),
        [create("pvc-1", kind="thin")],
        "snap-snap-2",
    ),
    "group snapshot": Case(
        "CreateVolumeGroupSnapshot",
        group_snapshot,
        delete_group_snapshot,
        [create("pvc-1"), create("pvc-3")],
        "snap",
    ),
    "expand": Case(
        "ControllerExpandVolume", expand(2 * SIZE), lambda *_: None, [create("pvc-1")], "grow"
    ),
    "expand, zeroed": Case(
        "ControllerExpandVolume",
        expand(2 * SIZE),
        lambda *_: None,
        [create("pvc-1", kind="clean")],
        "grow",
    ),
    "expand with a snapshot": Case(
        "ControllerExpandVolume",
        expand(2 * SIZE),
        lambda *_: None,
        [create("pvc-1"), snapshot("snap-1")],
        "grow",
    ),
}


class Trial:
    """A machine of its own, on which what comes before the call is done."""

    def __init__(self, case: Case, directory: Path, at: int = -1, *, after: bool = False) -> None:
        (directory / "mounts").mkdir(parents=True)
        self.host = FakeHost(directory / "mounts")
        self.group = self.host.new_group(200, 100, 20)
        self.host.lvm2.groups[self.group].disks[-1].tags.add(report.FAST)
        self.case = case
        config = configured.carver(directory, self.group, classes=classes(self.group))
        self.made: dict[str, str] = {}
        self._faults = Faults(self.host, at, after=after)
        with self.served(config) as (_, client):
            for one in case.before:
                one(client, self.made)
            self.before = names(self.host, self.group)

    @contextmanager
    def served(self, config: Config) -> Iterator[tuple[Service, Client]]:
        self.config = config
        with serving.served(self.host, config) as (service, client):
            # Nothing is tried again but by the caller.
            service.copier.jobs.retry_seconds = service.copier.jobs.soon_seconds = 1e6
            yield service, client

    def steps(self) -> list[str]:
        """The steps of the call, and of what it has done in the background."""
        with self.served(self.config) as (service, client):
            with self._faults.on():
                self.case.call(client, self.made)
            settle(service)
        return self._faults.taken

    def call(self, client: Client) -> str:
        """Make the call while its step fails; return the code."""
        with self._faults.on():
            try:
                self.case.call(client, self.made)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def repeat(self, service: Service, client: Client) -> object:
        """Repeat the call as its caller does, until it is done; return the answer."""
        for _ in range(5):
            try:
                return self.case.call(client, self.made)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.ABORTED:
                    raise
            settle(service)
        raise AssertionError("it is never done")

    def left(self) -> set[str]:
        """What the call left that is nobody's but its caller's."""
        every = report.read(self.host.lvm).group(self.group).volumes.values()
        return {
            one.name
            for one in every
            if one.name.startswith(self.case.made)
            and one.name not in self.before
            and one.own_tags.get("state") != "wiping"
            and (one.origin or one.pool or not one.name.startswith("snap"))
        }


def settle(service: Service) -> None:
    serving.again(service)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_left_after_a_failed_step_fits_the_code_of_the_answer(
    tmp_path: Path, name: str, after: bool
) -> None:
    case = CASES[name]
    steps = Trial(case, tmp_path / "whole").steps()
    assert steps
    rule = rules.of(case.method)
    for number, step in enumerate(steps):
        trial = Trial(case, tmp_path / str(number), number, after=after)
        where = f"{name}: step {number}, {step}"
        with trial.served(trial.config) as (service, client):
            code = trial.call(client)
            if rule.reaction(code) not in (rules.Reaction.GOES_ON, rules.Reaction.REPEATS):
                is_its_volume_s = case.method == "ControllerExpandVolume"
                assert is_its_volume_s or not trial.left(), f"{where}: {code}"
            made = trial.repeat(service, client)
            case.delete(client, made)
            settle(service)
            for snapshot_id in [one.snapshot_id for one in client.snapshots()]:
                client.delete_snapshot(snapshot_id)
            for volume in client.volumes():
                client.delete(volume.volume_id)
            settle(service)
            assert names(trial.host, trial.group) == set(), where
