"""Install Carver's wheel into the guest's virtual environments. Runs in the guest.

pip does the same, with all its checks, but an emulated processor needs many seconds to start it.
The service gets the wheel; the tests' environment gets the wheel's metadata and a path to the
copied tree, so that tests always see the files as they are.
"""

import base64
import configparser
import hashlib
import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

_SCRIPT = """\
#!{python}
import sys

from {module} import {function}

sys.exit({function}())
"""


def install(wheel: Path, environment: Path, tree: Path | None) -> None:
    """Put the wheel into an environment; with a tree, its metadata and a path to the tree."""
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    remove_old(site)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if tree is None or ".dist-info/" in name]
        archive.extractall(site, members)
    metadata = next(site.glob("carver-*.dist-info"))
    (metadata / "INSTALLER").write_text("carver-lab\n")
    written = [site / name for name in members if not name.endswith("/")]
    if tree is not None:
        written.append(site / "carver.pth")
        written[-1].write_text(f"{tree}\n")
    else:
        written += write_scripts(metadata / "entry_points.txt", environment / "bin")
    write_record(metadata / "RECORD", site, [*written, metadata / "INSTALLER"])


def remove_old(site: Path) -> None:
    """Remove what an earlier wheel installed, byte code included."""
    for metadata in site.glob("carver-*.dist-info"):
        for line in (metadata / "RECORD").read_text().splitlines():
            path = site / line.split(",")[0]
            path.unlink(missing_ok=True)
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        shutil.rmtree(metadata)


def write_scripts(entry_points: Path, folder: Path) -> list[Path]:
    """Write the programs that the wheel declares."""
    declared = configparser.ConfigParser()
    declared.read(entry_points)
    scripts = []
    for name, target in declared["console_scripts"].items():
        module, _, function = target.partition(":")
        script = folder / name
        text = _SCRIPT.format(python=folder / "python", module=module, function=function)
        script.write_text(text)
        script.chmod(0o755)
        scripts.append(script)
    return scripts


def write_record(record: Path, site: Path, written: list[Path]) -> None:
    """List what was installed, as the next installer, this one or pip, expects it."""
    lines = [f"{record.relative_to(site)},,"]
    for path in written:
        if path == record:
            continue
        content = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{os.path.relpath(path, site)},sha256={digest},{len(content)}")
    record.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path("/opt/carver/venv"), tree=None)
    install(Path(sys.argv[1]), Path("/opt/carver/test-venv"), tree=Path("/carver"))
