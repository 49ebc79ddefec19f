#!/usr/bin/env python3
"""Build Carver's container image from Debian packages and wheels: `make image`. Runs as root.

    deploy/image/build_image.py                 for this machine's processor
    deploy/image/build_image.py --arch arm64    for another one: qemu-user(1) runs its programs

    dist/carver-<version>-<architecture>.oci.tar    an OCI archive, for containerd, podman, skopeo
    dist/carver-<version>-<architecture>.spdx.json  what is in it, which is in the image too

Nothing is pulled: mmdebstrap makes the root file system, pip installs wheels at the versions of
constraints.txt into a virtual environment in it, umoci writes the image. It has two layers: what
Carver is made of is the upper one, of two megabytes. The lower one is the same, byte for byte, for
as long as Debian's packages and the wheels are, so that a node that gets another Carver need not
fetch and unpack it again.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from email import message_from_string
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(ROOT))

from mount.filesystem import FILE_SYSTEMS  # noqa: E402

WORK = ROOT / ".cache" / "image"
DIST = ROOT / "dist"
REPOSITORY = "localhost/carver"
SUITE = "bookworm"
ENVIRONMENT = "opt/carver"
SBOM = "usr/share/doc/carver/sbom.spdx.json"

# udev is the node's, or there is none; libudev, which Carver asks about sysfs, comes with lvm2.
PACKAGES = (
    *sorted(one.package for one in FILE_SYSTEMS.values()),
    "cryptsetup-bin",
    "lvm2",
    "python3",
    "thin-provisioning-tools",
    # In place of usrmerge, which is only there to make a system what mmdebstrap made it.
    "usr-is-merged",
    "util-linux",
)
# usrmerge, which mmdebstrap takes before it looks at our list, and the whole of Perl, for it.
REMOVED = (
    *("usrmerge", "libfile-find-rule-perl", "libtext-glob-perl", "libnumber-compare-perl"),
    *("perl", "libperl5.36", "perl-modules-5.36"),
)
# Licences stay. xfs_scrub, which Carver never runs, is the only user of ICU's 36 MB; dpkg, and so
# the list of contents, still names libicu.
LEFT_OUT = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/sbin/xfs_scrub*",
    "path-exclude=/usr/lib/*/libicu*",
)
# Debian's name of an architecture, and the kernel's and the wheels'.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# Tools of the machine that builds: program and Debian package.
TOOLS = {"mmdebstrap": "mmdebstrap", "umoci": "umoci"}
# With `arch-test` mmdebstrap sees that emulation works before it begins.
EMULATION = {"arch-test": "arch-test"}
BINFMT = Path("/proc/sys/fs/binfmt_misc")
# pip does not derive older platforms from newer ones when they are named explicitly.
GLIBC = ("2_36", "2_34", "2_31", "2_28", "2_17", "2_12", "2_5")
PYTHON = "3.11"
# What the upper layer has; "*" stands for the version.
SITE = f"{ENVIRONMENT}/lib/python{PYTHON}/site-packages"
OWN = (
    *(f"{SITE}/{name}" for name in ("agent", "lvm", "mount", "proto", "carver-*.dist-info")),
    *(f"{ENVIRONMENT}/bin/carver", SBOM),
)
# Whatever is newer in the lower layer gets this time: Debian 12's first release.
LOWER_TIME = datetime(2023, 6, 10, tzinfo=UTC)
# The image as in a pod: read-only, and no disk; memory where a pod has directories of the node.
AS_A_POD = """\
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount -t sysfs -o ro sysfs "$1/sys"
for folder in dev run tmp var/lib/carver; do mount -t tmpfs tmpfs "$1/$folder"; done
mknod -m 666 "$1/dev/null" c 1 3
mknod -m 666 "$1/dev/urandom" c 1 9
exec chroot "$1" env "PATH=$2:/usr/sbin:/usr/bin:/sbin:/bin" python -
"""


def main() -> int:
    """Build the image; 0 is success."""
    parser = argparse.ArgumentParser(description="Build Carver's container image into dist/.")
    parser.add_argument("--arch", choices=MACHINES, default=native(), help="default: %(default)s")
    architecture = parser.parse_args().arch
    if os.geteuid() != 0:
        print("build_image.py: run it as root: it makes a root file system", file=sys.stderr)
        return 2
    started = time.monotonic()
    # The tree may be edited while the image is made of its copy.
    commit, when = revision(), created()
    ensure_tools(TOOLS)
    if architecture != native():
        ensure_emulated(MACHINES[architecture])
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    stem = f"carver-{project()['version']}-{architecture}"

    fetch_wheels(WORK, architecture)
    root = make_root(WORK / "root", WORK / "wheels", architecture)
    document = json.dumps(sbom(root, stem, when), indent=1) + "\n"
    (root / SBOM).parent.mkdir(parents=True)
    (root / SBOM).write_text(document)
    (DIST / f"{stem}.spdx.json").write_text(document)
    check(root)
    archive = pack(root, DIST / f"{stem}.oci.tar", architecture, when, commit)

    unpacked = int(output("du", "--summarize", "--bytes", str(root)).split()[0])
    print(f"{archive.relative_to(ROOT)}: {archive.stat().st_size / 1e6:.0f} MB", end=", ")
    print(f"unpacked {unpacked / 1e6:.0f} MB, in {time.monotonic() - started:.0f} s")
    shutil.rmtree(WORK)
    return 0


def project() -> dict[str, Any]:
    """The project's table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def run(*words: str | Path, **environment: str) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(word) for word in words], check=True, env={**os.environ, **environment})


