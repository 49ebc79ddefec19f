"""Headers and keys of encrypted volumes by hand: each verb as a person types it."""

import io
from pathlib import Path

import pytest
from fakes.host import FakeHost
from fast.cli.conftest import Shell

from agent.cli import terminal
from agent.csi.client import Client
from lvm.active_devices import Device
from mount import luks

MIB = 1 << 20
pytestmark = pytest.mark.settings(header_backups=Path("headers"))


@pytest.fixture
def db(shell: Shell, tmp_path: Path) -> Path:
    """An encrypted volume that was in use; its key's file."""
    key = shell.key("key", b"sesame")
    shell("create db --size 64MiB --encryption luks2")
    shell(f"publish db {tmp_path}/db --key-file {key}")
    shell(f"expand db 96MiB --key-file {key}")
    shell("unpublish db")
    return key


def device(fake: FakeHost) -> Device:
    found = fake.devices.find("data", "vol-db")
    assert found is not None
    return found


def test_a_header_is_shown_backed_up_and_restored(
    shell: Shell, fake: FakeHost, db: Path, tmp_path: Path
) -> None:
    assert "aes-xts-plain64, sectors of 4096 bytes" in shell("header show db")
    file = tmp_path / "header"
    assert "keep it as you keep keys" in shell(f"header backup db {file}")
    assert "exists already" in shell(f"header backup db {file}", 1)
    fake.kernel.zero_out(device(fake).path, 0, 4 * MIB)
    assert "not whole" in shell("header show db", 1)
    assert "header restore" in shell(f"publish db {tmp_path}/db --key-file {db}", 1)
    assert "has the header" in shell(f"header restore db {file} --yes")
    shell(f"publish db {tmp_path}/db --key-file {db}")
    assert "unstage it first" in shell(f"header restore db {file} --yes", 1)


