"""The settings: their sources, their values, and the errors for mistakes."""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import errors
from agent.settings import settings, values
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm.caches import Cache
from lvm.layout import NO_RESERVE, Reserve
from lvm.thin import Policy


def load(
    tmp_path: Path, text: str = "", environment: dict[str, str] | None = None, *flags: str
) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(text)
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    arguments = parser.parse_args(["--config", str(file), *flags])
    return settings.load(arguments, environment or {})


CLASS = "[[classes]]\nname = 'n'\ngroup = 'g'\n"


def group(text: str) -> str:
    """One class, and a group with these keys beside its name."""
    return f"classes = [{{name = 'n', group = 'g'}}]\ngroups = [{{name = 'g', {text}}}]"


def load_class(tmp_path: Path, text: str = "") -> DeviceClass:
    [one] = load(tmp_path, CLASS + text).classes
    return one


def test_nothing_configured_is_one_class_on_a_file(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert found.classes == (settings.EMBEDDED_CLASS,)
    file = settings.BackingFile(settings.EMBEDDED_FILE, None)
    assert found.definitions == (settings.GroupDefinition("carver", file=file),)
    assert found.endpoint == settings.DEFAULT_SOCKET


def test_a_class_of_that_name_and_group_is_the_operator_s_own(tmp_path: Path) -> None:
    found = load(tmp_path, "[[classes]]\nname = 'default'\ngroup = 'carver'\ndefault = true")
    assert found.classes == (settings.EMBEDDED_CLASS,)
    assert found.definitions == ()


def test_the_default_file_need_not_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "DEFAULT_FILE", tmp_path / "none.toml")
    assert settings.load(argparse.Namespace(config=None), {}).log_level == "info"


def test_a_flag_outweighs_the_environment_and_that_the_file(tmp_path: Path) -> None:
    text, environment = 'node_id = "file"', {"CARVER_NODE_ID": "variable"}
    assert load(tmp_path, text).node_id == "file"
    assert load(tmp_path, text, environment).node_id == "variable"
    assert load(tmp_path, text, environment, "--node-id", "flag").node_id == "flag"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ('endpoint = "unix:///run/x.sock"', "endpoint", Path("/run/x.sock")),
        ('endpoint = "/run/x.sock"', "endpoint", Path("/run/x.sock")),
        ("", "kubelet_dir", ("/var/lib/kubelet",)),
        ('kubelet_dir = ["/a b", "/c"]', "kubelet_dir", ("/a b", "/c")),
        ('kubelet_dir = "/a,/b"', "kubelet_dir", ("/a", "/b")),
        ("", "metrics_address", None),
        ("", "topology_key", settings.TOPOLOGY_KEY),
        ('driver_name = "two.carver"', "topology_key", "topology.two.carver/node"),
    ],
)
def test_settings_are_parsed(tmp_path: Path, text: str, key: str, value: object) -> None:
    assert getattr(load(tmp_path, text), key) == value


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("127.0.0.1:9898", values.Address("127.0.0.1", 9898), "127.0.0.1:9898"),
        (":9898", values.Address("", 9898), ":9898"),
        ("[::1]:9898", values.Address("::1", 9898), "[::1]:9898"),
        ("node-1.local:80", values.Address("node-1.local", 80), "node-1.local:80"),
    ],
)
def test_an_address_to_listen_on_is_read_as_it_is_shown(
    tmp_path: Path, text: str, address: values.Address, shown: str
) -> None:
    assert load(tmp_path, f'metrics_address = "{text}"').metrics_address == address
    assert str(address) == shown


@pytest.mark.parametrize("key", ["controller_address", "enrolment_address"])
def test_grpc_can_listen_on_an_address_without_a_host(tmp_path: Path, key: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = getattr(load(tmp_path, f'{key} = ":0"'), key)
    # It raises RuntimeError where it refuses the address.
    assert server.add_insecure_port(str(address))
    server.stop(None)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("zero = 'fully'", {"zero": "fully"}),
        (
            "layout = 'raid5'\nstripes = 2\nrepair = 'auto'\nrepair_after_seconds = 60",
            {"repair": "auto", "repair_after_seconds": 60},
        ),
        ("layout = 'raid5'\nstripes = 2", {"repair": "manual"}),
        (
            "encryption = 'luks2'\nerase = 'crypto'\ndiscard = true\nkey_file = '/k'",
            {"encryption": "luks2", "erase": "crypto", "discard": True, "key_file": Path("/k")},
        ),
        (
            "encryption = 'luks2'\nbypass_workqueue = 'both'",
            {"bypass_workqueue": "both"},
        ),
        (
            "encryption = 'luks2'",
            {
                "erase": "zero",
                "discard": False,
                "key_file": None,
                "bypass_workqueue": "none",
            },
        ),
        ("", {"pool": None, "cache": None}),
        ("layout = 'thin'", {"pool": Policy()}),
        ("cache = 'cache'", {"cache": Cache("cache", "writethrough", Reserve(percent=10))}),
        (
            "cache = 'writecache'\ncache_size = '1GiB'",
            {"cache": Cache("writecache", "writeback", Reserve(size_bytes=1 << 30))},
        ),
        (
            "layout = 'thin'\ncache = 'cache'\ncache_mode = 'writeback'",
            {"pool": Policy(), "cache": Cache("cache", "writeback", Reserve(percent=10))},
        ),
    ],
)
def test_the_keys_of_a_class_are_parsed(
    tmp_path: Path, text: str, values: dict[str, object]
) -> None:
    found = vars(load_class(tmp_path, text))
    assert {key: found[key] for key in values} == values


