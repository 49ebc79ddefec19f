"""What is installed, pinned and packed is Carver, whole and nothing else."""

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.deb import build_package as deb
from deploy.image import build_image as image
from mount.filesystem import FILE_SYSTEMS

ROOT = Path(__file__).parents[3]
PACKAGES = ["agent", "lvm", "mount", "proto"]


def project() -> dict[str, Any]:
    whole: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return whole


def requirements() -> list[Requirement]:
    pyproject = project()
    extras = pyproject["project"]["optional-dependencies"].values()
    lines = [
        *pyproject["build-system"]["requires"],
        *pyproject["project"]["dependencies"],
        *(line for extra in extras for line in extra),
    ]
    # An extra may name another extra of Carver itself.
    return [one for one in map(Requirement, lines) if one.name != pyproject["project"]["name"]]


def floors() -> dict[str, Version]:
    """Return the lowest version that each bounded requirement admits."""
    return {
        one.name: Version(bound.version)
        for one in requirements()
        for bound in one.specifier
        if bound.operator == ">="
    }


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in pairs}


# Names


def owners(name: str) -> set[str]:
    """Return the distributions that bring a top-level module or package of this name.

    An editable install has no files under that name, only top_level.txt and a finder; another
    installer may leave out top_level.txt. So a distribution owns what either of them tells.
    """
    found: set[str] = set()
    for distribution in metadata.distributions():
        listed = (distribution.read_text("top_level.txt") or "").split()
        files = {file.parts[0].partition(".")[0] for file in distribution.files or []}
        if name in listed or name in files or name in mapped(distribution):
            # The source tree's egg-info and the installed metadata are one distribution.
            found.add(canonicalize_name(distribution.metadata["Name"]))
    return found


def mapped(distribution: metadata.Distribution) -> set[str]:
    """Return the names that a distribution's editable finders map to folders."""
    finders = [
        Path(file.name).stem
        for file in distribution.files or []
        if file.name.startswith("__editable__") and file.suffix == ".py"
    ]
    return {name for finder in finders for name in vars(importlib.import_module(finder))["MAPPING"]}


@pytest.mark.parametrize("name", PACKAGES)
def test_each_top_level_name_is_carver_s_alone_and_of_this_tree(name: str) -> None:
    assert owners(name) == {"carver"}
    assert list(importlib.import_module(name).__path__) == [str(ROOT / name)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("other-1.dist-info/top_level.txt", "proto\n"),
        ("other-1.dist-info/RECORD", "proto/__init__.py,,\n"),
        ("other-1.dist-info/RECORD", "__editable___other_1_finder.py,,\n"),
    ],
    ids=["top_level", "files", "editable"],
)
def test_another_distribution_with_a_name_of_ours_is_noticed(
    file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Name: Other\nVersion: 1\n")
    (tmp_path / "__editable___other_1_finder.py").write_text("MAPPING = {'proto': '/other'}\n")
    (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    assert owners("proto") == {"carver", "other"}


def test_only_the_four_packages_are_named() -> None:
    included = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {one.removesuffix(".*") for one in included} == set(PACKAGES)


def test_package_indexes_refuse_carver() -> None:
    assert "Private :: Do Not Upload" in project()["project"]["classifiers"]
    assert "Private :: Do Not Upload" in metadata.metadata("carver").get_all("Classifier", [])


# Versions


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_pinned_version_satisfies_the_requirement(requirement: Requirement) -> None:
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize(
    ("package", "modules", "pattern"),
    [
        ("protobuf", "*_pb2.py", r"^# Protobuf Python Version: (.+)$"),
        ("grpcio", "*_pb2_grpc.py", r"^GRPC_GENERATED_VERSION = '(.+)'$"),
    ],
)
def test_the_floor_is_what_the_generated_modules_demand(
    package: str, modules: str, pattern: str
) -> None:
    for module in (ROOT / "proto").glob(modules):
        [demanded] = re.findall(pattern, module.read_text(), re.M)
        assert floors()[package] == Version(demanded), module.name


# The wheel


def test_the_wheel_holds_every_file_of_the_four_packages_and_no_other(tmp_path: Path) -> None:
    # setuptools takes up what an earlier build left in build/, and leaves its own: so, a copy.
    unpacked = tmp_path / "carver"
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, unpacked, symlinks=True, ignore=leave)

    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    subprocess.run([*words, tmp_path / "dist", unpacked], check=True, capture_output=True)

    [wheel] = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packed == {
        str(path.relative_to(unpacked))
        for package in PACKAGES
        for path in (unpacked / package).rglob("*")
        if path.is_file()
    }


# File systems


@pytest.mark.parametrize("fs_type", FILE_SYSTEMS)
def test_a_file_system_is_in_the_lists_that_are_no_python(fs_type: str) -> None:
    package = FILE_SYSTEMS[fs_type].package
    packages = (ROOT / "vagrant/box/packages").read_text().splitlines()
    assert package in packages, f"add {package} to vagrant/box/packages"
    schema = json.loads((ROOT / "deploy/helm/carver/values.schema.json").read_text())
    known = schema["properties"]["storageClasses"]["items"]["properties"]["fsType"]["enum"]
    assert known == ["", *FILE_SYSTEMS], 'write these at "fsType" in values.schema.json'


# The image


@pytest.mark.parametrize(("architecture", "machine"), image.MACHINES.items())
def test_the_image_gets_wheels_for_its_own_processor(
    architecture: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(image, "run", lambda *words: started.extend(map(str, words)))
    monkeypatch.setattr(shutil, "copytree", lambda *_, **__: None)
    image.fetch_wheels(tmp_path, architecture)
    platforms = {word for word in started if word.startswith("--platform=")}
    assert f"--platform=manylinux2014_{machine}" in platforms
    assert all(word.endswith(machine) for word in platforms)


# The Debian package


def test_the_debian_package_is_described_as_dpkg_reads_it(tmp_path: Path) -> None:
    deb.describe(tmp_path)
    lines = (tmp_path / "DEBIAN" / "control").read_text().splitlines()
    control = dict(line.split(": ", 1) for line in lines)
    assert (control["Package"], control["Version"]) == ("carver", project()["project"]["version"])
    assert {"lvm2", "util-linux", "python3 (<< 3.12)"} <= set(control["Depends"].split(", "))
    for name in ("postinst", "prerm", "postrm"):
        script = tmp_path / "DEBIAN" / name
        assert script.stat().st_mode & 0o111
        subprocess.run(["sh", "-n", script], check=True)


def test_the_debian_package_s_command_sees_its_own_folder_only(tmp_path: Path) -> None:
    # The wheels that are there stand for those that are downloaded.
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carver-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("agent/__init__.py", "")
    deb.fill(tmp_path / "root", wheels)
    assert (tmp_path / "root/usr/lib/carver/agent/__init__.py").exists()
    unit = (tmp_path / "root/lib/systemd/system/carver.service").read_text()
    assert "ExecStart=/usr/bin/carver serve" in unit
    launcher = (tmp_path / "root/usr/bin/carver").read_text()
    assert launcher.startswith("#!/usr/bin/python3 -I\n")
    assert f'sys.path.insert(0, "{deb.LIBRARY}")' in launcher
