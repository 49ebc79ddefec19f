"""Volumes by hand: each verb as a person types it, on the service that runs.

tests/container types them on real volumes.
"""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import configured
import grpc
import pytest
from fakes.host import FakeHost

from agent.cli import main as cli
from agent.cli import terminal, volumes
from agent.core import errors
from agent.core import settings as configuration
from agent.core.classes import DeviceClass
from agent.core.host import Host
from agent.core.settings import Config
from agent.csi.client import Client
from agent.daemon.server import Service
from lvm.report import Group
from mount import table

MIB = 1 << 20


class Shell:
    """A person at a prompt: what is typed, and what is seen."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.complaint = ""

    def __call__(self, line: str, exit_code: int = 0, noun: str = "volume") -> str:
        """Type a line without `carver volume`, and return what was printed."""
        ended = cli.main([noun, *line.split()])
        seen = self._capsys.readouterr()
        self.complaint = seen.err
        assert ended == exit_code, seen.err
        return seen.out


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    made = FakeHost(tmp_path)
    made.lvm2.add_group("data", [100, 60])
    return made


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured.carver(tmp_path)


@pytest.fixture
def service(host: FakeHost, config: Config) -> Iterator[Service]:
    running = Service(config, Host(host.run, host.kernel, host.devices, host.disks), host.lvm)
    running.start(config.endpoint)
    yield running
    running.stop()


@pytest.fixture
def shell(
    host: FakeHost,
    config: Config,
    service: Service,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shell:
    here(host, config, monkeypatch)
    return Shell(capsys)


def here(host: FakeHost, settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command find the test's machine, and its configuration."""
    machine = Host(host.run, host.kernel, host.devices, host.disks)
    monkeypatch.setattr("agent.core.host.this_host", lambda _settings: machine)
    monkeypatch.setattr(configuration, "load", lambda _arguments, _environment: settings)


def refusing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the person is asked, who says no."""
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr(terminal, "confirmed", no)
    return asked


def mounted(host: FakeHost) -> list[str]:
    """The volumes' mounts, by name."""
    inside = table.read(host.kernel).mounts
    return [one.path for one in inside if "vol-" in one.path or one.path.endswith("/db")]


def test_a_volume_s_life_by_hand(shell: Shell, host: FakeHost, client: Client) -> None:
    place = host.directory / "db"

    assert shell("create db --size 64MiB").startswith("db: 64 MiB, ")
    assert shell("list --names") == "db\n"
    assert shell(f"publish db {place}") == f"db is at {place}\n"
    assert str(place) in shell("show db")
    assert shell("expand db 100MiB") == "db: 100 MiB\n"
    usage = client.stats(client.volumes()[0].volume_id, place).usage[0]
    assert usage.total > 80 * MIB
    assert shell("unpublish db") == f"db is no longer at {place}\n"
    assert mounted(host) == []
    assert not place.exists()
    assert shell("delete db --yes") == "db is deleted\n"
    assert client.volumes() == []


def test_what_may_change_is_changed_while_a_volume_is_in_use(shell: Shell, host: FakeHost) -> None:
    shell("create db --size 64MiB")
    shell(f"publish db {host.directory}/db")
    assert shell("modify db readAhead=1MiB") == "db: readAhead=1MiB\n"
    assert host.lvm2.groups["data"].volumes["vol-db"].tuning.read_ahead_bytes == MIB
    shell("modify db maximumRecoveryRate=1MiB", 1)
    assert "RAID" in shell.complaint
    shell("modify db readahead=1MiB", 1)
    assert "carver/readAhead" in shell.complaint
    shell("modify other readAhead=1MiB", 1)
    assert "'other'" in shell.complaint


@pytest.mark.parametrize("words", ["", "readAhead", "=1MiB"])
def test_a_change_needs_a_key_and_a_value(shell: Shell, words: str) -> None:
    with pytest.raises(SystemExit):
        shell(f"modify db {words}")


def test_a_raw_block_volume_is_published_as_what_it_is(shell: Shell, host: FakeHost) -> None:
    shell("create raw --size 16MiB --block")
    shell(f"publish raw {host.directory}/raw")
    assert host.kernel.device_size_bytes(f"{host.directory}/raw") == 16 * MIB
    shell("unpublish raw")
    shell("delete raw --yes")


