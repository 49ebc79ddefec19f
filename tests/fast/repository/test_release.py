"""A release is whole, of one version and commit, and the same whenever it is made."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import release
from deploy.image import build_image as image

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNTAGGED = f"{PROJECT}+g0123456"
MOMENT = 1_700_000_000


class Dist:
    """A folder with images, of a few bytes each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, architecture: str, tag: str = PROJECT, commit: str = COMMIT) -> str:
        """An image, as deploy/image/build_image.py packs it; its digest."""
        labels = {"org.opencontainers.image.revision": commit}
        blobs: dict[str, bytes] = {}

        def blob(content: Any) -> str:
            raw = json.dumps(content).encode()
            digest = hashlib.sha256(raw).hexdigest()
            blobs[f"blobs/sha256/{digest}"] = raw
            return f"sha256:{digest}"

        config = blob({"architecture": architecture, "config": {"Labels": labels}})
        manifest = blob({"config": {"digest": config}})
        named = {"io.containerd.image.name": f"{image.REPOSITORY}:{tag}"}
        index = {"manifests": [{"digest": manifest, "annotations": named}]}
        stem = f"carver-{PROJECT}-{architecture}"
        with tarfile.open(self.folder / f"{stem}.oci.tar", "w") as archive:
            for name, raw in {"index.json": json.dumps(index).encode(), **blobs}.items():
                member = tarfile.TarInfo(name)
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
        (self.folder / f"{stem}.spdx.json").write_text(json.dumps({"name": stem}))
        return manifest

    def release(self, version: str = PROJECT, target: str = "release") -> Path:
        made = self.folder / target
        release.gather(self.folder, made, PROJECT, version, COMMIT, MOMENT)
        return made


@pytest.fixture
def dist(tmp_path: Path) -> Dist:
    return Dist(tmp_path / "dist")


