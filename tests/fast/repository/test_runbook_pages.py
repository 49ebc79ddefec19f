"""docs/runbooks and docs/situations.md: their form, and each command that they tell people to type.

What runs on a node is run by tests/contract/test_runbooks.py, in marked blocks, or only reads. What
is for kubectl and helm is compared with the committed manifest and the chart.
"""

import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import checks, lab_checks

from agent.cli import main as cli
from agent.core import errors
from agent.extras.transfer.remote import Remote
from lvm import layout
from lvm.layout import Reserve
from lvm.report import Group

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(one for one in (DOCS / "runbooks").glob("*.md") if one.name != "README.md")
# Pages with commands for kubectl and helm, and with names of the chart's values.
DOCUMENTS = [*PAGES, DOCS / "operations.md"]
# Further pages with commands for kubectl.
FURTHER = [
    DOCS / f"{name}.md"
    for name in (
        *("backup", "cluster", "commands", "encryption", "install", "quickstart"),
        *("troubleshooting", "volumes"),
    )
]
SECTIONS = ("Is it this?", "What to do", "Did it work?", "How to go back", "What is tested")
GIB = 1 << 30

# Programs that a line of a document may begin with.
_ON_A_NODE = (
    "lv[a-z]+",
    "vg[a-z]+",
    "pv[a-z]+",
    "mount",
    "umount",
    "mkdir",
    "lsblk",
    "wipefs",
    "blkdiscard",
)
_PROGRAMS = ("carver", "kubectl", "helm", *_ON_A_NODE)
# Commands that change nothing.
_LOOKS = re.compile(
    r"carver (status|doctor|volume (list|show)|snapshot list|orphans|controller status)\b"
    r"(?!.*--delete)|(vgs|lvs|pvs|lsblk)\b|wipefs --no-act |vgcfgrestore --(list|test) "
)
# What no test runs, and why.
_NOT_RUN = {
    # The same as in another page, where it is run.
    "vgextend --metadatasize 80m GROUP /dev/NEW": "group-full.md",
}

# What the runbooks say was tried by hand alone, with lvm2 2.03.16 on loop devices.
_TRIED_BY_HAND = {
    ("cloned-disks.md", "vgcfgbackup --file /root/GROUP.before GROUP"),
    ("cloned-disks.md", "vgchange --activate n GROUP"),
    ("cloned-disks.md", "vgcfgrestore --file /root/GROUP.before GROUP"),
    ("group-full.md", "blkdiscard --zeroout /dev/NEW"),
}