def test_classes_name_their_groups(tmp_path: Path) -> None:
    text = """
        [[classes]]
        name = "fast"
        group = "nvme"
        default = true
        [[classes]]
        name = "bulk"
        group = "disks"
        fs_type = "xfs"
        mkfs_options = ["-L", "bulk"]
        [[classes]]
        name = "bulk2"
        group = "disks"
    """
    found = load(tmp_path, text)
    assert found.groups == ("nvme", "disks")
    assert found.definitions == ()
    assert found.device_class("") == found.device_class("fast")
    bulk = found.device_class("bulk")
    assert bulk is not None
    assert (bulk.fs_type, bulk.mkfs_options) == ("xfs", ("-L", "bulk"))
    assert found.device_class("gold") is None


def test_a_thin_class_has_the_policy_of_its_pool(tmp_path: Path) -> None:
    text = """
        layout = "thin"
        over_provisioning = 2.5
        pool_size = "10GiB"
        autoextend_threshold = "60%"
        autoextend_percent = 50
        refuse_above = 85
        chunk_size = "256KiB"
    """
    policy = Policy(2.5, Reserve(size_bytes=10 << 30), 60.0, 50.0, 85.0, 256 << 10)
    assert load_class(tmp_path, text).pool == policy


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512MiB", 512 << 20), ("10G", 10 << 30), ("2TB", 2 * 10**12), ("1Ki", 1024)],
)
def test_sizes_are_read_with_their_units(tmp_path: Path, text: str, size: int) -> None:
    [definition] = load(tmp_path, f'file_size = "{text}"').definitions
    assert definition.file is not None
    assert definition.file.size_bytes == size


def test_a_group_says_what_it_is_made_of(tmp_path: Path) -> None:
    text = """
        classes = [{name = "a", group = "disks"}, {name = "b", group = "file"}]
        [[groups]]
        name = "disks"
        devices = ["/dev/sdb", "/dev/disk/by-id/x"]
        [[groups]]
        name = "file"
        file = "/srv/file.img"
        file_size = "1GiB"
    """
    assert load(tmp_path, text).definitions == (
        settings.GroupDefinition("disks", ("/dev/sdb", "/dev/disk/by-id/x")),
        settings.GroupDefinition("file", file=settings.BackingFile(Path("/srv/file.img"), 1 << 30)),
    )


def test_the_group_of_the_class_that_is_there_anyway_may_be_of_devices(tmp_path: Path) -> None:
    found = load(tmp_path, '[[groups]]\nname = "carver"\ndevices = ["/dev/sdb"]')
    assert found.classes == (settings.EMBEDDED_CLASS,)
    assert found.definitions == (settings.GroupDefinition("carver", ("/dev/sdb",)),)


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("auto", None),
        ("200MiB", Reserve(size_bytes=200 << 20)),
        ("30%", Reserve(percent=30.0)),
        ("0", NO_RESERVE),
    ],
)
def test_the_bandwidth_of_background_work_is_read(
    tmp_path: Path, text: str, bandwidth: Reserve | None
) -> None:
    found = load(tmp_path, f'background_bandwidth = "{text}"')
    assert found.bandwidth_of("carver") == bandwidth
    assert load(tmp_path, "").bandwidth_of("carver") is None


def test_a_group_that_carver_does_not_create_may_have_a_bandwidth_of_its_own(
    tmp_path: Path,
) -> None:
    text = """
        background_bandwidth = "30%"
        classes = [{name = "a", group = "given"}, {name = "b", group = "made"}]
        [[groups]]
        name = "given"
        background_bandwidth = "1GiB"
        [[groups]]
        name = "made"
        devices = ["/dev/sdb"]
        background_bandwidth = "auto"
    """
    found = load(tmp_path, text)
    assert found.definitions == (settings.GroupDefinition("made", ("/dev/sdb",)),)
    assert found.bandwidth_of("given") == Reserve(size_bytes=1 << 30)
    assert found.bandwidth_of("made") is None
    assert found.bandwidth_of("other") == Reserve(percent=30.0)