def contents(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        return {
            one.name: file.read() for one in opened if (file := opened.extractfile(one)) is not None
        }


# The version


def test_the_version_is_the_tag_s() -> None:
    assert release.version_of("0.2.0", ["v0.2.0", "nightly"], COMMIT) == "0.2.0"


@pytest.mark.parametrize(
    ("revision", "version"),
    [(COMMIT, "0.2.0+g0123456"), (f"{COMMIT}.dirty", "0.2.0+g0123456.dirty")],
)
def test_without_a_tag_the_version_has_the_commit(revision: str, version: str) -> None:
    assert release.version_of("0.2.0", ["nightly"], revision) == version


@pytest.mark.parametrize(
    ("tags", "revision", "sentence"),
    [
        (["v0.3.0"], COMMIT, "v0.3.0: pyproject.toml has 0.2.0; tag this commit v0.2.0"),
        (["v0.2.0", "v0.3.0"], COMMIT, "v0.2.0, v0.3.0: pyproject.toml has 0.2.0"),
        (["v0.2.0"], f"{COMMIT}.dirty", "v0.2.0: files differ from the commit"),
    ],
    ids=["another", "two", "dirty"],
)
def test_a_tag_that_does_not_say_what_is_released_is_refused(
    tags: list[str], revision: str, sentence: str
) -> None:
    with pytest.raises(release.Refused, match=re.escape(sentence)):
        release.version_of("0.2.0", tags, revision)


def test_chart_manifests_and_documents_have_the_project_s_version() -> None:
    release.require_one_version(PROJECT, release.versions([]))
    places = [place for place, _ in release.versions([])]
    assert {"Chart.yaml, version", "Chart.yaml, appVersion", "kind.yaml, image"} <= set(places)
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        named = re.findall(r"carver[-_](\d+\.\d+\.\d+)", document.read_text())
        assert set(named) <= {PROJECT}, document.name


def test_another_version_anywhere_is_refused_and_named(
    dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.add("amd64", tag="9.9.9")
    with pytest.raises(release.Refused, match=r"-amd64\.oci\.tar, name has 9\.9\.9; change them"):
        dist.release()

    dist.add("amd64")
    monkeypatch.setattr(release, "versions", lambda _: [("Chart.yaml, version", "0.0.1")])
    with pytest.raises(release.Refused, match=r"Chart\.yaml, version has 0\.0\.1"):
        dist.release()
    assert not (dist.folder / "release").exists()


def test_an_image_of_another_commit_is_refused(dist: Dist) -> None:
    dist.add("amd64")
    dist.add("arm64", commit="f" * 40)
    with pytest.raises(release.Refused, match=r"-arm64\.oci\.tar: it is of commit f+, this is 01"):
        dist.release()
    assert not (dist.folder / "release").exists()


def test_without_an_image_it_is_refused(dist: Dist) -> None:
    with pytest.raises(release.Refused, match="has no image of it; run `make image`"):
        dist.release()


# What is in it


def test_all_of_it_is_there_and_each_checksum_is_right(dist: Dist) -> None:
    digests = {one: dist.add(one) for one in ("amd64", "arm64")}
    made = dist.release()

    stems = [f"carver-{PROJECT}-{one}" for one in digests]
    kinds = [".tar", ".oci.tar", ".spdx.json"]
    assert {path.name for path in made.iterdir()} == {
        *(f"{stem}{kind}" for stem in stems for kind in kinds),
        *(f"carver-{PROJECT}-{path.name}" for path in release.MANIFESTS.glob("*.yaml")),
        *(f"carver-{PROJECT}.tgz", "INSTALL.md", "NOTES.md", "IMAGES", "SHA256SUMS"),
    }
    sums = (made / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in sums} == {
        path.name for path in made.iterdir() if path.name != "SHA256SUMS"
    }
    for line in sums:
        digest, name = line.split("  ")
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    assert (made / "IMAGES").read_text().splitlines() == [
        f"{image.REPOSITORY}:{PROJECT} linux/{one} {digest}" for one, digest in digests.items()
    ]


@pytest.mark.starts_programs
def test_sha256sum_accepts_the_checksums_and_notices_a_change(dist: Dist) -> None:
    dist.add("amd64")
    made = dist.release()
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=made, check=False).returncode == 0
    (made / "NOTES.md").write_text("other")
    assert subprocess.run(check, cwd=made, check=False, capture_output=True).returncode == 1


def test_the_one_file_is_the_image_s_archive_with_the_rest_in_a_folder(dist: Dist) -> None:
    dist.add("amd64")
    made = dist.release(UNTAGGED)

    bundle = contents(made / f"carver-{UNTAGGED}-amd64.tar")
    alone = contents(made / f"carver-{UNTAGGED}-amd64.oci.tar")
    # containerd reads the index and what it leads to.
    assert alone.items() <= bundle.items()
    folder = f"carver-{UNTAGGED}/"
    beside = {name.removeprefix(folder): raw for name, raw in bundle.items() if name not in alone}
    assert all(name.startswith(folder) for name in bundle.keys() - alone.keys())
    chart = f"carver-{UNTAGGED}.tgz"
    assert beside[chart] == (made / chart).read_bytes()
    assert {f"carver-{UNTAGGED}-amd64.spdx.json", "INSTALL.md", "NOTES.md", "IMAGES"} < set(beside)
    for path in release.MANIFESTS.rglob("*.yaml"):
        name = f"manifests/{path.relative_to(release.MANIFESTS)}"
        assert beside[name] == path.read_bytes()


def test_the_chart_is_packed_as_helm_reads_it(dist: Dist) -> None:
    dist.add("amd64")
    packed = contents(dist.release() / f"carver-{PROJECT}.tgz")

    told = yaml.safe_load(packed["carver/Chart.yaml"])
    assert (told["name"], told["version"]) == ("carver", PROJECT)
    there = [path for path in release.CHART.rglob("*") if path.is_file()]
    assert packed == {
        f"carver/{path.relative_to(release.CHART)}": path.read_bytes()
        for path in there
        if path.name != ".helmignore"
    }


def test_what_the_chart_ignores_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "Chart.yaml").write_text("name: small\n")
    (tmp_path / ".helmignore").write_text("# editors'\n.*\n*~\n")
    for name in ("values.yaml", "values.yaml~", ".swap", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    release.write_chart(tmp_path, tmp_path.parent / "small.tgz", MOMENT)
    packed = contents(tmp_path.parent / "small.tgz")
    assert set(packed) == {"small/Chart.yaml", "small/values.yaml"}


def test_two_releases_are_equal_to_the_byte(dist: Dist) -> None:
    dist.add("amd64")
    first = dist.release()
    for path in dist.folder.glob("*.json"):
        path.touch()
    second = dist.release(target="again")
    sums = [(one / "SHA256SUMS").read_bytes() for one in (first, second)]
    assert sums[0] == sums[1]


def test_what_an_earlier_release_left_is_gone(dist: Dist) -> None:
    dist.add("amd64")
    (dist.folder / "release").mkdir()
    (dist.folder / "release" / "carver-0.0.1.tgz").touch()
    assert not (dist.release() / "carver-0.0.1.tgz").exists()


# The texts


CHANGELOG = """\
# Changelog

## [Unreleased]

### Added

- Something new.

## [0.2.0] - 2026-11-26

### Fixed

- Something old.

## [0.1.0] - before
"""


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.2.0", "# Carver 0.2.0\n\n### Fixed\n\n- Something old.\n"),
        ("0.2.0+g1", "# Carver 0.2.0+g1\n\n### Added\n\n- Something new.\n"),
    ],
)
def test_the_notes_are_the_changelog_s_section(version: str, text: str) -> None:
    assert release.notes(CHANGELOG, version, "0.2.0") == text


