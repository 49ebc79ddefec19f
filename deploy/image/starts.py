"""Inside the image, by its own Python: the service starts, says who it is, and ends.

No volume group is there, nor device-mapper, so Probe answers with an error that says so.
"""

import subprocess
import sys
from pathlib import Path

import grpc

from proto import csi_pb2 as csi
from proto import csi_pb2_grpc as services

CONFIGURATION = Path("/run/config.toml")
SOCKET = "unix:///run/csi.sock"
# For one that is emulated. It is asked anew each half second: gRPC's own pauses grow to minutes.
_SECONDS = 600
_OPTIONS = [("grpc.max_reconnect_backoff_ms", 500)]

CONFIGURATION.write_text(
    f'endpoint = "{SOCKET}"\nnode_id = "here"\nregistration = "none"\n'
    '[[classes]]\nname = "default"\ngroup = "none"\n'
)
service = subprocess.Popen(["carver", "serve", "--config", str(CONFIGURATION)])
try:
    with grpc.insecure_channel(SOCKET, options=_OPTIONS) as channel:
        identity = services.IdentityStub(channel)
        who = identity.GetPluginInfo(
            csi.GetPluginInfoRequest(), wait_for_ready=True, timeout=_SECONDS
        )
        print(f"serves {who.name} {who.vendor_version}")
        try:
            identity.Probe(csi.ProbeRequest(), timeout=_SECONDS)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                raise
finally:
    service.terminate()
sys.exit(service.wait(_SECONDS))