@pytest.mark.parametrize("text", ["fast", "4KiB", "0.5%", "101%", "-1"])
def test_a_bandwidth_that_would_never_end_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(errors.BadConfig, match="1MiB or more"):
        load(tmp_path, f'background_bandwidth = "{text}"')


UUID = "11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("over_provisioning", "0.5", "1 or more"),
        ("over_provisioning", "true", "1 or more"),
        ("autoextend_threshold", "0", "up to 100"),
        ("autoextend_percent", "'much'", "up to 100"),
        ("refuse_above", "101", "up to 100"),
        ("chunk_size", "'96KiB'", "power of two"),
        ("chunk_size", "'2GiB'", "64KiB to 1GiB"),
        ("pool_size", "'all'", "a size is"),
        ("zero", "'all'", "first, fully"),
        ("encryption", "'rot13'", "luks2"),
        ("bypass_workqueue", "'all'", "both"),
        ("key_file", "'k'", "absolute path"),
        ("group", "'a/b'", "lvm(8)"),
        ("group", f"'{'g' * 60}'", "at most"),
        ("raid", "1", "not a key"),
        ("fs_type", "'ntfs'", "ext4"),
        ("mkfs_options", "['-F']", "-F"),
        ("mkfs_options", f"['-U', '{UUID}']", "same UUID"),
    ],
)
def test_an_invalid_value_in_a_class_is_refused_with_what_is_allowed(
    tmp_path: Path, key: str, value: str, word: str
) -> None:
    keys = {"name": "'n'", "group": "'g'", "layout": "'thin'", key: value}
    check_refusal(tmp_path, f"classes = [{table(keys)}]", f"classes[0].{key}", [word])


@pytest.mark.parametrize(
    ("text", "key", "word"),
    [
        ("over_provisioning = 2", "layout", "over_provisioning: only for layout thin"),
        ("layout = 'thin'\nstripes = 2", "layout", "thin has no stripes"),
        ("layout = 'thin'\nautoextend_threshold = 95", "layout", "less than refuse_above"),
        ("layout = 'thin'\nzero = 'fully'", "zero", "a thin pool zeroes"),
        ("repair = 'auto'", "repair", "copies or parity"),
        ("repair_after_seconds = 60", "repair", "copies or parity"),
        ("erase = 'crypto'", "erase", "encryption"),
        ("discard = true", "discard", "encryption"),
        ("key_file = '/k'", "key_file", "encryption"),
        ("encryption = 'luks2'\nreencrypt = true", "reencrypt", "removed after version 0.2.0"),
        ("reencrypt = false", "reencrypt", "leave it out"),
        ("bypass_workqueue = 'read'", "bypass_workqueue", "encryption"),
        ("cache_size = '1G'", "cache", "only for a class with a cache"),
        ("cache = 'cache'\nlayout = 'raid1'", "cache", "linear and thin, this is raid1"),
        ("cache = 'writecache'\ncache_mode = 'writethrough'", "cache", "writecache is writeback"),
    ],
)
def test_keys_of_a_class_that_contradict_each_other_are_refused(
    tmp_path: Path, text: str, key: str, word: str
) -> None:
    check_refusal(tmp_path, CLASS + text, f"classes[0].{key}", [word])


def table(keys: Mapping[str, str]) -> str:
    """An inline table of TOML."""
    return f"{{{', '.join(f'{key} = {value}' for key, value in keys.items())}}}"


