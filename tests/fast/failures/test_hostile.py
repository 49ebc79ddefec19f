"""Hostile requests: each is refused with a specific code and changes nothing, or succeeds.

Hypothesis makes requests of every kind from the descriptors: fields with what belongs there, and
with traversals, options, control characters, unicode and sizes that do not.
`CARVER_HOSTILE=seed=7,examples=400` asks for others; with `seconds=300` it goes on with further
seeds for so long.
"""

import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chosen
import configured
import grpc
import pytest
from fakes.host import FakeHost
from fakes.kernel import FakeKernel
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from serving import served

from agent.csi.client import Client, block, mounted
from agent.requests.parameters import MUTABLE_FIELD as MUTABLE
from agent.settings.settings import TOPOLOGY_KEY
from mount.filesystem import FILE_SYSTEMS
from proto import csi_pb2 as csi

MIB = 1 << 20
# Made anew for each example; what the fake names itself is the same each time.
TOP = Path(tempfile.gettempdir()).resolve() / f"carver-hostile-{os.getpid()}"
HERE = TOP / "kubelet"
MOUNTED, RAW = "data@20000000/vol-pvc-mounted", "data@20000000/vol-pvc-raw"

HOSTILE = [
    *("..", "../../etc/passwd", "/", "/etc/passwd", "/proc/self/fd/0"),
    *(f"{HERE}/{one}" for one in ("../../etc", "link/x", "staging/../staging", "staging/inner")),
    f"{HERE}//x",
    *("-o", "--config", "-rf /", "ext4 -F", "ext4,loop", "%n%s", "$(reboot)"),
    *("a\nb", "a\0b", "\x7f", "ü" * 70, "x" * 4096, "\N{RIGHT-TO-LEFT OVERRIDE}"),
    *(f"{group}/vol-pvc-1" for group in ("data@", "data@3kXq0b9Z", "other@3kXq0b9Z", "data")),
]
WORDS: Mapping[str, list[str]] = {
    "volume_id": ["csi-1", MOUNTED, RAW],
    "source_volume_id": [MOUNTED],
    "source_volume_ids": [MOUNTED, RAW],
    "group_snapshot_id": ["data@20000000/gsnap-pvc-new"],
    "snapshot_ids": ["data@20000000/snap-snapshot1"],
    "node_id": ["here", "elsewhere"],
    "name": ["pvc-mounted", "pvc-new", "snapshot1", "x_tmeta"],
    "staging_target_path": [f"{HERE}/staging", f"{HERE}/new"],
    "target_path": [f"{HERE}/target", f"{HERE}/new", f"{HERE}/file", f"{HERE}/full"],
    "volume_path": [f"{HERE}/target", f"{HERE}/staging"],
    "fs_type": [*FILE_SYSTEMS, "ntfs", "proc"],
    "mount_flags": ["ro", "noatime", "bind", "remount", "loop=/dev/sda", "journal_path=/x", "suid"],
    "starting_token": ["", "data@3kXq0b9Z/vol"],
}
KEYS = {
    "carver/class": ["plain", "none"],
    "class": ["plain"],
    "carver/fsType": ["xfs", "proc"],
    "carver/mkfsOptions": ["-m 1", "-F", "-E offset=1", "-L a;b", "-d file"],
    "carver/stripes": ["1", "2", "-1", "1e9", "9" * 5000],
    "stripeSize": ["64KiB", "0", "x"],
    "mirrors": ["0", "1"],
    "cacheSize": ["10%", "-1"],
    "carver/releaseOnNodeLoss": ["true", "maybe"],
    "readAhead": ["1MiB", "auto", "0", "1000", "-1", "9" * 5000],
    "carver/maximumRecoveryRate": ["1MiB", "0"],
    "carver/mountOptions": ["noatime", "errors=panic", "device=/dev/sda"],
    "csi.storage.k8s.io/pvc/name": ["web"],
    "csi.storage.k8s.io/ephemeral": ["true", "true", "maybe"],
    "csi.storage.k8s.io/pod.name": ["web-0", "x" * 2000],
    "carver/readOnly": ["true", "false", "perhaps"],
    "size": ["16Mi", "0", "-1", "1e9", "9" * 30],
    "carver/size": ["16Mi"],
    TOPOLOGY_KEY: ["here", "elsewhere"],
}
# Each service, and what the client calls it.
SERVICES = {"Controller": "controller", "Node": "node", "GroupController": "group_controller"}
NUMBERS = [0, 1, -1, 4096, 64 * MIB, 400 * MIB, (1 << 63) - 1, -(1 << 63)]


def texts(field: str) -> st.SearchStrategy[str]:
    usual = st.sampled_from(WORDS.get(field, ["x"]))
    return st.one_of(*[usual] * 4, st.sampled_from(HOSTILE), st.text(max_size=40))


def maps() -> st.SearchStrategy[dict[str, str]]:
    known = st.sampled_from(sorted(KEYS)).flatmap(
        lambda key: st.tuples(st.just(key), st.sampled_from(KEYS[key]))
    )
    hostile = st.tuples(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE))
    pairs = st.lists(st.one_of(known, known, hostile), max_size=3)
    return pairs.map(dict)


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return maps()
    if kind is not None:
        one: st.SearchStrategy[Any] = messages(kind)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        one = texts(field.name)
        if field.type == FieldDescriptor.TYPE_BYTES:
            one = one.map(str.encode)
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = st.booleans()
    elif field.type == FieldDescriptor.TYPE_ENUM:
        one = st.integers(-1, 12)
    else:
        fits = (1 << 31) if field.type == FieldDescriptor.TYPE_INT32 else (1 << 63)
        one = st.sampled_from([number for number in NUMBERS if -fits <= number < fits])
    return st.lists(one, max_size=3) if field.is_repeated else one