# Pages beside the runbooks with commands for a node.
_CHECKED = [
    DOCS / f"{name}.md"
    for name in ("encryption", "install", "operations", "troubleshooting", "volumes")
]
# By lvm2 2.03.16 on loop devices, or by its manual pages alone, as the page says.
_BY_HAND = "by hand"
_RUNBOOKS = "tests/contract/test_runbooks.py"
# lvm2's and util-linux' commands there, and what runs them.
_RUN = {
    "blkdiscard --zeroout /dev/NEW": _BY_HAND,
    "lvchange --activate n GROUP/pool-CLASS": _RUNBOOKS,
    "lvchange --activate n GROUP/vol-NAME": _RUNBOOKS,
    "lvchange --activate y --ignoreactivationskip GROUP/vol-NAME": _RUNBOOKS,
    "lvchange --addtag carver.givenUp=yes GROUP/LV": "tests/vm/test_repairs.py",
    "lvchange --rebuild /dev/OLD GROUP/LV": _BY_HAND,
    "lvchange --syncaction check GROUP/LV": _BY_HAND,
    "lvconvert --swapmetadata --poolmetadata GROUP/pool-CLASS_meta0 GROUP/pool-CLASS": _BY_HAND,
    "lvconvert --uncache --force GROUP/vol-NAME": _BY_HAND,
    "pvchange --addtag carver.fast /dev/NEW": _BY_HAND,
    "pvchange --metadataignore y /dev/OLD": _BY_HAND,
    "pvcreate --test --uuid UUID --restorefile FILE /dev/OLD": _BY_HAND,
    "pvcreate --uuid UUID --restorefile FILE /dev/OLD": _BY_HAND,
    "pvmove --abort": "tests/contract/test_repairs.py",
    "vgcfgbackup --file /root/GROUP.before GROUP": _BY_HAND,
    "vgcfgrestore --file /etc/lvm/archive/FILE GROUP": _BY_HAND,
    "vgcfgrestore --file FILE GROUP": _BY_HAND,
    "vgchange --yes --config 'global/system_id_source=lvmlocal local/system_id=OLD'"
    ' --systemid "" GROUP': "tests/contract/test_other_nodes.py",
    "vgchange --yes --config global/use_lvmlockd=1 --lock-type none --lockopt force"
    " GROUP": "tests/contract/test_other_nodes.py",
    "vgcreate --metadatasize 80m GROUP-fast /dev/NEW": _BY_HAND,
    "vgcreate --metadatasize 80m hdd /dev/disk/by-id/HDD": _BY_HAND,
    "vgcreate --metadatasize 80m ssd /dev/disk/by-id/SSD": _BY_HAND,
    "vgextend --metadatasize 80m GROUP /dev/NEW1 /dev/NEW2": _BY_HAND,
    "vgmerge GROUP GROUP-fast": _BY_HAND,
    "wipefs --all --backup /dev/NEW": _BY_HAND,
    "lvcreate --activate n --zero n --wipesignatures n --extents COUNT --name recovered GROUP"
    " /dev/DISK:START-END": _BY_HAND,
    "lvchange --activate y GROUP/recovered": _BY_HAND,
    "lvextend --extents +COUNT GROUP/recovered /dev/DISK:START-END": _BY_HAND,
    "lvremove GROUP/recovered": _BY_HAND,
    "blkdiscard --zeroout /dev/GROUP/recovered": _BY_HAND,
}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each line of code in a document, and the name of its marked block; empty if it has none."""
    marked = ""
    for line in text.splitlines():
        if found := re.fullmatch(r"<!-- (.+): (begin|end) -->", line):
            marked = found[1] if found[2] == "begin" else ""
        elif re.match(rf" {{4,}}({'|'.join(_PROGRAMS)})( |$)", line):
            yield line.strip(), marked


def commands(program: str, further: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """The lines that begin with this program, each with the name of its page."""
    return [
        (page.name, line)
        for page in (*DOCUMENTS, *further)
        for line, _ in blocks(page.read_text())
        if line.split()[0] == program
    ]


def manifest() -> list[Mapping[str, Any]]:
    text = (ROOT / "deploy/kubernetes/container-lvm2.yaml").read_text()
    return [one for one in yaml.safe_load_all(text) if one]


# Form


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_says_when_what_whether_and_how_back(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.M)
    assert [one for one in headings if one in SECTIONS] == [*SECTIONS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_is_in_both_lists(page: Path) -> None:
    assert f"({page.name})" in (DOCS / "runbooks" / "README.md").read_text()
    assert f"(runbooks/{page.name}" in (DOCS / "situations.md").read_text()


def test_every_situation_has_an_answer() -> None:
    text = (DOCS / "situations.md").read_text()
    rows = [one for one in text.splitlines() if re.match(r"\| [A-Z]", one)]
    assert len(rows) > 40
    assert [one for one in rows if "](" not in one.split("|")[2]] == []


def test_what_is_said_to_be_tested_exists() -> None:
    every = checks.ALL.keys() | lab_checks.ALL.keys()
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\[([^]]+)\]\(\.\./testing\.md#the-checks\)", text):
            assert set(re.findall("`([a-z-]+)`", link)) <= every, page.name
        for path in re.findall(r"`(tests/[^`]+)`", text):
            assert (ROOT / path).exists(), path


def test_the_alerts_that_are_named_exist() -> None:
    alerts = set(re.findall("alert: (Carver[A-Za-z]+)", _text("deploy/monitoring/alerts.yaml")))
    for page in (*PAGES, DOCS / "runbooks" / "README.md"):
        assert set(re.findall(r"`(Carver[A-Z]\w+)`", page.read_text())) <= alerts, page.name


def _text(path: str) -> str:
    return (ROOT / path).read_text()


# On a node


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_on_a_node_is_run_by_a_test_or_only_looks(page: Path) -> None:
    tests = _text("tests/contract/test_runbooks.py")
    run = set(re.findall(r'(?:runbook|block_of|type_it)\("([^"]+)"\)', tests))
    for line, marked in blocks(page.read_text()):
        if line.split()[0] in ("kubectl", "helm"):
            continue
        is_run = marked in run or line in _NOT_RUN or (page.name, line) in _TRIED_BY_HAND
        assert is_run or _LOOKS.match(line), f"{page.name}: {line}"


def _within_sentences() -> list[str]:
    """The `carver` commands that stand within sentences of the runbooks, some without arguments."""
    texts = [re.sub(r"\s+", " ", one.read_text()) for one in DOCUMENTS]
    return sorted({it for one in texts for it in re.findall(r"`(carver [a-z][^`]+)`", one)})


@pytest.mark.parametrize("line", _within_sentences())
def test_a_command_within_a_sentence_is_understood(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = re.split(r" [<>|] ", line)[0]
    try:
        cli.parser().parse_args(shlex.split(words)[1:])
    except SystemExit:
        said = capsys.readouterr().err
        assert "are required" in said or "expected one argument" in said, said


@pytest.mark.parametrize("page", _CHECKED, ids=lambda page: page.stem)
def test_each_other_command_on_a_node_is_run_by_a_test_or_by_hand(page: Path) -> None:
    """Of the pages beside the runbooks; Carver's own commands have tests of their own."""
    for line, marked in blocks(page.read_text()):
        if line.split()[0] in ("kubectl", "helm", "carver") or marked or _LOOKS.match(line):
            continue
        where = _RUN.get(line)
        assert where, f"{page.name}: {line}"
        assert where == _BY_HAND or (ROOT / where).exists(), where


