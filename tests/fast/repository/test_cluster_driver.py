"""What tests/cluster/driver.yaml tells the upstream e2e suite is what the service announces."""

from pathlib import Path
from typing import Any

import expect
import manifest
import pytest
import yaml

from agent.csi.client import Client
from agent.settings import settings
from mount import filesystem, options
from proto import csi_pb2 as csi

ROOT = Path(__file__).parents[3]
MIB = 1 << 20

# kubernetes/test/e2e/storage/external/external.go, driverDefinition
KEYS = {
    *("DriverInfo", "StorageClass", "VolumeAttributesClass", "SnapshotClass", "InlineVolumes"),
    *("ClientNodeName", "NodeSelectors", "Timeouts"),
}
FROM = {"FromName", "FromFile", "FromExistingClassName"}
# kubernetes/test/e2e/storage/framework/testdriver.go, DriverInfo and its parts
INFO = {
    *("Name", "InTreePluginName", "TestTags", "MaxFileSize", "SupportedSizeRange"),
    *("SupportedFsType", "SupportedMountOption", "RequiredMountOption", "Capabilities"),
    *("RequiredAccessModes", "TopologyKeys", "NumAllowedTopologies", "StressTestOptions"),
    *("VolumeSnapshotStressTestOptions", "PerformanceTestOptions"),
}
STRESS = {
    "StressTestOptions": {"NumPods", "NumRestarts"},
    "VolumeSnapshotStressTestOptions": {"NumPods", "NumSnapshots"},
}
CAPABILITIES = {
    *("persistence", "block", "fsGroup", "volumeMountGroup", "exec", "snapshotDataSource"),
    *("pvcDataSource", "offlineSnapshotClone", "multipods", "RWX", "controllerExpansion"),
    *("nodeExpansion", "offlineExpansion", "onlineExpansion", "volumeLimits", "singleNodeVolume"),
    *("topology", "capacity", "FSResizeFromSourceNotSupported", "readWriteOncePod"),
    *("multiplePVsSameID", "capReadOnlyMany"),
}

Modes = csi.VolumeCapability.AccessMode
Controller = csi.ControllerServiceCapability.RPC
Node = csi.NodeServiceCapability.RPC
Plugin = csi.PluginCapability.Service


@pytest.fixture(scope="module")
def driver() -> dict[str, Any]:
    read = yaml.safe_load((ROOT / "tests" / "cluster" / "driver.yaml").read_text())
    assert isinstance(read, dict)
    return read