def test_a_volume_is_at_a_second_path_only_if_that_is_said(shell: Shell, host: FakeHost) -> None:
    one, other = host.directory / "db", host.directory / "reader"
    shell("create db --size 64MiB")
    shell(f"publish db {one}")
    shell(f"publish db {other}", 1)
    assert "allows one target" in shell.complaint

    shell(f"publish db {other} --shared --read-only")
    told = json.loads(shell("show db --json"))
    assert {str(one), str(other)} <= set(told["places"])

    # The first stays, and so does what it stands on.
    shell(f"unpublish db {other}")
    assert str(one) in mounted(host)
    shell(f"unpublish db {one}")
    assert mounted(host) == []


def test_a_volume_goes_by_its_name_its_logical_volume_and_its_id(
    shell: Shell, client: Client
) -> None:
    odd = "a/very/odd/name"
    shell(f"create {odd} --size 16MiB")
    [volume] = client.volumes()
    logical = shell("list --names").strip()
    assert logical.startswith("vol.")
    for name in (odd, logical, volume.volume_id):
        assert json.loads(shell(f"show {name} --json"))["id"] == volume.volume_id
    shell("show nothing", 1)
    assert "there is no volume 'nothing'" in shell.complaint


def test_the_list_is_a_table_or_json(shell: Shell) -> None:
    shell("create one --size 64MiB --class plain --fs-type ntfs", 1)
    assert "one of ext4, xfs, btrfs (INVALID_ARGUMENT)" in shell.complaint
    shell("create one --size 16MiB --class plain --fs-type ext4")
    table = shell("list")
    assert "HEALTH" in table
    assert max(map(len, table.splitlines())) <= 100
    [told] = json.loads(shell("list --json"))
    assert (told["name"], told["size_bytes"], told["carver/class"]) == ("one", 16 * MIB, "plain")


