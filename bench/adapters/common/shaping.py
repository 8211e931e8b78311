"""A connection to a server that is far away: each response begins late, and each connection, or all together, have a speed limit.

shaping.py PORT UPSTREAM_PORT DELAY_SECONDS BYTES_PER_SECOND [ALL_BYTES_PER_SECOND]
"""

from __future__ import annotations

import asyncio
import math
import sys

PIECE_BYTES = 64 << 10


async def _requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event) -> None:
    while data := await reader.read(PIECE_BYTES):
        asked.set()
        writer.write(data)
        await writer.drain()
    writer.close()


class Link:
    """What all connections share: pieces leave one after the other."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free = rate, 0.0

    def due(self, size: int, now: float) -> float:
        self.free = max(self.free, now) + size / self.rate
        return self.free


async def _responses(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event, delay: float, rate: float, link: Link
) -> None:
    loop = asyncio.get_running_loop()
    due = 0.0
    while data := await reader.read(PIECE_BYTES):
        if asked.is_set():
            asked.clear()
            due = loop.time() + delay
        due = max(due, loop.time()) if due < loop.time() - 1 else due
        due += len(data) / rate
        if (wait := max(due, link.due(len(data), loop.time())) - loop.time()) > 0:
            await asyncio.sleep(wait)
        writer.write(data)
        await writer.drain()
    writer.close()


async def serve(port: int, upstream: int, delay: float, rate: float, all_rate: float = math.inf) -> None:
    link = Link(all_rate)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        asked = asyncio.Event()
        await asyncio.gather(
            _requests(reader, up_writer, asked), _responses(up_reader, writer, asked, delay, rate, link), return_exceptions=True
        )  # fmt: skip

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])))
