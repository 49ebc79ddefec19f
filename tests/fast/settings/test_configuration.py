"""The configuration that holds now: what a reload of the file takes over, and what waits."""

import argparse
import ast
from dataclasses import fields
from pathlib import Path

import pytest

from agent.core import errors
from agent.settings import settings
from agent.settings.configuration import Configuration
from agent.settings.settings import SETTINGS, Config

ROOT = Path(__file__).parents[3]

# Another value than the default for each setting, as the file has it.
OTHER = {
    "node_id": '"another"',
    "driver_name": '"another.csi.carver"',
    "endpoint": '"/run/another.sock"',
    "registration": '"none"',
    "registration_directory": '"/srv/registry"',
    "kubelet_dir": '"/srv/kubelet"',
    "metrics_address": '"127.0.0.1:1"',
    "health_address": '"127.0.0.1:2"',
    "log_format": '"json"',
    "log_level": '"debug"',
    "controller_expand": "false",
    "attach": "true",
    "max_volumes_per_node": "7",
    "inline_volume_limit": '"1GiB"',
    "inline_total_limit": '"10%"',
    "lvm": '"host"',
    "lvm_session": "false",
    "pods_cgroup": '"/database.slice"',
    "devices": '["/dev/sdx"]',
    "wipe": '"none"',
    "background_bandwidth": '"0"',
    "oldest_kernel": '"6.1"',
    "header_backups": '"/srv/headers"',
    "kubeconfig": '"/srv/kubeconfig"',
    "orphan_interval_seconds": "60",
    "orphan_grace_seconds": "60",
    "health_interval_seconds": "60",
    "controller_address": '"0.0.0.0:1"',
    "tls_directory": '"/srv/tls"',
    "nodes_file": '"/srv/nodes.toml"',
    "controllers": '"carver:1"',
    "advertised_host": '"192.0.2.1"',
    "enrolment_directory": '"/srv/enrolment"',
    "enrolment_address": '":1"',
    "controller_authority": '"another"',
    "release_lost_claims": "true",
    "evacuation_grace_seconds": "60",
    "forget_deleted_nodes": "true",
    "evacuation": "true",
    "node_account": '"another"',
    "file": '"/srv/another.img"',
    "file_size": '"1GiB"',
}


def load(directory: Path, text: str) -> Config:
    file = directory / "config.toml"
    file.write_text(text)
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(["--config", str(file)]), {})


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_changes_at_a_reload_or_stays_and_says_why(tmp_path: Path, key: str) -> None:
    before, wanted = load(tmp_path, ""), load(tmp_path, f"{key} = {OTHER[key]}")
    assert wanted != before
    configuration = Configuration(before)
    waiting = configuration.reload(lambda: wanted)
    if why := SETTINGS[key].fixed:
        assert waiting == {key: why}
        assert configuration.now == before
    else:
        assert waiting == {}
        assert configuration.now == wanted
    assert configuration.is_taken


def test_what_waits_for_a_restart_keeps_nothing_else_from_being_taken_over(tmp_path: Path) -> None:
    configuration = Configuration(load(tmp_path, ""))
    every = "\n".join(f"{key} = {value}" for key, value in OTHER.items())
    waiting = configuration.reload(lambda: load(tmp_path, every))
    assert waiting == {key: one.fixed for key, one in SETTINGS.items() if one.fixed}
    wanted, now = load(tmp_path, every), configuration.now
    for one in fields(Config):
        is_taken = getattr(now, one.name) == getattr(wanted, one.name)
        assert is_taken == (one.name not in waiting), one.name


def test_a_file_that_is_not_right_changes_nothing(tmp_path: Path) -> None:
    configuration = Configuration(before := load(tmp_path, ""))
    taken = configuration.taken_seconds
    with pytest.raises(errors.BadConfig, match="wipe"):
        configuration.reload(lambda: load(tmp_path, 'oldest_kernel = "6.1"\nwipe = "perhaps"'))
    assert configuration.now is before
    assert (configuration.is_taken, configuration.taken_seconds) == (False, taken)
    configuration.reload(lambda: load(tmp_path, ""))
    assert configuration.is_taken
    assert configuration.taken_seconds >= taken


