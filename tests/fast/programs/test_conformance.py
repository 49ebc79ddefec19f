"""How csi-sanity's report is read, and what the document says of it."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from conformance import run, sanity

from agent.settings import settings

COUNTED = re.compile(
    r"^\| (linear|thin|attach) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.M
)


def test_a_report_becomes_its_specs() -> None:
    spec = {
        "LeafNodeType": "It",
        "ContainerHierarchyTexts": ["Node Service", "NodeStageVolume"],
        "LeafNodeText": "should fail",
        "State": "skipped",
        "Failure": {"Message": "not supported"},
    }
    report = [{"SpecReports": [{**spec, "LeafNodeType": "BeforeSuite"}, spec]}]
    assert list(run.specs(report)) == [
        run.Spec("Node Service NodeStageVolume should fail", "skipped", "not supported")
    ]


def test_every_skipped_spec_is_listed_once_with_a_reason() -> None:
    text = run.REASONS.read_text()
    rows = COUNTED.findall(text)
    # The class of the installed service is a linear one.
    assert {"default" if row[0] == "linear" else row[0] for row in rows} == set(run.CLASSES)
    for row in rows:
        total, ran, passed, failed, skipped = map(int, row[1:])
        assert (ran + skipped, passed + failed) == (total, ran)
        assert len(run.reasons(row[0])) == skipped
        assert all(run.reasons(row[0]).values())


def test_what_the_run_has_skipped_is_listed_with_its_reason() -> None:
    for one in run.CLASSES:
        assert set(sanity.SKIPPED) <= run.reasons(one).keys()


def test_where_volumes_are_attached_every_spec_of_attaching_runs() -> None:
    waived = run.reasons("thin").keys() - run.reasons(run.ATTACHED).keys()
    assert len(waived) == 10
    assert all("ublishVolume" in one or "lifecycle" in one for one in waived)
    _, own, _ = sanity._STARTED[run.ATTACHED]
    assert tomllib.loads(own) == {"attach": True, "max_volumes_per_node": 4}


@pytest.mark.parametrize("device_class", sanity._STARTED)
def test_a_class_that_is_started_for_the_run_is_the_only_one_of_a_service_of_its_own(
    device_class: str, tmp_path: Path
) -> None:
    layout, own, _ = sanity._STARTED[device_class]
    places = sanity.Places(device_class)
    file = tmp_path / "config.toml"
    file.write_text(
        sanity._CONFIGURATION.format(
            directory=places.files,
            group=places.group,
            disk=places.disk,
            pods="/pods",
            device_class=device_class,
            layout=layout,
            settings=own,
        )
    )
    loaded = settings.load(argparse.Namespace(config=file), {})
    [made] = loaded.classes
    assert (made.name, made.group, made.layout.kind) == (device_class, places.group, layout)
    assert loaded.attach is (device_class == run.ATTACHED)
    others = [sanity.Places(one) for one in sanity._STARTED if one != device_class]
    assert all(
        {one.group, one.disk, one.files, one.pods}.isdisjoint(
            {places.group, places.disk, places.files, places.pods}
        )
        for one in others
    )


def test_the_document_names_the_version_that_is_run() -> None:
    assert f"csi-sanity {run.VERSION.removeprefix('v')}" in run.REASONS.read_text()
