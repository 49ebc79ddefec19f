"""What real callers sent, made again."""

import json
from collections.abc import Sequence
from pathlib import Path

import chosen
import pytest
from callers.directories import Directories
from callers.plugin import Answer, Plugin
from callers.recording import RECORDINGS, Recorded, Recording, Translation
from callers.replay import Replay
from real.any import AnyHost

from agent.settings.settings import TOPOLOGY_KEY, Config
from lvm import report
from mount import table

# By the recording, some volumes of one node, one of each kind.
_SOME = {
    # A file system whose deletion met its unstaging, raw block that was deleted while it was
    # unstaged, a larger restore of a snapshot, a clone, read-only, two pods and growth.
    "real-callers": (
        *("62e29283", "23eb19b0", "0dc4aef7", "25d53a4e", "ad53b87c", "ebb57629", "ed15b96e"),
        "3e79342d",
    ),
    # A snapshot whose volume is deleted first, its restore, growth, a volume and its clone, and raw
    # block that several pods use in turn.
    "central-callers": (*("94a1de1d", "6a8754d5", "c0c5cd26", "2a4ee245", "ece1104d", "b9576a18"),),
}
# By the recording: how many calls met another, of some volumes' and of all. In the cluster with
# one controller none did.
MET = {"real-callers": {"some": 10, "all": 37}, "central-callers": {"some": 0, "all": 0}}


def recorded(name: str, recording: Recording, which: str) -> tuple[Recorded, ...]:
    prefixes = tuple(f"vol-pvc-{one}" for one in _SOME[name])
    return recording.read() if which == "all" else recording.of_volumes(prefixes)


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("which", chosen.kinds(("some", "all"), usual=["some"]))
@pytest.mark.timeout(900)
def test_the_sender_of_each_recorded_call_goes_on_and_warns_of_nothing(
    which: str,
    name: str,
    host: AnyHost,
    config: Config,
    plugin: Plugin,
    directories: Directories,
    answers: list[Answer],
) -> None:
    recording = RECORDINGS[name]
    replay = Replay(plugin, host, directories, recording.node, config.node_id)
    made = replay.run(recorded(name, recording, which))
    require_well(made, answers, host, config, directories)
    assert len(replay.met) == MET[name][which]


@pytest.mark.variation
def test_a_node_of_a_recorded_cluster_is_replayed_like_one_alone(
    host: AnyHost,
    config: Config,
    plugin: Plugin,
    directories: Directories,
    answers: list[Answer],
    tmp_path: Path,
) -> None:
    """As a controller passes them on: requirements have all nodes, and another may be first."""
    alone, every = RECORDINGS["real-callers"], ("node-a", "node-b", "node-c")
    lines = []
    for number, line in enumerate(alone.file.read_text().splitlines()):
        call = json.loads(line)
        if wanted := call["request"].get("accessibility_requirements"):
            terms = [{"segments": {TOPOLOGY_KEY: one}} for one in every]
            is_copy = "volume_content_source" in call["request"]
            at = number % len(every) if is_copy else every.index("node-b")
            wanted.update(requisite=terms, preferred=terms[at:] + terms[:at])
        lines.append(json.dumps(call))
    file = tmp_path / "cluster.jsonl"
    file.write_text("\n".join(lines).replace("carver-lab", "node-b"))
    cluster = Recording(file, "node-b")
    replay = Replay(plugin, host, directories, cluster.node, config.node_id)
    made = replay.run(recorded("real-callers", cluster, "some"))
    require_well(made, answers, host, config, directories)
    asked = [one.request for one in answers if one.rule.method == "CreateVolume"]
    seen = {
        term.segments[TOPOLOGY_KEY]
        for one in asked
        for term in one.accessibility_requirements.requisite
    }
    assert seen == {"node-a", config.node_id, "node-c"}


def require_well(
    made: Sequence[tuple[Recorded, Answer]],
    answers: Sequence[Answer],
    host: AnyHost,
    config: Config,
    directories: Directories,
) -> None:
    """Assert that each sender goes on, no event warns, and nothing is left."""
    assert [str(one) for one in answers if one.reaction.is_a_stop] == []
    # People deleted a volume before its copy-on-write snapshots, and get an error.
    warned = [one for one in answers if one.is_warned_of and "has the snapshots" not in one.message]
    assert [str(one) for one in warned] == []
    # What succeeded in the cluster succeeds here, and nothing is left.
    assert [str(last) for call, last in made if call.code == "OK" and last.code != "OK"] == []
    assert report.read(host.lvm).group(config.classes[0].group).volumes == {}
    mounts = table.read(host.kernel).mounts
    assert [one for one in mounts if one.path.startswith(f"{directories.kubelet}/")] == []


def test_a_translated_request_keeps_the_relations_of_sizes_and_the_kinds_of_paths(
    directories: Directories,
) -> None:
    to = Translation("carver-lab", "here", directories.kubelet, {})
    sizes = sorted(
        {
            int(one.request["capacity_range"]["required_bytes"])
            for one in RECORDINGS["real-callers"].read()
            if "capacity_range" in one.request
        }
    )
    here = [to.size_bytes(one) for one in sizes]
    assert len(sizes) == 4
    assert here == sorted(set(here))
    assert here[-1] <= 128 << 20
