"""SELinux contexts of mounts, as kubelet requests them, on a fake kernel that has SELinux."""

from pathlib import Path

import configured
import expect
import pytest
from csi_client import Client
from fakes.host import FakeHost
from fakes.kernel import FakeKernel

from agent.csi.client import Mode, block, mounted
from agent.settings.settings import Config
from mount import kernel as syscalls
from mount import mount_errors, options, table
from mount.filesystem import FILE_SYSTEMS
from proto import csi_pb2 as csi

MIB = 1 << 20
CONTEXT = "system_u:object_r:container_file_t:s0:c15,c25"
OTHER = "system_u:object_r:container_file_t:s0:c1,c2"
# As AddSELinuxMountOption of kubelet's pkg/volume/util/selinux.go has it: one flag, in quotes.
FLAG = f'context="{CONTEXT}"'
MULTI = Mode.SINGLE_NODE_MULTI_WRITER


def asked(*flags: str) -> csi.VolumeCapability:
    return mounted("ext4", mode=MULTI, flags=list(flags))


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    directory = tmp_path / "mounts"
    directory.mkdir()
    made = FakeHost(directory)
    assert isinstance(made.kernel, FakeKernel)
    made.kernel.selinux = True
    return made


@pytest.fixture
def fake(host: FakeHost) -> FakeHost:
    return host


@pytest.fixture
def config(host: FakeHost, tmp_path: Path) -> Config:
    return configured.carver(tmp_path, host.new_group(200))


@pytest.fixture
def volume(client: Client) -> csi.Volume:
    return client.create("pvc-1", 320 * MIB, asked())


@pytest.fixture
def staging(host: FakeHost) -> Path:
    return host.directory / "staging"


@pytest.fixture
def target(host: FakeHost) -> Path:
    return host.directory / "target"


def context_at(host: FakeHost, path: Path) -> str:
    return table.read(host.kernel).at(str(path))[-1].context


@pytest.mark.parametrize("fs_type", FILE_SYSTEMS)
def test_a_volume_is_staged_and_published_with_its_context(
    client: Client, host: FakeHost, staging: Path, target: Path, fs_type: str
) -> None:
    with_context, without = (
        mounted(fs_type, mode=MULTI, flags=flags) for flags in ([FLAG, "noatime"], ["noatime"])
    )
    volume = client.create("pvc-1", 320 * MIB, with_context)
    for _ in range(2):
        client.stage(volume, staging, with_context)
    for _ in range(2):
        client.publish(volume, staging, target, with_context)
    client.publish(volume, staging, host.directory / "second", without)
    assert context_at(host, staging) == context_at(host, target) == CONTEXT
    [mount] = table.read(host.kernel).at(str(staging))
    assert "noatime" in mount.options


def test_a_mounted_volume_conflicts_with_another_context(
    client: Client, host: FakeHost, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging, asked(FLAG))
    client.publish(volume, staging, target, asked(FLAG))
    for flags in ([f'context="{OTHER}"'], []):
        with expect.code("ALREADY_EXISTS", str(staging), CONTEXT):
            client.stage(volume, staging, asked(*flags))
        # A superblock has one context at all paths.
        with expect.code("FAILED_PRECONDITION", "one for all", CONTEXT):
            client.stage(volume, host.directory / "elsewhere", asked(*flags))
    with expect.code("ALREADY_EXISTS", str(target), OTHER):
        client.publish(volume, staging, target, asked(f'context="{OTHER}"'))
    with expect.code("FAILED_PRECONDITION", str(staging), OTHER):
        client.publish(volume, staging, host.directory / "b", asked(f'context="{OTHER}"'))
    # Unpublished and unstaged, it can have another.
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, asked(f'context="{OTHER}"'))
    assert context_at(host, staging) == OTHER


def test_a_volume_mounted_without_a_context_is_not_given_one(
    client: Client, volume: csi.Volume, staging: Path, target: Path
) -> None:
    client.stage(volume, staging, asked())
    with expect.code("ALREADY_EXISTS", str(staging), CONTEXT):
        client.stage(volume, staging, asked(FLAG))
    with expect.code("FAILED_PRECONDITION", "no SELinux context", CONTEXT):
        client.publish(volume, staging, target, asked(FLAG))


