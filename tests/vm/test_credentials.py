"""A key file that systemd decrypts for the service, as docs/encryption.md has an operator do it."""

import secrets
import subprocess
from pathlib import Path

import expect
import pytest
from vm import deeds
from vm.conftest import Restart

from agent.config.settings import DEFAULT_SOCKET
from agent.csi.client import Client, mounted

MIB = 1 << 20
CREDENTIAL = Path("/run/test-luks.cred")
KEY_FILE = Path("/run/credentials/carver.service/luks")
CONFIGURATION = f"""\
[[classes]]
name = "plain"
group = "carver"
default = true

[[classes]]
name = "filed"
group = "carver"
encryption = "luks2"
key_file = "{KEY_FILE}"
"""


@pytest.fixture
def key() -> str:
    """A key that lies on the disk encrypted alone."""
    key = secrets.token_hex(16)
    # The host's key and not a TPM's: the lab has none.
    words = ("systemd-creds", "encrypt", "--with-key=host", "--name=luks", "-", str(CREDENTIAL))
    subprocess.run(words, check=True, input=key, text=True, capture_output=True)
    assert key.encode() not in CREDENTIAL.read_bytes()
    return key


def test_a_credential_of_systemd_s_opens_volumes(
    client: Client, directory: Path, restart: Restart, key: str
) -> None:
    deeds.CONFIGURATION.write_text(CONFIGURATION)
    restart(
        f"LoadCredentialEncrypted=luks:{CREDENTIAL}\nExecStart=\n"
        f"ExecStart=/opt/carver/venv/bin/carver serve --config {deeds.CONFIGURATION}"
    )
    found = KEY_FILE.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o400)
    staging = directory / "staging"
    with Client(DEFAULT_SOCKET) as caller:
        parameters = {"class": "filed"}
        volume = caller.create("test-filed", 48 * MIB, mounted("ext4"), parameters=parameters)
        caller.stage(volume, staging, mounted("ext4"))
        # Whoever calls sees the mount: a credential gives the service no namespace of its own.
        assert staging.is_mount()
        caller.unstage(volume.volume_id, staging)
        # It is that key, and no other.
        caller.stage(volume, staging, mounted("ext4"), {"passphrase": key})
        caller.unstage(volume.volume_id, staging)
        with expect.code("UNAUTHENTICATED"):
            caller.stage(volume, staging, mounted("ext4"), {"passphrase": f"{key}x"})
        caller.delete(volume.volume_id)
    CREDENTIAL.unlink()