def output(*words: str) -> str:
    """What a command that must succeed prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def native() -> str:
    """Debian's name for the architecture of this machine."""
    return output("dpkg", "--print-architecture").strip()


def git(*words: str) -> str:
    """What git prints about this tree; CalledProcessError if it is no repository."""
    # The tree may be another user's.
    return output("git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}", *words)


def created() -> datetime:
    """The time of all that is built: SOURCE_DATE_EPOCH, else the commit's, else now."""
    try:
        seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    except (OSError, ValueError, subprocess.CalledProcessError):
        seconds = int(time.time())
    return datetime.fromtimestamp(seconds, UTC)


def revision() -> str:
    """The commit, with `.dirty` where files differ from it; empty outside a repository."""
    try:
        commit, changes = git("rev-parse", "HEAD").strip(), git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}.dirty" if changes else commit


def ensure_tools(tools: Mapping[str, str]) -> None:
    """Install what builds the image, where it is missing."""
    missing = [package for program, package in tools.items() if shutil.which(program) is None]
    if missing:
        run("apt-get", "--quiet", "update")
        apt = ("apt-get", "--yes", "--quiet", "install", "--no-install-recommends")
        run(*apt, *missing, DEBIAN_FRONTEND="noninteractive")


def ensure_emulated(machine: str) -> None:
    """Have the kernel start programs of another processor by qemu, until it ends (binfmt_misc)."""
    ensure_tools({**EMULATION, f"qemu-{machine}-static": "qemu-user-static"})
    if not (BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT)
    if not (BINFMT / f"qemu-{machine}").exists():
        # Of the package; F: the kernel opens qemu now, so that it is found from any root.
        known = Path(f"/usr/lib/binfmt.d/qemu-{machine}.conf").read_text()
        (BINFMT / "register").write_text(known)


def fetch_wheels(work: Path, architecture: str) -> None:
    """Put into `work`/wheels Carver's own wheel, those that it needs, and pip's."""
    wheels = work / "wheels"
    machine = MACHINES[architecture]
    platforms = [f"--platform=manylinux_{version}_{machine}" for version in GLIBC]
    # setuptools takes up what an earlier build left in build/: so, a copy.
    tree = work / "tree"
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=leave)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, tree)
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar=off"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"),
        *(*platforms, f"--platform=manylinux2014_{machine}", "--dest", str(wheels)),
        *("--constraint", str(ROOT / "constraints.txt"), *project()["dependencies"], "pip"),
    )


