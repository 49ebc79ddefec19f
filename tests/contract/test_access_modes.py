"""What each access mode allows: exactly what docs/volumes.md says."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import chosen
import expect
import grpc
import pytest
from real.any import AnyHost
from serving import served

from agent.core.settings import Config
from agent.csi.client import Client, Mode, block, mounted
from mount import filesystem, table
from proto import csi_pb2 as csi

MIB = 1 << 20
DOCUMENT = Path(__file__).parents[2] / "docs" / "volumes.md"


def rows() -> Iterator[tuple[str, bool, list[str]]]:
    """Of the document's table: mode, both values of readonly, and the codes."""
    section = DOCUMENT.read_text().partition("## Access modes\n")[2].partition("\n## ")[0]
    for line in re.findall(r"^\| `.*$", section, re.M):
        mode, *codes = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        yield from ((mode, read_only, codes) for read_only in (False, True))


def code_of(call: Callable[[], None]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_the_document_has_every_mode() -> None:
    documented = sorted((mode, read_only) for mode, read_only, _ in rows())
    assert documented == sorted(
        (mode, one) for mode in Mode.DESCRIPTOR.values_by_name for one in (False, True)
    )


@pytest.mark.parametrize("seen", chosen.kinds(["as it is", "a link"], usual=["a link"]))
def test_where_kubelets_directory_is_seen_twice_a_volume_has_one_target(
    host: AnyHost, config: Config, tmp_path: Path, seen: str
) -> None:
    """As where it is bind-mounted elsewhere: what is mounted in one appears in the other."""
    directory, twin = host.directory, tmp_path / "twin"
    if seen == "a link":
        directory = tmp_path / "link"
        directory.symlink_to(host.directory)
    config = replace(config, kubelet_dir=(str(directory),))
    staging, target, second = (directory / name for name in ("staging", "first", "second"))
    one = mounted("ext4", mode=Mode.SINGLE_NODE_SINGLE_WRITER)
    with served(host, config) as (_, client):
        volume = client.create("pvc-1", 64 * MIB, one)
        client.stage(volume, staging, one)
        twin.mkdir()
        host.kernel.bind(str(host.directory / "staging"), str(twin), set())

        for _ in range(2):
            client.publish(volume, staging, target, one)
        with expect.code("FAILED_PRECONDITION", str(host.directory / "first"), "one target"):
            client.publish(volume, staging, second, one)

        client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
        with expect.code("FAILED_PRECONDITION", str(twin)):
            client.delete(volume.volume_id)
        host.kernel.unmount(str(twin))


@pytest.mark.parametrize("kind", chosen.kinds([*filesystem.FILE_SYSTEMS, "block"], usual=["block"]))
def test_every_combination_gives_the_code_that_is_documented(
    client: Client, host: AnyHost, kind: str
) -> None:
    def capability(mode: str) -> csi.VolumeCapability:
        number = Mode.Value(mode)
        return block(number) if kind == "block" else mounted(kind, mode=number)

    staging, first, second = (host.directory / name for name in ("staging", "first", "second"))
    volume = client.create("pvc-1", 320 * MIB, capability("SINGLE_NODE_WRITER"))
    for mode, read_only, documented in rows():
        asked, supported = capability(mode), documented[0] == "OK"
        client.stage(volume, staging, asked if supported else capability("SINGLE_NODE_WRITER"))

        found = [
            code_of(lambda: client.publish(volume, staging, target, asked, read_only=access))  # noqa: B023
            for target, access in (
                (first, read_only),
                (first, read_only),
                (first, not read_only),
                (second, read_only),
            )
        ]
        assert found == documented, (kind, mode, read_only)

        now = table.read(host.kernel)
        assert len(now.at(str(first))) == supported
        assert second.exists() == (documented[3] == "OK")
        if supported:
            wanted = read_only or mode == "SINGLE_NODE_READER_ONLY"
            assert now.at(str(first))[0].read_only == wanted
        for target in (first, second):
            client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)
