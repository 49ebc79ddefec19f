"""What real callers sent, made again."""

import chosen
import pytest
from callers import recording
from callers.directories import Directories
from callers.plugin import Answer, Plugin
from callers.recording import Recorded
from callers.replay import Replay
from real.any import AnyHost

from agent.core.settings import Config
from lvm import report
from mount import table

# One of each kind: a file system whose deletion met its unstaging, raw block that was deleted
# while it was unstaged, a larger restore of a snapshot, a clone, read-only, two pods and growth.
_SOME = ("62e29283", "23eb19b0", "0dc4aef7", "25d53a4e", "ad53b87c", "ebb57629", "ed15b96e")


def recorded(which: str) -> tuple[Recorded, ...]:
    prefixes = tuple(f"vol-pvc-{one}" for one in (*_SOME, "3e79342d"))
    return recording.read() if which == "all" else recording.of_volumes(prefixes)


@pytest.mark.parametrize("which", chosen.kinds(("some", "all"), usual=["some"]))
@pytest.mark.timeout(900)
def test_the_sender_of_each_recorded_call_goes_on_and_warns_of_nothing(
    which: str,
    host: AnyHost,
    config: Config,
    plugin: Plugin,
    directories: Directories,
    answers: list[Answer],
) -> None:
    replay = Replay(plugin, host, directories, config.node_id)
    made = replay.run(recorded(which))
    assert [str(one) for one in answers if one.reaction.is_a_stop] == []
    # People deleted a volume before its copy-on-write snapshots, and get an error.
    warned = [one for one in answers if one.is_warned_of and "has the snapshots" not in one.message]
    assert [str(one) for one in warned] == []
    assert len(replay.met) == (37 if which == "all" else 10)
    # What succeeded in the cluster succeeds here, and nothing is left.
    assert [str(last) for call, last in made if call.code == "OK" and last.code != "OK"] == []
    assert report.read(host.lvm).group(config.classes[0].group).volumes == {}
    mounts = table.read(host.kernel).mounts
    assert [one for one in mounts if one.path.startswith(f"{directories.kubelet}/")] == []


def test_a_translated_request_keeps_the_relations_of_sizes_and_the_kinds_of_paths(
    directories: Directories,
) -> None:
    to = recording.Translation("here", directories.kubelet, {})
    sizes = sorted(
        {
            int(one.request["capacity_range"]["required_bytes"])
            for one in recording.read()
            if "capacity_range" in one.request
        }
    )
    here = [to.size_bytes(one) for one in sizes]
    assert len(sizes) == 4
    assert here == sorted(set(here))
    assert here[-1] <= 128 << 20
