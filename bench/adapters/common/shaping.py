"""A connection to a server that is far away: each response begins late, and each connection has its own speed limit."""

from __future__ import annotations

import asyncio
import sys

PIECE_BYTES = 64 << 10


async def _requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event) -> None:
    while data := await reader.read(PIECE_BYTES):
        asked.set()
        writer.write(data)
        await writer.drain()
    writer.close()


async def _responses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event, delay: float, rate: float) -> None:
    loop = asyncio.get_running_loop()
    due = 0.0
    while data := await reader.read(PIECE_BYTES):
        if asked.is_set():
            asked.clear()
            due = loop.time() + delay
        due = max(due, loop.time()) if due < loop.time() - 1 else due
        due += len(data) / rate
        if (wait := due - loop.time()) > 0:
            await asyncio.sleep(wait)
        writer.write(data)
        await writer.drain()
    writer.close()


async def serve(port: int, upstream: int, delay: float, rate: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        asked = asyncio.Event()
        await asyncio.gather(
            _requests(reader, up_writer, asked), _responses(up_reader, writer, asked, delay, rate), return_exceptions=True
        )  # fmt: skip

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
