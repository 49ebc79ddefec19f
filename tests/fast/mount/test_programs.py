"""Programs that are run to their end, on harmless ones."""

import gc
import io
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expect
import grpc
import pytest

from lvm.lvm2 import Lvm
from mount import command, programs
from mount import mount_errors as mount_errors
from mount.command import Finished
from mount.programs import Programs
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

pytestmark = pytest.mark.starts_programs


@pytest.fixture(autouse=True, params=["_by_sh", "_by_subprocess"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are started in the way of lvm2, and in that of all others."""
    own = getattr(programs, request.param)
    monkeypatch.setattr(programs, "_by_subprocess", lambda words, seconds, _: own(words, seconds))


def test_a_program_s_output_and_exit_code_are_its_result_and_are_observed() -> None:
    seen: list[Finished] = []
    words = ("sh", "-c", "echo out; echo err >&2; exit 3")
    result = Programs(observe=seen.append)(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert [(one.words, one.exit_code) for one in seen] == [(words, 3)]


def test_words_are_never_a_shell_line() -> None:
    assert Programs()("echo", "$(id)", "; reboot").stdout == "$(id) ; reboot\n"


def test_a_program_sees_only_the_environment_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "value")
    seen = dict(line.split("=", 1) for line in Programs()("env").stdout.splitlines())
    assert seen == programs.ENVIRONMENT


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(mount_errors.ProgramMissing, match="no-such-program"):
        Programs()("no-such-program")


def test_a_program_is_ended_with_term_when_its_time_is_over() -> None:
    finished: list[Finished] = []
    run = Programs(observe=finished.append)
    with command.time_limit(0.2), pytest.raises(mount_errors.CommandTimedOut):
        # A program that would survive nothing but KILL's absence: it says so by its exit code.
        run("sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done")
    assert finished[0].exit_code != 9


def test_a_program_that_does_not_end_at_term_does_not_hold_up_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_GRACE_SECONDS", 0.1)
    go_on = tmp_path / "go on"
    # As long as a shell may take to set its trap on a busy machine.
    with command.time_limit(2), pytest.raises(mount_errors.CommandStuck) as caught:
        Programs()("sh", "-c", f"trap '' TERM; until [ -e '{go_on}' ]; do sleep 0.05; done")
    assert not caught.value.ended()
    go_on.touch()
    expect.soon(caught.value.ended)


def test_no_program_is_started_when_no_time_is_left(tmp_path: Path) -> None:
    with command.time_limit(0.0), pytest.raises(mount_errors.CommandTimedOut):
        Programs()("touch", str(tmp_path / "started"))
    assert not (tmp_path / "started").exists()


def test_lvm_of_the_host_is_reached_through_its_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[tuple[str, ...]] = []

    def execute(given: tuple[str, ...], *_: object) -> tuple[command.Result, bool]:
        words.append(given)
        return command.Result(0, "", ""), True

    monkeypatch.setattr(programs, "_execute", execute)
    run = Programs(lvm_on_host=True)
    run("lvm", "version")
    run("mkfs.ext4", "--", "/dev/x")
    assert words == [(*programs.HOST_NAMESPACES, "lvm", "version"), ("mkfs.ext4", "--", "/dev/x")]


def test_lvm_gets_its_devices_and_settings_as_options() -> None:
    words: list[tuple[str, ...]] = []

    def run(*given: str) -> command.Result:
        words.append(given)
        return command.Result(0, "out", "")

    needed = (
        "global/test=0 global/activation=1 activation/read_only_volume_list=[] "
        "activation/monitoring=0 backup/retain_min=50 backup/retain_days=0"
    )
    lvm = Lvm(run, ("/dev/a", "/dev/b"), ("activation/udev_sync=0", "activation/udev_rules=0"))
    assert lvm("lvs", "x") == "out"
    assert words == [
        (
            *("lvm", "lvs", "--devices", "/dev/a,/dev/b"),
            *("--config", f"{needed} activation/udev_sync=0 activation/udev_rules=0", "x"),
        )
    ]


class _Runner(csi_pb2_grpc.IdentityServicer):
    """A service whose every call starts a program."""

    def __init__(self) -> None:
        self._run = Programs()

    def Probe(  # noqa: N802
        self, request: csi.ProbeRequest, context: grpc.ServicerContext
    ) -> csi.ProbeResponse:
        result = self._run("sh", "-c", "echo alive")
        assert (result.exit_code, result.stdout) == (0, "alive\n"), result
        return csi.ProbeResponse()


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[csi_pb2_grpc.IdentityStub]:
    server = grpc.server(ThreadPoolExecutor(16))
    csi_pb2_grpc.add_IdentityServicer_to_server(_Runner(), server)
    address = f"unix://{tmp_path}/socket"
    server.add_insecure_port(address)
    server.start()
    with grpc.insecure_channel(address) as channel:
        yield csi_pb2_grpc.IdentityStub(channel)
    server.stop(None).wait()


def test_200_programs_started_from_server_threads_under_load_all_live(
    stub: csi_pb2_grpc.IdentityStub,
) -> None:
    """GRPC's fork handlers kill some of them where agent/__init__.py does not keep them out."""
    # Other tests' services that were killed may have left some.
    before = threading.active_count()
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda _: stub.Probe(csi.ProbeRequest()), range(200)))
    assert len(answers) == 200
    assert threading.active_count() < before + 100


def test_what_a_program_printed_is_not_kept_when_its_caller_has_it() -> None:
    # sh's objects are a cycle; without the collector they stay, and what they hold with them.
    length, times = 1 << 20, 8
    words = ("head", f"--bytes={length}", "/dev/zero")
    run = Programs()
    run(*words)
    gc.disable()
    try:
        before = bytes_held()
        for _ in range(times):
            assert len(run(*words).stdout) == length
        kept = bytes_held() - before
    finally:
        gc.enable()
    assert kept < length


def bytes_held() -> int:
    """How much is in the buffers that any object refers to.

    Not by tracemalloc: a lock of its that another thread holds at a fork stays held in the child.
    """
    held = {id(one): one for every in gc.get_objects() for one in gc.get_referents(every)}
    return sum(sys.getsizeof(one) for one in held.values() if isinstance(one, bytes | io.BytesIO))
