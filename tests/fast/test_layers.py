"""Who may import whom (docs/design.md), read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "lvm", "mount", "proto")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, as `package.module`, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def modules(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).glob("*.py")) if "_pb2" not in path.name]


def importers(name: str) -> set[str]:
    """The modules of the application that import a top-level package, or something in it."""
    return {
        f"{path.parent.name}/{path.name}"
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


@pytest.mark.parametrize(
    "policy",
    [
        *("diagnosis", "ephemeral", "provision", "snapshots", "access", "wiping", "inventory"),
        *("founding", "holders", "paging", "reclaiming", "growing", "carving", "jobs"),
        *("copying", "contents", "means", "groupsnapshots", "standstill"),
    ],
)
def test_policy_names_neither_grpc_nor_the_wire(policy: str) -> None:
    for stranger in ("grpc", "proto"):
        assert f"agent/{policy}.py" not in importers(stranger)


@pytest.mark.parametrize(
    ("library", "owners"),
    [
        ("sh", {"lvm/command.py"}),
        ("pyudev", {"lvm/events.py"}),
        ("prometheus_client", {"agent/metrics.py"}),
        ("ctypes", {"mount/syscalls.py"}),
        ("psutil", {"mount/users.py"}),
        ("rich", {"agent/screen.py"}),
        ("shtab", {"agent/cli.py"}),
        ("subprocess", {"proto/generate.py"}),
        ("asyncio", set()),
    ],
)
def test_a_library_is_imported_where_its_idea_lives(library: str, owners: set[str]) -> None:
    assert importers(library) == owners


ORDER = (
    "__main__",
    "cli",
    "verbs",
    "manual",
    "screen",
    "overview server",
    "identity controller groupcontroller node interceptor metrics monitor",
    "condition wire status secrets readiness registration ephemeral watching",
    "access provision preflight",
    "copying",
    "groupsnapshots",
    "snapshots standstill",
    "wiping reclaiming growing diagnosis chores",
    "contents holders paging carving means modifying",
    "inventory calls",
    "founding host",
    "config",
    "ids locks log client sockets jobs",
    "errors",
)


def test_the_agent_s_modules_import_downwards_only() -> None:
    level = {name: depth for depth, names in enumerate(ORDER) for name in names.split()}
    for path in modules("agent"):
        if path.stem == "__init__":
            continue
        for one in imports(path):
            package, _, rest = one.partition(".")
            imported = rest.partition(".")[0]
            if package == "agent" and imported in level:
                assert level[path.stem] < level[imported], f"{path.stem} imports {imported}"


def test_every_module_of_the_agent_has_its_place_in_the_order() -> None:
    named = {name for names in ORDER for name in names.split()}
    assert named | {"__init__"} == {path.stem for path in modules("agent")}


def test_every_module_says_first_what_it_owns() -> None:
    for package in PACKAGES:
        for path in modules(package):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            assert docstring, path
