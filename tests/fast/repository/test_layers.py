"""Who may import whom (docs/design.md), read from the source."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("agent", "lvm", "mount", "proto")


def places() -> list[str]:
    """The agent's modules, in the order in which the design has them, room by room."""
    table = (ROOT / "docs/design.md").read_text().partition("## Modules")[2].partition("###")[0]
    folder, found = "", []
    for first, second in re.findall(r"^\|([^|]*)\|([^|]*)\|", table, re.M):
        folder = first.strip(" `") or folder
        if second.strip() and folder.split("/")[0] == "agent":
            found.append(f"{folder}/{second.strip(' `')}".replace("/", "."))
    return [*found, "agent.__main__"]


PLACES = places()


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, as `package.module`, wherever the import stands."""
    return tuple(imported(path))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def modules(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]


def importers(name: str) -> set[str]:
    """The modules of the application that import a top-level package, or something in it."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in modules(package)
        if any(one == name or one.startswith(f"{name}.") for one in imports(path))
    }


def test_mechanism_knows_neither_policy_nor_transport_nor_the_other_mechanism() -> None:
    for package, strangers in (
        ("lvm", ("agent", "mount", "proto", "grpc")),
        ("mount", ("agent", "lvm", "proto", "grpc")),
    ):
        for stranger in strangers:
            assert not {one for one in importers(stranger) if one.startswith(f"{package}/")}


@pytest.mark.parametrize("module", PLACES)
def test_a_module_imports_only_rooms_above_its_own_and_what_stands_before_it(module: str) -> None:
    own = (ROOT / module.replace(".", "/")).with_suffix(".py")
    for one in imports(own):
        # The module that is imported, or in which the name is that is imported.
        known = [name for name in PLACES if f"{one}.".startswith(f"{name}.")]
        if known:
            assert PLACES.index(known[0]) < PLACES.index(module), one
        else:
            # A room itself has nothing to import.
            assert one.partition(".")[0] != "agent", one


@pytest.mark.parametrize(
    ("stranger", "rooms"),
    [
        ("grpc", {"codes.py", "csi", "service", "cli"}),
        ("proto", {"requests", "csi", "service", "cli"}),
    ],
)
def test_policy_names_neither_grpc_nor_the_wire(stranger: str, rooms: set[str]) -> None:
    inside = {one.split("/")[1] for one in importers(stranger) if one.startswith("agent/")}
    assert inside == rooms


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("sh", {"lvm/programs.py"}),
        ("pyudev", {"lvm/events.py"}),
        ("prometheus_client", {"agent/service/metrics.py"}),
        (
            "ctypes",
            {"agent/secret.py", "lvm/devicemapper.py", "mount/calls.py", "mount/libblkid.py"},
        ),
        ("psutil", {"mount/users.py"}),
        ("rich", {"agent/cli/terminal.py"}),
        ("yaml", {"agent/cluster/access.py"}),
        ("shtab", {"agent/cli/main.py"}),
        ("subprocess", {"proto/generate.py", "lvm/programs.py", "agent/cli/remote.py"}),
        ("xxhash", {"agent/streams/form.py"}),
        ("zstandard", {"agent/streams/form.py"}),
        ("asyncio", set()),
    ],
)
def test_a_library_is_imported_where_its_idea_lives(library: str, owners: set[str]) -> None:
    assert importers(library) == owners


def test_every_module_says_first_what_it_owns() -> None:
    for package in PACKAGES:
        for path in modules(package):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            assert docstring, path


def programs() -> list[Path]:
    """What is run by its path, and imports agent: by hand, in the guest or by a test."""
    files = [path for folder in ("tests", "vagrant/inside") for path in modules(folder)]
    return [path for path in files if runs(path) and "agent" in rooms(path)]


def runs(path: Path) -> bool:
    return any(isinstance(one, ast.If | ast.Expr) for one in ast.parse(path.read_text()).body[-1:])


def rooms(path: Path) -> list[str]:
    """The top-level packages that a file imports, in its order, but those of Python itself."""
    names = (one.partition(".")[0] for one in imports(path))
    return [one for one in names if one not in sys.stdlib_module_names]


@pytest.mark.parametrize("path", programs(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_program_imports_agent_before_all_that_may_import_grpc(path: Path) -> None:
    assert rooms(path)[0] == "agent"


@pytest.mark.starts_programs
def test_agent_after_grpc_is_refused() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    words = [sys.executable, "-c", "import grpc\nimport agent"]
    ended = subprocess.run(words, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ImportError: import agent before grpc" in ended.stderr