def messages(kind: Any) -> st.SearchStrategy[Message]:
    fields = {field.name: values(field) for field in kind.fields if not field.is_extension}
    made = message_factory.GetMessageClass(kind)
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: made(**chosen))


def honest(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """What an honest caller has in a field."""
    if field.name == "capacity_range":
        sizes = st.sampled_from([16 * MIB, 320 * MIB, 400 * MIB])
        return sizes.map(lambda size_bytes: csi.CapacityRange(required_bytes=size_bytes))
    if field.name.startswith("volume_capab"):
        one = st.sampled_from([mounted(), mounted("ext4"), mounted("ext4", ["noatime"]), block()])
        return st.lists(one, min_size=1, max_size=1) if field.is_repeated else one
    if field.name == MUTABLE:
        return st.sampled_from([{"readAhead": "1MiB"}, {"carver/readAhead": "auto"}])
    words = st.sampled_from(WORDS[field.name])
    return st.lists(words, max_size=2, unique=True) if field.is_repeated else words


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, Message]:
    """A service, a method, a request: an honest one, one with a wrong field, or wrong all over."""
    service = draw(st.sampled_from(sorted(SERVICES)))
    method = draw(st.sampled_from(list(csi.DESCRIPTOR.services_by_name[service].methods)))
    fields = list(method.input_type.fields)
    usual = {
        one.name: honest(one)
        for one in fields
        if one.name in WORDS or one.name.startswith(("volume_capab", "capacity_range", MUTABLE))
    }
    chosen = draw(st.fixed_dictionaries(usual))
    wrong = draw(st.sampled_from([[], *([one] for one in fields), fields]))
    for one in wrong:
        chosen[one.name] = draw(values(one))
    request = message_factory.GetMessageClass(method.input_type)(**chosen)
    return SERVICES[service], method.name, request


@dataclass(frozen=True)
class Machine:
    """A machine with a volume in use and a raw one, and Carver serving it."""

    host: FakeHost
    client: Client

    def code(self, service: str, method: str, request: Message) -> str:
        """The code of a call, with its message if it is not OK."""
        try:
            getattr(getattr(self.client, service), method)(request)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    def state(self) -> object:
        """All that a call could change."""
        assert isinstance(self.host.kernel, FakeKernel)
        volumes = [
            (one.name, one.length, sorted(one.tags), one.active, one.tuning)
            for one in self.host.lvm2.groups["data"].volumes.values()
        ]
        devices = [(one.path, one.size_bytes, repr(one.media)) for one in self.host.block]
        there = sorted((str(one), one.lstat().st_mode) for one in TOP.rglob("*"))
        return volumes, devices, self.host.kernel.mountinfo(), there


@contextmanager
def machine() -> Iterator[Machine]:
    shutil.rmtree(TOP, ignore_errors=True)
    (TOP / "outside").mkdir(parents=True)
    for name in ("full/inner", "full/empty"):
        (HERE / name).mkdir(parents=True)
    (HERE / "link").symlink_to(TOP / "outside")
    (HERE / "file").write_text("data")
    host = FakeHost(HERE)
    host.lvm2.add_group("data", [300])
    config = configured.carver(HERE, endpoint=TOP / "csi.sock", attach=True)
    try:
        with served(host, config) as (_, client):
            volume = client.create("pvc-mounted", 320 * MIB)
            raw = client.create("pvc-raw", 64 * MIB, block())
            assert (volume.volume_id, raw.volume_id) == (MOUNTED, RAW)
            client.stage(volume, HERE / "staging")
            client.publish(volume, HERE / "staging", HERE / "target")
            yield Machine(host, client)
    finally:
        shutil.rmtree(TOP)


def judge(several: list[tuple[str, str, Message]], codes: Counter[str]) -> None:
    """Make the calls on a machine of their own, and count their codes."""
    with machine() as this:
        before = this.state()
        for service, method, request in several:
            code = this.code(service, method, request)
            codes[f"{method} OK" if code == "OK" else code.partition(":")[0]] += 1
            assert not code.startswith(("INTERNAL", "UNKNOWN")), code
            after = this.state()
            if code != "OK":
                assert after == before, code
            before = after
        assert list((TOP / "outside").iterdir()) == []
        assert (HERE / "file").read_text() == "data"


@pytest.mark.timeout(3600)
def test_a_refused_call_has_a_code_of_its_own_and_changes_nothing() -> None:
    numbers = chosen.numbers("CARVER_HOSTILE", seed=1, examples=40, seconds=0)
    codes: Counter[str] = Counter()
    until = time.monotonic() + numbers["seconds"]
    chosen_settings = settings(
        max_examples=numbers["examples"],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
    )

    def judged(several: list[tuple[str, str, Message]]) -> None:
        judge(several, codes)

    for number in itertools.count(numbers["seed"]):
        print(f"seed={number}")
        seed(number)(chosen_settings(given(st.lists(calls(), min_size=1, max_size=8))(judged)))()
        if time.monotonic() >= until:
            break
    print(codes)