def test_classes_groups_and_bandwidths_are_taken_over(tmp_path: Path) -> None:
    configuration = Configuration(load(tmp_path, ""))
    text = """
        classes = [{name = "a", group = "x"}, {name = "b", group = "y"}]
        groups = [{name = "y", devices = ["/dev/sdx"], background_bandwidth = "1GiB"}]
    """
    configuration.reload(lambda: load(tmp_path, text))
    assert configuration.now == load(tmp_path, text)
    assert configuration.now.groups == ("x", "y")


def test_what_waits_for_a_restart_is_documented_with_its_reason() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = text.partition("| waits for a restart | why |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = (row.strip("| ").split(" | ") for row in rows)
    found = {key.strip("`"): why for keys, why in cells for key in keys.split(", ")}
    assert found == {key: one.fixed for key, one in SETTINGS.items() if one.fixed}


# Programs that read their configuration once.
_READ_ONCE = ("agent/cli", "agent/extras/controller", "agent/extras/evacuation")
# What holds for the moment of one scrape, and a file beside the socket, whose place is fixed.
_MAY_KEEP = {
    ("agent/daemon/node_metrics.py", "config"),
    ("agent/extras/orphans/look.py", "_history"),
}


def kept(path: Path) -> list[str]:
    """The attributes of `self` to which a module assigns what a Configuration has now."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for to, value in pairs:
            own = to.value if isinstance(to, ast.Attribute) else None
            if isinstance(to, ast.Attribute) and ast.unparse(own or to) == "self":
                found += [to.attr] * asks_now(value)
    return found


def asks_now(node: ast.AST) -> bool:
    """Whether an expression asks a configuration when it is evaluated: not within a lambda."""
    if isinstance(node, ast.Lambda):
        return False
    if isinstance(node, ast.Attribute) and ast.unparse(node).endswith((".now", "context.config")):
        return True
    return any(map(asks_now, ast.iter_child_nodes(node)))


def test_no_object_keeps_a_copy_of_the_configuration() -> None:
    found = set()
    for path in sorted((ROOT / "agent").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(_READ_ONCE) and name != "agent/extras/controller/controller_service.py":
            continue
        found |= {(name, one) for one in kept(path)}
    assert found == _MAY_KEEP


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("self._classes = configuration.now.classes", True),
        ("self._a, self._b = a, context.configuration.now", True),
        ("self._classes = context.config.classes", True),
        ("self._limit: int = policy(self._configuration.now.wipe)", True),
        ("self._limit = lambda: configuration.now.wipe", False),
        ("config = configuration.now", False),
        ("self._configuration = context.configuration", False),
    ],
)
def test_a_copy_is_found(tmp_path: Path, line: str, is_one: bool) -> None:
    (tmp_path / "one.py").write_text(line)
    assert bool(kept(tmp_path / "one.py")) == is_one


def test_a_record_of_the_configuration_is_held_by_one_class() -> None:
    """Only Configuration has an attribute or takes an argument to keep that is a Config."""
    holders = set()
    for path in sorted((ROOT / "agent").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(_READ_ONCE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                fields_of = (one for one in node.body if isinstance(one, ast.AnnAssign))
                inits = (
                    one
                    for one in node.body
                    if isinstance(one, ast.FunctionDef) and one.name == "__init__"
                )
                annotations = [one.annotation for one in fields_of]
                annotations += [
                    each.annotation
                    for one in inits
                    for each in (*one.args.args, *one.args.kwonlyargs)
                    if each.annotation is not None
                ]
                holders |= {
                    node.name
                    for one in annotations
                    if isinstance(one, ast.Name) and one.id == "Config"
                }
    # A Service is given what its Configuration begins with. A _Request (agent/operations/create.py)
    # is of one call, which acts by one configuration.
    assert holders == {"Configuration", "Service", "_Request"}
