"""The table of a volume's states: each state and each call, and each list, by the record alone.

tests/contract/test_conflicts.py has the calls that meet what a process has under way.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import configured
import expect
import pytest
from fakes.host import FakeHost

from agent.core import ids
from agent.csi.client import Client, block, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import volume_states
from agent.volumes.records import Volume
from agent.volumes.volume_states import STATES, WORK, Call, Outcome, State, Work
from lvm import names
from lvm.layout import Layout
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

EXTENT = 4 << 20
SIZE = 4 * EXTENT
MIRROR = Layout("raid1", mirrors=1)
# What tags say beside the state.
BESIDE = {
    State.READY: {},
    State.COPYING: {"zero": "fully"},
    State.RECEIVING: {"received": "data@1/vol-x", "into": "a", "offset": "0"},
    State.MOVED: {"moveTo": "there", "moveWord": "word"},
    State.DELETED: {},
    State.INLINE: {"ephemeral": "true"},
    State.MOVING: {"moveTo": "there", "moveWord": "word"},
    State.HELD: {"moveTo": "there", "moveWord": "word"},
    State.HALF_MADE: {},
}
CODES = {
    Outcome.ABORTED: "ABORTED",
    Outcome.ABSENT: "NOT_FOUND",
    Outcome.REFUSED: "FAILED_PRECONDITION",
    Outcome.NOT_OWN: "FAILED_PRECONDITION",
}
# States that no tag `state` records.
UNTAGGED = (State.INLINE, State.MOVING, State.HELD, State.HALF_MADE, State.READY)
# lvm2 refuses to use a RAID that it never made; no row has to.
MET = [
    (state, call)
    for state in State
    for call in Call
    if state is not State.HALF_MADE or call in (Call.CREATE, Call.DELETE)
]


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.lvm2.add_group("data", [200, 200])
    return host


@pytest.fixture
def config(tmp_path: Path) -> Config:
    classes = (
        DeviceClass("plain", "data", default=True),
        DeviceClass("mirror", "data", layout=MIRROR),
    )
    made = configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)
    return replace(made, controller_expand=True)


class Stand:
    """A node with a volume `v` in a state."""

    def __init__(self, service: Service, fake: FakeHost, client: Client, staging: Path) -> None:
        self.service, self._fake, self.client = service, fake, client
        self._staging, self._parameters = staging, {"class": "plain"}
        self.volume_id = ""

    def put(self, state: State) -> None:
        if state is State.HALF_MADE:
            self._parameters = {"class": "mirror"}
        self.volume_id = self._create().volume_id
        if state is State.HALF_MADE:
            self._fake.half_make_raid("data", "vol-v", MIRROR)
        changes = ["--addtag", "carver.adopted=old"]
        for key, value in BESIDE[state].items():
            changes += ["--addtag", f"carver.{key}={value}"]
        if state not in UNTAGGED:
            changes += ["--deltag", "carver.state=ready", "--addtag", f"carver.state={state}"]
        self._fake.lvm("lvchange", *changes, "--", "data/vol-v")
        if state is State.INLINE:
            self._fake.lvm("lvchange", "--activate", "n", "--", "data/vol-v")
            inline = names.logical_volume(ids.INLINE_PREFIX, "v")
            self._fake.lvm("lvrename", "--", "data", "vol-v", inline)
            self.volume_id = self.volume_id.replace("vol-v", inline)
        if state is State.HELD:
            self.service.context.holds.hold(self.volume_id, "there", 600)
        # What an operator did is in the cached state once a call has read it.
        self.client.volumes()

    def found(self) -> Volume:
        known = self.service.reports.fresh("data")
        return known.volume(self.volume_id)

    def call_of(self, call: Call) -> Callable[[], object]:
        one, client = self.volume_id, self.client
        volume = csi.Volume(volume_id=one, capacity_bytes=SIZE)
        match call:
            case Call.CREATE:
                return self._create
            case Call.COPY_FROM:
                return partial(client.create, "c", SIZE, block(), source=of_volume(one))
            case Call.SNAPSHOT:
                return partial(client.snapshot, "s", one)
            case Call.EXPAND | Call.EXPAND_OTHER:
                return partial(client.expand, one, 2 * SIZE)
            case Call.USE:
                return partial(client.stage, volume, self._staging, block())
            case Call.UNSTAGE:
                return partial(client.unstage, one, self._staging)
            case Call.DELETE:
                return partial(client.delete, one)
            case Call.GROW:
                return partial(self.service.autoextender.step, 0)
            case Call.MODIFY:
                return partial(client.modify, one, {"readIOPS": "500"})
            case Call.MANAGE:
                return partial(client.volume, one)
            case Call.ADOPT:
                asked = carver.AdoptVolumeRequest(group="data", logical_volume="old", block=True)
                return partial(client.adopt, asked)
            case Call.UNDO_ADOPT:
                asked = carver.AdoptVolumeRequest(group="data", logical_volume="old", dry_run=True)
                return partial(client.undo_adopt, asked)

    def _create(self) -> csi.Volume:
        return self.client.create("v", SIZE, block(), parameters=self._parameters)


@pytest.fixture
def stand(service: Service, fake: FakeHost, client: Client, tmp_path: Path) -> Stand:
    return Stand(service, fake, client, tmp_path / "staging")


def test_the_table_is_whole() -> None:
    assert set(STATES) == set(State)
    assert set(WORK) == set(Work)
    assert all(set(row.calls) == set(Call) for row in STATES.values())
    assert all(set(row) == set(Call) for row in WORK.values())
    assert len({row.ended_by for row in STATES.values()}) == len(STATES)


@pytest.mark.parametrize(("state", "call"), MET, ids=lambda one: one.name)
def test_a_call_does_as_the_table_says(stand: Stand, state: State, call: Call) -> None:
    stand.put(state)
    made = stand.call_of(call)
    if (code := CODES.get(STATES[state].calls[call])) is None:
        made()
    else:
        with expect.code(code):
            made()


@pytest.mark.parametrize("state", State, ids=lambda one: one.name)
def test_a_volume_is_seen_as_the_table_says(stand: Stand, state: State) -> None:
    stand.put(state)
    row, volume = STATES[state], stand.found()
    assert [one.volume_id for one in stand.client.volumes()] == [stand.volume_id] * row.is_listed
    # Nothing in the record of one that is held tells it from one that moves.
    assert volume_states.of(volume)[0] is (State.MOVING if state is State.HELD else state)
    assert volume.orphan == row.orphan
    # What a process notes at its start; a hold ends with its process.
    noted = stand.service.context.holds.resume(stand.service.reports)
    assert noted == row.is_noted


@pytest.mark.parametrize("state", State, ids=lambda one: one.name)
def test_the_calls_for_health_do_as_its_use(stand: Stand, state: State) -> None:
    stand.put(state)
    if (code := CODES.get(STATES[state].calls[Call.USE])) is None:
        stand.client.volume_health(stand.volume_id)
    else:
        with expect.code(code):
            stand.client.volume_health(stand.volume_id)


@pytest.mark.parametrize("call", [Call.DELETE, Call.UNDO_ADOPT], ids=lambda one: one.name)
def test_what_removes_a_moving_volume_says_how_the_move_is_ended(stand: Stand, call: Call) -> None:
    stand.put(State.MOVING)
    before = stand.found().own_tags
    with expect.code("FAILED_PRECONDITION", "it moves to there", "move NAME --undo"):
        stand.call_of(call)()
    assert stand.found().own_tags == before
