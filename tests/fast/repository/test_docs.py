"""What users read is true of the code: names, codes, links."""

import argparse
import io
import json
import re
import shlex
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import chart_values
import jsonschema
import manifest
import modules
import pytest
import yaml
from chart import documented as documented_values
from chart.documented import at
from cluster import record
from error_classes import EVERY, code_of
from floors import FLOORS
from rich.console import Console

import agent.core.errors
import lvm.lvm_errors
import mount.mount_errors
from agent.cli import main as cli
from agent.cli import terminal
from agent.cli.status import Class, Group, Overview, Pool, Snapshot, Volume
from agent.core import codes, tag
from agent.daemon.host import Host
from agent.requests.parameters import INLINE, LIMITS, MUTABLE, PREFIX, STORAGE_CLASS
from agent.settings import classes, settings
from lvm import layout, tuning
from lvm.devicemapper import TARGETS
from mount import filesystem, kernel, options

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MIB = 1 << 20


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def coded(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    [found] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    return str(found)


def first_cells(text: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.M))


# Configuration


@pytest.mark.parametrize(
    ("document", "heading", "names"),
    [
        ("configuration", "Settings", settings.SETTINGS),
        ("configuration", "Device classes", classes.CLASS_KEYS),
        ("configuration", "Groups that Carver makes", settings.GROUP_KEYS),
        (
            "configuration",
            "StorageClass parameters",
            [PREFIX + row.key for row in set(STORAGE_CLASS) - set(LIMITS)],
        ),
        (
            "configuration",
            "VolumeAttributesClass parameters",
            [PREFIX + row.key for row in MUTABLE],
        ),
        ("volumes", "Attributes", [PREFIX + row.key for row in set(INLINE) - set(STORAGE_CLASS)]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_every_key_is_documented_and_no_other(
    document: str, heading: str, names: Iterable[str]
) -> None:
    assert first_cells(section(text_of(f"docs/{document}.md"), heading)) == set(names)


@pytest.mark.parametrize(
    ("heading", "parsers"),
    [
        ("Settings", {key: one.parse for key, one in settings.SETTINGS.items()}),
        ("Device classes", classes.CLASS_KEYS),
    ],
)
def test_every_value_of_a_choice_is_in_its_key_s_row(
    heading: str, parsers: Mapping[str, Callable[[Any], Any]]
) -> None:
    lines = section(text_of("docs/configuration.md"), heading).splitlines()
    rows = {key: coded(line) for line in lines for key in first_cells(line)}
    missing = {key: allowed(parse) - rows[key] for key, parse in parsers.items()}
    assert {key: one for key, one in missing.items() if one} == {}, "add to docs/configuration.md"
    assert "discard" in allowed(classes.CLASS_KEYS["erase"])


def allowed(parse: Callable[[Any], Any]) -> set[str]:
    """The values that a setting may have, if it is a choice."""
    try:
        parse("?")
    except ValueError as error:
        found = re.fullmatch("one of (.+)", str(error))
        return set(found[1].split(", ")) if found else set()
    return set()


def test_every_layout_has_a_row() -> None:
    rows = section(text_of("docs/volumes.md"), "Layouts")
    assert first_cells(rows) - {"layout"} == set(layout.KINDS), "Layouts in docs/volumes.md"
    for name, kind in layout._KINDS.items():
        if kind.parity:
            assert f"| `{name}` | `stripes` + {kind.parity} | {kind.parity} disk" in rows


@pytest.mark.parametrize("fs_type", filesystem.FILE_SYSTEMS)
def test_each_file_system_is_documented(fs_type: str) -> None:
    known = filesystem.FILE_SYSTEMS[fs_type]
    sizes = section(text_of("docs/configuration.md"), "Sizes")
    assert f"| {fs_type} | {known.minimum_bytes // MIB} MiB | {known.package} |" in sizes

    rows = section(text_of("docs/configuration.md"), "mkfs options").splitlines()
    [row] = [line for line in rows if line.startswith(f"| {fs_type} |")]
    _, _, _, given, merged, _ = row.split("|")
    assert coded(given) == set(f"{known.allowed} {known.flags}".split())
    assert coded(merged) == set(known.merged.split())


def test_every_mount_option_is_documented_and_no_other() -> None:
    rows = section(text_of("docs/configuration.md"), "Mount options").splitlines()
    documented = {line.split("|")[1].strip(): coded(line) for line in rows if line.startswith("|")}
    assert documented["of the mount"] == set(kernel.ATTRIBUTES)
    assert documented["of the superblock"] == set(options.SUPERBLOCK)
    assert documented["of SELinux"] == {options.CONTEXT}
    for fs_type, known in filesystem.FILE_SYSTEMS.items():
        assert documented[f"of {fs_type}"] == set(known.mount_options.split())
    for word in documented["the defaults, said aloud"]:
        assert options.parse([word]) == options.Options()


# Tags


def test_every_tag_is_documented_and_no_other() -> None:
    text = section(text_of("docs/design.md"), "Tags")
    keys = {one for name, one in vars(tag).items() if name.isupper() and isinstance(one, str)}
    assert keys - {tag.FULLY, tag.BETWEEN} - coded(text) == set(), "Tags in docs/design.md"
    of_tuning = {tuning.OWN_MAXIMUM, *(one.tag for one in tuning.SETTINGS)}
    listed = "\n".join(re.findall(r"^- (`[^:]+):", text, re.M))
    assert coded(listed) - keys - of_tuning == set()


# Errors


def test_every_error_and_code_is_documented_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (\w+) \|", text_of("docs/troubleshooting.md"), re.M)
    assert dict(rows) == {
        f"{kind.__module__.partition('.')[0]}.{kind.__name__}": code_of(kind).name for kind in EVERY
    }, "Every error in docs/troubleshooting.md"
    assert len(rows) == len(dict(rows))
    lines = section(text_of("docs/troubleshooting.md"), "The codes").splitlines()
    explained = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    assert {code.name for _, code in codes.TABLE} <= explained


# The command


def commands() -> set[str]:
    """Every `carver` line that a document tells people to type."""
    lines = {line.strip() for one in DOCUMENTS for line in one.read_text().splitlines()}
    return {
        re.split(r" [<>|] ", line)[0] for line in lines if re.match(r"carver [a-z]+( |$)", line)
    }


@pytest.mark.parametrize("line", sorted(commands()))
def test_a_command_that_is_documented_is_understood(line: str) -> None:
    # argparse ends the process where it does not understand.
    assert cli.parser().parse_args(shlex.split(line)[1:]).run


def test_every_command_is_documented() -> None:
    typed = [shlex.split(line)[1:] for line in commands()]
    for noun, parser in offered(cli.parser()).items():
        assert noun in {words[0] for words in typed} | {"serve"}
        shown = {words[1] for words in typed if words[0] == noun and words[1:]}
        assert set(offered(parser)) <= shown, f"carver {noun}: a line of docs/commands.md"


def offered(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def test_the_pictures_show_what_the_commands_show_today() -> None:
    seen = Overview(
        *("node", "driver", "1", "/socket", True),
        (Class("fast", "nvme", "linear", "ext4", True, 0),),
        (Group("nvme", True),),
        (Pool("pool", "nvme", 0, 0.0, 0.0),),
        (Volume("id", "db", "nvme", 0, "linear", "", "ready", "", (), None, None, ()),),
        (Snapshot("id", "monday", "db", "nvme", 0, 0, 0, 0.0, ()),),
    )
    for picture, shown in (("status", terminal.status(seen)), ("doctor", terminal.doctor(()))):
        out = io.StringIO()
        Console(file=out, width=200).print(shown)
        titles = re.findall(r"[A-Z]{4,}", out.getvalue())
        drawn = re.sub(r"<[^>]*>|&#160;", " ", text_of(f"docs/images/{picture}.svg"))
        assert titles
        assert [one for one in titles if one not in drawn.split()] == []


# What a cluster needs


def cells(text: str) -> list[list[str]]:
    """Return the cells of each row of a page's tables."""
    rows = re.findall(r"^\| (.+) \|$", text, re.M)
    return [[cell.strip() for cell in row.split(" | ")] for row in rows]


def test_every_kernel_module_is_documented_and_no_other() -> None:
    rows = cells(section(text_of("docs/requirements.md"), "Kernel modules"))
    named = [name for row in rows for name in coded(row[0])]
    assert sorted(named) == sorted(
        [*(f"dm-{target}" for target in TARGETS), *filesystem.FILE_SYSTEMS, "dm-mod", "loop"]
    )
    assert {kind.module for kind in layout._KINDS.values()} - {""} <= set(named)


def test_every_port_of_the_manifests_is_documented_and_those_of_the_chart() -> None:
    rows = cells(section(text_of("docs/requirements.md"), "Ports"))
    documented = {int(row[0]): row[-1] for row in rows if row[0].isdigit()}
    manifests = (ROOT / "deploy" / "kubernetes").glob("*.yaml")
    opened = {
        port["containerPort"]
        for file in manifests
        for container in manifest.containers(file)
        for port in container.get("ports", ())
    }
    assert opened <= documented.keys()
    values = yaml.safe_load(documented_values.VALUES.read_text())
    places = [place for place in documented_values.places() if place[-1] == "port"]
    of_values = {holder[key]: place for place in places for holder, key in at(values, place)}
    assert {port for port, value in documented.items() if "`" in value} == of_values.keys()
    for port, place in of_values.items():
        assert f"`{'.'.join(place)}`" in documented[port]


def test_the_controller_s_rights_are_those_of_the_manifest() -> None:
    rows = cells(section(text_of("docs/requirements.md"), "Rights"))
    file = ROOT / "deploy" / "kubernetes" / "container-lvm2.yaml"
    granted = [
        [
            f"`{resource}`",
            f"`{group}`" if group else "core",
            ("the cluster" if kind == "ClusterRole" else "the release's namespace")
            + "".join(f", by the name `{name}`" for name in rule.get("resourceNames", ())),
            ", ".join(rule["verbs"]),
        ]
        for kind in ("ClusterRole", "Role")
        for role in manifest.of_kind(file, kind)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    ]
    assert [row for row in rows if len(row) == 4 and row[0].startswith("`")] == granted


def blocks(document: Path) -> list[str]:
    """Return the blocks of code that a page shows."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", document.read_text(), re.M)
    return [textwrap.dedent(one).lstrip() for one in found]


def manifests_in(document: Path) -> Iterator[dict[str, Any]]:
    """Yield the Kubernetes objects that a page shows whole."""
    for text in blocks(document):
        if text.startswith("apiVersion:"):
            yield from yaml.safe_load_all(text)


def test_the_chart_s_values_that_are_shown_are_values_of_the_chart() -> None:
    schema = json.loads(text_of("deploy/helm/carver/values.schema.json"))
    shown = [text for one in DOCUMENTS for text in blocks(one)]
    files = [one for one in shown if re.match(r"(config: \||pools:)$", one.split("\n")[0])]
    assert len(files) > 2
    for text in files:
        jsonschema.validate(yaml.safe_load(text), schema)


def test_every_file_that_a_command_names_is_there() -> None:
    for document in DOCUMENTS:
        if document.name != "CHANGELOG.md":
            for text in blocks(document):
                for name in re.findall(r"(?<![\w/.-])((?:deploy|tests|vagrant)/[\w./-]+)", text):
                    # A part in capitals is for the reader to replace.
                    is_pattern = any(char.isupper() for char in name)
                    assert is_pattern or (ROOT / name).exists(), f"{document.name}: {name}"


def test_the_objects_that_are_shown_are_as_their_schemas_say(tmp_path: Path) -> None:
    shown = [one for document in DOCUMENTS for one in manifests_in(document)]
    assert {"StorageClass", "PersistentVolumeClaim"} <= {one["kind"] for one in shown}
    file = tmp_path / "shown.yaml"
    file.write_text(yaml.safe_dump_all(shown))
    manifest.check_schemas(file)
    known = {PREFIX + row.key for row in STORAGE_CLASS}
    for one in shown:
        if one["kind"] == "StorageClass":
            assert one["provisioner"] == settings.DRIVER_NAME
            own = {key for key in one["parameters"] if key.startswith(PREFIX)}
            assert own <= known


def test_the_versions_of_kubernetes_that_were_tried_are_those_of_the_trials() -> None:
    tried = {one["kubernetes"].removeprefix("v") for one in record.read()}
    rows = {row[0]: row[1] for row in cells(section(text_of("docs/requirements.md"), "Versions"))}
    assert set(re.findall(r"\d+\.\d+\.\d+", rows["Kubernetes"])) == tried


def test_every_alert_is_documented_with_its_severity_and_what_to_do() -> None:
    document = yaml.safe_load(text_of("deploy/monitoring/alerts.yaml"))
    rules = [rule for one in document["groups"] for rule in one["rules"]]
    rows = cells(section(text_of("docs/metrics.md"), "Alerts"))
    assert [[row[0], *row[1:3], row[-1]] for row in rows if row[0].startswith("`")] == [
        [
            f"`{rule['alert']}`",
            rule["labels"]["severity"],
            rule["for"],
            linked(rule["annotations"]["runbook"]),
        ]
        for rule in rules
    ]


def linked(place: str) -> str:
    """Return a link from docs/metrics.md to a section or page; its text is the heading there."""
    path, hash_sign, anchor = place.partition("#")
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.M)
    [heading] = [one for one in headings if anchor_of(one) == anchor] if anchor else headings[:1]
    here = path.removeprefix("docs/")
    return f"[{heading}]({'' if here == 'metrics.md' else here}{hash_sign}{anchor})"


def test_an_alert_leads_to_the_page_that_the_table_of_runbooks_names() -> None:
    document = yaml.safe_load(text_of("deploy/monitoring/alerts.yaml"))
    pages = {
        rule["alert"]: rule["annotations"]["runbook"]
        for one in document["groups"]
        for rule in one["rules"]
    }
    text = text_of("docs/runbooks/README.md")
    rows = [row for row in cells(text) if len(row) == 2 and "](" in row[0]]
    found = [(name, row[0]) for row in rows for name in re.findall(r"`(Carver\w+)`", row[1])]
    assert sorted(name for name, _ in found) == sorted(pages)
    for name, situation in found:
        first = re.findall(r"\]\(([^)]+)\)", situation)[0]
        place = f"docs/{first[3:]}" if first.startswith("../") else f"docs/runbooks/{first}"
        assert place == pages[name], name


# The rest


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_here_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if fragment:
            assert fragment in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    return {anchor_of(one) for one in re.findall(r"^#+ (.+)$", text, re.M)}


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_no_one_is_told_to_add_a_disk_without_the_size_of_its_metadata_area() -> None:
    """lvm2 would make one of 1 MiB, which bounds the metadata of the whole group."""
    documents = [one for one in DOCUMENTS if "decisions" not in one.parts]
    sources = [one for room in ("agent", "mount") for one in (ROOT / room).rglob("*.py")]
    lines = [line for file in (*documents, *sources) for line in file.read_text().splitlines()]
    told = [line for line in lines if "vgextend" in line]
    assert told
    known = ("--metadatasize", "--restoremissing", "groups.vgextend(")
    assert [line for line in told if not any(option in line for option in known)] == []


def test_every_make_target_that_is_named_exists() -> None:
    lines = {line.split("#")[0].strip() for line in text_of("README.md").splitlines()}
    assert {"make demo", "make test"} <= lines
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of("Makefile"), re.M))
    for document in DOCUMENTS:
        text = document.read_text()
        code = coded(text) | {line for line in text.splitlines() if line.startswith("    ")}
        for line in code:
            if named := re.match(r"\s*make ([a-z0-9-]+)", line):
                assert named[1] in targets, f"{document.name}: make {named[1]}"


def test_the_floors_in_the_design_are_those_that_are_held() -> None:
    rows = [line.split("|") for line in section(text_of("docs/design.md"), "Floors").splitlines()]
    named = [sorted(coded(row[2])) for row in rows if len(row) == 5 and row[1].strip().isdigit()]
    assert named == [sorted(one.replace(".", "/") for one in rooms) for rooms in FLOORS]


def test_the_seams_in_the_design_are_the_parts_of_the_host() -> None:
    parts = typing.get_type_hints(Host).items()
    kinds = {kind.__name__ for name, kind in parts if isinstance(kind, type) and name != "observe"}
    named = coded(section(text_of("docs/design.md"), "Seams"))
    assert kinds <= named
    assert {"Converse", "Host"} <= named


def test_the_error_trees_in_the_design_exist() -> None:
    named = coded(section(text_of("docs/design.md"), "Errors"))
    trees = {one for one in named if re.fullmatch(r"[a-z.]+\.(?:[a-z]+_)?errors", one)}
    assert trees == {
        one.__name__ for one in (agent.core.errors, lvm.lvm_errors, mount.mount_errors)
    }


def test_the_names_in_each_kind_of_change_are_in_the_files_beside_them() -> None:
    for paragraph in text_of("docs/where.md").split("\n\n"):
        files = [ROOT / "docs" / one for one in re.findall(r"\]\(([^)#]+?)\)", paragraph)]
        text = " ".join(one.read_text() for one in files)
        names = {one for one in coded(paragraph) if re.fullmatch(r"[A-Z]\w*|[a-z]+_\w+", one)}
        missing = [one for one in names if not re.search(rf"\b{one}\b", text)]
        assert not files or missing == [], paragraph.partition("\n")[0]


def test_the_page_of_modules_is_as_their_first_lines() -> None:
    assert text_of("docs/modules.md") == modules.page(), "run `make modules`"


def test_the_page_of_the_chart_is_as_the_comments_of_its_values() -> None:
    assert text_of("docs/chart.md") == chart_values.page(), "run `make reference`"


def test_each_module_says_in_its_first_line_what_it_is() -> None:
    every = (
        path.relative_to(ROOT)
        for room in ("agent", "lvm", "mount")
        for path in (ROOT / room).rglob("*.py")
    )
    assert [str(one) for one in every if not modules.first_line(one).endswith((".", ":"))] == []


def test_the_changelog_has_the_present_version() -> None:
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.M)
    assert headings[:2] == ["Unreleased", version]


def test_the_licence_is_whole() -> None:
    licence = text_of("LICENSE")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
