"""How csi-sanity's report is read, and what the document says of it."""

import re

from conformance import run

COUNTED = re.compile(r"^\| (linear|thin) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.M)


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
    assert "linear" in {row[0] for row in rows}
    for row in rows:
        total, ran, passed, failed, skipped = map(int, row[1:])
        assert (ran + skipped, passed + failed) == (total, ran)
        assert len(run.reasons()) == skipped
    assert all(run.reasons().values())
