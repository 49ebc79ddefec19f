"""The project's virtual environment, for programs that a shebang starts by the system's Python."""

import importlib.util
import os
import sys
from pathlib import Path

_PYTHON = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"


def enter() -> None:
    """Start this program again by the virtual environment's Python, unless that runs it already."""
    if not _PYTHON.exists():
        if importlib.util.find_spec("cryptography") is None:
            sys.exit("this Python has no module cryptography: run `make venv`")
    elif Path(sys.prefix).resolve() != _PYTHON.parents[1].resolve():
        os.execv(_PYTHON, [str(_PYTHON), *sys.argv])  # noqa: S606