@pytest.fixture
def capabilities(driver: dict[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = driver["DriverInfo"]["Capabilities"]
    return found


def capability(
    mode: "Modes.Mode.ValueType", fs_type: str = "", *flags: str
) -> csi.VolumeCapability:
    mount = csi.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=flags)
    return csi.VolumeCapability(mount=mount, access_mode=Modes(mode=mode))


def creation(*asked: csi.VolumeCapability, size_bytes: int = 32 * MIB) -> csi.CreateVolumeRequest:
    room = csi.CapacityRange(required_bytes=size_bytes)
    return csi.CreateVolumeRequest(name="x", volume_capabilities=asked, capacity_range=room)


def test_the_suite_knows_every_key(driver: dict[str, Any]) -> None:
    assert driver.keys() <= KEYS
    for key in ("StorageClass", "SnapshotClass", "VolumeAttributesClass"):
        assert driver[key].keys() <= FROM
    info = driver["DriverInfo"]
    assert info.keys() <= INFO
    assert info["SupportedSizeRange"].keys() <= {"Min", "Max", "Step"}
    for key, known in STRESS.items():
        assert info[key].keys() == known
    # Said one by one: what the suite takes for true where nothing is said differs.
    assert info["Capabilities"].keys() == CAPABILITIES - {"offlineSnapshotClone"}
    # Sets are written as the suite reads them.
    for key in ("SupportedFsType", "SupportedMountOption"):
        assert set(map(str, info[key].values())) == {"{}"}


def test_the_class_is_one_that_is_installed(driver: dict[str, Any]) -> None:
    for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        installed = manifest.names(path, "StorageClass")
        assert driver["StorageClass"]["FromExistingClassName"] in installed
    examples = ROOT / "deploy" / "kubernetes" / "examples" / "attributes.yaml"
    known = manifest.names(examples, "VolumeAttributesClass")
    assert driver["VolumeAttributesClass"]["FromExistingClassName"] in known


def test_name_and_topology_are_the_service_s(driver: dict[str, Any], client: Client) -> None:
    info = driver["DriverInfo"]
    assert info["Name"] == client.identity.GetPluginInfo(csi.GetPluginInfoRequest()).name
    answer = client.node.NodeGetInfo(csi.NodeGetInfoRequest())
    assert info["TopologyKeys"] == list(answer.accessible_topology.segments)
    assert info["TopologyKeys"] == [settings.TOPOLOGY_KEY]
    assert info["Capabilities"]["volumeLimits"] is (answer.max_volumes_per_node > 0)


def test_capabilities_are_those_that_the_service_announces(
    capabilities: dict[str, bool], client: Client
) -> None:
    request = csi.ControllerGetCapabilitiesRequest()
    controller = {
        one.rpc.type for one in client.controller.ControllerGetCapabilities(request).capabilities
    }
    answer = client.node.NodeGetCapabilities(csi.NodeGetCapabilitiesRequest()).capabilities
    node = {one.rpc.type for one in answer}
    services = client.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    plugin = {one.service.type for one in services.capabilities}
    growth = {one.volume_expansion.type for one in services.capabilities}
    announced = {
        "snapshotDataSource": Controller.CREATE_DELETE_SNAPSHOT in controller,
        "pvcDataSource": Controller.CLONE_VOLUME in controller,
        "capacity": Controller.GET_CAPACITY in controller,
        "readWriteOncePod": Controller.SINGLE_NODE_MULTI_WRITER in controller
        and Node.SINGLE_NODE_MULTI_WRITER in node,
        "nodeExpansion": Node.EXPAND_VOLUME in node,
        "volumeMountGroup": Node.VOLUME_MOUNT_GROUP in node,
        "topology": Plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS in plugin,
        "onlineExpansion": csi.PluginCapability.VolumeExpansion.ONLINE in growth,
    }
    assert announced == {key: capabilities[key] for key in announced}


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("multipods", Modes.SINGLE_NODE_MULTI_WRITER),
        ("readWriteOncePod", Modes.SINGLE_NODE_SINGLE_WRITER),
        ("RWX", Modes.MULTI_NODE_MULTI_WRITER),
        ("capReadOnlyMany", Modes.MULTI_NODE_READER_ONLY),
    ],
)
def test_access_modes_are_those_that_the_service_takes(
    capabilities: dict[str, bool], client: Client, key: str, mode: "Modes.Mode.ValueType"
) -> None:
    request = creation(capability(mode))
    if key == "capReadOnlyMany":
        # The suite has such claims of a source only.
        writer = creation(capability(Modes.SINGLE_NODE_MULTI_WRITER))
        source = client.controller.CreateVolume(writer).volume.volume_id
        request.name = "copy"
        request.volume_content_source.volume.volume_id = source
    if capabilities[key]:
        assert client.controller.CreateVolume(request).volume.volume_id
    else:
        with expect.code("INVALID_ARGUMENT"):
            client.controller.CreateVolume(request)


def test_a_raw_block_volume_can_be_made(capabilities: dict[str, bool], client: Client) -> None:
    asked = capability(Modes.SINGLE_NODE_MULTI_WRITER)
    asked.block.SetInParent()
    made = client.controller.CreateVolume(creation(asked))
    assert bool(made.volume.volume_id) is capabilities["block"]


def test_file_systems_sizes_and_options_are_such_as_the_service_takes(
    driver: dict[str, Any], client: Client
) -> None:
    info = driver["DriverInfo"]
    # framework/testpattern.go has patterns for these alone.
    suite = {"ext3", "ext4", "xfs", "ntfs"}
    assert set(info["SupportedFsType"]) - {""} == suite & filesystem.FILE_SYSTEMS.keys()
    size = int(info["SupportedSizeRange"]["Min"].removesuffix("Mi")) * MIB
    assert size >= max(one.minimum_bytes for one in filesystem.FILE_SYSTEMS.values())
    flags = list(info["SupportedMountOption"])
    assert options.parse(flags) != options.Options()
    for fs_type in info["SupportedFsType"]:
        asked = capability(Modes.SINGLE_NODE_MULTI_WRITER, fs_type, *flags)
        made = client.controller.CreateVolume(creation(asked, size_bytes=size)).volume
        assert made.capacity_bytes >= size
        client.controller.DeleteVolume(csi.DeleteVolumeRequest(volume_id=made.volume_id))