def test_what_is_run_by_hand_is_still_in_a_page() -> None:
    lines = {line for page in _CHECKED for line, _ in blocks(page.read_text())}
    assert _RUN.keys() <= lines


def test_what_is_run_elsewhere_is_there() -> None:
    for line, name in _NOT_RUN.items():
        found = dict(blocks((DOCS / "runbooks" / name).read_text()))
        assert found[line]


def test_a_claim_or_its_volume_is_deleted_only_where_data_are_kept() -> None:
    """What says `kubectl delete` of claims or PersistentVolumes has them Retain first."""
    for page in PAGES:
        text = page.read_text()
        if found := re.search(r"^ +kubectl delete (persistentvolume|pvc|pv)", text, re.M):
            before = text[: found.start()].replace('"', "").replace(": ", ":")
            assert "persistentVolumeReclaimPolicy:Retain" in before, page.name


_CHECKS = re.compile(
    r"kubectl get .*[pP]olicy|kubectl get persistentvolumeclaim CLAIM .*jsonpath|wipefs --no-act"
    r"|carver .*--dry-run|vgcfgrestore --test|sha256sum --check"
)
_DELETES = re.compile(
    r"kubectl (delete|patch (?!.*Retain)) ?(persistentvolume|pvc|pv|statefulset)|(lv|vg|pv)remove "
    r"|wipefs --all|blkdiscard |vgreduce |vgextend |vgcfgrestore --file|lvconvert "
    r"|carver .*--(delete|finish|yes)"
)


@pytest.mark.parametrize("page", [*DOCUMENTS, *FURTHER], ids=lambda page: page.name)
def test_no_block_has_both_a_check_and_what_depends_on_it(page: Path) -> None:
    """Who pastes a whole block would delete whatever the check says."""
    for found in re.findall(r"(?:^ {4,}.*\n)+", page.read_text(), re.M):
        lines = [line.strip() for line in found.splitlines()]
        first = next((at for at, line in enumerate(lines) if _CHECKS.match(line)), len(lines))
        assert [one for one in lines[first:] if _DELETES.match(one)] == [], page.name


