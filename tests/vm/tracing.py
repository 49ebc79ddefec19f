"""Which processes the installed service starts, as strace(1) sees it."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def traced(pid: int, log: Path, *options: str) -> Iterator[list[str]]:
    """The lines in which a process and its children start processes, once it is over."""
    lines: list[str] = []
    words = ["strace", "--follow-forks", "--trace=process", f"--output={log}", f"--attach={pid}"]
    with subprocess.Popen([*words, *options], stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        assert "attached" in tracer.stderr.readline()
        yield lines
        tracer.send_signal(signal.SIGINT)
        tracer.communicate()
    for line in log.read_text().splitlines():
        starts = re.search(r"\b(execve|execveat|fork|vfork|clone|clone3)\(", line)
        if starts and "CLONE_THREAD" not in line:
            lines.append(line)
