#!/usr/bin/env python3
"""Gather what users are given, in dist/release: `make release`, with the images that are in dist.

    carver-VERSION-ARCH.tar          for a cluster without a registry: image, chart, manifests
    carver-VERSION-ARCH.oci.tar      the image alone, an OCI archive
    carver-VERSION-ARCH.spdx.json    what is in it
    carver-VERSION.tgz               the chart, as `helm package` would make it
    carver-VERSION-SET.yaml          manifests: deploy/kubernetes
    INSTALL.md, NOTES.md             docs/install.md and CHANGELOG.md, of each the section
    IMAGES                           each image's name, platform and digest
    SHA256SUMS                       of all others, written last

VERSION is pyproject.toml's. At a commit without the tag vVERSION it has the commit behind it, as
in 0.2.0+g1a2b3c4, and `.dirty` if files differ. Chart, manifests, images and tag must be of that
version, the images of that commit. Times are the commit's, or SOURCE_DATE_EPOCH: the same images
give the same bytes. Nothing is signed: CONTRIBUTING.md has the commands.
"""

import fnmatch
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(ROOT))

from deploy.image import build_image as image  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "carver"
MANIFESTS = ROOT / "deploy" / "kubernetes"
RELEASE = image.DIST / "release"
# The heading in docs/install.md that becomes INSTALL.md.
INSTALL = "### Without a registry"


class Refused(Exception):
    """The release cannot be made as things are; the message says what to do."""


@dataclass(frozen=True)
class Image:
    """What an OCI archive says of the one image in it."""

    archive: Path
    name: str
    digest: str
    architecture: str
    revision: str


def main() -> int:
    """Write dist/release; 0 is success."""
    try:
        project = str(image.project()["version"])
        revision = image.revision()
        tags = image.git("tag", "--points-at", "HEAD").split()
        version = version_of(project, tags, revision)
        moment = int(image.created().timestamp())
        gather(image.DIST, RELEASE, project, version, revision, moment)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"release.py: cannot ask git: {error}", file=sys.stderr)
        return 1
    except Refused as refused:
        print(f"release.py: {refused}", file=sys.stderr)
        return 1
    for path in sorted(RELEASE.iterdir()):
        print(f"{path.stat().st_size / 1e6:7.1f} MB  {path.name}")
    print((RELEASE / "IMAGES").read_text(), end="")
    return 0


def version_of(project: str, tags: Iterable[str], revision: str) -> str:
    """The release's version, by PEP 440; Refused if a tag contradicts it.

    `tags` are those of the commit, `revision` is the commit, with `.dirty` if files differ.
    """
    commit, _, dirty = revision.partition(".")
    named = [tag for tag in tags if re.match(r"v\d", tag)]
    if not named:
        return f"{project}+g{commit[:7]}" + (".dirty" if dirty else "")
    if named != [f"v{project}"]:
        raise Refused(
            f"cannot release {', '.join(named)}: pyproject.toml has {project};"
            f" tag this commit v{project} alone, or change the version"
        )
    if dirty:
        raise Refused(f"cannot release {named[0]}: files differ from the commit; commit them")
    return project


def gather(
    dist: Path, target: Path, project: str, version: str, revision: str, moment: int
) -> None:
    """Make the release in `target` of the images in `dist`; Refused before anything is written.

    `project` is the version that everything must have, `version` the release's, `revision` the
    commit that the images must be of, and `moment` the time of every file, in seconds.
    """
    found = images(dist, project)
    require_one_version(project, versions(found))
    for one in found:
        if one.revision != revision:
            raise Refused(
                f"cannot release {one.archive.name}: it is of commit {one.revision or 'unknown'},"
                f" this is {revision}; build it anew, or remove it"
            )
    changelog = (ROOT / "CHANGELOG.md").read_text()
    install = section((ROOT / "docs" / "install.md").read_text(), INSTALL, "docs/install.md")
    texts = {
        "NOTES.md": notes(changelog, version, project),
        "INSTALL.md": install.replace(INSTALL, f"# Carver {version} without a registry").replace(
            f"carver-{project}", f"carver-{version}"
        ),
        "IMAGES": "".join(f"{one.name} linux/{one.architecture} {one.digest}\n" for one in found),
    }

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name, text in texts.items():
        (target / name).write_text(text)
    chart = target / f"carver-{version}.tgz"
    write_chart(CHART, chart, moment)
    sets = {path.name: path for path in sorted(MANIFESTS.glob("*.yaml"))}
    for name, path in sets.items():
        shutil.copyfile(path, target / f"carver-{version}-{name}")
    inside = {chart.name: chart, **{name: target / name for name in texts}}
    for path in sorted(MANIFESTS.rglob("*.yaml")):
        inside[f"manifests/{path.relative_to(MANIFESTS)}"] = path
    for one in found:
        stem = f"carver-{version}-{one.architecture}"
        shutil.copyfile(one.archive, target / f"{stem}.oci.tar")
        contents = one.archive.with_name(one.archive.name.replace(".oci.tar", ".spdx.json"))
        shutil.copyfile(contents, target / f"{stem}.spdx.json")
        bundled = {**inside, f"{stem}.spdx.json": contents}
        write_bundle(one.archive, bundled, f"carver-{version}", target / f"{stem}.tar", moment)
    (target / "SHA256SUMS").write_text(checksums(target))


