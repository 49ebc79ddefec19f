"""What an RPC must achieve, and gRPC itself."""

import os

# sh forks and runs Python in the child before exec. gRPC's at-fork handlers crash that child when
# the fork comes from one of gRPC's own threads. They are installed when grpc is first imported,
# and only this variable, set before, keeps them out.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
