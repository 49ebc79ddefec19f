"""Keys that change while a volume stays in use: which opens it when, and what is reported."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import chosen
import configured
import expect
import grpc
import pytest
from csi_client import Client
from encrypted import Box
from model.stopping import Switch, stops
from nodes import Node
from real.any import AnyHost
from use import Use

from agent.csi.client import block, mounted, of_snapshot, of_volume
from agent.settings.settings import Config
from agent.volumes.tag_writer import TagWriter
from mount import luks
from mount import mount_errors as mount_errors
from mount.kernel import Kernel
from proto import csi_pb2 as csi

MIB = 1 << 20
SHARED = csi.VolumeCapability.AccessMode.SINGLE_NODE_MULTI_WRITER
OLD = {"passphrase": "correct horse battery staple"}
NEW = {"passphrase": "Tr0ub4dor&3"}
BOTH = {**NEW, "previousPassphrase": OLD["passphrase"]}
NAMED = {**BOTH, "passphraseGeneration": "2026-11"}
pytestmark = [
    pytest.mark.groups(data=[100, 100]),
    pytest.mark.settings(
        classes=(
            replace(configured.PLAIN, name="linear", encryption="luks2"),
            replace(configured.THIN, encryption="luks2"),
        )
    ),
]


@dataclass
class Used(Use):
    """A volume that is staged by the old key, and published for one pod."""

    host: AnyHost
    config: Config

    @property
    def box(self) -> Box:
        return Box(self.client, self.host, self.config.classes[0].group)

    def slots(self) -> tuple[int, ...]:
        return self.box.header().slots

    def own_tags(self) -> dict[str, str]:
        found = self.box.tags()
        return {one: found[one] for one in ("rotating", "keyGeneration") if one in found}

    def keys(self) -> dict[str, str]:
        """What `carver volume list` and `carver snapshot list` call each key."""
        here = (self.client.volumes_here(), self.client.snapshots_here())
        return {one.rpartition("/")[2]: key for each in here for one, key in each.keys.items()}

    def opens_by(self, secrets: dict[str, str]) -> None:
        """Out of use; then it is staged by these alone, and by no old key."""
        self.unstage()
        if secrets is not OLD:
            with expect.code("UNAUTHENTICATED"):
                self.stage(OLD)
        self.stage(secrets)
        assert len(self.slots()) == 1


KINDS = ("linear-ext4", "linear-block", "thin-ext4", "thin-block")


@pytest.fixture(params=chosen.kinds(KINDS, usual=["thin-block"]))
def used(request: pytest.FixtureRequest, client: Client, host: AnyHost, config: Config) -> Used:
    name, kind = request.param.split("-")
    how = block(mode=SHARED) if kind == "block" else mounted(kind, mode=SHARED)
    volume = client.create("pvc-1", 48 * MIB, how, parameters={"class": name})
    made = Used(client, host.directory, volume, how, host, config)
    made.stage(OLD)
    made.publish("a")
    return made


@pytest.mark.variation
def test_a_key_rotates_while_the_volume_stays_staged(used: Used) -> None:
    """A Deployment's rollout: the new pod comes before the old one goes, so nothing is unstaged."""
    used.publish("b", BOTH)
    used.unpublish("a")
    assert len(used.slots()) == 1
    used.unpublish("b")
    used.opens_by(NEW)


@pytest.mark.long_on_lvm
def test_a_key_rotates_at_a_repeated_stage(used: Used) -> None:
    """As after a restart of kubelet."""
    used.stage(BOTH)
    used.publish("b")
    used.unpublish("a", "b")
    used.opens_by(NEW)


@pytest.mark.variation
def test_a_key_rotates_when_the_volume_grows_in_use(used: Used) -> None:
    client, volume = used.client, used.volume
    grown = client.node_expand(volume.volume_id, used.at("a"), 96 * MIB, BOTH)
    assert grown.capacity_bytes == 96 * MIB
    used.unpublish("a")
    used.opens_by(NEW)


