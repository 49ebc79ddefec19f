"""Volumes by hand: each verb as a person types it, on the service that runs.

tests/container types them on real volumes.
"""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import configured
import grpc
import pytest
from fakes.host import FakeHost
from fast.cli.conftest import Shell

from agent.cli import terminal, volume_verbs
from agent.core import errors
from agent.csi.client import Client
from agent.csi.operator import Operator
from agent.daemon.server import Service
from agent.extras.transfer import transfer_service
from agent.requests.parameters import MUTABLE
from agent.settings.classes import DeviceClass
from lvm.report import Group
from mount import table
from mount.filesystem import FILE_SYSTEMS
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work is looked at again at once."""
    monkeypatch.setattr(volume_verbs, "_LOOK_SECONDS", 0)


def mounted(fake: FakeHost) -> list[str]:
    inside = table.read(fake.kernel).mounts
    return [one.path for one in inside if "vol-" in one.path or one.path.endswith("/db")]


def all_confirmed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have each question answered by yes; the questions, as they are asked."""
    asked: list[str] = []

    def yes(question: str) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr(terminal, "confirmed", yes)
    return asked


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the service, started after this, repair as that of 0.2.0: whatever differs, unasked."""
    add, repair = carver_pb2_grpc.add_OperatorServicer_to_server, Operator.RepairVolume
    calls = carver.DESCRIPTOR.services_by_name["Operator"].methods_by_name
    known = frozenset(set(calls) - {"RepairAsConfirmed"})

    def repair_unasked(
        self: Operator, request: carver.RepairVolumeRequest, context: grpc.ServicerContext
    ) -> carver.Progress:
        request.differing_images = True
        return repair(self, request, context)

    def add_known(operator: Operator, server: grpc.Server) -> None:
        allowed: Any = transfer_service._Allowed(server, known)
        add(operator, allowed)

    monkeypatch.setattr(Operator, "RepairVolume", repair_unasked)
    monkeypatch.setattr(carver_pb2_grpc, "add_OperatorServicer_to_server", add_known)


def test_a_volume_s_life_by_hand(shell: Shell, fake: FakeHost, client: Client) -> None:
    place = fake.directory / "db"

    assert shell("create db --size 64MiB").startswith("db: 64 MiB, ")
    assert shell("list --names") == "db\n"
    assert shell(f"publish db {place}") == f"db is at {place}\n"
    assert str(place) in shell("show db")
    assert shell("expand db 100MiB") == "db: 100 MiB\n"
    usage = client.stats(client.volumes()[0].volume_id, place).usage[0]
    assert usage.total > 80 * MIB
    assert shell("unpublish db") == f"db is no longer at {place}\n"
    assert mounted(fake) == []
    assert not place.exists()
    assert shell("delete db --yes") == "db is deleted\n"
    assert client.volumes() == []


def test_mutable_parameters_change_while_a_volume_is_in_use(shell: Shell, fake: FakeHost) -> None:
    shell("create db --size 64MiB")
    shell(f"publish db {fake.directory}/db")
    assert shell("modify db readAhead=1MiB") == "db: readAhead=1MiB\n"
    assert fake.lvm2.groups["data"].volumes["vol-db"].tuning.read_ahead_bytes == MIB
    assert "RAID" in shell("modify db maximumRecoveryRate=1MiB", 1)
    assert "carver/readAhead" in shell("modify db readahead=1MiB", 1)
    assert "'other'" in shell("modify other readAhead=1MiB", 1)


def test_the_help_of_modify_names_each_mutable_parameter(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        shell("modify --help")
    told = capsys.readouterr().out.replace("-\n", "-").split()
    words = {word.strip("(),;") for word in told}
    assert {row.key for row in MUTABLE} <= words


@pytest.mark.parametrize("words", ["", "readAhead", "=1MiB"])
def test_a_change_needs_a_key_and_a_value(shell: Shell, words: str) -> None:
    with pytest.raises(SystemExit):
        shell(f"modify db {words}")


def test_a_raw_block_volume_is_published_as_what_it_is(shell: Shell, fake: FakeHost) -> None:
    shell("create raw --size 16MiB --block")
    shell(f"publish raw {fake.directory}/raw")
    assert fake.kernel.device_size_bytes(f"{fake.directory}/raw") == 16 * MIB
    shell("unpublish raw")
    shell("delete raw --yes")


def test_a_volume_is_at_a_second_path_only_with_shared(shell: Shell, fake: FakeHost) -> None:
    one, other = fake.directory / "db", fake.directory / "reader"
    shell("create db --size 64MiB")
    shell(f"publish db {one}")
    assert "allows one target" in shell(f"publish db {other}", 1)

    shell(f"publish db {other} --shared --read-only")
    shown = json.loads(shell("show db --json"))
    assert {str(one), str(other)} <= set(shown["places"])

    # The first stays, and so does what it stands on.
    shell(f"unpublish db {other}")
    assert str(one) in mounted(fake)
    shell(f"unpublish db {one}")
    assert mounted(fake) == []


def test_a_volume_is_found_by_name_logical_volume_or_id(shell: Shell, client: Client) -> None:
    odd = "a/very odd/name"
    shell(f"create '{odd}' --size 16MiB")
    [volume] = client.volumes()
    logical = shell("list --names").strip()
    assert logical.startswith("vol.")
    for name in (odd, logical, volume.volume_id):
        assert json.loads(shell(f"show '{name}' --json"))["id"] == volume.volume_id
    assert "there is no volume 'nothing'" in shell("show nothing", 1)


def test_the_list_is_a_table_or_json(shell: Shell) -> None:
    assert f"one of {', '.join(FILE_SYSTEMS)} (INVALID_ARGUMENT)" in shell(
        "create one --size 64MiB --class plain --fs-type ntfs", 1
    )
    shell("create one --size 16MiB --class plain --fs-type ext4")
    table = shell("list")
    assert "HEALTH" in table
    assert max(map(len, table.splitlines())) <= 100
    [shown] = json.loads(shell("list --json"))
    assert (shown["name"], shown["size_bytes"], shown["carver/class"]) == ("one", 16 * MIB, "plain")


def test_nothing_is_deleted_unconfirmed(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("create db --size 16MiB")
    assert "give --yes" in shell("delete db", 1)
    assert len(client.volumes()) == 1

    asked = all_confirmed(monkeypatch)
    shell("delete db")
    assert asked == ["Delete db, 16 MiB, and all its data?"]
    assert client.volumes() == []


def test_without_a_service_the_complaint_names_the_next_step(prompt: Shell) -> None:
    assert "systemctl start carver" in prompt("list", 1)


def test_a_wrong_size_is_refused_before_any_command(
    shell: Shell, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.commands.clear()
    with pytest.raises(SystemExit, match="2"):
        shell("create db --size large")
    assert "10GiB" in capsys.readouterr().err
    assert fake.commands == []


def test_a_snapshot_is_taken_listed_and_deleted(shell: Shell, client: Client) -> None:
    shell("create db --size 64MiB")
    made = shell("create db monday --size 50%", noun="snapshot")
    assert made.startswith("monday: db as it is now, ")
    assert shell("list --names", noun="snapshot") == "monday\n"
    [shown] = json.loads(shell("list --json", noun="snapshot"))
    assert (shown["name"], shown["volume"], shown["ready"]) == ("monday", "db", True)
    assert "monday" in shell("list", noun="snapshot")

    assert "give --yes" in shell("delete monday", 1, noun="snapshot")
    assert "there is no snapshot 'tuesday'" in shell("delete tuesday --yes", 1, noun="snapshot")
    assert shell("delete monday --yes", noun="snapshot") == "monday is deleted\n"
    assert client.snapshots() == []


def test_a_volume_is_a_copy_of_a_snapshot_or_of_another_volume(
    shell: Shell,
    client: Client,
    service: Service,
    fake: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell("create db --size 64MiB")
    shell("create db monday", noun="snapshot")

    # The copy does not end before the command waits.
    waits, copy = threading.Event(), fake.kernel.copy

    def slow(source: str, target: str, offset: int, length: int, *, blank: bool) -> None:
        assert waits.wait(20)
        copy(source, target, offset, length, blank=blank)

    monkeypatch.setattr(fake.kernel, "copy", slow)
    monkeypatch.setattr(volume_verbs, "sleep", lambda _seconds: waits.set())
    service.copier.grace_seconds = 0.05
    assert shell("create again --from-snapshot monday").startswith("again: 64 MiB, ")
    assert "is being copied" in shell.complaint
    service.copier.grace_seconds = 20
    assert shell("create twin --from-volume db --size 100MiB").startswith("twin: 100 MiB, ")
    sources = {one.content_source.WhichOneof("type") for one in client.volumes()}
    assert sources == {None, "snapshot", "volume"}

    assert "there is no snapshot 'tuesday'" in shell("create late --from-snapshot tuesday", 1)
    # The size is the least that is asked for.
    assert shell("create small --from-volume db --size 4MiB").startswith("small: 64 MiB, ")
    assert "--size" in shell("create empty", 1)
    assert len(client.volumes()) == 4


def test_the_document_s_example_works_as_it_stands(
    shell: Shell, fake: FakeHost, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.lvm2.add_group("data", [32000])
    monkeypatch.setattr(terminal, "confirmed", lambda _question: True)
    document = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    [example] = re.findall(r"<!-- by hand: begin -->\n(.*?)<!-- by hand: end -->", document, re.S)
    for line in example.replace("/mnt", str(fake.directory)).splitlines():
        carver, noun, words = line.strip().split(" ", 2)
        assert carver == "carver"
        shell(words, noun=noun)
    assert client.volumes() == []
    assert mounted(fake) == []


class TestInACluster:
    """Where volumes grow on their node."""

    pytestmark = pytest.mark.settings(controller_expand=False)

    def test_a_volume_grows_where_it_is_published(self, shell: Shell, fake: FakeHost) -> None:
        place: Path = fake.directory / "db"
        shell("create db --size 64MiB")
        assert "publish it" in shell("expand db 100MiB", 1)
        shell(f"publish db {place}")
        assert shell("expand db 100MiB") == "db: 100 MiB\n"


def test_a_volume_is_repaired_and_a_disk_replaced(shell: Shell, fake: FakeHost) -> None:
    shell("create db --size 64MiB")
    assert "is whole" in shell("repair db")
    new = fake.new_device(600 * MIB)
    shown = shell(f"replace-disk /dev/fake-data-0 {new} --yes", noun="group")
    assert "is moved" in shown
    assert shown.endswith("data is whole\n")
    assert new in [one.name for one in fake.lvm2.groups["data"].disks]


@pytest.mark.groups(data=[60, 60])
@pytest.mark.settings(classes=(configured.PLAIN, configured.RAID))
class TestOfARaid:
    """A volume of two images."""

    def test_images_that_differ_are_made_alike_only_when_that_is_confirmed(
        self,
        shell: Shell,
        fake: FakeHost,
        refused: list[str],
    ) -> None:
        shell("create db --size 64MiB --class raid")
        assert "is whole" in shell("repair db")
        assert refused == [], "nothing is overwritten"
        volume = fake.lvm2.groups["data"].volumes["vol-db"]
        volume.health = "mismatches exist"
        assert "'db' is not repaired: not confirmed" in shell("repair db", 1)
        assert volume.health
        [question] = refused
        assert "overwrite" in question
        assert "is whole" in shell("repair db --yes")
        assert not volume.health

    @pytest.mark.parametrize("option", ["", " --yes"])
    def test_an_older_service_that_overwrites_unasked_is_not_asked_to_repair(
        self,
        older: None,
        shell: Shell,
        fake: FakeHost,
        refused: list[str],
        option: str,
    ) -> None:
        """A service of 0.2.0 that is not restarted yet after an upgrade."""
        shell("create db --size 64MiB --class raid")
        volume = fake.lvm2.groups["data"].volumes["vol-db"]
        volume.health = "mismatches exist"
        assert "the command and the service of the same version" in shell(f"repair db{option}", 1)
        assert volume.health
        assert refused == []

    def test_the_repair_goes_on_once_it_is_confirmed(
        self, shell: Shell, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = all_confirmed(monkeypatch)
        shell("create db --size 64MiB --class raid")
        fake.lvm2.groups["data"].volumes["vol-db"].health = "mismatches exist"
        assert "is whole" in shell("repair db")
        assert len(asked) == 1

    def test_images_that_begin_to_differ_during_a_repair_are_asked_about(
        self,
        shell: Shell,
        fake: FakeHost,
        refused: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A check by lvm2 ends between the first look and the last step."""
        shell("create db --size 64MiB --class raid")
        volume, repair = fake.lvm2.groups["data"].volumes["vol-db"], Client.repair

        def check_ends(*args: Any, **fields: Any) -> tuple[bool, str]:
            volume.health = "mismatches exist"
            return repair(*args, **fields)

        monkeypatch.setattr(Client, "repair", check_ends)
        assert "not confirmed" in shell("repair db", 1)
        assert volume.health
        assert refused

    @pytest.mark.settings(classes=(configured.PLAIN, configured.THIN))
    def test_images_of_its_pool_are_not_asked_about(
        self,
        shell: Shell,
        fake: FakeHost,
        refused: list[str],
    ) -> None:
        """The repair of a thin volume is that of its pool's metadata; it overwrites no image."""
        shell("create db --size 64MiB --class thin")
        pool = fake.lvm2.groups["data"].volumes["pool-thin"]
        pool.health = "mismatches exist"
        assert "is whole" in shell("repair db")
        assert refused == []
        assert pool.health

    def test_a_volume_that_a_move_holds_is_repaired(
        self, shell: Shell, client: Client, service: Service
    ) -> None:
        """Its health is not to be had as long as that; the repair needs none."""
        shell("create db --size 64MiB --class raid")
        [volume] = client.volumes()
        service.context.holds.hold(volume.volume_id, "there", 30.0, "")
        assert "is whole" in shell("repair db")


