"""The core works where no extra is installed: its contract tests pass without the folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CORE = (
    "test_lifecycle.py",
    "test_controller.py",
    "test_node.py",
    "test_snapshots.py",
)


# The finder of an editable installation would find the folder all the same.
WITHOUT_FINDERS = """\
import sys
from importlib.util import find_spec

sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one).lower()]
if find_spec("agent.extras") is not None:
    sys.exit("an extra can be imported")
"""


@pytest.mark.starts_programs
def test_the_core_s_contract_holds_without_extras(tmp_path: Path) -> None:
    for name in ("agent", "lvm", "mount", "proto", "tests"):
        ignored = shutil.ignore_patterns("extras", "__pycache__") if name == "agent" else None
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FINDERS)
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*words, *(f"tests/contract/{one}" for one in CORE)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert " passed" in ended.stdout
