"""A key file that systemd decrypts for the service, as docs/encryption.md has an operator do it."""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import expect
import pytest
from csi_client import Asking
from vm import privileges
from vm.conftest import Restart

from agent.csi.client import Client, mounted
from agent.settings.settings import DEFAULT_SOCKET

MIB = 1 << 20
CREDENTIAL = Path("/run/test-luks.cred")
# By the kernel's own name for it, by which systemd finds it (tpm2-util.c).
TPM = Path("/dev/tpmrm0")
# An emulated TPM on an emulated processor tests itself first.
TPM_SECONDS = 60
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


@contextmanager
def tpm(state: Path) -> Iterator[None]:
    """A TPM2 that swtpm emulates, as a device of the kernel's; what it keeps is in a folder."""
    assert not TPM.exists(), "there is one already"
    state.mkdir(exist_ok=True)
    subprocess.run(["modprobe", "tpm_vtpm_proxy"], check=True)
    words = ["swtpm", "chardev", "--vtpm-proxy", "--tpm2", "--tpmstate", f"dir={state}"]
    with subprocess.Popen(words) as emulator:
        try:
            privileges.within(TPM_SECONDS, TPM.exists, "the kernel sees no TPM")
            yield
        finally:
            emulator.terminate()
    privileges.within(TPM_SECONDS, lambda: not TPM.exists(), "the TPM is still there")


@pytest.fixture(params=["host", "tpm2"])
def sealed_by(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """What systemd seals the key to, in the words of systemd-creds(1)."""
    kind: str = request.param
    if kind == "host":
        yield kind
    else:
        with tpm(tmp_path / "tpm"):
            yield kind
        # To no other one.
        with tpm(tmp_path / "other"):
            words = ("systemd-creds", "decrypt", "--name=luks", str(CREDENTIAL), "-")
            assert subprocess.run(words, capture_output=True).returncode != 0
    CREDENTIAL.unlink(missing_ok=True)


@pytest.fixture
def key(sealed_by: str) -> str:
    """A key that lies on the disk encrypted alone."""
    key = secrets.token_hex(16)
    how = f"--with-key={sealed_by}"
    words = ("systemd-creds", "encrypt", how, "--name=luks", "-", str(CREDENTIAL))
    subprocess.run(words, check=True, input=key, text=True, capture_output=True)
    assert key.encode() not in CREDENTIAL.read_bytes()
    return key


@pytest.mark.variation
def test_a_credential_of_systemd_s_opens_volumes(
    client: Client, directory: Path, restart: Restart, key: str
) -> None:
    privileges.CONFIGURATION.write_text(CONFIGURATION)
    restart(
        f"LoadCredentialEncrypted=luks:{CREDENTIAL}\nExecStart=\n"
        f"ExecStart=/opt/carver/venv/bin/carver serve --config {privileges.CONFIGURATION}"
    )
    found = KEY_FILE.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o400)
    staging = directory / "staging"
    with Asking(DEFAULT_SOCKET) as caller:
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
