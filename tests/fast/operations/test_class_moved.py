"""A class gets another volume group: what is in the one before is not made twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import configured
import expect
import pytest
import serving
from csi_client import Client
from fakes.disks import FakeDisks
from fakes.host import FakeHost

from agent.csi.client import block
from agent.groups import volume_group
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.lvm2 import Lvm

MIB = 1 << 20
SIZE = 16 * MIB
GROUPS = ("old", "new")


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    for name in GROUPS:
        host.lvm2.add_group(name, [200])
    return host


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where lvm2 has its copies of what it wrote."""
    made = tmp_path / "root"
    (made / "etc/lvm/backup").mkdir(parents=True)
    return made


@pytest.fixture
def lvm(fake: FakeHost, root: Path) -> Lvm:
    return replace(fake.lvm, root=root)


@pytest.fixture
def before(tmp_path: Path) -> Config:
    classes = (DeviceClass("moved", "old", default=True), DeviceClass("other", "new"))
    return configured.carver(tmp_path, kubelet_dir=("/",), classes=classes)


@pytest.fixture
def after(before: Config) -> Config:
    """The class has the other group; its own is that of another class now."""
    classes = (DeviceClass("moved", "new", default=True), DeviceClass("other", "old"))
    return replace(before, classes=classes)


@pytest.fixture
def without(after: Config) -> Config:
    """No class has the group that it had."""
    return replace(after, classes=after.classes[:1])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_group, "_SHORT_WAIT_SECONDS", 0.1)


def back_up(fake: FakeHost, root: Path) -> None:
    """What lvm2 does after each change (vgcfgbackup(8))."""
    for name in GROUPS:
        group = fake.lvm2.groups[name]
        volumes = "".join(f'{one} {{\nid = "{name}"\n}}\n' for one in group.volumes)
        text = f'{name} {{\nid = "x"\nlogical_volumes {{\n{volumes}}}\n}}\ncontents = "text"\n'
        (root / "etc/lvm/backup" / name).write_text(text)


@pytest.fixture
def made(before: Config, fake: FakeHost, lvm: Lvm, root: Path) -> str:
    """The id of a volume in the group that the class had, of a call whose answer was lost."""
    with serving.served(fake, before, lvm) as (_, client):
        volume = client.create("pvc-1", SIZE, block())
    back_up(fake, root)
    return volume.volume_id


@contextmanager
def hanging(fake: FakeHost) -> Iterator[None]:
    assert isinstance(fake.disks, FakeDisks)
    fake.disks.hanging.add("/dev/fake-old-0")
    try:
        yield
    finally:
        fake.disks.hanging.clear()


@contextmanager
def refused(fake: FakeHost) -> Iterator[None]:
    fake.share("old")
    try:
        yield
    finally:
        fake.lvm2.groups["old"].lock_type = ""
        fake.lvm2.groups["old"].seqno += 1


def create(client: Client, name: str = "pvc-1") -> str:
    return client.create(name, SIZE, block()).volume_id


@pytest.mark.parametrize("how", [hanging, refused])
@pytest.mark.parametrize("is_rebooted", [True, False], ids=["rebooted", "restarted"])
def test_a_volume_that_may_be_in_a_group_that_does_not_answer_is_not_made_again(
    made: str, after: Config, fake: FakeHost, lvm: Lvm, root: Path, how: object, is_rebooted: bool
) -> None:
    if is_rebooted:
        fake.deactivate("old", "vol-pvc-1")
    else:
        # The node's lvm2 keeps no copies: the volume is active.
        (root / "etc/lvm/backup/old").unlink()
    assert callable(how)
    with serving.served(fake, after, lvm) as (service, client):
        with how(fake):
            if how is refused:
                # By then it was read, and its state is lost.
                with expect.code("FAILED_PRECONDITION", "old"):
                    client.volume(made)
            with expect.code("UNAVAILABLE", "volume group old", "vol-pvc-1"):
                create(client)
            assert not fake.lvm2.groups["new"].volumes
            # What is new cannot be there.
            client.delete(create(client, "pvc-2"))
            # Nor is it said that it is not here, which would let another node make it.
            with expect.code("UNAVAILABLE", "volume group old"):
                client.create("pvc-1", 9000 * MIB, block())
        service.volume_groups.outdate()
        service.reports.fresh()
        assert create(client) == made
    assert not fake.lvm2.groups["new"].volumes


def test_an_inline_volume_is_not_made_again_either(
    before: Config, after: Config, fake: FakeHost, lvm: Lvm, root: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with serving.served(fake, before, lvm) as (_, client):
        client.publish_inline("csi-1", target, {"size": "16Mi"})
        fake.kernel.unmount(str(target))
    back_up(fake, root)
    with serving.served(fake, after, lvm) as (_, client), hanging(fake):
        with expect.code("UNAVAILABLE", "volume group old"):
            client.publish_inline("csi-1", target, {"size": "16Mi"})
        assert not fake.lvm2.groups["new"].volumes


def test_a_volume_of_a_group_that_no_class_has_is_found_by_its_name(
    made: str, without: Config, fake: FakeHost, lvm: Lvm
) -> None:
    with serving.served(fake, without, lvm) as (service, client):
        with hanging(fake):
            service.volume_groups.outdate()
            with expect.code("UNAVAILABLE", "/dev/fake-old-0"):
                create(client)
            client.delete(create(client, "pvc-2"))
        service.volume_groups.outdate()
        assert create(client) == made
        assert not fake.lvm2.groups["new"].volumes
        client.delete(made)
        # lvm2's copy is older, and the group itself decides.
        assert create(client).partition("@")[0] == "new"


def test_a_group_that_is_gone_with_its_disks_keeps_no_volume_from_being_made(
    made: str, without: Config, fake: FakeHost, lvm: Lvm
) -> None:
    fake.deactivate("old", "vol-pvc-1")
    del fake.lvm2.groups["old"]
    with serving.served(fake, without, lvm) as (_, client):
        assert create(client).partition("@")[0] == "new"
