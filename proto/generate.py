"""Generate the Python modules and their type stubs from the .proto files: `make proto`."""

import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# The stubs come from mypy-protobuf and not from protoc's own --pyi_out, which leaves services and
# the names in HasField and WhichOneof untyped, and lets None pass where a string is wanted.
# Carver's server has threads, no asyncio, and leaves some RPCs to the generated base class, which
# answers UNIMPLEMENTED: so no asyncio variants, and no abstract methods.
MESSAGES = "quiet"
SERVICES = "quiet,only_sync,generate_concrete_servicer_stubs"


def generate(output: Path) -> None:
    """Write the package's generated files to output/proto."""
    scripts = Path(sysconfig.get_path("scripts"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            # Paths relative to the folder above make the modules import each other as proto.….
            f"--proto_path={FOLDER.parent}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={output}",
            f"--grpc_python_out={output}",
            f"--mypy_out={MESSAGES}:{output}",
            f"--mypy_grpc_out={SERVICES}:{output}",
            *(f"proto/{source.name}" for source in sorted(FOLDER.glob("*.proto"))),
        ],
        check=True,
    )


if __name__ == "__main__":
    generate(FOLDER.parent)
