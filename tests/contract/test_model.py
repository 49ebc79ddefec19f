"""Thousands of calls in any order, one by one and two at once, against a model of the node.

The same seed gives the same calls; it is printed. `CARVER_MODEL=seed=7,examples=1000,steps=80`
chooses others. What hypothesis prints of a failure is the shortest sequence that fails; with
`shrink=0` it is the first.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chosen
import pytest
from fakes.host import FakeHost
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    rule,
    run_state_machine_as_test,
)
from model import operations as do
from model.expected import CLASS, EXTENT_BYTES, Model
from model.machine import METADATA_EXTENTS, Machine
from model.operations import MIB, Outcome, Use
from real.host import Lab, real_host

from agent.settings.classes import DeviceClass
from lvm.layout import Layout
from lvm.thin import Policy
from mount.filesystem import FILE_SYSTEMS

_DISKS = (150, 100)
_NAMES = ("a", "b", "c")
_PODS = ("csi-1", "csi-2")
_STAGING = {"a": "staging-a", "b": "staging-b", "c": "staging-c"}
_TARGETS = ("target-1", "target-2", "target-3")

_volumes = st.sampled_from((*_NAMES, *_NAMES, *_NAMES, *_PODS, do.MALFORMED, do.ELSEWHERE))
_pods = st.sampled_from(_PODS)
_any_name = st.sampled_from((*_NAMES, *_PODS))
_names = st.sampled_from(_NAMES)
_paths = st.sampled_from((*_TARGETS, *_TARGETS, *_STAGING.values()))
_targets = st.sampled_from(_TARGETS)
_modes = st.sampled_from((do.MULTI_WRITER, do.MULTI_WRITER, do.WRITER, do.READER_ONLY, do.READERS))
_uses = st.one_of(
    st.builds(Use, st.just("mount"), _modes, st.just("ext4")),
    st.builds(Use, st.just("mount"), _modes, st.sampled_from(("", *FILE_SYSTEMS))),
    st.builds(Use, st.just("block"), _modes),
)
# The uses of most calls, so that a repeated call is often the same.
_usual = st.sampled_from(
    (
        Use("mount", do.MULTI_WRITER, "ext4"),
        Use("mount", do.MULTI_WRITER, "ext4"),
        Use("block", do.MULTI_WRITER),
        Use("mount", do.WRITER, "ext4"),
    )
)
_WRITES, _READS = (Use("mount", mode, "ext4") for mode in (do.MULTI_WRITER, do.READERS))
# A volume that was made for a writer may be staged and published for readers.
_used_as = st.one_of(_usual, _usual, st.just(_READS))
_any_use = st.one_of(_usual, _usual, _uses)
_sizes = st.sampled_from((16 * MIB, 16 * MIB, 17 * MIB, 0, 64 * MIB, 320 * MIB, 700 * MIB))
_limits = st.sampled_from((0, 0, 0, 16 * MIB, 18 * MIB, 400 * MIB))
_ENCRYPTED = (("carver/encryption", "luks2"),)
_parameters = st.sampled_from(
    (
        *((), (), (), _ENCRYPTED, _ENCRYPTED),
        *((("carver/class", "plain"),), (("carver/class", "other"),)),
        *((("carver/fsType", "xfs"),), (("carver/reencrypt", "true"),), (("unheard", "of"),)),
    )
)
_keys = st.sampled_from(("right", "right", "right", "wrong", ""))


def _own_staging(volume: str) -> str:
    return _STAGING.get(volume, _STAGING["a"])


_read_aheads = st.sampled_from(("auto", "0", "64KiB", "1MiB", "1MiB", "1000", "much"))
_mutable = st.one_of(
    st.tuples(st.tuples(st.just("carver/readAhead"), _read_aheads)),
    st.tuples(st.tuples(st.just("carver/writeIOPS"), st.sampled_from(("0", "9", "50", "60")))),
    st.sampled_from((None, (("carver/maximumRecoveryRate", "1MiB"),), (("unheard", "of"),))).map(
        lambda one: one or ()
    ),
)
_creates = st.builds(do.Create, _names, _sizes, _limits, _any_use, _parameters, mutable=_mutable)
_modifies = st.builds(do.Modify, _volumes, _mutable)


@st.composite
def _attachings(draw: st.DrawFn, volume: str = "") -> do.Call:
    """A volume, any or this one, is attached to a node or detached from it."""
    volume = volume or draw(_volumes)
    node = draw(st.sampled_from((do.HERE, do.HERE, do.HERE, do.THERE)))
    if draw(st.booleans()):
        return do.Detach(volume, draw(st.sampled_from((node, ""))))
    return do.Attach(volume, node, draw(_any_use), draw(st.booleans()))


_plain_creates = st.builds(do.Create, _names, st.just(16 * MIB), st.just(0), _usual)
_deletes = st.builds(do.Delete, _volumes)
_snapshot_names = st.sampled_from(("snap-1", "snap-2"))
_snapshots = st.builds(do.Snapshot, _volumes, _snapshot_names)
_sources = st.one_of(
    st.tuples(st.just(do.OF_SNAPSHOT), _snapshot_names), st.tuples(st.just(do.OF_VOLUME), _names)
)
_copies = st.builds(
    do.Create,
    _names,
    st.sampled_from((0, 0, 16 * MIB, 64 * MIB)),
    _limits,
    _any_use,
    parameters=st.sampled_from(((), _ENCRYPTED)),
    source=_sources,
)
_stages = st.one_of(
    *(st.builds(do.Stage, st.just(one), st.just(_STAGING[one]), _used_as, _keys) for one in _NAMES),
    *(st.builds(do.Stage, st.just(one), st.just(_STAGING[one]), _used_as) for one in _NAMES),
    st.builds(do.Stage, _volumes, _paths, _any_use),
)
_unstages = st.one_of(
    *(st.builds(do.Unstage, st.just(one), st.just(_STAGING[one])) for one in _NAMES),
    st.builds(do.Unstage, _volumes, _paths),
)
_publishes = st.one_of(
    *(
        st.builds(
            do.Publish, st.just(one), st.just(_STAGING[one]), _targets, _used_as, st.booleans()
        )
        for one in _NAMES
    ),
    st.builds(do.Publish, _volumes, _paths, _paths, _any_use, st.booleans()),
)
_inlines = st.builds(do.PublishInline, _pods, _targets, st.just(16 * MIB), _any_use, st.booleans())
_odd_inlines = st.builds(do.PublishInline, _pods, _paths, _sizes, _any_use, st.booleans())
_unpublishes = st.builds(do.Unpublish, _volumes, _paths)
_expands = st.builds(do.Expand, _volumes, _sizes.filter(bool), _limits)
_node_expands = st.one_of(
    st.builds(do.NodeExpand, _volumes, _paths, _sizes, _limits, reads=st.booleans()),
    st.builds(do.NodeExpand, _names, _paths, _sizes, _limits, _keys),
)
_looks = st.one_of(
    st.builds(do.Get, _volumes),
    st.builds(do.Validate, _volumes, _any_use),
    st.builds(do.Volumes, st.sampled_from((0, 1, 2))),
    st.builds(do.Snapshots, st.sampled_from(("", *_NAMES))),
    st.just(do.Capacity()),
    st.builds(do.Stats, _volumes, _paths),
    st.builds(do.Health, _volumes, st.booleans()),
)
_changes = st.one_of(
    *(_plain_creates, _creates, _deletes, _stages, _unstages),
    *(_publishes, _inlines, _unpublishes, _expands, _modifies, _attachings()),
)


_seen_at_once = st.one_of(_changes, st.just(do.Volumes()), st.just(do.Capacity()))


def _of(volume: str) -> st.SearchStrategy[do.Call]:
    """What happens to a volume that is used as usual."""
    staging = _STAGING[volume]
    return st.one_of(
        st.builds(do.Create, st.just(volume), st.just(16 * MIB), st.just(0), _usual),
        st.builds(do.Delete, st.just(volume)),
        st.builds(do.Modify, st.just(volume), _mutable),
        _attachings(volume),
        st.builds(do.Snapshot, st.just(volume), st.just(f"snap-{volume}")),
        st.builds(do.Stage, st.just(volume), st.just(staging), _used_as),
        st.builds(do.Unstage, st.just(volume), st.just(staging)),
        st.builds(do.Expand, st.just(volume), _sizes.filter(bool)),
        st.builds(do.Publish, st.just(volume), st.just(staging), _targets, _used_as, st.booleans()),
        st.builds(do.Unpublish, st.just(volume), _targets),
    )


_pairs: st.SearchStrategy[tuple[do.Call, do.Call]] = st.one_of(
    st.tuples(_changes, _seen_at_once), *(st.tuples(_of("a"), _of(other)) for other in _NAMES)
)


class Node(RuleBasedStateMachine):
    """A node and its model, side by side."""

    def __init__(self, machine: Machine, take_away: Callable[[], object]) -> None:
        super().__init__()
        self.machine = machine
        self.take_away = take_away
        self.model = Model(sum(_DISKS) * EXTENT_BYTES)
        # Thin ones follow other rules, which the model does not know.
        self.knows_snapshots = True

    def _is_sensible(self, call: do.Call) -> bool:
        """No CO uses a volume with a file system as a raw device: then mkfs may find it busy."""
        of_one = isinstance(call, do.Create) and call.source != do.NO_SOURCE
        if not self.knows_snapshots and (of_one or isinstance(call, do.Snapshot)):
            return False
        volume = self.model.volumes.get(getattr(call, "volume", ""))
        raw = isinstance(call, do.Publish) and call.use.is_block
        return not raw or (volume is not None and volume.use.is_block)

    def _do(self, call: do.Call) -> None:
        if not self._is_sensible(call):
            return
        expected = self.model.apply(call)
        answer = self.machine.by_kubelet(call)
        assert self.machine.same(call, answer, expected), f"{call}: {answer}, expected {expected}"
        self._compare()

    def _compare(self) -> None:
        assert self.machine.state() == self.model.state()

    @rule(snapshot=_snapshot_names)
    def delete_snapshot(self, snapshot: str) -> None:
        self._do(do.DeleteSnapshot(snapshot))

    create = rule(call=_plain_creates)(_do)
    create_oddly = rule(call=_creates)(_do)
    delete = rule(call=_deletes)(_do)
    snapshot = rule(call=_snapshots)(_do)
    copy = rule(call=_copies)(_do)
    stage = rule(call=_stages)(_do)
    publish = rule(call=_publishes)(_do)
    publish_inline = rule(call=st.one_of(_inlines, _inlines, _odd_inlines))(_do)
    unpublish = rule(call=_unpublishes)(_do)
    unstage = rule(call=_unstages)(_do)
    expand = rule(call=_expands)(_do)
    modify = rule(call=_modifies)(_do)
    attach = rule(call=_attachings())(_do)
    node_expand = rule(call=_node_expands)(_do)
    look = rule(call=_looks)(_do)

    @rule(volume=_names, use=_usual, path=_targets, read_only=st.booleans())
    def bring_into_use(self, volume: str, use: Use, path: str, read_only: bool) -> None:
        """What a CO does for a new pod."""
        self._do(do.Create(volume, 16 * MIB, 0, use))
        self._do(do.Stage(volume, _STAGING[volume], use))
        self._do(do.Publish(volume, _STAGING[volume], path, use, read_only))

    @rule(volume=_names, use=_usual, path=_targets, read_only=st.booleans(), key=_keys)
    def bring_encrypted_into_use(
        self, volume: str, use: Use, path: str, read_only: bool, key: str
    ) -> None:
        """The same with a StorageClass that encrypts, and has a secret, or lacks it."""
        self._do(do.Create(volume, 16 * MIB, 0, use, _ENCRYPTED))
        self._do(do.Stage(volume, _STAGING[volume], use, key))
        self._do(do.Publish(volume, _STAGING[volume], path, use, read_only))
        self._do(do.NodeExpand(volume, path, 24 * MIB, 0, key))

    @rule(
        pair=st.permutations(_NAMES),
        use=_usual,
        key=_keys,
        snapshot=_snapshot_names,
    )
    def copy_encrypted(self, pair: list[str], use: Use, key: str, snapshot: str) -> None:
        """Clone a volume in use, and take a snapshot of the clone before its first use."""
        source, made = pair[:2]
        self._do(do.Create(source, 16 * MIB, 0, use, _ENCRYPTED))
        self._do(do.Stage(source, _STAGING[source], use, "right"))
        self._do(do.Create(made, 0, 0, use, _ENCRYPTED, source=(do.OF_VOLUME, source)))
        self._do(do.Snapshot(made, snapshot))
        self._do(do.Stage(made, _STAGING[made], use, key))
        self._do(do.Snapshot(made, snapshot))

    @rule(pair=st.permutations(_NAMES), paths=st.permutations(_TARGETS), snapshot=_snapshot_names)
    def read_a_snapshot(self, pair: list[str], paths: list[str], snapshot: str) -> None:
        """What a backup program does: two pods read a claim that was restored for them."""
        if not self.knows_snapshots:
            return
        source, made = pair[:2]
        self._do(do.Create(source, 16 * MIB, 0, _WRITES))
        self._do(do.Stage(source, _STAGING[source], _WRITES))
        self._do(do.Snapshot(source, snapshot))
        self._do(do.Create(made, 32 * MIB, 0, _READS, source=(do.OF_SNAPSHOT, snapshot)))
        self._do(do.Stage(made, _STAGING[made], _READS))
        for path in paths[:2]:
            self._do(do.Publish(made, _STAGING[made], path, _READS))

    @rule(volume=_names)
    def let_go(self, volume: str) -> None:
        """What a CO does when the last pod is gone."""
        for path in sorted(self.model.of(volume)):
            if path in _TARGETS:
                self._do(do.Unpublish(volume, path))
        self._do(do.Unstage(volume, _STAGING[volume]))
        self._do(do.Delete(volume))

    @rule(pair=_pairs, waits=st.integers(0, 1 << 16))
    def two_at_once(self, pair: tuple[do.Call, do.Call], waits: int) -> None:
        """Both happen, in one order or the other; on one volume or path, one may be put off."""
        first, second = pair
        if not (self._is_sensible(first) and self._is_sensible(second)):
            return
        for one in pair:
            self.machine.let_go(one)
        self.machine.switch.waits = random.Random(waits)
        with ThreadPoolExecutor(2) as pool:
            found = tuple(pool.map(self.machine.call, (first, second)))
        self.machine.switch.waits = None
        state = self.machine.state()
        fitting = [
            model
            for model, answers in self._ways(first, second)
            if answers == found and model.state() == state
        ]
        assert fitting, f"{first} and {second} at once: {found}, {state}"
        self.model = fitting[0]

    def _ways(
        self, first: do.Call, second: do.Call
    ) -> Iterator[tuple[Model, tuple[Outcome, Outcome]]]:
        """How the model can go on from here, with what is answered."""
        model = self.model.copy()
        yield model, (model.apply(first), model.apply(second))
        model = self.model.copy()
        later = model.apply(second)
        yield model, (model.apply(first), later)
        if _held(first) & _held(second):
            model = self.model.copy()
            yield model, (model.apply(first), Outcome("ABORTED"))
            model = self.model.copy()
            yield model, (Outcome("ABORTED"), model.apply(second))

    @rule()
    def restart(self) -> None:
        self.machine.restart()
        self._compare()

    @rule()
    def reboot(self) -> None:
        self.machine.reboot()
        self.model.reboot()
        self._compare()

    # What is drawn never depends on the state: after two calls at once, that may differ.

    def _is_unused(self, volume: str) -> bool:
        there = self.model.volumes.get(volume)
        is_there = there is not None and there.active and not self.model.of(volume)
        # An open one does not go, and one without its header is for other tests.
        return is_there and not self.model.volumes[volume].header_bytes

    @rule(volume=_any_name)
    def deactivate_behind_its_back(self, volume: str) -> None:
        if self._is_unused(volume):
            self.machine.deactivate(volume)
            self.model.deactivate(volume)
            self._compare()

    @rule(volume=_any_name, contents=st.sampled_from(("", "ext4")))
    def overwrite_behind_its_back(self, volume: str, contents: str) -> None:
        # What overwrites all of a volume overflows its snapshots, too.
        if self._is_unused(volume) and not self.model.has_snapshots(volume):
            self.machine.overwrite(volume, contents)
            self.model.overwrite(volume, contents)

    def teardown(self) -> None:
        """Whatever was done, all of it can be undone, and then nothing is left."""
        try:
            for path, place in list(self.model.places.items()):
                self._do(do.Unpublish(place.volume, path))
            for snapshot in list(self.model.snapshots):
                self._do(do.DeleteSnapshot(snapshot))
            for volume in list(self.model.volumes):
                inline = do.is_inline(volume)
                self._do(do.Unpublish(volume, _TARGETS[0]) if inline else do.Delete(volume))
            for path in list(self.model.entries):
                self._do(do.Unpublish("a", path))
            assert self.model.state() == Model(self.model.total_bytes).state()
        finally:
            self.machine.let_all_go()
            self.machine.stop()
            self.take_away()


def _held(call: do.Call) -> set[str]:
    """What a call holds while it lasts: its volume, and the path where it puts it."""
    held = {getattr(call, "volume", "")}
    if isinstance(call, do.Stage | do.Publish | do.PublishInline):
        held.add(call.path)
    if isinstance(call, do.Publish):
        held.add(call.staging)
    if isinstance(call, do.Snapshot):
        held.add(call.snapshot)
    return held - {""}


def _thin(group: str) -> DeviceClass:
    """A class that promises what its pool can grow to, and no more."""
    return DeviceClass("plain", group, default=True, layout=Layout("thin"), pool=Policy())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", chosen.kinds(["linear", "thin"], usual=["linear"]))
def test_the_node_does_what_the_model_does(
    request: pytest.FixtureRequest, real: bool, layout: str, tmp_path: Path
) -> None:
    examples, steps = (80, 50) if chosen.every else (16, 50)
    if real:
        # A shorter sequence is not worth hours on a real machine.
        examples, steps = 1, 40
    numbers = chosen.numbers(
        "CARVER_MODEL", seed=1, examples=examples, steps=steps, shrink=int(not real)
    )
    shared: Lab | None = request.getfixturevalue("shared_lab") if real else None
    serial = itertools.count()

    class Here(Node):
        def __init__(self) -> None:
            directory = tmp_path / str(next(serial)) / "mounts"
            directory.mkdir(parents=True)
            own = contextlib.ExitStack()
            host = own.enter_context(real_host(shared, directory)) if shared else None
            any_host = host or FakeHost(directory)
            group = any_host.new_group(*_DISKS)
            # What is encrypted is for StorageClasses to say.
            plain = DeviceClass(CLASS, group, default=True)
            changes = {"classes": (_thin(group) if layout == "thin" else plain,)}
            machine = Machine(any_host, group, directory.parent, settings=changes)
            super().__init__(machine, own.close)
            if layout == "thin":
                self.knows_snapshots = False
                self.model.total_bytes -= METADATA_EXTENTS * EXTENT_BYTES

    run_state_machine_as_test(
        seed(numbers["seed"])(Here),
        settings=settings(
            max_examples=numbers["examples"],
            stateful_step_count=numbers["steps"],
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if numbers["shrink"] else [])],
        ),
    )
