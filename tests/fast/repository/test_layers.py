"""Who may import whom (docs/design.md), read from the source."""

import ast
import functools
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from floors import FLOORS

ROOT = Path(__file__).parents[3]
PACKAGES = ("agent", "lvm", "mount", "proto")


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


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for package in PACKAGES for path in modules(package)}


def imported_modules(name: str) -> set[str]:
    """The application's modules that a module imports, or out of which it imports a name."""
    found = set()
    for one in imports(MODULES[name]):
        known = one if one in MODULES else one.rpartition(".")[0]
        found |= {known} & MODULES.keys() - {"agent"}
    return found


def floor_of(name: str) -> int | None:
    for number, rooms in enumerate(FLOORS):
        if any(f"{name}.".startswith(f"{room}.") for room in rooms):
            return number
    return None


def test_every_module_is_on_a_floor() -> None:
    outside = {name for name in MODULES if floor_of(name) is None}
    assert outside == {"agent", "agent.__main__", *(one for one in outside if "proto" in one)}


@pytest.mark.parametrize("name", sorted(one for one in MODULES if floor_of(one) is not None))
def test_a_module_imports_only_from_its_floor_and_those_below(name: str) -> None:
    own = floor_of(name)
    assert own is not None
    above = {one for one in imported_modules(name) if (floor_of(one) or 0) > own}
    assert not above


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: imported_modules(name) for name in MODULES}
    # Raises CycleError with the modules that import each other.
    assert list(graphlib.TopologicalSorter(graph).static_order())


# The operations take requests as records.
GRPC = {"agent/core/codes.py"}
WIRE = {"agent/requests/requests.py"}


@pytest.mark.parametrize(("stranger", "allowed"), [("grpc", GRPC), ("proto", WIRE)])
def test_nothing_below_the_services_names_grpc_or_the_wire(
    stranger: str, allowed: set[str]
) -> None:
    floors = FLOORS[: FLOORS.index(("agent.csi",))]
    below = tuple(f"{room.replace('.', '/')}/" for rooms in floors for room in rooms)
    assert {one for one in importers(stranger) if one.startswith(below)} == allowed


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("sh", {"mount/programs.py"}),
        ("pyudev", {"lvm/udev_events.py"}),
        (
            "prometheus_client",
            {"agent/daemon/node_metrics.py", "agent/extras/controller/controller_metrics.py"},
        ),
        ("ctypes", {"mount/calls.py"}),
        ("psutil", {"mount/mounts.py"}),
        ("rich", {"agent/cli/terminal.py"}),
        ("yaml", {"agent/extras/kubernetes/access.py"}),
        ("shtab", {"agent/cli/main.py"}),
        (
            "subprocess",
            {"proto/generate.py", "mount/programs.py"},
        ),
        ("xxhash", {"agent/extras/streams/form.py"}),
        ("zstandard", {"agent/extras/streams/form.py"}),
        (
            "asyncio",
            {
                f"agent/extras/controller/{one}.py"
                for one in (
                    *("call_records", "enrolment", "health_events", "lists", "nodes", "placement"),
                    *("controller_process", "node_moves", "questions", "router"),
                )
            }
            | {
                f"agent/extras/evacuation/{one}.py"
                for one in (
                    "cluster_view",
                    "evacuation_calls",
                    "evacuator",
                    "lost_claims",
                    "node_inventory",
                )
            },
        ),
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


def test_what_changes_one_group_reads_all_only_where_no_hint_names_it() -> None:
    """A group that does not answer would keep it from another (docs/design.md, invariant 6)."""
    found = [
        path.name
        for path in modules("agent/operations")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) in ("self._reports.fresh", "self._mender.mend")
        and not node.args
    ]
    # Each looks at a hint first.
    assert found == ["inline.py", "replace_disk.py"]


@pytest.mark.parametrize("name", ["agent.volumes.reports", "agent.volumes.report_age"])
def test_what_finds_imports_nothing_of_lvm_that_runs_a_command(name: str) -> None:
    of_lvm = {one for one in imported_modules(name) if one.startswith("lvm.")}
    assert of_lvm <= {"lvm.report", "lvm.names"}


def test_the_logical_volume_of_an_id_is_found_in_one_module() -> None:
    """Elsewhere it is a field of a record: agent/volumes/backing.py."""
    makers = {
        str(path.relative_to(ROOT))
        for path in modules("agent")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Backing", "backing.Backing")
    }
    assert makers == {"agent/volumes/backing.py"}