def make_root(root: Path, wheels: Path, architecture: str) -> Path:
    """The root file system: Debian's packages, and Carver in an environment of its own."""
    [pip] = wheels.glob("pip-*.whl")
    python = f"/{ENVIRONMENT}/bin/python"
    # Run from its own wheel, pip leaves nothing behind.
    install = f"{python} /wheels/{pip.name}/pip --isolated --disable-pip-version-check install"
    hooks = [
        'mkdir "$1/wheels"',
        f'cp {wheels}/*.whl "$1/wheels"',
        f'chroot "$1" python3 -m venv --without-pip /{ENVIRONMENT}',
        f'chroot "$1" {install} --no-index --no-cache-dir --root-user-action=ignore'
        " --find-links /wheels carver",
        'rm -r "$1/wheels"',
        f'chroot "$1" dpkg --purge {" ".join(REMOVED)}',
        # Mount points of the DaemonSet, so that nothing need be made in a read-only root.
        'mkdir -p "$1/etc/carver" "$1/run/udev" "$1/run/lock/lvm" "$1/run/cryptsetup"'
        ' "$1/var/lib/carver" "$1/var/lib/kubelet"',
        'rm -rf "$1/var/lib/apt" "$1"/var/cache/* "$1"/var/log/* "$1"/var/lib/dpkg/*-old',
        # What names the machine that built it.
        'rm -f "$1/etc/hostname" "$1/etc/resolv.conf"',
    ]
    run(
        # What it mounts is gone with it, also when it is killed.
        *("unshare", "--mount"),
        *("mmdebstrap", "--quiet", "--mode=root", "--variant=essential", "--format=directory"),
        f"--architectures={architecture}",
        *(f"--dpkgopt={option}" for option in LEFT_OUT),
        *("--dpkgopt=force-unsafe-io", f"--include={','.join(PACKAGES)}"),
        *(f"--customize-hook={hook}" for hook in hooks),
        *(SUITE, root),
        SOURCE_DATE_EPOCH=str(int(LOWER_TIME.timestamp())),
    )
    return root


def check(root: Path) -> None:
    """Carver and the programs that it starts are there and start, and no compiler is."""
    programs = (
        (f"/{ENVIRONMENT}/bin/carver", "--version"),
        ("lvm", "version"),
        ("blkid", "--version"),
        ("nsenter", "--version"),
        *((one.program, "-V") for one in FILE_SYSTEMS.values()),
        ("thin_check", "--version"),
        ("cryptsetup", "--version"),
    )
    for words in programs:
        output("chroot", str(root), *words)
    found = [
        name for name in ("cc", "gcc", "pip", "apt-get") if shutil.which(name, path=paths(root))
    ]
    if found:
        raise SystemExit(f"build_image.py: does not belong in the image: {', '.join(found)}")
    subprocess.run(
        ("unshare", "--mount", "sh", "-ec", AS_A_POD, "sh", str(root), f"/{ENVIRONMENT}/bin"),
        input=(ROOT / "deploy" / "image" / "starts.py").read_text(),
        check=True,
        text=True,
    )


def paths(root: Path) -> str:
    """The image's PATH, seen from outside."""
    folders = (f"{ENVIRONMENT}/bin", "usr/local/bin", "usr/sbin", "usr/bin")
    return os.pathsep.join(str(root / folder) for folder in folders)


def sbom(root: Path, name: str, when: datetime) -> dict[str, Any]:
    """What is in the image, as SPDX 2.3: Debian's packages and Python's, with their versions."""
    form = r"${binary:Package}\t${Version}\t${Architecture}\n"
    query = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", "--showformat", form)
    lines = output(*query).splitlines()
    packages = [_deb(*line.split("\t")) for line in lines]
    packages += [_wheel(path) for path in sorted((root / SITE).glob("*.dist-info/METADATA"))]
    about = "SPDXRef-DOCUMENT"
    digest = hashlib.sha256(json.dumps(packages).encode()).hexdigest()
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": about,
        "name": name,
        "documentNamespace": f"urn:carver:sbom:{name}:{digest}",
        "creationInfo": {
            "created": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: carver deploy/image/build_image.py"],
        },
        "packages": packages,
        "relationships": [
            {
                "spdxElementId": about,
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": package["SPDXID"],
            }
            for package in packages
        ],
    }


