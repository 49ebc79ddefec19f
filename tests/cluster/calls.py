#!/usr/bin/env python3
"""Print each call that real callers made of Carver's nodes in the lab's cluster, one a line.

    vagrant/cluster.py install recording        # Carver logs each call with its request
    tests/cluster/e2e.py                        # or anything else that makes calls
    tests/cluster/calls.py > calls.jsonl
    tests/cluster/calls.py --node carver-node-2 > tests/data/NAME.jsonl

Each line names the node that was called. With `--node` only that node's calls are printed, in the
form of tests/data/real-callers.jsonl, which test_replay.py repeats. Secrets are not in the log, and
so not here.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# This file is a program, and Python would look beside it only.
sys.path.insert(0, str(ROOT))

from vagrant import venv  # noqa: E402

if __name__ == "__main__":
    venv.enter()

from vagrant import cluster  # noqa: E402

# Of calls that repeat by the hundred, so many of each kind and code are kept on each node.
_ROUTINE = frozenset(
    {"Probe", "GetCapacity", "NodeGetCapabilities", "NodeGetVolumeStats", "ListNodeVolumes"}
    | {"ControllerGetCapabilities", "GetPluginInfo", "GetPluginCapabilities"}
)
_KEPT = 2
# What Carver's own controller asks, and no sidecar.
_OWN = frozenset({"ControllerListVolumeHealth", "ControllerGetVolumeHealth"})
# Fields of a line of the log that are no part of a request.
_OF_LINE = frozenset({"time", "level", "logger", "message", "method"})


def main() -> int:
    """Print the calls of every node, or of one; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--node", default="", help="print this node's calls, to be replayed")
    wanted = parser.parse_args().node
    lab, printed = cluster.present(), 0
    words = (f"--namespace={cluster.NAMESPACE}", "--selector=app.kubernetes.io/component=node")
    for pod in lab.control_plane.objects("pods", *words):
        name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
        log = lab.kubectl("logs", name, "--container=carver", words[0]).stdout
        if wanted not in ("", node):
            continue
        of_node = {} if wanted else {"node": node}
        for call in kept(calls(log.splitlines())):
            print(json.dumps({**call, **of_node}, separators=(",", ":")))
            printed += 1
    if not printed:
        text = "no call is in the log with its request: vagrant/cluster.py install recording"
        print(f"calls.py: {text}", file=sys.stderr)
    return 0 if printed else 1


def calls(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Read the calls of a log in JSON at the level debug, in the order of their ends.

    A call has two lines, how it ended and its request; those of two calls may stand between each
    other, so a request belongs to the oldest call of its method that has none yet.
    """
    began: datetime | None = None
    ended: list[dict[str, Any]] = []
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if one.get("message") == "call":
            moment = datetime.fromisoformat(one["time"])
            began = began or moment
            seconds = round((moment - began).total_seconds(), 2)
            call = {"t": seconds, "method": one["method"], "code": one["code"]}
            if "error" in one:
                call["error"] = one["error"]
            ended.append(call)
        elif one.get("message") == "request":
            of_method = (it for it in ended if it["method"] == one["method"])
            oldest = next((it for it in of_method if "request" not in it), None)
            # There is none where the log begins within a call.
            if oldest is not None:
                oldest["request"] = {key: it for key, it in one.items() if key not in _OF_LINE}
    yield from (one for one in ended if "request" in one)


def kept(made: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave out calls that only repeat what others of their kind asked and were answered."""
    seen: dict[tuple[str, str], int] = {}
    for one in made:
        kind = (one["method"], one["code"])
        seen[kind] = seen.get(kind, 0) + 1
        is_routine = one["method"] in _ROUTINE and seen[kind] > _KEPT
        if not is_routine and one["method"] not in _OWN:
            yield one


if __name__ == "__main__":
    sys.exit(main())
