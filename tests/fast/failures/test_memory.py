"""What a process keeps in memory of the keys that it was given, when nobody needs them any more."""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from expect import soon
from traces import places

from agent.csi.client import Client, mounted

MIB = 1 << 20
HERE = Path(__file__).parent
SUPPORT = HERE.parents[1] / "support"
ROOT = HERE.parents[2]

pytestmark = pytest.mark.starts_programs


@contextmanager
def serving(directory: Path, **environment: str) -> Iterator[int]:
    """A service in a process of its own; yields its id."""
    words = (sys.executable, str(HERE / "memory_service.py"), str(directory))
    path = {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    process = subprocess.Popen(
        words, env={**os.environ, **path, **environment}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.terminate()
        process.communicate()


def set_by_the_unit() -> dict[str, str]:
    """The C library's variables, as the installed service has them."""
    unit = (ROOT / "systemd/carver.service").read_text()
    found = dict(re.findall(r"^Environment=(\w+)=(.+)$", unit, re.M))
    assert set(found) == {"MALLOC_ARENA_MAX", "MALLOC_PERTURB_", "GLIBC_TUNABLES"}
    return found


@pytest.mark.parametrize("kind", ["key", "schlüssel", "鍵", "🔑"])
def test_no_long_key_is_left_when_the_volume_is_closed(tmp_path: Path, kind: str) -> None:
    # Python's own allocator has memory of its own for objects up to 512 bytes (Objects/obmalloc.c),
    # which glibc does not see freed: docs/security.md.
    rest = secrets.token_hex(300)
    secret = {"passphrase": f"{kind}-{rest}"}
    newer = {"passphrase": f"{kind}-{rest}-2", "previousPassphrase": secret["passphrase"]}
    older = {**secret, "previousPassphrase": newer["passphrase"]}
    # As it is sent and used, and as Python has a text with such characters.
    needles = [rest.encode(form) for form in ("utf-8", "utf-16-le", "utf-32-le")]
    with serving(tmp_path, **set_by_the_unit()) as pid:

        def found() -> list[list[str]]:
            return [places(pid, one) for one in needles]

        with Client(tmp_path / "csi.sock") as client:
            volume = client.create(
                "pvc-1", 48 * MIB, mounted("ext4"), parameters={"carver/encryption": "luks2"}
            )
            for number in range(3):
                staging = tmp_path / f"staging-{number}"
                client.stage(volume, staging, mounted("ext4"), secret)
                client.node_expand(volume.volume_id, staging, (64 + number) * MIB, secret)
                # The key changes while it is in use, and back.
                for each in (newer, older):
                    client.publish(volume, staging, tmp_path / "target", mounted("ext4"), each)
                client.unpublish(volume.volume_id, tmp_path / "target")
                client.unstage(volume.volume_id, staging)
        with Client(tmp_path / "csi.sock") as client:
            client.capacity()
        # What a connection read last goes with it, a moment after the caller hung up.
        soon(lambda: found() == [[], [], []], found)
