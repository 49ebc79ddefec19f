"""`carver volume adopt`: what it prints is what `kubectl apply` takes."""

from collections.abc import Sequence
from typing import Any

import configured
import kubernetes_validate
import pytest
import yaml
from fakes.host import FakeHost
from fast.cli.conftest import Shell
from manifest import KUBERNETES_VERSION

from agent.csi.client import Client, Mode, mounted
from lvm import volumes

MIB = 1 << 20


def make(fake: FakeHost, name: str, fs_type: str = "ext4") -> None:
    """A logical volume of another's, with a file system if any."""
    volumes.create(fake.lvm, "data", volumes.New(name, 64 * MIB, {}))
    if fs_type:
        found = fake.devices.find("data", name)
        assert found is not None
        fake.write(found.path, fs_type)


def objects(printed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The PersistentVolume and the claim, as the API server would check them."""
    volume, claim = yaml.safe_load_all(printed)
    for one in (volume, claim):
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
    return volume, claim


def test_the_printed_objects_are_the_volume_s(shell: Shell, fake: FakeHost, client: Client) -> None:
    make(fake, "web")
    volume, claim = objects(shell("adopt data/web --claim shop/web-0 --storage-class fast"))
    [listed] = client.volumes()
    assert volume["metadata"] == {
        "name": "web",
        "annotations": {"pv.kubernetes.io/provisioned-by": "lvm.csi.carver"},
    }
    spec = volume["spec"]
    assert spec["csi"] == {
        "driver": "lvm.csi.carver",
        "volumeHandle": listed.volume_id,
        "fsType": "ext4",
        "volumeAttributes": dict(listed.volume_context),
    }
    assert spec["capacity"] == {"storage": str(64 * MIB)}
    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert (spec["volumeMode"], spec["storageClassName"]) == ("Filesystem", "fast")
    [term] = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
    segments = dict(listed.accessible_topology[0].segments)
    [expression] = term["matchExpressions"]
    assert {expression["key"]: expression["values"][0]} == segments
    assert claim["metadata"] == {"namespace": "shop", "name": "web-0"}
    assert spec["claimRef"]["name"] == "web-0"
    assert (claim["spec"]["volumeName"], claim["spec"]["storageClassName"]) == ("web", "fast")
    assert claim["spec"]["accessModes"] == spec["accessModes"] == ["ReadWriteOnce"]
    assert shell("list --names") == "web\n"
    assert client.volumes_here().claims == {listed.volume_id: "shop/web-0"}


def test_a_raw_volume_s_objects_are_of_a_block_device(shell: Shell, fake: FakeHost) -> None:
    make(fake, "web", "")
    assert "--block" in shell("adopt data/web", 1)
    volume, claim = objects(shell("adopt data/web --block"))
    assert volume["spec"]["volumeMode"] == claim["spec"]["volumeMode"] == "Block"
    assert claim["metadata"] == {"namespace": "default", "name": "web"}


def test_a_dry_run_prints_all_and_changes_nothing(
    shell: Shell, fake: FakeHost, client: Client
) -> None:
    make(fake, "web")
    printed = shell("adopt data/web --dry-run")
    assert "to do: rename data/web to vol-web" in shell.complaint
    assert client.volumes() == []
    assert shell("adopt data/web") == printed
    assert "done: rename data/web to vol-web" in shell.complaint
    assert shell("adopt data/web") == printed
    assert "nothing: it is so already" in shell.complaint
    assert shell("adopt data/vol-web") == printed


def test_an_adoption_is_undone(shell: Shell, fake: FakeHost) -> None:
    make(fake, "web")
    shell("adopt data/web")
    shell("adopt data/web --undo --dry-run")
    assert set(fake.lvm2.groups["data"].volumes) == {"vol-web"}
    assert shell("adopt data/web --undo") == ""
    assert "done: rename data/vol-web to web" in shell.complaint
    assert not fake.lvm2.groups["data"].volumes["web"].tags


def test_names_that_kubernetes_does_not_have_are_replaced(shell: Shell, fake: FakeHost) -> None:
    make(fake, "Web_1")
    volume, claim = objects(shell("adopt data/Web_1"))
    assert volume["metadata"]["name"].startswith("adopted-")
    assert claim["metadata"]["name"] == volume["metadata"]["name"]


class TestManifest:
    """`carver volume manifest`: the same objects for a volume that Carver made."""

    def test_the_claim_is_that_which_the_volume_was_made_for(
        self, shell: Shell, client: Client
    ) -> None:
        about = {
            "csi.storage.k8s.io/pvc/namespace": "shop",
            "csi.storage.k8s.io/pvc/name": "data-db-0",
        }
        made = client.create("pvc-1", 64 * MIB, mounted("xfs"), parameters=about)
        volume, claim = objects(shell("manifest pvc-1 --storage-class fast"))
        assert volume["metadata"]["name"] == claim["spec"]["volumeName"] == "pvc-1"
        assert volume["spec"]["csi"]["volumeHandle"] == made.volume_id
        assert volume["spec"]["csi"]["fsType"] == "xfs"
        assert volume["spec"]["volumeMode"] == "Filesystem"
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert claim["metadata"] == {"namespace": "shop", "name": "data-db-0"}
        _, other = objects(shell("manifest pvc-1 --claim shop/restored"))
        assert other["metadata"] == {"namespace": "shop", "name": "restored"}

    @pytest.mark.parametrize(
        ("modes", "expected"),
        [
            ([Mode.SINGLE_NODE_WRITER], ["ReadWriteOnce"]),
            ([Mode.SINGLE_NODE_SINGLE_WRITER], ["ReadWriteOncePod"]),
            (
                [Mode.SINGLE_NODE_MULTI_WRITER, Mode.MULTI_NODE_READER_ONLY],
                ["ReadOnlyMany", "ReadWriteOnce"],
            ),
        ],
    )
    def test_names_access_modes_and_mount_options_are_as_the_volume_was_made(
        self,
        shell: Shell,
        client: Client,
        modes: Sequence["Mode.ValueType"],
        expected: list[str],
    ) -> None:
        flags = ["noatime", "nosuid", "nodev", "noexec"]
        asked = [mounted("ext4", flags, mode) for mode in modes]
        client.create("a", 64 * MIB, *asked, parameters={"csi.storage.k8s.io/pv/name": "pvc-17"})
        volume, claim = objects(shell("manifest a"))
        assert volume["metadata"]["name"] == claim["spec"]["volumeName"] == "pvc-17"
        assert volume["spec"]["mountOptions"] == flags
        assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == expected
        assert "not recorded" not in shell.complaint

    def test_what_is_not_recorded_is_said(self, shell: Shell, fake: FakeHost) -> None:
        """The capabilities are too long for a tag, which has a digest; or there is no such tag."""
        shell("create db --size 64MiB")
        made = fake.lvm2.groups["data"].volumes["vol-db"]
        kept = {one for one in made.tags if not one.startswith("carver.capabilities=")}
        assert len(kept) == len(made.tags) - 1
        for present in ({"carver.capabilities=sha256:" + 64 * "0"}, set[str]()):
            made.tags = kept | present
            fake.lvm2.groups["data"].seqno += 1
            volume, _ = objects(shell("manifest db"))
            assert volume["spec"]["accessModes"] == ["ReadWriteOnce"]
            assert volume["spec"]["mountOptions"] == []
            assert "access modes and mount options are not recorded" in shell.complaint

    def test_a_volume_without_a_claim_has_one_of_its_own_name(self, shell: Shell) -> None:
        shell("create raw --size 64MiB --block")
        volume, claim = objects(shell("manifest raw"))
        assert volume["spec"]["volumeMode"] == "Block"
        assert claim["metadata"] == {"namespace": "default", "name": "raw"}

    def test_a_bad_name_or_an_unknown_volume_is_an_error(self, shell: Shell) -> None:
        shell("create raw --size 64MiB --block")
        assert "--claim" in shell("manifest raw --claim Shop", 1)
        assert "none" in shell("manifest none", 1)

    @pytest.mark.settings(classes=(configured.PLAIN, configured.SEALED))
    def test_of_an_encrypted_volume_the_secret_is_asked_for(self, shell: Shell) -> None:
        shell("create db --size 64MiB --class sealed")
        objects(shell("manifest db"))
        assert "nodeStageSecretRef" in shell.complaint


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("web", "GROUP/LV"),
        ("data/web/x", "GROUP/LV"),
        ("data/web --claim web", "--claim"),
        ("data/web --claim shop/Web", "--claim"),
        ("data/web --storage-class Fast!", "--storage-class"),
    ],
)
def test_bad_words_change_nothing(shell: Shell, fake: FakeHost, words: str, problem: str) -> None:
    make(fake, "web")
    assert problem in shell(f"adopt {words}", 1)
    assert set(fake.lvm2.groups["data"].volumes) == {"web"}


def test_what_lvm2_says_against_it_is_said(shell: Shell, fake: FakeHost) -> None:
    fake.lvm("vgextend", "--", "data", fake.new_device(64 * MIB))
    for name, problem in {"sick": "mismatches", "kept": "read-only", "far": "missing"}.items():
        make(fake, name)
        made = fake.lvm2.groups["data"].volumes[name]
        made.health, made.read_only = "mismatches exist" * (name == "sick"), name == "kept"
        fake.lvm2.groups["data"].disks[1].missing = name == "far"
        fake.lvm2.groups["data"].seqno += 1
        assert problem in shell(f"adopt data/{name}", 1)
