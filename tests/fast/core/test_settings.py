"""What an operator may decide, from where, and what is said of mistakes."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import errors, settings, values
from agent.core.classes import DeviceClass
from agent.core.settings import Config
from lvm.caches import Cache
from lvm.layout import Reserve
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


def test_an_endpoint_may_be_an_address_or_a_path(tmp_path: Path) -> None:
    assert load(tmp_path, 'endpoint = "unix:///run/x.sock"').endpoint == Path("/run/x.sock")
    assert load(tmp_path, 'endpoint = "/run/x.sock"').endpoint == Path("/run/x.sock")


def test_kubelet_s_directories_are_absolute_and_may_be_several(tmp_path: Path) -> None:
    assert load(tmp_path).kubelet_dir == ("/var/lib/kubelet",)
    assert load(tmp_path, 'kubelet_dir = ["/a b", "/c"]').kubelet_dir == ("/a b", "/c")
    assert load(tmp_path, "", {"CARVER_KUBELET_DIR": "/a,/b"}).kubelet_dir == ("/a", "/b")
    for wrong in ("[]", '"relative"'):
        with pytest.raises(errors.BadConfig, match="absolute path"):
            load(tmp_path, f"kubelet_dir = {wrong}")


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


def test_metrics_are_off_until_they_are_asked_for(tmp_path: Path) -> None:
    assert load(tmp_path).metrics_address is None


def test_a_thin_class_is_not_told_to_zero(tmp_path: Path) -> None:
    text = '[[classes]]\nname = "a"\ngroup = "data"\n'
    [one] = load(tmp_path, text + 'zero = "fully"').classes
    assert one.zero == "fully"
    for wrong in ('zero = "all"', 'layout = "thin"\nzero = "fully"'):
        with pytest.raises(errors.BadConfig, match="zero"):
            load(tmp_path, text + wrong)


def test_only_what_has_copies_is_repaired_unasked(tmp_path: Path) -> None:
    text = '[[classes]]\nname = "a"\ngroup = "data"\n'
    raid = text + 'layout = "raid5"\nstripes = 2\n'
    [one] = load(tmp_path, raid + 'repair = "auto"\nrepair_after_seconds = 60').classes
    assert (one.repair, one.repair_after_seconds) == ("auto", 60)
    assert load(tmp_path, raid).classes[0].repair == "manual"
    for wrong in ('repair = "auto"', "repair_after_seconds = 60"):
        with pytest.raises(errors.BadConfig, match="repair"):
            load(tmp_path, text + wrong)


def test_what_is_said_of_encryption_is_for_classes_that_encrypt(tmp_path: Path) -> None:
    plain = '[[classes]]\nname = "a"\ngroup = "g"\n'
    text = plain + 'encryption = "luks2"\n'
    [one] = load(tmp_path, text + 'erase = "crypto"\ndiscard = true\nkey_file = "/k"').classes
    said = (one.encryption, one.erase, one.discard, one.key_file)
    assert said == ("luks2", "crypto", True, Path("/k"))
    [one] = load(tmp_path, text + 'reencrypt = true\nbypass_workqueue = "both"').classes
    assert (one.reencrypt, one.bypass_workqueue) == (True, "both")
    [one] = load(tmp_path, text).classes
    assert (one.erase, one.discard, one.key_file) == ("zero", False, None)
    assert (one.reencrypt, one.bypass_workqueue) == (False, "none")
    wrongs = ('erase = "crypto"', "discard = true", 'key_file = "/k"', 'encryption = "rot13"')
    for wrong in (*wrongs, "reencrypt = true", 'bypass_workqueue = "read"'):
        with pytest.raises(errors.BadConfig, match=wrong.split()[0]):
            load(tmp_path, plain + wrong)
    with pytest.raises(errors.BadConfig, match=r"bypass_workqueue.*all"):
        load(tmp_path, text + 'bypass_workqueue = "all"')
    with pytest.raises(errors.BadConfig, match="absolute path"):
        load(tmp_path, text + 'key_file = "k"')


def test_a_driver_s_name_is_part_of_its_topology_key(tmp_path: Path) -> None:
    assert load(tmp_path).topology_key == settings.TOPOLOGY_KEY
    assert load(tmp_path, 'driver_name = "two.carver"').topology_key == "topology.two.carver/node"
    for wrong in ("Two", "-two", "a b", "x" * 64):
        with pytest.raises(errors.BadConfig, match="driver_name"):
            load(tmp_path, f'driver_name = "{wrong}"')


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


def test_a_thin_class_says_how_its_pool_is_made_promised_and_grown(tmp_path: Path) -> None:
    text = """
        [[classes]]
        name = "plain"
        group = "data"
        layout = "thin"
        [[classes]]
        name = "generous"
        group = "data"
        layout = "thin"
        over_provisioning = 2.5
        pool_size = "10GiB"
        autoextend_threshold = "60%"
        autoextend_percent = 50
        refuse_above = 85
        chunk_size = "256KiB"
    """
    plain, generous = load(tmp_path, text).classes
    assert plain.layout.is_thin
    assert plain.pool == Policy()
    assert generous.pool == Policy(2.5, Reserve(size_bytes=10 << 30), 60.0, 50.0, 85.0, 256 << 10)
    assert load(tmp_path, "[[classes]]\nname = 'n'\ngroup = 'g'").classes[0].pool is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("over_provisioning", "0.5", ["1 or more"]),
        ("over_provisioning", "true", ["1 or more"]),
        ("autoextend_threshold", "0", ["up to 100"]),
        ("autoextend_percent", "'much'", ["up to 100"]),
        ("refuse_above", "101", ["up to 100"]),
        ("chunk_size", "'96KiB'", ["power of two"]),
        ("chunk_size", "'2GiB'", ["64KiB to 1GiB"]),
        ("pool_size", "'all'", ["a size is"]),
    ],
)
def test_what_no_pool_can_be_is_refused_with_what_can(
    tmp_path: Path, key: str, value: str, words: list[str]
) -> None:
    text = f"[[classes]]\nname = 'n'\ngroup = 'g'\nlayout = 'thin'\n{key} = {value}"
    with pytest.raises(errors.BadConfig) as refused:
        load(tmp_path, text)
    assert refused.value.key == f"classes[0].{key}"
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layout = 'linear'\nover_provisioning = 2", "over_provisioning: only for layout thin"),
        ("layout = 'thin'\nstripes = 2", "thin has no stripes"),
        ("layout = 'thin'\nautoextend_threshold = 95", "less than refuse_above"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(errors.BadConfig, match=words):
        load(tmp_path, f"[[classes]]\nname = 'n'\ngroup = 'g'\n{text}")


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


def test_a_class_says_what_cache_its_volumes_have(tmp_path: Path) -> None:
    text = """
        [[classes]]
        name = "a"
        group = "g"
        cache = "cache"
        [[classes]]
        name = "b"
        group = "g"
        cache = "writecache"
        cache_size = "1GiB"
        [[classes]]
        name = "c"
        group = "g"
        layout = "thin"
        cache = "cache"
        cache_mode = "writeback"
    """
    classes = load(tmp_path, text).classes
    assert [one.cache for one in classes] == [
        Cache("cache", "writethrough", Reserve(percent=10)),
        Cache("writecache", "writeback", Reserve(size_bytes=1 << 30)),
        Cache("cache", "writeback", Reserve(percent=10)),
    ]
    assert [one.pool is not None for one in classes] == [False, False, True]


CLASS = "classes = [{name = 'n', group = 'g'}]\n"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('groups = "x"', "groups", ["[[groups]]"]),
        ("[[groups]]\ndevices = ['/dev/sdb']", "groups[0].name", ["required"]),
        (CLASS + "groups = [{name = 'g'}]", "groups[0]", ["either devices or a file"]),
        (
            CLASS + "groups = [{name = 'g', devices = ['/dev/sdb'], file = '/x'}]",
            "groups[0]",
            ["either devices or a file"],
        ),
        (
            CLASS + "groups = [{name = 'g', devices = ['/dev/sdb'], file_size = '1G'}]",
            "groups[0].file_size",
            ["on a file"],
        ),
        (CLASS + "groups = [{name = 'g', devices = []}]", "groups[0].devices", ["one absolute"]),
        (CLASS + "groups = [{name = 'g', devices = ['sdb']}]", "groups[0].devices", ["absolute"]),
        (
            CLASS + "groups = [{name = 'g', devices = ['/dev/a,b']}]",
            "groups[0].devices",
            ["without blanks and commas"],
        ),
        (CLASS + 'groups = [{name = "g", file = "/a\\u0000"}]', "groups[0].file", ["absolute"]),
        (CLASS + "groups = [{name = 'g', file = 'x'}]", "groups[0].file", ["absolute"]),
        (
            CLASS + "groups = [{name = 'g', devices = ['/dev/sdb'], fast = ['/dev/sdc']}]",
            "groups[0].fast",
            ["some of the group's"],
        ),
        ("[[classes]]\nname = 'n'\ngroup = 'g'\ncache_size = '1G'", "classes[0].cache", ["cache"]),
        (
            "[[classes]]\nname = 'n'\ngroup = 'g'\ncache = 'cache'\nlayout = 'raid1'",
            "classes[0].cache",
            ["only for layouts linear and thin", "raid1"],
        ),
        (
            "[[classes]]\nname = 'n'\ngroup = 'g'\ncache = 'writecache'\n"
            "cache_mode = 'writethrough'",
            "classes[0].cache",
            ["writecache is writeback"],
        ),
        (CLASS + "groups = [{name = 'g', disks = []}]", "groups[0].disks", ["not a key"]),
        (CLASS + "groups = [{name = 'h', file = '/x'}]", "groups[0].name", ["no class", "h"]),
        (
            CLASS + "groups = [{name = 'g', file = '/x'}, {name = 'g', file = '/y'}]",
            "groups[1].name",
            ["listed twice"],
        ),
        (
            CLASS + "groups = [{name = 'g', devices = ['/dev/sdb', '/dev/sdb']}]",
            "groups[0]",
            ["/dev/sdb is listed twice"],
        ),
        ("colour = 1", "colour", ["not a setting", "node_id", "classes"]),
        ('node_id = "a b"', "node_id", ["'a b'", "letters"]),
        (f'node_id = "{"n" * 254}"', "node_id", ["253"]),
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
        ("[[classes]]\nname = 'n'\ngroup = 'a/b'", "classes[0].group", ["'a/b'", "lvm(8)"]),
        (f"[[classes]]\nname = 'n'\ngroup = '{'g' * 60}'", "classes[0].group", ["at most"]),
        ("[[classes]]\nname = 'n'\ngroup = 'g'\nraid = 1", "classes[0].raid", ["not a key"]),
        (
            "[[classes]]\nname = 'n'\ngroup = 'g'\nfs_type = 'ntfs'",
            "classes[0].fs_type",
            ["'ntfs'", "ext4"],
        ),
        (
            "[[classes]]\nname = 'n'\ngroup = 'g'\nmkfs_options = ['-F']",
            "classes[0].mkfs_options",
            ["-F"],
        ),
        (
            "[[classes]]\nname = 'n'\ngroup = 'g'\n[[classes]]\nname = 'n'\ngroup = 'h'",
            "classes",
            ["same name"],
        ),
        (
            "[[classes]]\nname = 'a'\ngroup = 'g'\ndefault = true\n"
            "[[classes]]\nname = 'b'\ngroup = 'g'\ndefault = true",
            "classes",
            ["default", "a, b"],
        ),
        ("node_id = ", "file", ["cannot be read"]),
    ],
)
def test_a_mistake_is_named_with_its_key_its_value_and_what_is_allowed(
    tmp_path: Path, text: str, key: str, words: list[str]
) -> None:
    with pytest.raises(errors.BadConfig) as refused:
        load(tmp_path, text)
    assert refused.value.key == key
    for word in [str(tmp_path), *words]:
        assert word in str(refused.value)


def test_a_mistake_in_a_flag_or_variable_names_it(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match="--log-level"):
        load(tmp_path, "", {}, "--log-level", "loud")
    with pytest.raises(errors.BadConfig, match="CARVER_LOG_LEVEL"):
        load(tmp_path, "", {"CARVER_LOG_LEVEL": "loud"})


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    arguments = argparse.Namespace(config=tmp_path / "none.toml")
    with pytest.raises(errors.BadConfig, match="does not exist"):
        settings.load(arguments, {})


TEXTS = [
    "",
    "g",
    "/x",
    "/dev/sdb",
    "..",
    "-",
    "--yes",
    "a\nb",
    "/a\0b",
    "/dev/a b",
    "1G",
    "-1",
    "half",
]
VALUES = st.recursive(
    st.one_of(st.sampled_from(TEXTS), st.integers(-1, 1 << 70), st.booleans(), st.floats()),
    lambda one: st.one_of(st.lists(one, max_size=3), st.dictionaries(st.sampled_from(TEXTS), one)),
    max_leaves=4,
)
KEYS = [*settings.GROUP_KEYS, "disks", ""]


@given(st.one_of(VALUES, st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), max_size=3)))
def test_whatever_stands_in_the_place_of_groups_is_understood_or_refused(tables: Any) -> None:
    device_classes = (DeviceClass(name="c", group="g"),)
    found: tuple[settings.GroupDefinition, ...] = ()
    where = "groups"
    try:
        found = settings.parse_groups("file", tables, device_classes)
    except errors.BadConfig as refused:
        where = refused.key
    assert where.startswith("groups")
    assert all(bool(one.devices) != bool(one.file) for one in found)
