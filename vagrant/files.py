"""Files of the lab's state: written whole, read as absent where damaged, shared with root."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file whole: after a crash it has its old content or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(handle)
        part.chmod(mode)
        give_to_owner(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_text(path: Path) -> str:
    """Read a file; empty where there is none, or where it is of a process that just ended."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no file, or it is damaged."""
    try:
        found = json.loads(read_text(path))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def give_to_owner(path: Path) -> None:
    """Give what root made to the owner of the folder that it is in.

    Some of the lab's programs run under sudo; their user's next program writes the same files.
    """
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