def test_a_disk_is_not_replaced_unconfirmed(
    shell: Shell, fake: FakeHost, refused: list[str]
) -> None:
    new = fake.new_device(600 * MIB)
    assert "is not taken" in shell(f"replace-disk /dev/fake-data-0 {new}", 1, noun="group")


def test_a_kubeconfig_is_refused_before_anything_is_sent(shell: Shell) -> None:
    shell("create db --size 64MiB")
    assert "--finish" in shell("receive copy --kubeconfig /etc/carver/admin.conf", 1)
    # Before anything is sent or finished.
    for words in ("move db --to node-b", "receive copy --finish"):
        assert "/nowhere/admin.conf: kubeconfig: cannot be read" in shell(
            f"{words} --kubeconfig /nowhere/admin.conf", 1
        )


class TestWhereAGroupIsAway:
    """Of two groups one is not on this node any more; each has a volume, and a snapshot of it."""

    pytestmark = pytest.mark.settings(classes=(configured.PLAIN, DeviceClass("fast", "fast")))

    @pytest.fixture
    def shell(self, shell: Shell, fake: FakeHost) -> Shell:
        """With `db` in the group that is there, and `web` in the one that is not."""
        fake.lvm2.add_group("fast", [100])
        for name, device_class in (("db", "plain"), ("web", "fast")):
            shell(f"create {name} --size 16MiB --class {device_class}")
            shell(f"create {name} of-{name}", noun="snapshot")
        del fake.lvm2.groups["fast"]
        return shell

    def test_the_other_group_s_volumes_are_shown_and_used(
        self, shell: Shell, fake: FakeHost, client: Client
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
        shell(f"publish db {fake.directory}/db")
        shell("expand db 32MiB")
        shell("unpublish db")
        shell("delete db --yes")
        assert shell("list --names").strip() == ""

    def test_an_unknown_name_may_be_in_the_group_that_is_away(
        self, shell: Shell, fake: FakeHost
    ) -> None:
        gone = "volume group fast is not on this node"
        assert "may have it" in shell("show web", 1)
        assert gone in shell.complaint
        assert gone in shell("delete of-web --yes", 1, noun="snapshot")
        # An id says which group it is of.
        uuid = fake.lvm2.groups["data"].uuid.replace("-", "")[:8]
        shell(f"show data@{uuid}/vol-other", 1)
        assert gone not in shell.complaint
        assert "there is no volume" in shell.complaint

    def test_a_group_that_never_answered_does_not_block_the_other(
        self, shell: Shell, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        volume_group = service.volume_groups.known("fast")
        assert volume_group is not None

        def look() -> Group | None:
            raise errors.GroupSilent("fast", ["/dev/sdx"])

        monkeypatch.setattr(volume_group, "_report", look)
        volume_group.cached, volume_group.status_seconds = None, 0.0
        assert "db" in shell("list")
        assert "/dev/sdx" in shell.complaint


class TestAClassThatOverwrites:
    """Where a volume, and what it grows by, is overwritten before it is there."""

    pytestmark = pytest.mark.settings(classes=(replace(configured.PLAIN, zero="fully"),))

    @pytest.fixture
    def waits(
        self, service: Service, fake: FakeHost, monkeypatch: pytest.MonkeyPatch
    ) -> threading.Event:
        """Nothing is overwritten before the command waits."""
        waits, zero_out = threading.Event(), fake.kernel.zero_out
        service.copier.grace_seconds = service.growth_zeroer.grace_seconds = 0.05

        def slow(device: str, offset_bytes: int, length_bytes: int, **how: Any) -> None:
            assert waits.wait(20)
            zero_out(device, offset_bytes, length_bytes, **how)

        monkeypatch.setattr(fake.kernel, "zero_out", slow)
        monkeypatch.setattr(volume_verbs, "sleep", lambda _seconds: waits.set())
        return waits

    def test_a_volume_and_its_growth_are_waited_for(
        self, shell: Shell, waits: threading.Event
    ) -> None:
        assert shell("create db --size 16MiB").startswith("db: 16 MiB, ")
        assert "(ABORTED)" not in shell.complaint
        assert "call again" in shell.complaint
        waits.clear()
        assert shell("expand db 32MiB") == "db: 32 MiB\n"
        assert "what it grows by is overwritten" in shell.complaint

    def test_growth_on_the_node_is_waited_for(
        self, shell: Shell, waits: threading.Event, monkeypatch: pytest.MonkeyPatch, fake: FakeHost
    ) -> None:
        shell("create db --size 64MiB")
        shell(f"publish db {fake.directory}/db")
        monkeypatch.setattr(Client, "can_expand", lambda _client: False)
        waits.clear()
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
def test_a_pod_s_volume_is_unpublished_only_if_confirmed(
    shell: Shell, fake: FakeHost, refused: list[str], place: str
) -> None:
    own, pods = fake.directory / "db", fake.directory / place
    pods.parent.mkdir(parents=True)
    shell("create db --size 64MiB")
    shell(f"publish db {own} --shared")
    shell(f"publish db {pods} --shared")
    assert "give --yes" in shell("unpublish db", 1)
    assert str(own) in mounted(fake)
    [question] = refused
    assert str(pods) in question
    assert str(own) not in question
    # A named path needs no question, nor does one that is not of a pod.
    shell(f"unpublish db {pods}")
    shell("unpublish db")
    assert len(refused) == 1
    shell(f"publish db {pods}")
    shell("unpublish db --yes")
    assert mounted(fake) == []


def test_the_claim_is_named_before_its_volume_is_deleted(
    shell: Shell, client: Client, refused: list[str]
) -> None:
    labels = {"pvc/name": "data-0", "pvc/namespace": "shop", "pv/name": "pvc-7"}
    parameters = {f"csi.storage.k8s.io/{key}": value for key, value in labels.items()}
    client.create("pvc-7", 16 * MIB, parameters=parameters)
    shell("delete pvc-7", 1)
    assert "of the claim shop/data-0" in refused[0]
