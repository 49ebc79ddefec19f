"""Carver above its packages for LVM and the kernel: operations, services, command, extras.

Importing this package raises `ImportError` if grpc was imported before without its fork handlers
being switched off.
"""

import os
import sys

# Environment variable that, when it is "0" as grpc is first imported, keeps gRPC from installing
# its at-fork handlers. The library sh forks, and runs Python in the child before exec. gRPC's
# handlers crash such a child if the fork comes from one of gRPC's own threads.
_FORK_HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
if "grpc" in sys.modules and os.environ.get(_FORK_HANDLERS) != "0":
    raise ImportError("import agent before grpc, whose fork handlers would kill programs it starts")
os.environ[_FORK_HANDLERS] = "0"

# Have gRPC speak only TLS 1.3. gRPC has no setting for the oldest TLS version. So the only cipher
# suite of TLS 1.2 that is allowed is one with a pre-shared key, with which no certificate can be
# used. The variable does not affect the cipher suites of TLS 1.3.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"
