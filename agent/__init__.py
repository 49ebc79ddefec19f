"""Carver above LVM and the kernel: operations, CSI services, process, command and extras.

Raises `ImportError` where grpc was imported before it.
"""

import os
import sys

# sh forks and runs Python in the child before exec. gRPC's at-fork handlers crash that child when
# the fork comes from one of gRPC's own threads. They are installed when grpc is first imported,
# and only this variable, set before, keeps them out.
_FORK_HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
if "grpc" in sys.modules and os.environ.get(_FORK_HANDLERS) != "0":
    raise ImportError("import agent before grpc, whose fork handlers would kill programs it starts")
os.environ[_FORK_HANDLERS] = "0"

# Of TLS 1.2's suites only one that no certificate can serve (its key is shared beforehand): so gRPC
# speaks TLS 1.3, whose suites this does not choose. It has no other way to set a least version.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"