def test_an_inline_volume_has_a_context(client: Client, host: FakeHost, target: Path) -> None:
    for _ in range(2):
        client.publish_inline("csi-1", target, {"size": "64Mi"}, asked(FLAG))
    assert context_at(host, target) == CONTEXT


def test_a_raw_block_volume_needs_no_context(client: Client, staging: Path) -> None:
    client.stage(client.create("pvc-2", 16 * MIB, block()), staging, block())


@pytest.mark.parametrize(
    ("flag", "context"),
    [
        (FLAG, CONTEXT),
        (f"ro,{FLAG},noatime", CONTEXT),
        ("context=system_u:object_r:container_file_t:s0", "system_u:object_r:container_file_t:s0"),
        ("context=system_u:object_r:container_file_t", "system_u:object_r:container_file_t"),
        ('context="u:r:t:s0-s0:c0.c1023"', "u:r:t:s0-s0:c0.c1023"),
    ],
)
def test_a_context_is_parsed_without_its_quotes(flag: str, context: str) -> None:
    assert options.parse([flag]).context == context


@pytest.mark.parametrize(
    "flag",
    [
        "context=",
        'context=""',
        "context=system_u",
        "context=a:b",
        f"context={CONTEXT}",  # the part after the comma is an option of its own
        f'context="{CONTEXT}',
        f'context=""{CONTEXT}""',
        'context="a:b:c:s0,errors=panic"',
        'context="a:b:c:s0:c1 c2"',
        'context="a:b:c:x0"',
        'noatime="a,b"',
        f'fscontext="{CONTEXT}"',
        f'defcontext="{CONTEXT}"',
        f'rootcontext="{CONTEXT}"',
    ],
)
def test_an_invalid_context_is_refused(flag: str) -> None:
    with pytest.raises(mount_errors.BadOption):
        options.parse([flag])


def test_two_contexts_contradict_each_other() -> None:
    with pytest.raises(mount_errors.BadOption, match="contradicts"):
        options.parse([FLAG, f'context="{OTHER}"'])
    assert options.parse([FLAG, FLAG]).context == CONTEXT


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("u:r:t:s0:c3,c1,c2", "u:r:t:s0:c1.c3", True),
        ("u:r:t:s0:c1,c2", "u:r:t:s0:c1.c2", True),
        ("u:r:t:s0-s0", "u:r:t:s0", True),
        ("u:r:t:s0-s0:c1", "u:r:t:s0", False),
        ("u:r:t:s0:c1,c2", "u:r:t:s0:c1,c3", False),
        ("u:r:t:s0", "u:r:t:s1", False),
        ("u:r:t:s0", "u:r:t", False),
        ("u:r:t", "u:r:v", False),
        ("", "", True),
        ("", "u:r:t", False),
    ],
)
def test_contexts_are_compared_by_their_meaning(one: str, other: str, same: bool) -> None:
    assert options.is_same_context(one, other) == same


@pytest.mark.parametrize(
    ("shown", "context"),
    [
        (f'rw,context="{CONTEXT}",stripe=4', CONTEXT),
        ("rw,context=u:r:t:s0", "u:r:t:s0"),
        (f'rw,fscontext="{CONTEXT}"', ""),
        ("rw,seclabel,stripe=4", ""),
    ],
)
def test_the_mount_table_shows_the_context(shown: str, context: str) -> None:
    line = f"40 36 253:3 / /mnt rw - ext4 /dev/dm-3 {shown}\n"
    assert table.Table(line).mounts[0].context == context


def test_the_older_system_call_quotes_a_context_with_commas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []
    monkeypatch.setattr("mount.calls.mount", lambda *words: made.append(words[-1]))
    kernel = syscalls.Kernel(old_calls=True)
    parameters = ["discard", f"context={CONTEXT}", "commit=5"]
    kernel.mount("/dev/none", str(tmp_path), "ext4", set(), parameters)
    assert made == [f'discard,context="{CONTEXT}",commit=5']
