"""Writes a stream: parts of a volume in their order, and the end mark."""

from collections.abc import Callable

from agent.streams import form
from agent.streams.form import Header, Packed, Totals
from mount.blocks import Bytes


class Writer:
    """A stream on its way out. `write` is given bytes, and takes all of them."""

    def __init__(self, write: Callable[[Bytes], object], header: Header) -> None:
        self.totals = Totals()
        # How long the stream is until now.
        self.written_bytes = 0
        self._write = write
        self._header = header
        text, self._proof = form.opening(header)
        self._put(text)

    def data(self, offset_bytes: int, length_bytes: int, packed: Packed) -> None:
        """A part that holds data, packed by `form.pack`."""
        self._frame(form.DATA, offset_bytes, length_bytes, packed)
        self.totals.add(length_bytes, is_zeroes=False)

    def zeroes(self, offset_bytes: int, length_bytes: int) -> None:
        """A part that holds zeroes only."""
        self._frame(form.ZEROES, offset_bytes, length_bytes)
        self.totals.add(length_bytes, is_zeroes=True)

    def end(self) -> None:
        """The end mark: whoever reads it has everything."""
        packed = form.pack(self.totals.pack(), compress=False)
        self._frame(form.END, self._header.size_bytes, 0, packed)

    def _frame(
        self, kind: bytes, offset_bytes: int, length_bytes: int, packed: Packed | None = None
    ) -> None:
        text, self._proof = form.heading(self._proof, kind, offset_bytes, length_bytes, packed)
        self._put(text)
        if packed is not None:
            self._put(packed.payload)

    def _put(self, text: Bytes) -> None:
        self._write(text)
        self.written_bytes += len(text)
