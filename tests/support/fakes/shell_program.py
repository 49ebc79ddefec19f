"""A program that answers as lvm2's shell does, with chosen mishaps at chosen commands.

It is started as `lvm`. What it does with each command of a shell stands in the file `plan` beside
it, a word a line; what it did, in `done`.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

HERE = Path(sys.argv[0]).parent
# Larger than a pipe holds.
MUCH = 300_000


def note(text: str) -> None:
    """Write down what was done."""
    with (HERE / "done").open("a") as done:
        done.write(f"{text}\n")


def planned(is_for: str) -> str:
    """The next word of the plan, where it is for a start or for a command, as asked."""
    plan = HERE / "plan"
    words = plan.read_text().split() if plan.exists() else []
    if not words or (words[0] in STARTS) != (is_for == "start"):
        return "usual"
    plan.write_text("\n".join(words[1:]))
    return words[0]


def process(words: list[str]) -> None:
    """One command in a process of its own."""
    note(f"process {' '.join(words)}")
    print('{"report": []}' if words[0] == "fullreport" else "  Done.")


def lines() -> Iterator[str]:
    """What is said to the shell, with its prompt before each."""
    while True:
        sys.stdout.write("lvm> ")
        sys.stdout.flush()
        line = ""
        while not line.endswith("\n"):
            try:
                piece = os.read(0, 1)
            except OSError:
                return
            if not piece:
                return
            line += piece.decode()
        yield line[:-1]


REFUSAL = "Volume group has insufficient free space."


def answer(
    line: str, reports: TextIO, code: int = 1, size: int = 0, refusal: str = REFUSAL
) -> None:
    """Report a command, its status last."""
    subcommand = line.split()[0]
    row = {"log_object_name": subcommand, "log_ret_code": "0"}
    messages = [("warn", "WARNING: as always."), ("print", f"Said: {line}")]
    if code != 1:
        messages.append(("error", refusal))
    log = [row | {"log_type": kind, "log_message": message} for kind, message in messages]
    log.append(row | {"log_type": "status", "log_message": "", "log_ret_code": str(code)})
    report = {"report": ["x" * size]} if subcommand == "fullreport" else {}
    reports.write(f"  {json.dumps(report | {'log': log})}\n")
    reports.flush()


def did(line: str) -> None:
    note(f"did {line}")


def die_before(line: str, reports: TextIO) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(line: str, reports: TextIO) -> None:
    did(line)
    os.kill(os.getpid(), signal.SIGKILL)


def cut(line: str, reports: TextIO) -> None:
    did(line)
    reports.write('  {"log": [')
    reports.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def garble(line: str, reports: TextIO) -> None:
    did(line)
    reports.write('  {"log": [')
    reports.flush()


def other(line: str, reports: TextIO) -> None:
    did(line)
    answer("lvrename", reports)


def silent(line: str, reports: TextIO) -> None:
    did(line)


def much(line: str, reports: TextIO) -> None:
    did(line)
    answer(line, reports, size=MUCH)


def refuse(line: str, reports: TextIO) -> None:
    answer(line, reports, code=5)


def puzzle(line: str, reports: TextIO) -> None:
    """Refuse in unknown words."""
    answer(line, reports, code=5, refusal="Something was not as it should be.")


def starve(line: str, reports: TextIO) -> None:
    answer(line, reports, code=5, refusal="Couldn't allocate memory for a volume.")


def chatter(line: str, reports: TextIO) -> None:
    def say() -> None:
        os.write(1, b"what nobody asked for\n")
        note("chattered")

    usual(line, reports)
    threading.Timer(0.1, say).start()


def stop(line: str, reports: TextIO) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    did(line)
    answer(line, reports)


def hang(line: str, reports: TextIO) -> None:
    note("hangs")
    time.sleep(60)


def wait_for_lock(line: str, reports: TextIO) -> None:
    """As lvm2 does that waits for a lock: TERM has it give that up, and live."""
    given_up = []
    before = signal.signal(signal.SIGTERM, lambda *_: given_up.append(1))
    note("hangs")
    while not given_up:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, before)
    answer(line, reports, code=5)


def hold_lock(line: str, reports: TextIO) -> None:
    """As lvm2 does that holds a lock: TERM waits until it lets go."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note("hangs")
    while not (HERE / "let go").exists():
        time.sleep(0.01)
    did(line)
    answer(line, reports, size=MUCH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def usual(line: str, reports: TextIO) -> None:
    did(line)
    answer(line, reports)


STARTS = {"no-shell", "mute"}


def shell() -> None:
    """Read commands, and do with each what is planned."""
    start = planned("start")
    note(f"shell {os.getpid()}")
    if start == "no-shell":
        sys.stderr.write("Please supply an LVM command.\n")
        sys.exit(3)
    if start == "mute":
        time.sleep(60)
    with os.fdopen(int(os.environ["LVM_REPORT_FD"]), "w") as reports:
        for line in lines():
            action: Callable[[str, TextIO], None] = globals()[planned("command")]
            action(line, reports)


if __name__ == "__main__":
    process(sys.argv[1:]) if sys.argv[1:] else shell()