def images(dist: Path, project: str) -> list[Image]:
    """The images of this version in `dist`; Refused without one."""
    found = [
        read_image(path)
        for architecture in image.MACHINES
        if (path := dist / f"carver-{project}-{architecture}.oci.tar").exists()
    ]
    if not found:
        raise Refused(f"cannot release {project}: {dist} has no image of it; run `make image`")
    return found


def read_image(archive: Path) -> Image:
    """What the archive says of its image."""
    with tarfile.open(archive) as content:

        def load(name: str) -> Any:
            file = content.extractfile(name)
            if file is None:
                raise Refused(f"cannot release {archive.name}: {name} in it is no file")
            return json.load(file)

        def blob(digest: str) -> Any:
            return load(f"blobs/{digest.replace(':', '/')}")

        [manifest] = load("index.json")["manifests"]
        config = blob(blob(manifest["digest"])["config"]["digest"])
    return Image(
        archive,
        manifest["annotations"]["io.containerd.image.name"],
        manifest["digest"],
        config["architecture"],
        config["config"].get("Labels", {}).get("org.opencontainers.image.revision", ""),
    )


def versions(found: Iterable[Image]) -> Iterator[tuple[str, str]]:
    """Where a version is written down, and which."""
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    yield "Chart.yaml, version", str(chart["version"])
    yield "Chart.yaml, appVersion", str(chart["appVersion"])
    for path in sorted(MANIFESTS.glob("*.yaml")):
        text = path.read_text()
        for tag in sorted(set(re.findall(rf"{image.REPOSITORY}:(\S+)", text))):
            yield f"{path.name}, image", tag
        for label in sorted(set(re.findall(r'app\.kubernetes\.io/version: "?([^"\s]+)', text))):
            yield f"{path.name}, labels", label
    for one in found:
        yield f"{one.archive.name}, name", one.name.rpartition(":")[2]


def require_one_version(project: str, found: Iterable[tuple[str, str]]) -> None:
    """Raise Refused if one of the places has another version than pyproject.toml."""
    others = [f"{place} has {version}" for place, version in found if version != project]
    if others:
        raise Refused(
            f"cannot release {project}, which pyproject.toml has: {'; '.join(others)};"
            " change them, run `make manifests` and `make image`"
        )


def notes(changelog: str, version: str, project: str) -> str:
    """The changelog's section of a version, or what is unreleased of one that has no tag.

    If nothing is unreleased, it is the section of the version that is being prepared.
    """
    name = version if version == project else "Unreleased"
    text = section(changelog, f"## [{name}]", "CHANGELOG.md")
    if not text.partition("\n")[2].strip() and name == "Unreleased":
        text = section(changelog, f"## [{project}]", "CHANGELOG.md")
    body = text.partition("\n")[2].strip()
    if not body:
        raise Refused(f"cannot release {version}: CHANGELOG.md says nothing of it")
    return f"# Carver {version}\n\n{body}\n"


def section(text: str, heading: str, document: str) -> str:
    """A heading that begins so, and what follows, up to the next one of its level or above."""
    level = len(heading.partition(" ")[0])
    found = re.search(rf"^{re.escape(heading)}.*?(?=^#{{1,{level}}} |\Z)", text, re.M | re.S)
    if found is None:
        raise Refused(f"cannot release: {document} has no section {heading}")
    return found[0].rstrip() + "\n"


def write_chart(chart: Path, target: Path, moment: int) -> None:
    """Pack a chart for helm: its files below the chart's name, with nothing of this machine."""
    name = yaml.safe_load((chart / "Chart.yaml").read_text())["name"]
    lines = (chart / ".helmignore").read_text().splitlines()
    # Each pattern there is for a name, as none has a slash.
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    files = {}
    for path in sorted(one for one in chart.rglob("*") if one.is_file()):
        inner = path.relative_to(chart)
        if not any(fnmatch.fnmatch(part, one) for part in inner.parts for one in patterns):
            files[f"{name}/{inner}"] = path
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=moment) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        _add(archive, files, moment)


def write_bundle(
    oci: Path, files: Mapping[str, Path], folder: str, target: Path, moment: int
) -> None:
    """Write the image's archive with more files in a folder of their own.

    containerd takes the image that index.json names, and drops what that does not lead to.
    """
    with tarfile.open(oci) as source, tarfile.open(target, "w") as archive:
        for member in source:
            member.pax_headers, member.mtime = {}, moment
            archive.addfile(member, source.extractfile(member) if member.isfile() else None)
        _add(archive, {f"{folder}/{name}": path for name, path in files.items()}, moment)


def _add(archive: tarfile.TarFile, files: Mapping[str, Path], moment: int) -> None:
    """Add files, in the order of their names, as root's and of one time."""
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = len(content), moment, 0o644
        member.uname = member.gname = "root"
        archive.addfile(member, io.BytesIO(content))


def checksums(folder: Path) -> str:
    """The SHA-256 of each file, as sha256sum(1) checks them."""
    return "".join(f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir()))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
