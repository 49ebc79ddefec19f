#!/usr/bin/env python3
"""Find Debian's prometheus and promtool; where they are not installed, unpack them into .cache.

    tests/prometheus/programs.py    print the folder that has both

The package itself would start a service on port 9090, so it is unpacked and not installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".cache" / "prometheus"
NAMES = ("prometheus", "promtool")


def ensure() -> Path:
    """Return the folder that has both programs. Raises CalledProcessError where apt has neither."""
    installed = [shutil.which(name) for name in NAMES]
    if all(installed):
        return Path(str(installed[0])).parent
    if not UNPACKED.is_dir():
        UNPACKED.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=UNPACKED.parent) as folder:
            _unpack(Path(folder))
            # One rename, so that what was interrupted is not taken for both programs.
            (Path(folder) / "usr" / "bin").rename(UNPACKED)
    return UNPACKED


def _unpack(folder: Path) -> None:
    words = ["apt-get", "--quiet", "--quiet", "download", "prometheus"]
    if subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode:
        # On a new machine apt knows no packages yet.
        as_root = [] if os.geteuid() == 0 else ["sudo"]
        subprocess.run([*as_root, "apt-get", "--quiet", "--quiet", "update"], check=True)
        subprocess.run(words, cwd=folder, check=True)
    [package] = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)


if __name__ == "__main__":
    print(ensure())
    sys.exit(0)
