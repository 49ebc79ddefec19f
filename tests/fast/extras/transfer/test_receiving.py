"""Receiving where an answer was lost, a check waits, or a description is wrong."""

import io
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import configured
import expect
import grpc
import nodes
import pytest
from fakes.disk import Disk
from fakes.host import FakeHost
from nodes import MIB, SIZE, Node, volume_of

from agent.core import errors
from agent.core.ids import VolumeId
from agent.csi.client import block, mounted
from agent.extras.streams.form import Header
from agent.extras.transfer import stream_descriptions, streams_command
from agent.settings.classes import DeviceClass
from agent.work import background
from lvm import lvm_errors as lvm_errors
from lvm import report
from lvm.tuning import AS_IT_IS, PLAIN, Tuning
from mount.command import Result
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

DATA = b"contents" * 512


@pytest.fixture
def sent(here: Node, fake: FakeHost) -> bytes:
    """A whole snapshot, as a stream."""
    volume = volume_of(here)
    fake.write_bytes(here.device("vol-db"), 0, DATA)
    fake.write_bytes(here.device("vol-db"), SIZE - len(DATA), DATA)
    here.client.snapshot("1", volume.volume_id)
    return nodes.stream(here, "1")


def pretended(there: Node) -> csi.Volume:
    """The volume being received, by a guessed id."""
    group = there.service.reports.fresh(there.group).group(there.group)
    return csi.Volume(volume_id=str(VolumeId.of(group, "vol-copy")))


def lose(fake: FakeHost, *words: str, made: bool = True) -> None:
    """The answer to the next command of these words does not come, which was done, or was not."""
    left = [True]

    def intercept(command: Sequence[str]) -> Result | None:
        if left and set(words) <= set(command):
            left.clear()
            if made:
                fake.lvm2_program(command)
            raise lvm_errors.SessionLost(command, "it ended")
        return None

    fake.intercept = intercept


