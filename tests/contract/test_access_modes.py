"""What each access mode allows: exactly what docs/volumes.md says."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import chosen
import configured
import expect
import grpc
import pytest
from real.any import AnyHost
from real.host import RealHost
from serving import served

from agent.csi.client import Client, Mode, block, mounted, of_snapshot, of_volume
from agent.settings.settings import Config
from mount import filesystem, table
from proto import csi_pb2 as csi

MIB = 1 << 20
READERS = ("SINGLE_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY")
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


@pytest.mark.variation
@pytest.mark.parametrize("kind", [*filesystem.FILE_SYSTEMS, "block"])
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
            wanted = read_only or mode in READERS
            assert now.at(str(first))[0].read_only == wanted
        for target in (first, second):
            client.unpublish(volume.volume_id, target)
        client.unstage(volume.volume_id, staging)


# ReadOnlyMany: claims that are restored to be read, as backup programs do.

DATA = b"data" * MIB
KEY = {"passphrase": "correct horse battery staple"}
pytestmark = [
    # Room for an xfs in use, its snapshot and a copy.
    pytest.mark.groups(data=[300, 150]),
    pytest.mark.settings(classes=(configured.PLAIN, configured.THIN)),
]


def as_writer(kind: str) -> csi.VolumeCapability:
    """What kubelet asks for a claim that is ReadWriteOnce."""
    mode = Mode.SINGLE_NODE_MULTI_WRITER
    return block(mode) if kind == "block" else mounted(kind, mode=mode)


def as_readers(kind: str) -> csi.VolumeCapability:
    """What kubelet asks for a claim that is ReadOnlyMany."""
    mode = Mode.MULTI_NODE_READER_ONLY
    return block(mode) if kind == "block" else mounted(kind, mode=mode)


def size_of(kind: str) -> int:
    return 64 * MIB if kind == "block" else filesystem.FILE_SYSTEMS[kind].minimum_bytes + 64 * MIB


class Origin:
    """A volume that a pod is writing to, and a snapshot of it in the middle of that."""

    def __init__(
        self, client: Client, host: AnyHost, kind: str, parameters: dict[str, str]
    ) -> None:
        self.client, self.host, self.kind, self.parameters = client, host, kind, parameters
        self.secrets = KEY if "encryption" in parameters else None
        self.staging, self.target = host.directory / "writer-staging", host.directory / "writer"
        use, size = as_writer(kind), size_of(kind)
        self.volume = client.create("pvc-1", size, use, parameters=parameters)
        client.stage(self.volume, self.staging, use, self.secrets)
        client.publish(self.volume, self.staging, self.target, use, self.secrets)
        self._write(DATA)
        self.snapshot = client.snapshot("1", self.volume.volume_id)
        self._write(bytes(len(DATA)))

    def restored(self, more_bytes: int = 0) -> csi.Volume:
        """A claim that is to be read only, made of the snapshot."""
        return self.client.create(
            "pvc-2",
            size_of(self.kind) + more_bytes,
            as_readers(self.kind),
            parameters=self.parameters,
            source=of_snapshot(self.snapshot.snapshot_id),
        )

    def require_data(self, place: Path) -> None:
        """What a pod reads there is the snapshot's, and it cannot write."""
        assert table.read(self.host.kernel).at(str(place))[-1].read_only
        if self.kind == "block":
            assert self.host.kernel.device_is_read_only(str(place))
        if not isinstance(self.host, RealHost):
            return
        if self.kind == "block":
            assert self.host.read_bytes(str(place), 8 * MIB, len(DATA)) == DATA
            with pytest.raises(OSError, match=r"not permitted|Read-only"):
                self.host.write_bytes(str(place), 8 * MIB, DATA)
            return
        assert (place / "data").read_bytes() == DATA
        with pytest.raises(OSError, match="Read-only"):
            (place / "more").write_bytes(DATA)

    def _write(self, data: bytes) -> None:
        """Nothing in memory, where no file system holds files."""
        if not isinstance(self.host, RealHost):
            return
        if self.kind == "block":
            self.host.write_bytes(str(self.target), 8 * MIB, data)
        else:
            (self.target / "data").write_bytes(data)

    def end(self) -> None:
        self.client.unpublish(self.volume.volume_id, self.target)
        self.client.unstage(self.volume.volume_id, self.staging)
        self.client.delete_snapshot(self.snapshot.snapshot_id)
        self.client.delete(self.volume.volume_id)


@pytest.mark.parametrize("kind", chosen.kinds([*filesystem.FILE_SYSTEMS, "block"], usual=["ext4"]))
@pytest.mark.parametrize("storage", chosen.kinds(["plain", "thin", "encrypted"], usual=["plain"]))
def test_pods_read_a_restored_claim_beside_the_writer_of_its_source(
    host: AnyHost, config: Config, kind: str, storage: str
) -> None:
    parameters = {"encryption": "luks2"} if storage == "encrypted" else {"class": storage}
    use = as_readers(kind)
    staging, pods = host.directory / "staging", [host.directory / f"pod-{n}" for n in range(3)]
    with served(host, config) as (_, client):
        origin = Origin(client, host, kind, parameters)
        copy = origin.restored(more_bytes=32 * MIB)
        assert origin.restored(more_bytes=32 * MIB) == copy
        # The log of what the source's writer had begun is replayed, which writes to the volume.
        client.stage(copy, staging, use, origin.secrets)
        for pod in (*pods[:2], pods[0]):
            client.publish(copy, staging, pod, use, origin.secrets)
        for pod in pods[:2]:
            origin.require_data(pod)
        if kind != "block":
            assert table.read(host.kernel).at(str(staging))[-1].read_only
            with expect.code("FAILED_PRECONDITION", "read-only"):
                client.publish(copy, staging, pods[2], as_writer(kind), origin.secrets)
    with served(host, config) as (_, client):
        origin.client = client
        client.stage(copy, staging, use, origin.secrets)
        for pod in pods:
            client.publish(copy, staging, pod, use, origin.secrets, read_only=True)
            origin.require_data(pod)
        assert not client.unhealthy()
        for pod in pods:
            client.unpublish(copy.volume_id, pod)
            assert not pod.exists()
        client.unstage(copy.volume_id, staging)
        client.delete(copy.volume_id)
        origin.end()
        assert not client.volumes()