@pytest.mark.variation
def test_lists_show_the_key_generation_of_volumes_and_snapshots(used: Used) -> None:
    before = used.client.snapshot("before", used.volume.volume_id)
    assert set(used.keys().values()) == {"(unnamed)"}
    used.publish("b", NAMED)
    after = used.client.snapshot("after", used.volume.volume_id)
    assert used.own_tags() == {"keyGeneration": "2026-11"}
    shown = [used.client.snapshots_here().keys[one.snapshot_id] for one in (before, after)]
    assert shown == ["(unnamed)", "2026-11"]
    # A copy with the old key is shown so until it is staged with both.
    copies = [
        used.client.create(name, 0, used.how, source=of_snapshot(one.snapshot_id), parameters=like)
        for name, one in (("c1", before), ("c2", after))
        for like in ({"class": used.volume.volume_context["carver/class"]},)
    ]
    assert {used.client.volumes_here().keys[one.volume_id] for one in copies} == {"(unnamed)"}
    there = used.host.directory / "copy"
    with expect.code("UNAUTHENTICATED"):
        used.client.stage(copies[0], there, used.how, NEW)
    for one in copies:
        used.client.stage(one, there, used.how, NAMED)
        used.client.unstage(one.volume_id, there)
    assert {used.client.volumes_here().keys[one.volume_id] for one in copies} == {"2026-11"}
    # The next key has no name.
    used.publish("c", {"passphrase": "third", "previousPassphrase": NEW["passphrase"]})
    assert used.own_tags() == {}


@pytest.mark.long_on_lvm
@pytest.mark.parametrize("made_of", ["snapshot", "volume"])
def test_a_copy_made_while_the_key_changes_loses_the_old_key_when_it_is_staged(
    used: Used, monkeypatch: pytest.MonkeyPatch, made_of: str
) -> None:
    client, like = used.client, {"class": used.volume.volume_context["carver/class"]}
    with monkeypatch.context() as patch:

        def fails(_self: luks.Cryptsetup, path: str, *_key: object) -> None:
            raise mount_errors.CryptFailed("luksKillSlot", path, "Device or resource busy")

        patch.setattr(luks.Cryptsetup, "remove_key", fails)
        used.publish("b", NAMED)
        assert (used.own_tags(), len(used.slots())) == ({"rotating": "yes"}, 2)
        source = of_volume(used.volume.volume_id)
        if made_of == "snapshot":
            taken = client.snapshot("s", used.volume.volume_id).snapshot_id
            assert client.snapshots_here().keys[taken] == "(rotating)"
            source = of_snapshot(taken)
        copies = [client.create("c1", 0, used.how, source=source, parameters=like)]
    # The source's change of keys ends; the copy has both keys all the same.
    used.publish("c", NAMED)
    if made_of == "snapshot":
        copies.append(client.create("c2", 0, used.how, source=source, parameters=like))
    there = used.host.directory / "copy"
    for copy in copies:
        assert client.volumes_here().keys[copy.volume_id] == "(rotating)"
        # By the new key alone, as once the old one is gone from the secret.
        client.stage(copy, there, used.how, {**NEW, "passphraseGeneration": "2026-11"})
        client.unstage(copy.volume_id, there)
        assert client.volumes_here().keys[copy.volume_id] == "2026-11"
        with expect.code("UNAUTHENTICATED"):
            client.stage(copy, there, used.how, OLD)


@pytest.mark.variation
@pytest.mark.parametrize("named", [True, False])
def test_a_new_volume_records_the_generation_of_its_key(
    client: Client, host: AnyHost, config: Config, named: bool
) -> None:
    volume = client.create("pvc-1", 48 * MIB, block())
    secret = {**NEW, "passphraseGeneration": "first"} if named else NEW
    client.stage(volume, host.directory / "staging", block(), secret)
    used = Used(client, host.directory, volume, block(), host, config)
    assert used.own_tags() == ({"keyGeneration": "first"} if named else {})


@pytest.mark.variation
@pytest.mark.parametrize(
    "previous",
    [{}, {"previousPassphrase": "another"}],
)
def test_a_key_that_does_not_fit_stops_no_pod_and_is_reported(
    used: Used, previous: dict[str, str]
) -> None:
    """The old pod uses it still, and the right key can be given then."""
    assert "KeyRotationPending" not in used.reasons()
    used.publish("b", {**NEW, **previous, "passphraseGeneration": "2"})
    assert used.own_tags() == {"rotating": "yes"}
    assert set(used.keys().values()) == {"(rotating)"}
    assert "KeyRotationPending" in used.reasons()
    assert used.slots() == (0,)
    used.publish("c", NAMED)
    assert used.own_tags() == {"keyGeneration": "2026-11"}
    assert set(used.keys().values()) == {"2026-11"}
    assert "KeyRotationPending" not in used.reasons()


