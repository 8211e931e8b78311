"""obstore: asynchronous GETs, or GETs in threads, with a limit of how many are in flight."""
# /// script
# dependencies = ["obstore==0.12.1", "numpy==2.4.6"]
# ///

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import drawn
import obstore


def remote_epoch(o: Any) -> Any:
    """A shuffled epoch of objects, each an image. Objects of the next batches are in flight while a batch is consumed."""
    store = obstore.store.S3Store(o.bucket, endpoint=o.endpoint, region="us-east-1", client_options={"allow_http": True})

    def in_threads() -> Any:
        batches = drawn.shuffled(o, o.images)
        order = [row for rows in batches for row in rows.tolist()]
        with concurrent.futures.ThreadPoolExecutor(o.threads) as pool:
            bodies = pool.map(lambda row: bytes(obstore.get(store, f"files/{row:06d}.jpg").bytes()), order)
            for rows in batches:
                yield [next(bodies) for _ in rows]

    def turn() -> Any:
        loop = asyncio.new_event_loop()
        limit = asyncio.Semaphore(o.threads)

        async def get(row: int) -> bytes:
            async with limit:
                return bytes(await (await obstore.get_async(store, f"files/{row:06d}.jpg")).bytes_async())

        async def batch(rows: Any) -> list[bytes]:
            return await asyncio.gather(*map(get, rows.tolist()))

        waiting, ahead = [], 3
        batches = drawn.shuffled(o, o.images)
        for number in range(len(batches)):
            waiting += [loop.create_task(batch(rows)) for rows in batches[number + len(waiting) : number + ahead]]
            yield loop.run_until_complete(waiting.pop(0))
        loop.close()

    return in_threads if o.way == "threads" else turn
