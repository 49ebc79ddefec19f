"""Whose a bridge is, the snapshot that a volume is copied from: several may have one name."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import expect
import in_background
import pytest
import serving
from fakes.host import FakeHost

from agent.core import errors
from agent.csi.client import Client, block, of_volume
from agent.daemon.server import Service
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from mount.command import Result

MIB = 1 << 20
SIZE = 32 * MIB
# The classes of the groups.
CLASSES = {"a": "first", "b": "second"}
pytestmark = [
    pytest.mark.groups(**{key: [300] for key in CLASSES}),
    pytest.mark.settings(
        classes=tuple(DeviceClass(name, one, default=one == "a") for one, name in CLASSES.items())
    ),
]


@contextmanager
def serve(config: Config, fake: FakeHost, **grace_seconds: float) -> Iterator[Service]:
    """Carver, at the socket where the next one will be, too."""
    running = serving.start(config, fake, **{"eraser": 20, "copier": 20, **grace_seconds})
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def alone(fake: FakeHost, group: str) -> Iterator[None]:
    """Inside, the other group's disks are not there."""
    [other] = CLASSES.keys() - {group}
    away = fake.lvm2.groups.pop(other)
    try:
        yield
    finally:
        fake.lvm2.groups[other] = away


@pytest.fixture
def allow_copies(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing is copied before this is called."""
    copy, allowed = fake.kernel.copy, threading.Event()

    def fails(source: str, target: str, offset: int, length: int, *, blank: bool) -> None:
        if not allowed.is_set():
            raise OSError(5, "Input/output error")
        copy(source, target, offset, length, blank=blank)

    monkeypatch.setattr(fake.kernel, "copy", fails)
    return allowed.set


def words_of(group: str) -> bytes:
    return f"what {group} holds".encode().ljust(4096, b"!")


def held(fake: FakeHost, group: str, name: str = "x") -> bytes:
    return fake.read_bytes(f"/dev/mapper/{group}-vol--{name}", 0, 4096)


def logical(fake: FakeHost, group: str) -> set[str]:
    return set(fake.lvm2.groups[group].volumes)


def begin(config: Config, fake: FakeHost, group: str) -> None:
    """A source in a group, and a copy of it called `x`, which comes no further than its bridge."""
    with alone(fake, group), serve(config, fake), Client(config.endpoint) as client:
        chosen = {"class": CLASSES[group]}
        source = client.create(f"of-{group}", SIZE, block(), parameters=chosen)
        fake.write_bytes(f"/dev/mapper/{group}-vol--of--{group}", 0, words_of(group))
        with expect.code("ABORTED", "Input/output error"):
            of = of_volume(source.volume_id)
            client.create("x", SIZE, block(), parameters=chosen, source=of)
    assert logical(fake, group) == {f"vol-of-{group}", "vol-x", "copy-x"}


@pytest.fixture
def allow_both(
    config: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> Callable[[], None]:
    """Both groups have a source, and a copy `x` of it, which is filled after this is called."""
    for group in CLASSES:
        begin(config, fake, group)
    return allow_copies


def idle(service: Service) -> None:
    """What goes on behind the answers has ended, or failed."""
    for jobs in (service.copier.jobs, service.copier.bridges, service.eraser.jobs):
        in_background.ended(jobs)


def test_each_volume_is_filled_from_its_own_bridge(
    config: Config, fake: FakeHost, allow_both: Callable[[], None]
) -> None:
    allow_both()
    with serve(config, fake) as service:
        idle(service)
        for group in CLASSES:
            assert held(fake, group) == words_of(group)
            assert logical(fake, group) == {f"vol-of-{group}", "vol-x"}


def test_a_copy_whose_source_s_group_is_away_for_a_moment_is_completed_later(
    config: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> None:
    """That the group is not there proves nothing of the bridge in it."""
    with serve(config, fake, copier=0) as service, Client(config.endpoint) as client:
        origin = client.create("origin", SIZE, block()).volume_id

        def clone() -> str:
            how = {"class": "second"}
            source = of_volume(origin)
            return client.create("new", SIZE, block(), parameters=how, source=source).volume_id

        with expect.code("ABORTED"):
            clone()
        in_background.ended(service.copier.jobs)
        service.copier.grace_seconds = 20
        with alone(fake, "b"):
            in_background.again(service.copier.jobs)
            in_background.ended(service.copier.jobs)
            with expect.code("ABORTED"):
                clone()
        allow_copies()
        in_background.again(service.copier.jobs)
        assert clone().startswith("b@")
        idle(service)
        assert logical(fake, "b") == {"vol-new"}
        assert logical(fake, "a") == {"vol-origin"}


def test_unused_bridge_of_another_group_is_removed(
    config: Config, fake: FakeHost, allow_both: Callable[[], None]
) -> None:
    fake.lvm("lvremove", "--yes", "--", "a/vol-x")
    allow_both()
    with serve(config, fake) as service:
        idle(service)
        assert held(fake, "b") == words_of("b")
        assert logical(fake, "a") == {"vol-of-a"}


def test_volume_without_its_bridge_is_not_filled(
    config: Config, fake: FakeHost, allow_both: Callable[[], None]
) -> None:
    fake.lvm("lvremove", "--yes", "--", "b/copy-x")
    allow_both()
    with serve(config, fake) as service, Client(config.endpoint) as client:
        idle(service)
        assert "carver.state=copying" in fake.lvm2.groups["b"].volumes["vol-x"].tags
        assert [one.volume_id.partition("@")[0] for one in client.volumes()] == ["a", "a", "b"]


def test_delete_keeps_the_bridge_of_the_other_group(
    config: Config, fake: FakeHost, allow_both: Callable[[], None]
) -> None:
    fake.lvm("lvremove", "--yes", "--", "a/copy-x")
    with serve(config, fake) as service, Client(config.endpoint) as client:
        idle(service)
        [volume_id] = [
            str(one.id)
            for one in service.reports.fresh().volumes()
            if one.name == "vol-x" and one.group.name == "a"
        ]
        client.delete(volume_id)
        idle(service)
        assert logical(fake, "a") == {"vol-of-a"}
        assert "copy-x" in logical(fake, "b")
    allow_both()
    with serve(config, fake) as service:
        idle(service)
        assert held(fake, "b") == words_of("b")


@pytest.mark.parametrize("restarted", [False, True])
def test_bridge_of_a_deleted_volume_is_not_used(
    config: Config, fake: FakeHost, restarted: bool
) -> None:
    def refuse(words: Sequence[str]) -> Result | None:
        parts = words[1] == "lvconvert" and "a/copy-x" in words
        return Result(5, "", "  it does not work today\n") if parts else None

    def make(client: Client) -> None:
        client.create("x", SIZE, block(), source=of_volume(source.volume_id))

    def make_anew(service: Service, client: Client) -> None:
        for is_refused in (True, False):
            idle(service)
            fake.intercept = refuse if is_refused else lambda _words: None
            with expect.code("ABORTED", "copy-x", "unused, being removed"):
                make(client)
        idle(service)
        make(client)

    with serve(config, fake) as service, Client(config.endpoint) as client:
        source = client.create("of-a", SIZE, block())
        fake.write_bytes("/dev/mapper/a-vol--of--a", 0, words_of("nothing new"))
        fake.intercept = refuse
        make(client)
        [volume_id] = {one.volume_id for one in client.volumes()} - {source.volume_id}
        client.delete(volume_id)
        idle(service)
        assert logical(fake, "a") == {"vol-of-a", "copy-x"}
        fake.write_bytes("/dev/mapper/a-vol--of--a", 0, words_of("a"))
        if not restarted:
            make_anew(service, client)
    if restarted:
        with serve(config, fake) as service, Client(config.endpoint) as client:
            make_anew(service, client)
    assert held(fake, "a") == words_of("a")
    assert logical(fake, "a") == {"vol-of-a", "vol-x"}


def test_bridge_of_another_moment_is_not_used(
    config: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> None:
    """Of the same source, and in its place."""
    begin(config, fake, "a")
    volumes = fake.lvm2.groups["a"].volumes
    [taken] = [tag for tag in volumes["copy-x"].tags if tag.startswith("carver.time=")]
    fake.lvm("lvchange", "--deltag", taken, "--addtag", "carver.time=1", "--", "a/copy-x")
    allow_copies()
    with serve(config, fake) as service, Client(config.endpoint) as client:
        idle(service)
        assert logical(fake, "a") == {"vol-of-a", "vol-x"}
        [source] = {one.volume_id for one in client.volumes()}
        with expect.code("FAILED_PRECONDITION", "repeat the call"):
            client.create("x", SIZE, block(), source=of_volume(source))
        assert logical(fake, "a") == {"vol-of-a"}


def test_copy_of_an_earlier_version_is_completed(
    config: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> None:
    """That did not record the time of the bridge."""
    begin(config, fake, "a")
    tags = fake.lvm2.groups["a"].volumes["vol-x"].tags
    [taken] = [tag for tag in tags if tag.startswith("carver.bridge=")]
    fake.lvm("lvchange", "--deltag", taken, "--", "a/vol-x")
    allow_copies()
    with serve(config, fake) as service:
        idle(service)
        assert held(fake, "a") == words_of("a")
        assert logical(fake, "a") == {"vol-of-a", "vol-x"}


# Groups that do not answer


@pytest.fixture
def three(config: Config, fake: FakeHost) -> Config:
    """Also with a third group."""
    fake.lvm2.add_group("c", [100])
    return replace(config, classes=(*config.classes, DeviceClass("third", "c")))


@contextmanager
def refused(fake: FakeHost, group: str) -> Iterator[None]:
    """Inside, Carver uses nothing of a group."""
    fake.share(group)
    try:
        yield
    finally:
        fake.lvm2.groups[group].lock_type = ""
        fake.lvm2.groups[group].seqno += 1


def leave(config: Config, fake: FakeHost, into: str) -> str:
    """A source in group a, and a copy of it called `x`, which comes no further than its bridge."""
    with serve(config, fake) as service, Client(config.endpoint) as client:
        source = client.create("of-a", SIZE, block())
        fake.write_bytes("/dev/mapper/a-vol--of--a", 0, words_of("a"))
        with expect.code("ABORTED", "Input/output error"):
            of = of_volume(source.volume_id)
            client.create("x", SIZE, block(), parameters={"class": into}, source=of)
        idle(service)
    return source.volume_id


@pytest.mark.parametrize("into", ["first", "second"])
def test_an_unused_bridge_is_removed_while_a_group_that_cannot_need_it_is_refused(
    three: Config, fake: FakeHost, allow_copies: Callable[[], None], into: str
) -> None:
    source = leave(three, fake, into)
    fake.lvm("lvremove", "--yes", "--", f"{'a' if into == 'first' else 'b'}/vol-x")
    with refused(fake, "c"), serve(three, fake) as service, Client(three.endpoint) as client:
        idle(service)
        assert logical(fake, "a") == {"vol-of-a"}
        client.expand(source, 2 * SIZE)
        client.delete(source)
        idle(service)
        assert not logical(fake, "a")


def test_a_bridge_is_kept_while_the_group_of_its_copy_is_refused(
    three: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> None:
    leave(three, fake, "third")
    with refused(fake, "c"), serve(three, fake) as service:
        idle(service)
        assert logical(fake, "a") == {"vol-of-a", "copy-x"}
        [job] = service.copier.bridges.unfinished()
        with pytest.raises(errors.GroupBusy, match="volume group c"):
            job.future.result(20)
    allow_copies()
    with serve(three, fake) as service:
        idle(service)
        assert held(fake, "c") == words_of("a")
        assert logical(fake, "a") == {"vol-of-a"}


def test_a_bridge_that_does_not_say_whose_it_is_is_kept_while_any_group_is_refused(
    three: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> None:
    """As earlier versions took them."""
    leave(three, fake, "first")
    fake.lvm("lvremove", "--yes", "--", "a/vol-x")
    [mark] = (one for one in fake.lvm2.groups["a"].volumes["copy-x"].tags if "carver.copy=" in one)
    fake.lvm("lvchange", "--deltag", mark, "--", "a/copy-x")
    with refused(fake, "c"), serve(three, fake) as service:
        idle(service)
        assert logical(fake, "a") == {"vol-of-a", "copy-x"}
    with serve(three, fake) as service:
        idle(service)
        assert logical(fake, "a") == {"vol-of-a"}


def test_a_bridge_of_a_copy_to_one_group_is_not_used_for_a_copy_to_another(
    three: Config, fake: FakeHost
) -> None:
    """By its tag it would be removed while the group that it does not name has the copy."""

    def full(words: Sequence[str]) -> Result | None:
        if words[1] == "lvconvert" and "a/copy-x" in words:
            return Result(5, "", "  it does not work today\n")
        is_made = words[1] == "lvcreate" and "vol-x" in words
        return Result(5, "", "  insufficient free space\n") if is_made else None

    with serve(three, fake) as service, Client(three.endpoint) as client:
        of = of_volume(client.create("of-a", SIZE, block()).volume_id)
        fake.write_bytes("/dev/mapper/a-vol--of--a", 0, words_of("a"))
        fake.intercept = full
        with expect.code("RESOURCE_EXHAUSTED"):
            client.create("x", SIZE, block(), parameters={"class": "second"}, source=of)
        idle(service)
        assert "copy-x" in logical(fake, "a")
        fake.intercept = lambda _words: None
        with expect.code("ABORTED", "unused, being removed"):
            client.create("x", SIZE, block(), parameters={"class": "third"}, source=of)
        idle(service)
        client.create("x", SIZE, block(), parameters={"class": "third"}, source=of)
        idle(service)
        assert held(fake, "c") == words_of("a")
        assert logical(fake, "a") == {"vol-of-a"}


def test_a_bridge_that_was_promised_when_it_was_looked_at_is_removed_later(
    config: Config, fake: FakeHost, allow_copies: Callable[[], None]
) -> None:
    leave(config, fake, "first")
    fake.lvm("lvremove", "--yes", "--", "a/vol-x")
    running = Service(config, serving.machine(fake), fake.lvm)
    running.copier.bridges.retry_seconds = 0.05
    known = running.reports.fresh("a")
    [bridge] = known.snapshots()
    with running.copier.keep_source(bridge, "x"):
        serving.recover(running)
        [job] = running.copier.bridges.unfinished()
        with pytest.raises(errors.VolumeInUse):
            job.future.result(20)
        assert logical(fake, "a") == {"vol-of-a", "copy-x"}
    expect.soon(lambda: logical(fake, "a") == {"vol-of-a"}, lambda: logical(fake, "a"))
    running.stop()
