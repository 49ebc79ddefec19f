"""A key is lost, and an older header is there: the commands of docs/encryption.md."""

import re
import subprocess
from pathlib import Path

import pytest

MIB = 1 << 20
PAGE = Path(__file__).parents[2] / "docs" / "encryption.md"
PBKDF = ("--pbkdf", "argon2id", "--pbkdf-memory", "65536", "--pbkdf-force-iterations", "4")
# cryptsetup(8), "RETURN CODES".
NO_KEY = 2


def commands() -> str:
    [found] = re.findall(
        r"<!-- lost key: begin -->\n(.*?)<!-- lost key: end -->", PAGE.read_text(), re.S
    )
    return str(found)


def cryptsetup(*words: object) -> int:
    return subprocess.run(["cryptsetup", "--batch-mode", *map(str, words)]).returncode


def opens(key: Path, header: Path) -> bool:
    code = cryptsetup("open", "--test-passphrase", "--key-file", key, header)
    assert code in (0, NO_KEY)
    return code == 0


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The key of an earlier time, the key that is lost, and one that is new."""
    made = [tmp_path / name for name in ("earlier", "lost", "new")]
    for one in made:
        one.write_text(f"key-{one.name}")
    earlier, lost, new = made
    return earlier, lost, new


def volume(tmp_path: Path, name: str, earlier: Path, lost: Path) -> tuple[Path, Path]:
    """A volume whose key was changed, and a backup of its header from before."""
    device, backup = tmp_path / name, tmp_path / f"{name}.header"
    with device.open("wb") as file:
        file.truncate(16 * MIB)
    made = ("luksFormat", "--type", "luks2", "--offset", "8192", *PBKDF)
    assert cryptsetup(*made, "--key-file", earlier, device) == 0
    assert cryptsetup("luksHeaderBackup", device, "--header-backup-file", backup) == 0
    assert cryptsetup("luksChangeKey", *PBKDF, "--key-file", earlier, device, lost) == 0
    assert opens(lost, device)
    assert not opens(earlier, device)
    return device, backup


def run(device: Path, header: Path, earlier: Path, new: Path, tmp_path: Path) -> int:
    script = commands()
    for word, path in {
        "OLDKEY": earlier,
        "HEADER": header,
        "NEWKEY": new,
        "/dev/GROUP/vol-NAME": device,
        "/tmp/master": tmp_path / "master",
    }.items():
        assert word in script
        script = script.replace(word, str(path))
    return subprocess.run(["sh", "-e", "-c", script]).returncode


def test_an_older_header_and_its_key_give_the_volume_another_key(
    tmp_path: Path, keys: tuple[Path, Path, Path]
) -> None:
    earlier, lost, new = keys
    device, backup = volume(tmp_path, "db", earlier, lost)
    assert run(device, backup, earlier, new, tmp_path) == 0
    assert opens(new, device)
    assert opens(lost, device)
    assert not (tmp_path / "master").exists()


def test_the_header_of_another_volume_gives_none(
    tmp_path: Path, keys: tuple[Path, Path, Path]
) -> None:
    earlier, lost, new = keys
    device, _ = volume(tmp_path, "db", earlier, lost)
    _, other = volume(tmp_path, "other", earlier, lost)
    assert run(device, other, earlier, new, tmp_path) != 0
    assert not opens(new, device)
    assert opens(lost, device)