def test_a_volume_that_is_staged_before_the_answer_keeps_its_header(
    shell: Shell, fake: FakeHost, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "header"
    shell(f"header backup db {file}")
    new = shell.key("new", b"another")
    shell(f"rekey db --key-file {db} --new-key-file {new}")
    before = fake.read_bytes(device(fake).path, 0, 4 * MIB)

    def answer(_asked: str) -> bool:
        shell(f"publish db {tmp_path}/db --key-file {new}")
        return True

    monkeypatch.setattr(terminal, "confirmed", answer)
    assert "unstage it first" in shell(f"header restore db {file}", 1)
    assert fake.read_bytes(device(fake).path, 0, 4 * MIB) == before


def test_only_the_volume_s_own_header_is_restored(shell: Shell, db: Path, tmp_path: Path) -> None:
    shell("create other --size 64MiB --encryption luks2")
    shell(f"publish other {tmp_path}/other --key-file {db}")
    file = tmp_path / "header"
    shell(f"header backup other {file}")
    assert "it is of the header" in shell(f"header restore db {file} --yes", 1)
    assert "is not a backup" in shell(f"header restore db {db} --yes", 1)
    assert "is not a backup" in shell("header restore db /nowhere --yes", 1)


@pytest.mark.parametrize("by", ["rekey", "header"])
def test_a_key_that_was_changed_by_hand_loses_its_name(
    shell: Shell, fake: FakeHost, db: Path, tmp_path: Path, by: str
) -> None:
    file, new = tmp_path / "db.header", shell.key("new", b"new one")
    shell(f"header backup db {file}")
    fake.lvm("lvchange", "--addtag", "carver.keyGeneration=2026-11", "--", "data/vol-db")
    assert "2026-11" in shell("list")
    if by == "rekey":
        shell(f"rekey db --key-file {db} --new-key-file {new}")
    else:
        shell("unpublish db")
        shell(f"header restore db {file} --yes")
    assert "(unnamed)" in shell("list")


def test_a_volume_gets_another_key_and_a_recovery_key(
    shell: Shell, fake: FakeHost, db: Path, tmp_path: Path
) -> None:
    new, spare, again = (shell.key(one, one.encode()) for one in ("new", "spare", "again"))
    assert shell(f"rekey db --key-file {db} --new-key-file {new}") == "db has a new key\n"
    assert "does not open db" in shell(f"rekey db --key-file {db} --new-key-file {new}", 1)
    # The copy that Carver keeps does not open by the old one either.
    (kept,) = (tmp_path / "headers").iterdir()
    now = fake.read_bytes(device(fake).path, 0, 2 * luks.METADATA_BYTES)
    assert kept.read_bytes() == now
    shell(f"rekey db --key-file {new} --new-key-file {spare} --recovery")
    done = shell(f"rekey db --key-file {new} --new-key-file {again} --recovery")
    assert done == "db has a recovery key\n"
    header = luks.read(fake.kernel, device(fake).path)
    assert header is not None
    assert header.slots == (1, 2)
    assert "UNAUTHENTICATED" in shell(f"publish db {tmp_path}/db --key-file {spare}", 1)
    for key in (new, again):
        shell(f"publish db {tmp_path}/db --key-file {key}")
        shell("unpublish db")


def test_a_header_of_a_re_encryption_is_left_as_it_is(
    shell: Shell, fake: FakeHost, db: Path, tmp_path: Path
) -> None:
    file = tmp_path / "header"
    shell(f"header backup db {file}")
    where = device(fake).path

    begin = ("cryptsetup", "reencrypt", "--init-only", "--key-file", "-", "--", where)
    assert fake.run(*begin, stdin=bytearray(b"sesame")).exit_code == 0
    assert "begun, and not ended" in shell("header show db")
    before = fake.read_bytes(where, 0, 4 * MIB)
    new = shell.key("new", b"another")
    for line in (
        f"header backup db {tmp_path}/other",
        f"header restore db {file} --yes",
        f"rekey db --key-file {db} --new-key-file {new}",
    ):
        assert f"cryptsetup reencrypt --resume-only {where}`" in shell(line, 1)
    assert "FAILED_PRECONDITION" in shell(f"publish db {tmp_path}/db --key-file {db}", 1)
    assert fake.read_bytes(where, 0, 4 * MIB) == before
    finish = ("cryptsetup", "reencrypt", "--resume-only", "--key-file", "-", "--", where)
    assert fake.run(*finish, stdin=bytearray(b"sesame")).exit_code == 0
    # The UUID is as before, and the master key is another.
    assert "another master key" in shell(f"header restore db {file} --yes", 1)
    shell(f"publish db {tmp_path}/db --key-file {db}")
    assert "re-encryption" not in shell("header show db")


@pytest.mark.parametrize("recovery", ["", " --recovery"])
@pytest.mark.parametrize(
    ("data", "files", "why"),
    [
        (b"", "--key-file {old} --new-key-file -", "1 to 2048 bytes"),
        (b"x" * 2049, "--key-file {old} --new-key-file -", "1 to 2048 bytes"),
        (b"sesame", "--key-file - --new-key-file -", "only one of the two"),
        (b"sesame", "--key-file {old} --new-key-file -", "is the key that it has"),
    ],
)
def test_a_wrong_new_key_changes_nothing(
    shell: Shell,
    fake: FakeHost,
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    files: str,
    why: str,
    recovery: str,
) -> None:
    before = fake.read_bytes(device(fake).path, 0, 4 * MIB)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert why in shell(f"rekey db{recovery} {files.format(old=db)}", 1)
    assert fake.read_bytes(device(fake).path, 0, 4 * MIB) == before


def test_a_lost_key_is_replaced_by_the_recovery_key(shell: Shell, db: Path, tmp_path: Path) -> None:
    recovery, new = shell.key("recovery", b"in the safe"), shell.key("new", b"another")
    shell(f"rekey db --recovery --key-file {db} --new-key-file {recovery}")
    shell(f"rekey db --key-file {recovery} --new-key-file {new}")
    assert "does not open" in shell(f"publish db {tmp_path}/db --key-file {db}", 1)
    assert "1, 2" in shell("header show db")
    newest = shell.key("newest", b"the next one")
    shell(f"rekey db --key-file {new} --new-key-file {newest}")
    shell(f"publish db {tmp_path}/db --key-file {newest}")


def test_keys_are_asked_for_without_a_file(
    shell: Shell, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(("sesame", "".join(["open", " it"])))
    monkeypatch.setattr("getpass.getpass", lambda _prompt: next(typed))
    shell("rekey db")
    shell(f"publish db {tmp_path}/db --key-file {shell.key('new', b'open it')}")


@pytest.mark.parametrize("key", [b"line\r\nline\r\n", "schl\u00fcssel".encode(), b"0123\x00"])
def test_a_key_is_every_byte_of_its_file_or_of_standard_input(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    file = shell.key("key", key)
    shell("create db --size 64MiB --encryption luks2")
    shell(f"publish db {tmp_path}/db --key-file {file}")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(key)))
    shell("expand db 96MiB --key-file -")
    shell("unpublish db")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(key)))
    shell(f"publish db {tmp_path}/db --key-file -")
    shell(f"rekey db --key-file {file} --new-key-file {shell.key('new', b'another')}")


@pytest.mark.parametrize("verb", ["publish db {directory}/db", "expand db 128MiB"])
def test_an_unusable_key_file_changes_nothing(
    shell: Shell, db: Path, client: Client, tmp_path: Path, verb: str
) -> None:
    shell(f"publish db {tmp_path}/other --key-file {db}")
    line = f"{verb.format(directory=tmp_path)} --key-file"
    binary = shell.key("binary", b"\xff\xfe")
    before = client.volumes()
    assert "is not UTF-8" in shell(f"{line} {binary}", 1)
    assert "/nowhere cannot be read" in shell(f"{line} /nowhere", 1)
    db.chmod(0o444)
    assert "chmod 0400" in shell(f"{line} {db}", 1)
    assert client.volumes() == before


def test_a_volume_that_is_not_active_or_not_encrypted_has_no_header(
    shell: Shell, fake: FakeHost, client: Client
) -> None:
    shell("create db --size 64MiB")
    assert "not there, or not whole" in shell("header show db", 1)
    fake.deactivate("data", "vol-db")
    complaint = shell("header show db", 1)
    assert "is not active; publish it, or activate that alone" in complaint
    assert "`lvchange -ay -K data/vol-db`" in complaint
    assert "NodeStageVolume" not in complaint


def test_without_the_key_the_complaint_names_the_option(
    shell: Shell, db: Path, tmp_path: Path
) -> None:
    assert "`carver volume publish --key-file`" in shell(f"publish db {tmp_path}/db", 1)
    shell(f"publish db {tmp_path}/db --key-file {db}")
    assert "`carver volume expand --key-file`" in shell("expand db 128MiB", 1)