def check_refusal(tmp_path: Path, text: str, key: str, words: Sequence[str]) -> None:
    """The file is refused, with its name, the key and the words."""
    with pytest.raises(errors.BadConfig) as refused:
        load(tmp_path, text)
    assert refused.value.key == key
    for word in [str(tmp_path), *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('groups = "x"', "groups", ["[[groups]]"]),
        ("[[groups]]\ndevices = ['/dev/sdb']", "groups[0].name", ["required"]),
        (group("devices = ['/dev/sdb'], file = '/x'"), "groups[0]", ["either devices or a file"]),
        (group("devices = ['/dev/sdb'], file_size = '1G'"), "groups[0].file_size", ["on a file"]),
        (group("devices = []"), "groups[0].devices", ["one absolute"]),
        (group("devices = ['sdb']"), "groups[0].devices", ["absolute"]),
        (group("devices = ['/dev/a,b']"), "groups[0].devices", ["without blanks and commas"]),
        (group('file = "/a\\u0000"'), "groups[0].file", ["absolute"]),
        (group("file = 'x'"), "groups[0].file", ["absolute"]),
        (
            group("devices = ['/dev/sdb'], fast = ['/dev/sdc']"),
            "groups[0].fast",
            ["some of the group's"],
        ),
        (group("disks = []"), "groups[0].disks", ["not a key"]),
        (group("file = '/x'}, {name = 'g', file = '/y'"), "groups[1].name", ["listed twice"]),
        (group("file = '/x'}, {name = 'h', file = '/y'"), "groups[1].name", ["no class", "h"]),
        (group("devices = ['/dev/sdb', '/dev/sdb']"), "groups[0]", ["/dev/sdb is listed twice"]),
        ("classes = [{name = 'n', group = 'g'}]\ngroups = [{name = 'g'}]", "groups[0]", ["either"]),
        ("colour = 1", "colour", ["not a setting", "node_id", "classes"]),
        ('node_id = "a b"', "node_id", ["'a b'", "letters"]),
        (f'node_id = "{"n" * 254}"', "node_id", ["253"]),
        ('driver_name = "Two"', "driver_name", ["lower-case"]),
        ('driver_name = "-two"', "driver_name", ["lower-case"]),
        ('driver_name = "a b"', "driver_name", ["lower-case"]),
        (f'driver_name = "{"x" * 64}"', "driver_name", ["63"]),
        ("kubelet_dir = []", "kubelet_dir", ["absolute path"]),
        ('kubelet_dir = "relative"', "kubelet_dir", ["absolute path"]),
        ('endpoint = "relative"', "endpoint", ["'relative'", "absolute"]),
        ('registration = "both"', "registration", ["'both'", "self, none"]),
        ('metrics_address = "localhost"', "metrics_address", ["'localhost'", ":9898"]),
        ('metrics_address = ":70000"', "metrics_address", ["':70000'"]),
        ('log_format = "xml"', "log_format", ["'xml'", "text, json"]),
        ("controller_expand = 3", "controller_expand", ["3", "true or false"]),
        ("max_volumes_per_node = -1", "max_volumes_per_node", ["-1", "0 or more"]),
        ("max_volumes_per_node = true", "max_volumes_per_node", ["True"]),
        ('file_size = "ten"', "file_size", ["'ten'", "10GiB"]),
        ("devices = 1", "devices", ["1", "list"]),
        ("devices = ['sdb']", "devices", ["absolute"]),
        ("devices = '/dev/sd b'", "devices", ["absolute"]),
        ('classes = "x"', "classes", ["[[classes]]"]),
        ("[[classes]]\ngroup = 'g'", "classes[0].name", ["required"]),
        ("[[classes]]\nname = 'n'", "classes[0].group", ["required"]),
        (CLASS + CLASS, "classes", ["same name"]),
        (
            "classes = [{name = 'a', group = 'g', default = true},"
            " {name = 'b', group = 'g', default = true}]",
            "classes",
            ["default", "a, b"],
        ),
        ("node_id = ", "file", ["cannot be read"]),
    ],
)
def test_a_mistake_is_reported_with_its_key_its_value_and_what_is_allowed(
    tmp_path: Path, text: str, key: str, words: list[str]
) -> None:
    check_refusal(tmp_path, text, key, words)


def test_a_mistake_in_a_flag_or_variable_names_it(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match="--log-level"):
        load(tmp_path, "", {}, "--log-level", "loud")
    with pytest.raises(errors.BadConfig, match="CARVER_LOG_LEVEL"):
        load(tmp_path, "", {"CARVER_LOG_LEVEL": "loud"})


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    arguments = argparse.Namespace(config=tmp_path / "none.toml")
    with pytest.raises(errors.BadConfig, match="does not exist"):
        settings.load(arguments, {})


TEXTS = ["", "g", "/x", "/dev/sdb", "..", "-", "--yes", "a\nb", "/a\0b", "/dev/a b", "-1", "half"]
VALUES = st.recursive(
    st.one_of(st.sampled_from(TEXTS), st.integers(-1, 1 << 70), st.booleans(), st.floats()),
    lambda one: st.one_of(st.lists(one, max_size=3), st.dictionaries(st.sampled_from(TEXTS), one)),
    max_leaves=4,
)
KEYS = [*settings.GROUP_KEYS, "disks", ""]


@given(st.one_of(VALUES, st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), max_size=3)))
def test_any_value_of_groups_is_parsed_or_refused(tables: Any) -> None:
    device_classes = (DeviceClass(name="c", group="g"),)
    found: tuple[settings.GroupDefinition, ...] = ()
    where = "groups"
    try:
        found, _ = settings.parse_groups("file", tables, device_classes)
    except errors.BadConfig as refused:
        where = refused.key
    assert where.startswith("groups")
    assert all(bool(one.devices) != bool(one.file) for one in found)
