"""A disk that takes as long to be overwritten as a test wants."""

import threading
from collections.abc import Callable

import expect
import pytest
from fakes.host import FakeHost

from mount.block_io import By


class Disk:
    """Writes of zeroes wait, fail or go through, as the test says."""

    def __init__(self, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[tuple[str, int, int]] = []
        self.reached, self.free = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.fail_once: OSError | None = None
        self._real: Callable[..., None] = fake.kernel.zero_out
        monkeypatch.setattr(fake.kernel, "zero_out", self._zero_out)

    def _zero_out(
        self,
        device: str,
        offset_bytes: int,
        length_bytes: int,
        *,
        allow_in_use: bool = False,
        method: By | None = None,
    ) -> None:
        self.reached.set()
        assert self.free.wait(expect.PATIENCE_SECONDS)
        once, self.fail_once = self.fail_once, None
        if error := once or self.error:
            raise error
        self._real(device, offset_bytes, length_bytes, allow_in_use=allow_in_use, method=method)
        self.written.append((device, offset_bytes, length_bytes))