def test_a_released_volume_stays_reserved_for_its_claim() -> None:
    """Without its whole `claimRef` any waiting claim of the class could be given the volume."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        assert '"/spec/claimRef"' not in text, page.name
        assert '"claimRef":null' not in text, page.name


def test_a_statefulset_keeps_its_claims_before_it_is_scaled() -> None:
    for name, step in (("uninstall.md", "4. Scale all"), ("migrate.md", "5. Stop it: scale it")):
        text = (DOCS / "runbooks" / name).read_text()
        assert text.index('"whenScaled":"Retain"') < text.index(step), name


# Where a page has applications stopped, in the words that the pages use.
_SCALES = re.compile(
    r"(?<!are )\b[Ss]cal(?:e|ed|es|ing)\b(?!-)[^.;|#]{0,70}?\bto 0\b|--replicas[ =]0\b"
    r"|\breplicas: 0\b|(?<!nothing )\b[Ss]top (?:the|its|all) (?:pods|users|workload|application)\b"
)
# What must be before it: the rule, its link, or the name of the field with what it does.
_KEEPS = re.compile(r"#scale-to-0\)|^## Scale to 0$|whenScaled", re.M)


def without_its_warning(text: str) -> list[str]:
    """The places of a page that scale to 0 without the warning before them in their section.

    A row of a table is read by itself, and so must have the link itself.
    """
    found = []
    for match in _SCALES.finditer(text):
        row = text[text.rfind("\n", 0, match.start()) + 1 : text.find("\n", match.end())]
        heading = text.rfind("\n## ", 0, match.start()) + 1
        before = row if row.startswith("|") else text[heading : match.end() + 60]
        # The link may have the words as its text, which then come before its target.
        if not _KEEPS.search(before):
            found.append(row.strip())
    return found


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"], ids=lambda page: page.name
)
def test_a_page_that_scales_to_0_warns_that_this_may_delete_claims(page: Path) -> None:
    if "decisions" not in page.parts:
        assert without_its_warning(page.read_text()) == []


def test_the_warning_is_missed_where_it_comes_late_or_in_another_row() -> None:
    late = "## A\n1. Scale to 0 what uses it.\n" + "2. Wait.\n" * 9 + "See [it](x.md#scale-to-0).\n"
    rows = "## A\n| a | [scale to 0](x.md#scale-to-0) |\n| b | scale it to 0 |\n"
    assert without_its_warning(late) == ["1. Scale to 0 what uses it."]
    assert without_its_warning(rows) == ["| b | scale it to 0 |"]
    assert without_its_warning("## A\n[Scale to 0](x.md#scale-to-0) it.\nStop the pods.\n") == []


def test_the_rule_comes_before_the_command_that_scales() -> None:
    text = (DOCS / "operations.md").read_text()
    rule = text[text.index("\n## Scale to 0\n") :]
    steps = ["may delete the data", "whenScaled'", '"whenScaled":"Retain"', "--replicas 0"]
    order = [rule.index(one.removesuffix("'")) for one in steps]
    assert order == sorted(order)


# kubectl and helm

_KINDS = {
    *("persistentvolume", "persistentvolumes", "persistentvolumeclaim", "persistentvolumeclaims"),
    *("statefulset", "statefulsets", "pod", "pods", "node", "nodes", "secret", "csidriver"),
    *("csinodes", "poddisruptionbudgets", "csistoragecapacities", "deployment", "daemonset"),
    *("pvc", "pv", "configmap", "namespace", "volumeattachments", "volumesnapshotcontents"),
    *("clusterrolebinding", "clusterrole", "role", "rolebinding", "serviceaccount"),
    *("poddisruptionbudget", "volumesnapshots", "volumegroupsnapshots", "crd", "secrets"),
    "snapshotmetadataservices",
}
_VERBS = {
    *("get", "delete", "patch", "apply", "describe", "logs", "exec", "rollout", "annotate"),
    *("drain", "cordon", "uncordon", "label", "taint", "scale", "create", "config", "wait", "diff"),
}
# Options, and whether each has a value.
_OPTIONS = {
    "--namespace": True,
    "--selector": True,
    "--field-selector": True,
    "--output": True,
    "--patch": True,
    "--type": True,
    "--filename": True,
    "--container": True,
    "--all-namespaces": False,
    "--ignore-daemonsets": False,
    "--wait": True,
    "--cascade": True,
    "--cert": True,
    "--dry-run": True,
    "--duration": True,
    "--for": True,
    "--from-file": True,
    "--from-literal": True,
    "--ignore-not-found": False,
    "--key": True,
    "--minify": False,
    "--overwrite": False,
    "--raw": False,
    "--replicas": True,
    "--stdin": False,
    "--timeout": True,
    "--tty": False,
}


def parsed(line: str) -> tuple[list[str], dict[str, str]]:
    """The words and the options of a line for kubectl; what `exec` runs is left out."""
    words, found, rest = [], {}, shlex.split(line.removesuffix("\\"), comments=True)[1:]
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if word == ">":
            rest.pop(0)
            continue
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            words.append(word)
            continue
        assert option in _OPTIONS, f"{line}: {option}"
        found[option] = value if equals or not _OPTIONS[option] else rest.pop(0)
    return words, found


@pytest.mark.parametrize(("page", "line"), commands("kubectl", FURTHER))
def test_a_line_for_kubectl_is_understood(page: str, line: str) -> None:
    words, found = parsed(line)
    assert words[0] in _VERBS
    if words[0] in ("get", "delete", "patch", "describe", "annotate"):
        assert {*words[1].split(",")} <= _KINDS
    if "--patch" in found:
        assert json.loads(found["--patch"])
    if found.get("--namespace") == "carver-system":
        _require_known(words, found)


@pytest.mark.parametrize(
    ("page", "line"), [one for one in commands("kubectl", FURTHER) if " -- carver " in one[1]]
)
def test_a_command_of_carver_s_within_a_pod_is_understood(page: str, line: str) -> None:
    del page
    words = re.split(r" [<>|] ", line.partition(" -- carver ")[2])[0]
    cli.parser().parse_args(shlex.split(words))


def _require_known(words: list[str], found: Mapping[str, str]) -> None:
    """Raise AssertionError for an object, container or label that the manifest has not."""
    named = {f"{one['kind'].lower()}/{one['metadata']['name']}": one for one in manifest()}
    # The controller makes these itself.
    made = {"secret/carver-controller", "configmap/carver-controller"}
    # A pod or object that the reader fills in is in capitals.
    objects = [one for one in words[1:] if "/" in one]
    if words[0] == "rollout" and words[2:3] == ["deployment"]:
        objects.append(f"deployment/{words[3]}")
    if words[:1] == ["delete"] and words[1] in ("secret",):
        objects.append(f"secret/{words[2]}")
    for one in objects:
        assert one in named.keys() | made, one
        if "--container" in found and one in named:
            assert found["--container"] in _containers(named[one])
    if "--selector" in found:
        key, _, value = found["--selector"].partition("=")
        templates = [
            one["spec"]["template"] for one in named.values() if "template" in one.get("spec", {})
        ]
        assert value in [one["metadata"]["labels"].get(key) for one in templates]


def _containers(one: Mapping[str, Any]) -> list[str]:
    return [it["name"] for it in one["spec"]["template"]["spec"]["containers"]]


@pytest.mark.parametrize(("page", "line"), commands("helm", [DOCS / "backup.md"]))
def test_a_line_for_helm_names_the_release_and_the_chart(page: str, line: str) -> None:
    words = shlex.split(line.removesuffix("\\"))
    verb = 2 if words[1] == "get" else 1
    assert words[verb] in ("values", "history", "upgrade", "rollback", "uninstall")
    assert words[verb + 1] == "carver"
    assert words[words.index("--namespace") + 1] == "carver-system"
    # Otherwise helm writes a heading before the values, which the chart refuses.
    assert words[1] != "get" or words[words.index("--output") + 1] == "yaml"
    for one in words:
        if one.startswith("deploy/"):
            assert (ROOT / one / "Chart.yaml").exists()


def test_the_values_of_the_chart_that_are_named_exist() -> None:
    values = yaml.safe_load(_text("deploy/helm/carver/values.yaml"))
    # A certificate's name, such as `controller.DRIVER`, is no value.
    named = {
        (page.name, path)
        for page in (*DOCUMENTS, DOCS / "metrics.md", DOCS / "cluster.md")
        for path in re.findall(
            r"`((?:controller|node|sidecars|metrics|networkPolicy|csiDriver)\.(?!lvm\.)[a-z][A-Za-z.]*)[:`]",
            page.read_text(),
        )
    }
    assert ("node-lost.md", "controller.forgetDeletedNodes") in named
    for page, path in named:
        at = values
        for key in path.split("."):
            if key == "NAME":
                break
            assert key in at, f"{page}: {path}"
            at = at[key]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_objects_in_a_page_are_yaml(page: Path) -> None:
    for found in re.findall(r"^( +)apiVersion: .*\n((?:\1.*\n)+)", page.read_text(), re.M):
        text = "\n".join(one[len(found[0]) :] for one in found[1].splitlines())
        for made in yaml.safe_load_all(f"apiVersion: v1\n{text}"):
            assert made["kind"]
            assert made["metadata"]["name"]


def test_the_script_in_place_of_ssh_runs_the_command_in_the_node_s_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "operations.md").read_text()
    [found] = re.findall(r"^    #!/bin/sh\n(?:    .*\n)+", text, re.M)
    stub = """#!/bin/sh
    case "$*" in
        *"get pods"*"spec.nodeName=node-b") echo pod/carver-node-1 ;;
        *"exec --stdin pod/carver-node-1"*)
            while [ "$1" != -- ]; do shift; done
            shift
            exec "$@" ;;
        *) exit 3 ;;
    esac
    """
    for name, script in (("carver-exec", found), ("kubectl", stub)):
        (tmp_path / name).write_text(textwrap.dedent(script).lstrip())
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ssh = [str(tmp_path / "carver-exec")]
    assert Remote("node-b", ssh, ["echo"]).ask('{"said": "two  words"}') == {"said": "two  words"}
    fed = Remote("node-b", ssh, ["cat"]).feed("-", write=lambda send: send(b'{"fed": 1}'))
    assert fed == {"fed": 1}
    with pytest.raises(errors.NodeRefused):
        Remote("node-c", ssh, ["echo"]).ask("{}")


def _node_pods() -> Mapping[str, Any]:
    """The DaemonSet of Carver's pods on the nodes."""
    [found] = (one for one in manifest() if one["kind"] == "DaemonSet")
    return found