@pytest.mark.variation
def test_a_rotation_can_be_reversed(used: Used) -> None:
    used.publish("b", NAMED)
    back = {**OLD, "previousPassphrase": NEW["passphrase"], "passphraseGeneration": "2026-10"}
    used.publish("c", back)
    assert used.own_tags() == {"keyGeneration": "2026-10"}
    used.unpublish("a", "b", "c")
    used.opens_by(OLD)


@pytest.mark.variation
def test_a_known_key_costs_no_command_again(node: Node, host: AnyHost) -> None:
    used = begun(node)

    def cost() -> list[str]:
        run = [words[2:] if words[0] == "env" else words for words in used.host.commands]
        used.host.commands.clear()
        return [words[1] for words in run if words[0] == "cryptsetup"]

    cost()
    used.stage(OLD)
    used.publish("b", OLD)
    assert cost() == []
    used.publish("c", NAMED)
    # No slot opens by the new one; the old key does; the new one's is proved, then the old killed.
    added = ["open", "open", "luksAddKey", "open", "luksKillSlot"]
    assert cost() == [*added, "luksHeaderBackup"]
    for pod in "abc":
        used.publish(pod, NAMED)
    used.stage(NAMED)
    assert cost() == []
    # Another process asks once.
    node.restart()
    used.client = node.client
    cost()
    used.publish("a", NAMED)
    used.publish("b", NAMED)
    assert cost() == ["open"]


@pytest.mark.variation
def test_without_tags_a_volume_is_used_by_the_key_that_it_has(
    used: Used, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lvm2 writes no tag while a disk is missing, and without one no key is changed."""
    used.unpublish("a")
    used.unstage()
    real = TagWriter.replace

    def refuse(*_: object) -> None:
        raise mount_errors.CommandFailed(("lvm", "lvchange"), 5, "a disk is missing")

    monkeypatch.setattr(TagWriter, "replace", refuse)
    used.stage(NAMED)
    assert used.slots() == (0,)
    used.publish("a", NAMED)
    assert used.slots() == (0,)
    monkeypatch.setattr(TagWriter, "replace", real)
    used.publish("b", NAMED)
    assert used.own_tags() == {"keyGeneration": "2026-11"}
    used.unpublish("a", "b")
    used.opens_by(NEW)


@pytest.fixture
def node(host: AnyHost, config: Config, tmp_path: Path) -> Iterator[Node]:
    """A service that can be killed."""
    config = replace(config, header_backups=tmp_path / "headers")
    made = Node(host, config, config.classes[0].group, tmp_path)
    made.start()
    yield made
    made.stop()


def begun(node: Node) -> Used:
    """A volume of a node, used by the old key."""
    volume = node.client.create("pvc-1", 48 * MIB, block())
    how = block(mode=SHARED)
    used = Used(node.client, node.host.directory, volume, how, node.host, node.config)
    used.stage(OLD)
    used.publish("a")
    return used


CALLS = {
    "stage": lambda used: used.stage(NAMED),
    "publish": lambda used: used.publish("b", NAMED),
    "expand": lambda used: used.client.node_expand(
        used.volume.volume_id, used.at("a"), 96 * MIB, NAMED
    ),
}


@pytest.mark.variation
@pytest.mark.parametrize("name", CALLS)
def test_a_rotation_killed_at_any_step_is_completed(node: Node, name: str) -> None:
    def trial(stop_at: int = -1, before: bool = True) -> list[str]:
        used = begun(node)
        switch = Switch(stop_at, before=before)
        node.restart(switch)
        used.client = node.client
        with suppress(grpc.RpcError):
            CALLS[name](used)
        taken = list(switch.taken)
        if stop_at >= 0:
            assert switch.dead.wait(expect.PATIENCE_SECONDS)
            node.kill()
            used.client = node.client
            # It opens by one of the two, whatever the kill left.
            assert set(used.slots()) & {0, 1}
            CALLS[name](used)
        assert used.own_tags() == {"keyGeneration": "2026-11"}, (stop_at, before)
        # Nor does the backup of the header open by the old key.
        assert node.config.header_backups is not None
        [kept] = node.config.header_backups.iterdir()
        backup = luks.read(Kernel(), str(kept))
        assert backup is not None
        assert backup.slots == used.slots(), (stop_at, before)
        used.unpublish("a", "b")
        used.opens_by(NEW)
        used.unstage()
        node.client.delete(used.volume.volume_id)
        return taken

    steps = trial()
    assert len(steps) > 5
    for stop_at, before in stops(steps):
        trial(stop_at, before)
