"""A way over sockets on loopback that can be lost without a word, as if a machine lost power."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """A way to a port, which can be lost without a word to either end."""

    def __init__(self, to: int) -> None:
        self._to, self.port, self.bytes = to, 0, 0
        self.passes = asyncio.Event()
        self.passes.set()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator["Relay"]:
        made = cls(port)
        server = await asyncio.start_server(made._connected, "127.0.0.1", 0)
        made.port = server.sockets[0].getsockname()[1]
        try:
            yield made
        finally:
            server.close()
            for one in made._tasks:
                one.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        loop = asyncio.get_running_loop()
        self._tasks += [
            loop.create_task(self._copy(reader, back)),
            loop.create_task(self._copy(there, writer)),
        ]

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.passes.wait()
                self.bytes += len(data)
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