def test_a_label_keeps_carver_off_a_node() -> None:
    [line] = (one for _, one in commands("kubectl") if "patch daemonset" in one)
    words, options = parsed(line)
    found = _node_pods()
    assert words[2] == found["metadata"]["name"]
    [change] = json.loads(options["--patch"])
    *path, last = change["path"].split("/")[1:]
    at: Any = found
    for key in path:
        at = at[int(key) if isinstance(at, list) else key]
    assert (change["op"], last) == ("add", "-")
    assert isinstance(at, list)
    assert at[0].keys() == change["value"].keys()
    label = f"{change['value']['key']}={change['value']['values'][0]}"
    assert f"kubectl label node NODE {label}" in [one for _, one in commands("kubectl")]


def test_the_pod_for_lvm2_by_hand_sees_what_carver_s_pod_sees() -> None:
    text = (DOCS / "operations.md").read_text()
    [shown] = re.findall(r"^    apiVersion: v1\n    kind: Pod\n(?:    .*\n)+", text, re.M)
    pod = yaml.safe_load(textwrap.dedent(shown))["spec"]
    template = _node_pods()["spec"]["template"]["spec"]

    def paths(spec: Mapping[str, Any]) -> dict[str, str]:
        sources = {one["name"]: one["hostPath"] for one in spec["volumes"] if "hostPath" in one}
        mounted = spec["containers"][0]["volumeMounts"]
        names = {one["name"]: one["mountPath"] for one in mounted}
        return {path: sources[name]["path"] for name, path in names.items() if name in sources}

    assert paths(pod).items() <= paths(template).items()
    assert {"/dev", "/etc/lvm", "/run/lock/lvm", "/run/udev"} <= paths(pod).keys()
    assert pod["hostIPC"] == template["hostIPC"]