def test_before_the_tag_the_notes_are_of_the_version_that_is_being_prepared() -> None:
    nothing_new = CHANGELOG.replace("### Added\n\n- Something new.\n\n", "")
    found = release.notes(nothing_new, "0.2.0+g1", "0.2.0")
    assert found == "# Carver 0.2.0+g1\n\n### Fixed\n\n- Something old.\n"


@pytest.mark.parametrize("version", ["0.1.0", "0.3.0"], ids=["empty", "absent"])
def test_a_version_without_notes_is_refused(version: str) -> None:
    with pytest.raises(release.Refused, match=r"CHANGELOG\.md"):
        release.notes(CHANGELOG, version, version)


def test_the_install_notes_can_be_read_alone(dist: Dist) -> None:
    dist.add("amd64")
    text = (dist.release(UNTAGGED) / "INSTALL.md").read_text()
    assert text.startswith(f"# Carver {UNTAGGED} without a registry\n")
    assert f"images import carver-{UNTAGGED}-amd64.tar" in text
    # Files that it would lead to are not there.
    assert "](" not in text


# The program


@pytest.fixture
def run(dist: Dist, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The program, in a repository that has these tags."""

    def act(*tags: str, revision: str = COMMIT) -> int:
        monkeypatch.setattr(image, "revision", lambda: revision)
        monkeypatch.setattr(image, "git", lambda *_: " ".join(tags) or str(MOMENT))
        return release.main()

    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(MOMENT))
    monkeypatch.setattr(image, "DIST", dist.folder)
    monkeypatch.setattr(release, "RELEASE", dist.folder / "release")
    return act


def test_the_program_says_what_it_made_and_why_it_made_nothing(
    run: Callable[..., int], dist: Dist, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("v9.9.9") == 1
    assert capsys.readouterr().err.startswith("release.py: cannot release v9.9.9: pyproject.toml")

    digest = dist.add("amd64")
    assert run(f"v{PROJECT}") == 0
    told = capsys.readouterr().out
    assert f"carver-{PROJECT}-amd64.tar\n" in told
    assert told.endswith(f"linux/amd64 {digest}\n")