@pytest.mark.variation
def test_a_claim_that_nothing_could_ever_write_needs_a_source(
    client: Client, host: AnyHost
) -> None:
    readers = [block(Mode.Value(mode)) for mode in READERS]
    for use in ([readers[0]], [readers[1]], readers):
        with expect.code("INVALID_ARGUMENT", "volume_capabilities: ", "empty", "dataSource"):
            client.create("pvc-1", 64 * MIB, *use)
    assert not client.volumes()
    # Of a claim with both modes kubelet uses the first.
    both = client.create("pvc-1", 64 * MIB, block(), readers[1])
    assert client.confirms(both.volume_id, readers[1])
    for mode in readers:
        assert client.capacity(None, mode) == client.capacity(None, block())
        copy = client.create("pvc-2", 64 * MIB, mode, source=of_volume(both.volume_id))
        with expect.code("ALREADY_EXISTS", "capabilities"):
            client.create("pvc-2", 64 * MIB, block(), source=of_volume(both.volume_id))
        client.delete(copy.volume_id)


@pytest.mark.parametrize("first", chosen.kinds(["writer", "readers"], usual=["writer"]))
def test_a_writer_and_readers_of_one_volume_use_the_access_that_it_is_staged_with(
    client: Client, host: AnyHost, first: str
) -> None:
    """As where two PersistentVolumes have one handle."""
    writer, readers = as_writer("ext4"), as_readers("ext4")
    staging, (one, two, three) = host.directory / "staging", map(host.directory.joinpath, "abc")
    volume = client.create("pvc-1", 64 * MIB, writer, readers)
    staged, other = (writer, readers) if first == "writer" else (readers, writer)
    client.stage(volume, staging, staged)
    with expect.code("ALREADY_EXISTS", str(staging)):
        client.stage(volume, staging, other)
    client.publish(volume, staging, one, staged)
    client.publish(volume, staging, two, readers)
    assert table.read(host.kernel).at(str(two))[-1].read_only
    # One that is alone, by its mode, comes beside none.
    with expect.code("FAILED_PRECONDITION", "one target"):
        client.publish(volume, staging, three, mounted("ext4", mode=Mode.SINGLE_NODE_READER_ONLY))
    if first == "writer":
        client.publish(volume, staging, three, writer)
        assert not table.read(host.kernel).at(str(three))[-1].read_only
    else:
        with expect.code("FAILED_PRECONDITION", "read-only"):
            client.publish(volume, staging, three, writer)
    for path in (one, two, three):
        client.unpublish(volume.volume_id, path)
    client.unstage(volume.volume_id, staging)


@pytest.mark.parametrize("kind", chosen.kinds([*filesystem.FILE_SYSTEMS, "block"], usual=["ext4"]))
def test_what_readers_have_grows_and_its_file_system_with_the_next_writer(
    client: Client, host: AnyHost, kind: str
) -> None:
    writer, readers, size = as_writer(kind), as_readers(kind), size_of(kind)
    staging, pod = host.directory / "staging", host.directory / "pod"
    volume = client.create("pvc-1", size, writer, readers)
    client.stage(volume, staging, writer)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, readers)
    client.publish(volume, staging, pod, readers)

    def total() -> int:
        return client.stats(volume.volume_id, pod).usage[0].total

    before = total()
    for _ in range(2):
        grown = client.node_expand(volume.volume_id, pod, size + 96 * MIB, capability=readers)
        assert grown.capacity_bytes == size + 96 * MIB
    assert total() == before + (96 * MIB if kind == "block" else 0)
    # It is as its claim asks, so there is nothing to report.
    assert not client.unhealthy()
    client.unpublish(volume.volume_id, pod)
    client.unstage(volume.volume_id, staging)
    client.stage(volume, staging, writer)
    client.publish(volume, staging, pod, writer)
    assert total() > before + 80 * MIB
    client.unpublish(volume.volume_id, pod)
    client.unstage(volume.volume_id, staging)


@pytest.mark.variation
def test_readers_of_a_copy_whose_source_was_never_formatted_find_it_empty(
    client: Client, host: AnyHost
) -> None:
    use, staging = as_readers("ext4"), host.directory / "staging"
    origin = client.create("pvc-1", 64 * MIB, as_writer("ext4"))
    copy = client.create("pvc-2", 64 * MIB, use, source=of_volume(origin.volume_id))
    client.stage(copy, staging, use)
    client.stage(copy, staging, use)
    assert sum(words[0].startswith("mkfs") for words in host.commands) == 1
    assert table.read(host.kernel).at(str(staging))[-1].read_only
    client.unstage(copy.volume_id, staging)