def test_a_volume_made_without_an_answer_is_held(there: Node, fake: FakeHost, sent: bytes) -> None:
    lose(fake, "lvcreate", "vol-copy")
    with pytest.raises(grpc.RpcError):
        nodes.receive(there, "copy", sent)
    assert there.names() == {"vol-copy"}
    place = there.directory / "staging"
    for _ in range(2):
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.stage(pretended(there), place, block())
        with expect.code("FAILED_PRECONDITION", "received"):
            there.client.publish(pretended(there), place, there.directory / "raw", block())
        # The next stream is applied in part: there is a device, and its tags are known.
        with pytest.raises(errors.AgentError):
            nodes.receive(there, "copy", sent[: len(sent) // 2])
    nodes.receive(there, "copy", sent)
    streams_command.finish(there.at, "copy")
    there.client.stage(pretended(there), place, block())
    assert there.content("vol-copy").startswith(DATA)


def test_a_minimum_rate_that_could_not_be_set_is_set_by_the_next_stream(
    here: Node, there: Node, fake: FakeHost
) -> None:
    """A minimum without a maximum is not set by lvcreate, and the lvchange after it failed."""
    volume = volume_of(here, "raid1")
    here.client.modify(volume.volume_id, {"minimumRecoveryRate": "1MiB"})
    here.client.snapshot("1", volume.volume_id)
    data = nodes.stream(here, "1")
    lose(fake, "lvchange", "--minrecoveryrate", made=False)
    with pytest.raises((errors.AgentError, grpc.RpcError)):
        nodes.receive(there, "copy", data, "raid1")
    nodes.receive(there, "copy", data, "raid1")
    streams_command.finish(there.at, "copy")
    assert tuning(there).minimum_recovery_kib == 1024


def test_a_stream_that_is_sent_again_brings_the_parameters_of_then(here: Node, there: Node) -> None:
    """Where a part of it was received, and where all of it was."""
    volume = volume_of(here)
    here.client.modify(volume.volume_id, {"readIOPS": "500"})
    here.client.snapshot("1", volume.volume_id)
    data = nodes.stream(here, "1")
    with pytest.raises(errors.AgentError):
        nodes.receive(there, "copy", data[: len(data) // 2])
    for limit in (900, 700):
        here.client.modify(volume.volume_id, {"readIOPS": str(limit)})
        nodes.receive(there, "copy", nodes.stream(here, "1"))
        assert tuning(there).read_iops == limit


def tuning(node: Node) -> Tuning:
    return report.read(node.host.lvm).group(node.group).volume("vol-copy").tuning


def test_a_volume_found_receiving_is_held(there: Node, sent: bytes) -> None:
    with pytest.raises(errors.AgentError):
        nodes.receive(there, "copy", sent[: len(sent) // 2])
    there.service.context.holds.remove_note(pretended(there).volume_id)
    with pytest.raises(errors.AgentError):
        nodes.receive(there, "copy", sent[: len(sent) // 2])
    with expect.code("FAILED_PRECONDITION", "received"):
        there.client.stage(pretended(there), there.directory / "staging", block())


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_volume_that_was_not_made_holds_no_other_of_its_name(
    there: Node, fake: FakeHost, sent: bytes, is_removed: bool
) -> None:
    lose(fake, "lvcreate", "vol-copy", made=False)
    with pytest.raises(grpc.RpcError):
        nodes.receive(there, "copy", sent)
    place = there.directory / "staging"
    if is_removed:
        there.transfer.AbortReceive(carver.MoveRequest(volume_id=pretended(there).volume_id))
        with expect.code("NOT_FOUND"):
            there.client.stage(pretended(there), place, block())
    made = there.client.create("copy", SIZE, block())
    there.client.stage(made, place, block())


def test_a_volume_finished_without_an_answer_is_usable_after_a_retry(
    there: Node, fake: FakeHost, sent: bytes
) -> None:
    nodes.receive(there, "copy", sent)
    lose(fake, "lvchange", "carver.state=ready")
    with pytest.raises(grpc.RpcError):
        streams_command.finish(there.at, "copy")
    streams_command.finish(there.at, "copy")
    there.client.stage(pretended(there), there.directory / "staging", block())


def test_a_partly_erased_volume_takes_no_stream_and_is_not_finished(
    there: Node, fake: FakeHost, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its removal failed, or was killed, before it was on record as deleted."""
    nodes.receive(there, "copy", sent)
    disk = Disk(fake, monkeypatch)
    disk.error = OSError(5, "Input/output error")
    disk.free.set()
    with expect.code("INTERNAL", "Input/output error"):
        there.transfer.AbortReceive(carver.MoveRequest(volume_id=pretended(there).volume_id))
    there.restart()
    with expect.code("FAILED_PRECONDITION", "only to be removed"):
        nodes.receive(there, "copy", sent)
    with expect.code("FAILED_PRECONDITION", "only to be removed"):
        streams_command.finish(there.at, "copy")
    disk.error = None
    there.transfer.AbortReceive(carver.MoveRequest(volume_id=pretended(there).volume_id))
    assert there.names() == set()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_queued_check_leaves_the_next_volume_of_its_name_alone(
    there: Node, fake: FakeHost, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    monkeypatch.setattr(background, "_AT_ONCE", 1)
    source = there.client.create("db", 64 * MIB, mounted("ext4"))
    there.client.stage(source, there.directory / "staging", mounted("ext4"))
    there.client.snapshot("1", source.volume_id)
    nodes.receive(there, "copy", nodes.stream(there, "1"))
    identity = str(streams_command.status(there.at, "copy")["volume_id"])
    # Staging and receiving wait for the same turns.
    work = there.service.inline_volumes._stager._detached
    begun, over = threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert over.wait(60)

    with ThreadPoolExecutor(1) as another:
        another.submit(work.do, "another", there.group, "mkfs", long, lambda: None)
        assert begun.wait(60)
        with monkeypatch.context() as hasty:
            hasty.setattr(there.client.channel, "timeout_seconds", 3)
            with expect.code("ABORTED", "fsck"):
                streams_command.finish(there.at, "copy")
        queued = work._detached[identity]
        if by_hand:
            fake.deactivate(there.group, "vol-copy")
            fake.lvm("lvremove", "--yes", "--", f"{there.group}/vol-copy")
        else:
            there.transfer.AbortReceive(carver.MoveRequest(volume_id=identity))
        there.client.create("copy", 64 * MIB, mounted("ext4"))
        fake.commands.clear()
        over.set()
        expect.soon(queued.future.done)
    assert "fsck.ext4" not in {words[0] for words in fake.commands}


UUID = "5b9f7f0a-6b0e-4d5c-9d27-0f0f8c1f6c3e"
SEALED = {"encryption": "luks2", "header": str(4 * MIB), "sealed": UUID}


def taken(directory: Path, facts: dict[str, str], encryption: str = "") -> dict[str, str]:
    host = FakeHost(directory)
    group = host.new_group(100)
    one = DeviceClass("plain", group, encryption=encryption)
    facts = {"access": "block", **facts}
    header = Header("volume", "snapshot", 64 * MIB, 17, "chain", facts=facts)
    return stream_descriptions.tags_of(
        "copy", one, header, 64 * MIB, report.read(host.lvm).group(group)
    )


def test_the_facts_of_encryption_are_kept(tmp_path: Path) -> None:
    for encryption in ("", "luks2"):
        assert SEALED.items() <= taken(tmp_path, SEALED, encryption).items()


def test_what_only_versions_up_to_0_2_0_send_is_passed_over(tmp_path: Path) -> None:
    had = taken(tmp_path, {**SEALED, "reencrypt": "true", "unheardOf": "1"}, "luks2")
    assert SEALED.items() <= had.items()
    assert not {"reencrypt", "unheardOf"} & had.keys()


@pytest.mark.parametrize("layout", ["linear", "raid1"])
@pytest.mark.parametrize("has_all", [True, False], ids=["all", "limits alone, as up to 0.2.0"])
def test_a_mutable_parameter_without_a_fact_is_as_it_was_unless_all_were_sent(
    has_all: bool, layout: str
) -> None:
    """What is not specified is not changed where a further stream is received."""
    shape = configured.LAYOUTS[layout]
    facts = {"readIOPS": "100", "maximumRecoveryRate": "1MiB"}
    header = Header(
        "v", "s", 64 * MIB, 17, "c", facts=facts | ({"allMutable": "yes"} if has_all else {})
    )
    rates = {"maximum_recovery_kib": 1024} if shape.is_raid else {"minimum_recovery_kib": None}
    wanted = replace(PLAIN if has_all else AS_IT_IS, read_iops=100, maximum_recovery_kib=None)
    wanted = replace(wanted, bound_recovery_kib=None, **rates)
    assert stream_descriptions.tuning_of(header, shape) == wanted


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({**SEALED, "header": ""}, "header"),
        ({**SEALED, "header": "1e9"}, "header"),
        ({**SEALED, "header": "512"}, "header"),
        ({**SEALED, "header": str(64 * MIB)}, "header"),
        ({**SEALED, "sealed": "../etc"}, "sealed"),
        ({**SEALED, "encryption": "rot13"}, "encryption"),
        ({"header": str(4 * MIB)}, "header"),
        ({"sealed": UUID}, "header"),
    ],
)
def test_wrong_facts_of_encryption_are_refused(
    tmp_path: Path, facts: dict[str, str], field: str
) -> None:
    with pytest.raises((errors.BadField, errors.NotAllowed), match=field):
        taken(tmp_path, facts)


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"sealed": UUID}, "header"),
        ({"header": str(4 * MIB)}, "header"),
        (SEALED, "encryption"),
        ({"formatted": "ntfs"}, "formatted"),
        ({"rotating": "x" * 2000}, "rotating"),
        ({"mountOptions": "suid_dumpable"}, "mountOptions"),
    ],
)
def test_a_later_stream_with_wrong_facts_changes_nothing(
    here: Node, there: Node, fake: FakeHost, facts: dict[str, str], field: str
) -> None:
    """The facts are checked as those of the first stream, before the volume grows."""
    volume = volume_of(here, "thin")
    base = here.client.snapshot("1", volume.volume_id)
    nodes.receive(there, "copy", nodes.stream(here, "1"))
    here.client.expand(volume.volume_id, 2 * SIZE)
    later, out = here.client.snapshot("2", volume.volume_id), io.BytesIO()
    with streams_command.outgoing(here.at, later.snapshot_id, base.snapshot_id) as source:
        header = replace(source.header, facts={**source.header.facts, **facts})
        replace(source, header=header).send(out.write)
    fake.commands.clear()
    with expect.code("INVALID_ARGUMENT", field):
        nodes.receive(there, "copy", out.getvalue())
    assert {words[1] for words in fake.commands} <= {"fullreport"}


def test_a_class_that_encrypts_refuses_plain_streams(tmp_path: Path) -> None:
    with pytest.raises(errors.BadField, match="class plain encrypts"):
        taken(tmp_path, {"fsType": "ext4", "access": "mount"}, "luks2")
    assert taken(tmp_path, {"fsType": "ext4", "access": "mount"})["fsType"] == "ext4"


def own_tags(node: Node, name: str) -> Mapping[str, str]:
    return report.read(node.host.lvm).group(node.group).volume(name).own_tags


def without_access(node: Node, *names: str) -> None:
    for name in names:
        if access := own_tags(node, name).get("access"):
            words = ("--deltag", f"carver.access={access}")
            node.host.lvm("lvchange", *words, "--", f"{node.group}/{name}")


def test_a_stream_of_what_lost_the_tag_of_its_access_is_not_begun(here: Node, sent: bytes) -> None:
    assert sent
    without_access(here, "snap-1")
    # The volume's tag says it.
    nodes.stream(here, "1")
    without_access(here, "vol-db")
    with expect.code("FAILED_PRECONDITION", "no `access`"):
        nodes.stream(here, "1")


def test_what_was_formatted_is_sent_to_be_mounted(
    here: Node, there: Node, fake: FakeHost, tmp_path: Path
) -> None:
    volume = here.client.create("db", SIZE, mounted())
    here.client.stage(volume, tmp_path / "staged", mounted())
    here.client.unstage(volume.volume_id, tmp_path / "staged")
    expect.soon(lambda: own_tags(here, "vol-db").get("formatted") == "ext4")
    here.client.snapshot("1", volume.volume_id)
    without_access(here, "vol-db", "snap-1")
    nodes.receive(there, "copy", nodes.stream(here, "1"))
    assert own_tags(there, "vol-copy")["access"] == "mount"


@pytest.mark.parametrize(("facts", "access"), [({}, ""), ({"formatted": "ext4"}, "mount")])
def test_a_stream_that_does_not_say_how_it_is_accessed_is_not_taken_for_raw_block(
    there: Node, facts: dict[str, str], access: str
) -> None:
    header = Header(
        volume_id="data@20000000/vol-db",
        snapshot_id="data@20000000/snap-1",
        size_bytes=SIZE,
        taken_nanoseconds=1,
        chain="a",
        facts=facts,
    )
    group = there.service.reports.fresh(there.group).group(there.group)

    def made() -> dict[str, str]:
        return stream_descriptions.tags_of(
            "copy", DeviceClass("plain", there.group), header, SIZE, group
        )

    if access:
        assert made()["access"] == access
    else:
        with pytest.raises(errors.NotAllowed, match="access"):
            made()


def test_a_received_volume_with_damaged_tags_is_not_called_absent(there: Node, sent: bytes) -> None:
    """Where it is absent a move may be undone, and its first node use it again."""
    nodes.receive(there, "copy", sent)
    words = ("--addtag", "carver.state=ready")
    there.host.lvm("lvchange", *words, "--", f"{there.group}/vol-copy")
    with expect.code("FAILED_PRECONDITION", "`state` twice"):
        there.transfer.ReceiveStatus(carver.NameRequest(name="copy"))


def test_a_command_of_an_older_version_removes_what_was_received(there: Node, sent: bytes) -> None:
    nodes.receive(there, "copy", sent)
    call = there.client.channel.unary_unary("/carver.v2.Transfer/AbortReceive")
    call(carver.VolumeRequest(volume_id=pretended(there).volume_id).SerializeToString())
    assert there.names() == set()


def test_what_came_by_another_move_or_by_none_is_not_removed(there: Node, sent: bytes) -> None:
    nodes.receive(there, "copy", sent)
    request = carver.MoveRequest(volume_id=pretended(there).volume_id, release="ab" * 32)
    before = streams_command.status(there.at, "copy")
    with expect.code("FAILED_PRECONDITION", "by another move, or by none"):
        there.transfer.AbortReceive(request)
    assert streams_command.status(there.at, "copy") == before
    streams_command.abort(there.at, "copy", confirmed=True)
    assert there.names() == set()
