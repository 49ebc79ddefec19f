"""Images for a cluster in the lab, of compiled programs and Debian packages. Nothing is pulled.

An image of one program has that program alone, as the sidecars' own images have. What Kubernetes'
tests want is served by stand-ins: agnhost, and Debian's busybox and coreutils, in one layer.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vagrant import lab_host
from vagrant.steps import Step

PAUSE = "registry.k8s.io/pause:lab"
_RELEASE = "bookworm"
# Packages of the tests' stand-ins, whose pods use dd with oflag=nocache, mkfs and mount. The shell
# is bash: a test's loop counts by `let`, which dash lacks, and busybox's shell runs its own dd.
_PACKAGES = ("bash", "busybox-static", "coreutils", "e2fsprogs", "mount", "util-linux")
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """One image: its names, and how its containers start; its files are its archive's layer."""

    names: Sequence[str]
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def write_archive(target: Path, images: Iterable[Image], files: Mapping[str, Path]) -> None:
    """Write images that share one layer into an archive as `docker save` makes it.

    `files` has for each path in the layer the file or folder that is put there. containerd reads
    such archives by `ctr images import`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    layer, part = target.with_suffix(".layer"), target.with_suffix(".part")
    with tarfile.open(layer, "w") as packed:
        for name, source in sorted(files.items()):
            packed.add(source, arcname=name, filter=_as_root)
    with layer.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    manifest = []
    with tarfile.open(part, "w") as archive:
        archive.add(layer, arcname="layer.tar")
        for number, image in enumerate(images):
            name = f"config-{number}.json"
            _add_text(archive, name, json.dumps(_config(image, digest)))
            manifest.append({"Config": name, "RepoTags": [*image.names], "Layers": ["layer.tar"]})
        _add_text(archive, "manifest.json", json.dumps(manifest))
    layer.unlink()
    part.rename(target)


def make_stand_ins(making: Step, target: Path, agnhost: Path, names: Sequence[str]) -> None:
    """Make one archive of the images that Kubernetes' tests want, and of the pods' pause.

    `names` are those that `e2e.test --list-images` prints and that pods of the chosen tests use.
    """
    root = target.with_suffix(".root")
    lab_host.remove_tree(root)
    include = f"--include={','.join(_PACKAGES)}"
    making.run(
        *lab_host.as_root("unshare", "--mount", "mmdebstrap", "--mode=root", "--variant=extract"),
        *("--format=directory", include, "--dpkgopt=path-exclude=/usr/share/*", _RELEASE, root),
    )
    (root / "bin" / "sh").symlink_to("bash")
    programs = ("bin", "sbin", "usr/bin", "usr/sbin")
    there = {one.name for folder in programs for one in (root / folder).glob("*")}
    busybox = root / "bin" / "busybox"
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True)
    for name in applets.stdout.split():
        if name not in there:
            (root / "bin" / name).symlink_to("busybox")
    shutil.copy2(agnhost, root / "agnhost")
    for folder in ("dev", "etc", "proc", "sys", "tmp", "mnt"):
        (root / folder).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    is_agnhost = [one for one in names if "agnhost" in one]
    others = [one for one in names if one not in is_agnhost]
    mark = {"carver.lab/stand-in": "agnhost and Debian packages"}
    images = [
        Image(is_agnhost, entrypoint=["/agnhost"], command=["pause"], labels=mark),
        Image(others, command=["/bin/sh"], labels=mark),
        Image([PAUSE], entrypoint=["/bin/busybox", "tail", "-f", "/dev/null"], labels=mark),
    ]
    files = {one.name: one for one in root.iterdir()}
    write_archive(target, [one for one in images if one.names], files)
    lab_host.remove_tree(root)


# A containerd of its own, on this machine, imports archives and ends. What it mounts while it
# unpacks a layer is gone with its namespace of mounts, and it is gone with its namespace of
# processes, also where this shell fails or is killed.
_IMPORT = """\
containerd=$1 ctr=$2 root=$3 socket=$4/socket
shift 4
"$containerd" --root "$root" --state "${socket%/*}" --address "$socket" --config /dev/null &
until "$ctr" --address "$socket" version >/dev/null 2>&1; do
    sleep 0.2
    kill -0 $!
done
for archive; do
    "$ctr" --address "$socket" --namespace k8s.io images import --snapshotter overlayfs "$archive"
done
kill $!
wait $! || :
"""


def make_store(
    making: Step, target: Path, containerd: Path, ctr: Path, archives: Sequence[Path]
) -> None:
    """Make a folder that is containerd's store, with the images of some archives in it."""
    lab_host.remove_tree(target)
    state = target.with_suffix(".state")
    alone = ("unshare", "--mount-proc", "--pid", "--fork", "--kill-child")
    words = (*alone, "sh", "-ec", _IMPORT, "sh", containerd, ctr, target, state)
    making.run(*lab_host.as_root(*words, *archives), timeout_seconds=900)
    lab_host.remove_tree(state)


def _config(image: Image, layer_digest: str) -> dict[str, Any]:
    config: dict[str, Any] = {"Env": [_PATH]}
    if image.entrypoint:
        config["Entrypoint"] = [*image.entrypoint]
    if image.command:
        config["Cmd"] = [*image.command]
    if image.labels:
        config["Labels"] = dict(image.labels)
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        "history": [{"created_by": "vagrant/images.py"}],
    }


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Give a file to root, with one time for all, so that the same files make the same layer."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    return entry


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
