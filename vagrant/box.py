"""The lab's box: what it is made of, whether that changed, and how it is built."""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from vagrant.lab_host import LAB, NAME, PROJECT, as_root, remove_tree
from vagrant.steps import Step

# Debian's releases that the box can be built of, each with its Python; the first is the default.
RELEASES = {"bookworm": "3.11", "trixie": "3.13"}

KEY = LAB / "key"
TOOLS = LAB / "tools"
_RECIPE = PROJECT / "vagrant" / "box"
# pip does not derive older platforms from newer ones when they are named explicitly.
_GUEST_PLATFORMS = ("2_28", "2_17", "2_12", "2_5")


class BoxError(Exception):
    """The box cannot be built as it was asked for."""


def release() -> str:
    """Name the Debian release to build the box of; raises BoxError for one that is not known."""
    chosen = os.environ.get("CARVER_LAB_RELEASE") or next(iter(RELEASES))
    if chosen not in RELEASES:
        raise BoxError(f"CARVER_LAB_RELEASE is {chosen!r}; known are {', '.join(RELEASES)}")
    return chosen


def folder() -> Path:
    """Return where the built box lies: each release has its own."""
    return LAB / f"box-{release()}"


def wheels() -> Path:
    """Return where the wheels of the guest's Python lie."""
    return LAB / f"wheels-{release()}"


def stock() -> str | None:
    """Name the stock box to use instead of building one."""
    return os.environ.get("CARVER_LAB_BOX")


def make_key() -> None:
    """Make the key pair the guest lets in, once."""
    if not KEY.exists():
        LAB.mkdir(exist_ok=True)
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", NAME, "-f", str(KEY)]
        subprocess.run(words, check=True)


def requirements() -> dict[str, str]:
    """Read what the guest's virtual environments need, as the text of pip's input files."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    carver = project["dependencies"]
    test = project["optional-dependencies"]["test"]
    constraints = (PROJECT / "constraints.txt").read_text()
    return {
        "carver.txt": "\n".join(["-c constraints.txt", *carver, ""]),
        "test.txt": "\n".join(["-c constraints.txt", *carver, *test, ""]),
        "constraints.txt": constraints,
    }


def digest() -> str:
    """Hash everything the box is made of; the box carries it in its name."""
    content = hashlib.sha256()
    for text in requirements().values():
        content.update(text.encode())
    for path in [KEY.with_suffix(".pub"), *sorted(_RECIPE.rglob("*"))]:
        if path.is_file():
            content.update(os.path.relpath(path, PROJECT).encode())
            content.update(path.read_bytes())
    content.update(os.environ.get("CARVER_LAB_MIRROR", "").encode())
    content.update(release().encode())
    return content.hexdigest()[:12]


def name() -> str:
    """Name the box that the present tree asks for."""
    return stock() or f"{NAME}-{release()}-{digest()}"


def is_built() -> bool:
    """Tell whether the cached box is the one that the present tree asks for."""
    stamp = folder() / "name"
    return stamp.exists() and stamp.read_text() == name()


def fetch_wheels(step: Step) -> None:
    """Download the wheels of the guest's Python; the guest itself has no uplink."""
    into = wheels()
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for file_name, text in requirements().items():
        (into / file_name).write_text(text)
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in _GUEST_PLATFORMS]
    step.run(
        *(pip(step), "download", "--dest", into, "--only-binary=:all:", "--progress-bar=off"),
        *("--implementation=cp", f"--python-version={RELEASES[release()]}", *platforms),
        *("--platform=manylinux2014_x86_64", "--requirement", into / "test.txt"),
    )


def build(step: Step) -> None:
    """Build the box and remember what it was made of."""
    into = folder()
    remove_tree(into)
    mirror = os.environ.get("CARVER_LAB_MIRROR", "")
    script = as_root("env", f"CARVER_LAB_MIRROR={mirror}", "bash", _RECIPE / "build.sh")
    step.run(*script, release(), into, wheels(), KEY.with_suffix(".pub"))
    step.run(*as_root("chown", "-R", str(os.getuid()), into))
    (into / "name").write_text(name())


def pip(step: Step) -> Path:
    """Return a pip that can build Carver's wheel, in an environment of the lab's own."""
    program = TOOLS / "bin" / "pip"
    if not program.exists():
        step.run(sys.executable, "-m", "venv", TOOLS)
        constraints = PROJECT / "constraints.txt"
        step.run(program, "install", "--quiet", "--constraint", constraints, "setuptools")
    return program
