"""In the guest: a load until the plug is pulled, and what is left of it at the next boot."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import json
import sys
import threading
from dataclasses import asdict

from csi_client import Client
from faults import load
from faults.process import await_begun

from agent.settings.settings import DEFAULT_SOCKET

_CLIENTS = 8


def main() -> None:
    with Client(DEFAULT_SOCKET) as client:
        await_begun(client)
    if sys.argv[1] == "load":
        seed = int(sys.argv[2])
        load.start(seed)
        with load.clients(_CLIENTS, seed, lambda name: print(f"deleted {name}", flush=True)):
            print("under way", flush=True)
            threading.Event().wait()
    else:
        print(json.dumps(asdict(load.judge())))


main()
