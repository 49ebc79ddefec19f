#!/usr/bin/env python3
"""Build Carver's Debian package from wheels: `make deb`. Needs no root and no debhelper.

    dist/carver_<version>_<architecture>.deb

Everything that Carver imports lies in /usr/lib/carver, outside Python's own path, so that its names
meet no other package's. The service is neither enabled nor started by installing it: without a
configuration it would make a group on a file.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(ROOT))

from deploy.image import build_image as image  # noqa: E402
from mount.filesystem import FILE_SYSTEMS  # noqa: E402

WORK = ROOT / ".cache" / "deb"
LIBRARY = "/usr/lib/carver"
LAUNCHER = f"""\
#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "{LIBRARY}")
from agent.cli.main import main

sys.exit(main())
"""
# The wheels are for one minor version of Python, which is Debian 12's.
DEPENDS = (
    *("python3 (>= 3.11)", "python3 (<< 3.12)", "lvm2", "util-linux", "udev", "e2fsprogs"),
    "libc6 (>= 2.28)",
)
RECOMMENDS = (
    *("cryptsetup-bin", "thin-provisioning-tools"),
    # ext4 is the default.
    *(one.package for fs_type, one in FILE_SYSTEMS.items() if fs_type != "ext4"),
)
DEFAULTS = """\
# Settings of Carver as variables; /etc/carver/config.toml has them as well, and the device classes.
#CARVER_NODE_ID=node-17
#CARVER_METRICS_ADDRESS=127.0.0.1:9898
"""
SCRIPTS = {
    "postinst": """\
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    # Upgraded under a running service: mounts outlive it.
    systemctl try-restart carver.service
fi
""",
    "prerm": """\
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now carver.service
fi
# What Python compiled while Carver ran.
find /usr/lib/carver -name __pycache__ -prune -exec rm -r {} +
""",
    "postrm": """\
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
""",
}


def main() -> int:
    """Build the package; 0 is success."""
    shutil.rmtree(WORK, ignore_errors=True)
    root = WORK / "root"
    (root / "DEBIAN").mkdir(parents=True)
    image.DIST.mkdir(exist_ok=True)
    architecture = image.native()
    image.fetch_wheels(WORK, architecture)
    fill(root, WORK / "wheels")
    describe(root)
    package = image.DIST / f"carver_{image.project()['version']}_{architecture}.deb"
    image.run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, package)
    shutil.rmtree(WORK)
    return 0


def fill(root: Path, wheels: Path) -> None:
    """Put everything where it is to be installed."""
    library = root / LIBRARY.lstrip("/")
    for wheel in sorted(wheels.glob("*.whl")):
        if not wheel.name.startswith("pip-"):
            # A wheel is an archive of what it installs (PEP 427), but for a folder that none has.
            with zipfile.ZipFile(wheel) as content:
                content.extractall(library)
    if found := list(library.glob("*.data")):
        raise SystemExit(f"build_package.py: only pip can install {', '.join(map(str, found))}")
    program = _write(root / "usr/bin/carver", LAUNCHER, 0o755)
    unit = (ROOT / "systemd" / "carver.service").read_text()
    _write(
        root / "lib/systemd/system/carver.service",
        unit.replace("/opt/carver/venv/bin/carver", "/usr/bin/carver"),
    )
    _write(root / "etc/default/carver", DEFAULTS)
    words = (sys.executable, "-m", "agent", "completion", "bash")
    script = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _write(root / "usr/share/bash-completion/completions" / program.name, script)
    copyright_file = root / "usr/share/doc/carver/copyright"
    _write(copyright_file, (ROOT / "LICENSE").read_text())


def describe(root: Path) -> None:
    """Write what dpkg reads."""
    about = image.project()
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    fields = {
        "Package": "carver",
        "Version": about["version"],
        "Architecture": image.native(),
        "Maintainer": "The Carver maintainers <root@localhost>",
        "Section": "admin",
        "Priority": "optional",
        "Installed-Size": str(size),
        "Depends": ", ".join(DEPENDS),
        "Recommends": ", ".join(RECOMMENDS),
        "Description": about["description"],
    }
    folder = root / "DEBIAN"
    _write(folder / "control", "".join(f"{key}: {value}\n" for key, value in fields.items()))
    _write(folder / "conffiles", "/etc/default/carver\n")
    for name, body in SCRIPTS.items():
        _write(folder / name, f"#!/bin/sh\nset -e\n{body}", 0o755)


def _write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


if __name__ == "__main__":
    sys.exit(main())