# Numbers


def test_the_sizes_of_cow_stores_are_those_that_carver_makes() -> None:
    text = (DOCS / "runbooks" / "backup-schedule.md").read_text()
    group = Group.__new__(Group)
    object.__setattr__(group, "extent_size_bytes", 4 << 20)
    usual = layout.copy_on_write_bytes(100 * GIB, Reserve(percent=20.0), group)
    largest = layout.copy_on_write_bytes(100 * GIB, Reserve(percent=200.0), group)
    assert f"its COW store: {usual / GIB:.0f} GiB" in text
    assert f"{largest / GIB:.1f} GiB: a larger store is never used" in text


# Messages


def test_the_sections_that_messages_name_exist() -> None:
    files = [one for room in ("agent", "lvm", "mount") for one in (ROOT / room).rglob("*.py")]
    # Adjacent strings are one.
    text = "".join(re.sub(r'"\s+f?"', "", one.read_text()) for one in files)
    named = {
        *re.findall(r"`([A-Z][^`\n]+)` in (docs/[a-z/-]+\.md)", text),
        *(pair[::-1] for pair in re.findall(r"\((docs/[a-z/-]+\.md), ([A-Z][^)\n]+)\)", text)),
    }
    assert len(named) > 5
    for heading, path in named:
        assert re.search(rf"^#+ {re.escape(heading)}$", _text(path), re.M), f"{path}: {heading}"