def test_nothing_is_deleted_that_nobody_confirmed(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("create db --size 16MiB")
    shell("delete db", 1)
    assert "give --yes" in shell.complaint
    assert len(client.volumes()) == 1

    asked: list[str] = []

    def yes(question: str) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr(terminal, "confirmed", yes)
    shell("delete db")
    assert asked == ["Delete db, 16 MiB, and all its data?"]
    assert client.volumes() == []


def test_where_nobody_serves_the_next_step_is_named(
    host: FakeHost,
    config: Config,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here(host, config, monkeypatch)
    shell = Shell(capsys)
    shell("list", 1)
    assert "systemctl start carver" in shell.complaint


def test_a_size_that_is_none_is_refused_before_anything_is_asked(
    shell: Shell, host: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        shell("create db --size large")
    assert "10GiB" in capsys.readouterr().err
    assert host.commands == []


def test_a_snapshot_is_taken_listed_and_deleted(shell: Shell, client: Client) -> None:
    shell("create db --size 64MiB")
    made = shell("create db monday --size 50%", noun="snapshot")
    assert made.startswith("monday: db as it is now, ")
    assert shell("list --names", noun="snapshot") == "monday\n"
    [told] = json.loads(shell("list --json", noun="snapshot"))
    assert (told["name"], told["volume"], told["ready"]) == ("monday", "db", True)
    assert "monday" in shell("list", noun="snapshot")

    shell("delete monday", 1, noun="snapshot")
    assert "give --yes" in shell.complaint
    shell("delete tuesday --yes", 1, noun="snapshot")
    assert "there is no snapshot 'tuesday'" in shell.complaint
    assert shell("delete monday --yes", noun="snapshot") == "monday is deleted\n"
    assert client.snapshots() == []


def test_a_volume_is_made_of_a_snapshot_or_of_another_volume(
    shell: Shell,
    client: Client,
    service: Service,
    host: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell("create db --size 64MiB")
    shell("create db monday", noun="snapshot")

    # The copy does not end before the command was told to wait.
    told, copy = threading.Event(), host.kernel.copy

    def slow(source: str, target: str, offset: int, length: int, *, blank: bool) -> None:
        assert told.wait(20)
        copy(source, target, offset, length, blank=blank)

    monkeypatch.setattr(host.kernel, "copy", slow)
    monkeypatch.setattr(volumes, "sleep", lambda _seconds: told.set())
    service.copier.grace_seconds = 0.05
    assert shell("create again --from-snapshot monday").startswith("again: 64 MiB, ")
    assert "is being copied" in shell.complaint
    service.copier.grace_seconds = 20
    assert shell("create twin --from-volume db --size 100MiB").startswith("twin: 100 MiB, ")
    sources = {one.content_source.WhichOneof("type") for one in client.volumes()}
    assert sources == {None, "snapshot", "volume"}

    shell("create late --from-snapshot tuesday", 1)
    assert "there is no snapshot 'tuesday'" in shell.complaint
    shell("create small --from-volume db --size 4MiB", 1)
    assert "OUT_OF_RANGE" in shell.complaint
    shell("create empty", 1)
    assert "--size" in shell.complaint
    assert len(client.volumes()) == 3


def test_the_document_s_example_works_as_it_stands(
    shell: Shell, host: FakeHost, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.lvm2.add_group("data", [32000])
    monkeypatch.setattr(terminal, "confirmed", lambda _question: True)
    document = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    [example] = re.findall(r"<!-- by hand: begin -->\n(.*?)<!-- by hand: end -->", document, re.S)
    for line in example.replace("/mnt", str(host.directory)).splitlines():
        carver, noun, words = line.strip().split(" ", 2)
        assert carver == "carver"
        shell(words, noun=noun)
    assert client.volumes() == []
    assert mounted(host) == []


class TestInACluster:
    """Where volumes grow on their node."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        """The same, as a cluster has it."""
        return configured.carver(tmp_path, controller_expand=False)

    def test_a_volume_grows_where_it_is_used(self, shell: Shell, host: FakeHost) -> None:
        place: Path = host.directory / "db"
        shell("create db --size 64MiB")
        shell("expand db 100MiB", 1)
        assert "publish it" in shell.complaint
        shell(f"publish db {place}")
        assert shell("expand db 100MiB") == "db: 100 MiB\n"


def test_a_volume_is_repaired_and_a_disk_replaced(
    shell: Shell, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "_LOOK_SECONDS", 0)
    shell("create db --size 64MiB")
    assert "is whole" in shell("repair db")
    new = host.new_device(600 * MIB)
    told = shell(f"replace-disk /dev/fake-data-0 {new} --yes", noun="group")
    assert "is moved" in told
    assert told.endswith("data is whole\n")
    assert new in [one.name for one in host.lvm2.groups["data"].disks]


def test_a_disk_is_not_replaced_unconfirmed(
    shell: Shell, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "confirmed", lambda _question: False)
    new = host.new_device(600 * MIB)
    shell(f"replace-disk /dev/fake-data-0 {new}", exit_code=1, noun="group")
    assert "is not taken" in shell.complaint


def test_a_kubeconfig_goes_with_what_it_is_for(shell: Shell) -> None:
    shell("create db --size 64MiB")
    shell("receive copy --kubeconfig /etc/carver/admin.conf", exit_code=1)
    assert "--finish" in shell.complaint
    # Before anything is sent or finished.
    for words in ("move db --to node-b", "receive copy --finish"):
        shell(f"{words} --kubeconfig /nowhere/admin.conf", exit_code=1)
        assert "/nowhere/admin.conf: kubeconfig: cannot be read" in shell.complaint


class TestWhereAGroupIsAway:
    """Of two groups one is not on this node any more; each has a volume, and a snapshot of it."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        """A class on each."""
        classes = (
            DeviceClass(name="plain", group="data", default=True),
            DeviceClass(name="fast", group="fast"),
        )
        return configured.carver(tmp_path, classes=classes)

    @pytest.fixture
    def shell(self, shell: Shell, host: FakeHost) -> Shell:
        """With `db` in the group that is there, and `web` in the one that is not."""
        host.lvm2.add_group("fast", [100])
        for name, device_class in (("db", "plain"), ("web", "fast")):
            shell(f"create {name} --size 16MiB --class {device_class}")
            shell(f"create {name} of-{name}", noun="snapshot")
        del host.lvm2.groups["fast"]
        return shell

    def test_what_is_in_the_other_is_shown_and_used_as_ever(
        self, shell: Shell, host: FakeHost, client: Client
    ) -> None:
        with pytest.raises(grpc.RpcError, match="fast is not on this node"):
            client.volumes()
        assert shell("list --names") == "db\n"
        assert "volume group fast is not on this node" in shell.complaint
        assert [one["name"] for one in json.loads(shell("list --json"))] == ["db"]
        assert "db" in shell("list")
        assert json.loads(shell("show db --json"))["name"] == "db"
        shell("create twin --from-snapshot of-db")
        shell("delete twin --yes")
        assert shell("list --names", noun="snapshot") == "of-db\n"
        assert "volume group fast is not on this node" in shell.complaint
        shell("delete of-db --yes", noun="snapshot")
        shell(f"publish db {host.directory}/db")
        shell("expand db 32MiB")
        shell("unpublish db")
        shell("delete db --yes")
        assert shell("list --names").strip() == ""

    def test_what_is_not_found_may_be_in_the_one_that_is_away(
        self, shell: Shell, host: FakeHost
    ) -> None:
        gone = "volume group fast is not on this node"
        shell("show web", 1)
        assert "may have it" in shell.complaint
        assert gone in shell.complaint
        shell("delete of-web --yes", 1, noun="snapshot")
        assert gone in shell.complaint
        # An id says which group it is of.
        uuid = host.lvm2.groups["data"].uuid.replace("-", "")[:8]
        shell(f"show data@{uuid}/vol-other", 1)
        assert gone not in shell.complaint
        assert "there is no volume" in shell.complaint

    def test_one_that_never_answered_keeps_nobody_from_the_other(
        self, shell: Shell, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        volume_group = service.volume_groups.known("fast")
        assert volume_group is not None

        def look() -> Group | None:
            raise errors.GroupSilent("fast", ["/dev/sdx"])

        monkeypatch.setattr(volume_group, "_report", look)
        volume_group.cached, volume_group.time_seconds = None, 0.0
        assert "db" in shell("list")
        assert "/dev/sdx" in shell.complaint


class TestAClassThatOverwrites:
    """Where a volume, and what it grows by, is overwritten before it is there."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        """The one class does."""
        classes = (DeviceClass(name="plain", group="data", default=True, zero="fully"),)
        return configured.carver(tmp_path, classes=classes)

    @pytest.fixture
    def told(
        self, service: Service, host: FakeHost, monkeypatch: pytest.MonkeyPatch
    ) -> threading.Event:
        """Nothing is overwritten before the command was told to wait."""
        told, zero_out = threading.Event(), host.kernel.zero_out
        service.copier.grace_seconds = service.growth_zeroer.grace_seconds = 0.05

        def slow(device: str, offset_bytes: int, length_bytes: int) -> None:
            assert told.wait(20)
            zero_out(device, offset_bytes, length_bytes)

        monkeypatch.setattr(host.kernel, "zero_out", slow)
        monkeypatch.setattr(volumes, "sleep", lambda _seconds: told.set())
        return told

    def test_a_volume_and_what_it_grows_by_is_waited_for(
        self, shell: Shell, told: threading.Event
    ) -> None:
        assert shell("create db --size 16MiB").startswith("db: 16 MiB, ")
        assert "(ABORTED)" not in shell.complaint
        assert "call again" in shell.complaint
        told.clear()
        assert shell("expand db 32MiB") == "db: 32 MiB\n"
        assert "what it grows by is overwritten" in shell.complaint

    def test_what_grows_on_its_node_is_waited_for_too(
        self, shell: Shell, told: threading.Event, monkeypatch: pytest.MonkeyPatch, host: FakeHost
    ) -> None:
        shell("create db --size 64MiB")
        shell(f"publish db {host.directory}/db")
        monkeypatch.setattr(Client, "can_expand", lambda _client: False)
        told.clear()
        assert shell("expand db 100MiB") == "db: 100 MiB\n"
        assert "what it grows by is overwritten" in shell.complaint


@pytest.mark.parametrize(
    "place",
    [
        "pods/17/volumes/kubernetes.io~csi/pv/mount",
        "plugins/kubernetes.io/csi/pv/globalmount",
        "pods/17/volume-subpaths/pv/web/0",
    ],
)
def test_a_pod_s_volume_is_taken_from_it_only_if_that_is_said(
    shell: Shell, host: FakeHost, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    own, pods = host.directory / "db", host.directory / place
    pods.parent.mkdir(parents=True)
    shell("create db --size 64MiB")
    shell(f"publish db {own} --shared")
    shell(f"publish db {pods} --shared")
    shell("unpublish db", 1)
    assert "give --yes" in shell.complaint
    assert str(own) in mounted(host)

    asked = refusing(monkeypatch)
    shell("unpublish db", 1)
    [question] = asked
    assert str(pods) in question
    assert str(own) not in question
    # One that is named needs no question, nor does one that is nobody's pod's.
    shell(f"unpublish db {pods}")
    shell("unpublish db")
    assert len(asked) == 1
    shell(f"publish db {pods}")
    shell("unpublish db --yes")
    assert mounted(host) == []


def test_the_claim_is_named_before_its_volume_is_deleted(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"pvc/name": "data-0", "pvc/namespace": "shop", "pv/name": "pvc-7"}
    parameters = {f"csi.storage.k8s.io/{key}": value for key, value in told.items()}
    client.create("pvc-7", 16 * MIB, parameters=parameters)
    asked = refusing(monkeypatch)
    shell("delete pvc-7", 1)
    assert "of the claim shop/data-0" in asked[0]