def _deb(package: str, version: str, architecture: str) -> dict[str, Any]:
    name = package.partition(":")[0]
    locator = f"pkg:deb/debian/{name}@{version}?arch={architecture}&distro={SUITE}"
    return _package("deb", name, version, "NOASSERTION", locator)


def _wheel(path: Path) -> dict[str, Any]:
    told = message_from_string(path.read_text())
    name, version = told["Name"], told["Version"]
    # SPDX wants an expression; older metadata has prose in another field.
    licence = told.get("License-Expression", "NOASSERTION")
    locator = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
    return _package("python", name, version, licence, locator)


def _package(kind: str, name: str, version: str, licence: str, locator: str) -> dict[str, Any]:
    return {
        "SPDXID": f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', name)}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": licence,
        "copyrightText": "NOASSERTION",
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": locator,
            }
        ],
    }


def pack(root: Path, archive: Path, architecture: str, when: datetime, commit: str) -> Path:
    """The root file system as an OCI archive with two layers and a name that containerd knows."""
    about, version = project(), project()["version"]
    layout = WORK / "oci"
    image = f"{layout}:{version}"
    labels = {
        "title": about["name"],
        "description": about["description"],
        "version": version,
        "licenses": about["license"],
        "created": when.isoformat(),
        # deploy/release.py takes no image of another commit.
        "revision": commit,
    }
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", image)
    own = [f"./{path.relative_to(root)}" for pattern in OWN for path in root.glob(pattern)]
    # Of /dev only what a runtime does not make itself, which is nothing.
    others = [f"--exclude={one}" for one in ("./dev/*", *own)]
    for name, words, newest in (
        ("packages", (*others, "."), LOWER_TIME),
        ("carver", tuple(own), when),
    ):
        layer = WORK / f"{name}.tar"
        run(*_same_tar(newest), "-C", root, "-cf", layer, *words)
        history = ("--history.created", newest.isoformat(), "--history.created_by", "make image")
        run("umoci", "raw", "add-layer", *history, "--image", image, layer)
    run(
        *("umoci", "config", "--no-history", "--image", image),
        *("--architecture", architecture, "--os", "linux", "--created", when.isoformat()),
        *("--config.entrypoint", f"/{ENVIRONMENT}/bin/carver", "--config.cmd", "serve"),
        *("--config.stopsignal", "SIGTERM"),
        *("--config.env", f"PATH=/{ENVIRONMENT}/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        # As in systemd/carver.service.
        *("--config.env", "MALLOC_ARENA_MAX=2", "--config.env", "MALLOC_PERTURB_=165"),
        *("--config.env", "GLIBC_TUNABLES=glibc.malloc.tcache_count=0"),
        *(
            f"--config.label=org.opencontainers.image.{key}={value}"
            for key, value in labels.items()
        ),
    )
    run("umoci", "gc", "--layout", layout)
    index = layout / "index.json"
    content = json.loads(index.read_text())
    [manifest] = content["manifests"]
    # The name under which containerd's import files it; umoci knows only tags.
    manifest["annotations"]["io.containerd.image.name"] = f"{REPOSITORY}:{version}"
    index.write_text(json.dumps(content))
    names = ("oci-layout", "index.json", "blobs")
    run(*_same_tar(when), "-C", layout, "-cf", archive, *names)
    return archive


def _same_tar(newest: datetime) -> tuple[str, ...]:
    """A tar that writes the same bytes of the same files; none is newer than a time."""
    return (
        *("tar", "--sort=name", "--numeric-owner", "--format=posix", "--xattrs"),
        *("--pax-option=delete=atime,delete=ctime", f"--mtime=@{int(newest.timestamp())}"),
        "--clamp-mtime",
    )


if __name__ == "__main__":
    sys.exit(main())
