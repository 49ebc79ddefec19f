"""The parameter of a StorageClass that allows the release of claims: accepted, and checked."""

import expect
import pytest
from csi_client import Client

from agent.core import errors
from agent.extras.evacuation import release_notes
from agent.requests.parameters import Parameters

MIB = 1 << 20


@pytest.mark.parametrize("key", release_notes.PARAMETERS)
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_class_may_have_it_and_the_volume_is_the_same(key: str, value: str) -> None:
    given = Parameters.from_proto({key: value})
    assert given.own_tags() == given.context() == {}


@pytest.mark.parametrize("value", ["", "yes", "True"])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(errors.BadField, match="releaseOnNodeLoss"):
        Parameters.from_proto({"carver/releaseOnNodeLoss": value})


def test_an_inline_volume_has_no_claim_to_release() -> None:
    with pytest.raises(errors.NotAllowed, match="releaseOnNodeLoss"):
        Parameters.from_pod({"carver/releaseOnNodeLoss": "true"})


def test_a_repeated_call_may_differ_in_it(client: Client) -> None:
    """As after the class was made anew: it is no property of the volume."""
    first = client.create("pvc-1", 16 * MIB, parameters={"carver/releaseOnNodeLoss": "true"})
    again = client.create("pvc-1", 16 * MIB, parameters={"carver/releaseOnNodeLoss": "false"})
    assert again.volume_id == first.volume_id
    with expect.code("INVALID_ARGUMENT", "releaseOnNodeLoss"):
        client.create("pvc-2", 16 * MIB, parameters={"carver/releaseOnNodeLoss": "x"})
