"""How cryptsetup is run: keys at standard input only, and what its exit codes mean."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mount import luks, mount_errors
from mount.command import Result, Runner
from mount.luks import Cryptsetup

KEY = bytearray(b"correct horse battery staple")


def cryptsetup(program: Runner, *, waits_for_udev: bool = True) -> Cryptsetup:
    return Cryptsetup(program, waits_for_udev=waits_for_udev)


class Program:
    """Ends with this exit code, and remembers what it was given."""

    def __init__(self, exit_code: int = 0, stderr: str = "") -> None:
        self.words: tuple[str, ...] = ()
        self.stdin = b""
        self._result = Result(exit_code, "", stderr)

    def __call__(self, *words: str, stdin: bytearray | None = None) -> Result:
        self.words, self.stdin = words, bytes(stdin or b"")
        return self._result


ACTIONS: dict[str, Callable[[Cryptsetup], object]] = {
    "luksFormat": lambda one: one.make(
        "/dev/x", KEY, uuid="u", offset_bytes=4 << 20, sector_bytes=4096
    ),
    "open": lambda one: one.open("/dev/x", KEY, "name", discard=True, read_only=True),
    "resize": lambda one: one.grow("/dev/x", KEY, "name"),
    "luksAddKey": lambda one: one.add("/dev/x", KEY, bytearray(b"another"), 1),
    "luksKillSlot": lambda one: one.remove_key("/dev/x", KEY, 1),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_key_is_read_at_standard_input_and_is_no_word(action: str) -> None:
    program = Program()
    ACTIONS[action](cryptsetup(program))
    assert program.words[:2] == ("cryptsetup", action)
    assert program.stdin.startswith(KEY)
    assert {"--batch-mode", "--key-file", "--disable-external-tokens"} <= set(program.words)
    assert not any(KEY.decode() in word for word in program.words)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_key_that_does_not_fit_is_another_error_than_a_failure(action: str) -> None:
    with pytest.raises(mount_errors.WrongKey, match="/dev/x"):
        ACTIONS[action](cryptsetup(Program(2)))
    with pytest.raises(mount_errors.CryptFailed, match="no luck"):
        ACTIONS[action](cryptsetup(Program(1, "no luck")))
    with pytest.raises(mount_errors.CryptFailed, match="64 MiB"):
        ACTIONS[action](cryptsetup(Program(3)))


def test_what_a_header_is_made_with() -> None:
    program = Program()
    ACTIONS["luksFormat"](cryptsetup(program))
    said = " ".join(program.words)
    assert "--type luks2 --cipher aes-xts-plain64 --key-size 512 --hash sha256" in said
    assert "--pbkdf argon2id --pbkdf-memory 65536 --pbkdf-parallel 4" in said
    assert "--sector-size 4096 --offset 8192 --uuid u" in said


@pytest.mark.parametrize("bypass", [set(), {"write", "read"}])
def test_which_work_queues_are_passed_by(bypass: set[str]) -> None:
    program = Program()
    cryptsetup(program).open("/dev/x", KEY, "name", discard=False, bypass=bypass)
    found = [one for one in program.words if "workqueue" in one]
    assert found == [f"--perf-no_{one}_workqueue" for one in sorted(bypass)]


def test_a_device_in_use_is_busy_when_it_is_closed() -> None:
    program = Program()
    cryptsetup(program, waits_for_udev=False).close("name")
    assert program.words == ("env", "DM_DISABLE_UDEV=1", "cryptsetup", "close", "--", "name")
    with pytest.raises(mount_errors.CryptBusy, match="name is in use"):
        cryptsetup(Program(5)).close("name")
    with pytest.raises(mount_errors.CryptFailed):
        cryptsetup(Program(4)).close("name")


def test_no_more_than_two_take_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(luks, "_PATIENCE_SECONDS", 0.01)
    inside, ended = threading.Semaphore(0), threading.Event()

    def wait(*_words: str, stdin: bytearray | None = None) -> Result:
        inside.release()
        assert ended.wait(20)
        return Result(0, "", "")

    slow = cryptsetup(wait)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(slow.remove_key, "/dev/x", KEY, 1)
            assert inside.acquire(timeout=20)
        with pytest.raises(mount_errors.CryptPending, match="call again"):
            slow.remove_key("/dev/x", KEY, 1)
        ended.set()
    slow.remove_key("/dev/x", KEY, 1)
