"""In the guest: a load until the plug is pulled, and what is left of it at the next boot."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import json
import sys
import threading
from dataclasses import asdict

from faults import load

from agent.client import Client
from agent.config import DEFAULT_SOCKET

_CLIENTS = 8


def main() -> None:
    with Client(DEFAULT_SOCKET) as client:
        load.patiently(client.probe)
    if sys.argv[1] == "load":
        seed = int(sys.argv[2])
        load.start(seed)
        with load.clients(_CLIENTS, seed):
            print("under way", flush=True)
            threading.Event().wait()
    else:
        print(json.dumps(asdict(load.judge())))


main()
