"""boto3: GETs in threads, with as many connections, and without checks of checksums that the server did not ask for."""
# /// script
# dependencies = ["boto3==1.44.8", "numpy==2.4.6"]
# ///

from __future__ import annotations

import concurrent.futures
import json
import pathlib
from typing import Any

import boto3
import drawn
from botocore.config import Config


def _client(o: Any) -> Any:
    config = Config(
        max_pool_connections=o.threads, response_checksum_validation="when_required", tcp_keepalive=True, retries={"mode": "standard"}
    )
    return boto3.client("s3", endpoint_url=o.endpoint, config=config)


def ranges(o: Any) -> Any:
    """GET batches of ranges of objects; with `scan`, without waiting for the end of a batch."""
    client, batches = _client(o), json.loads(pathlib.Path(o.ranges).read_text())
    pool = concurrent.futures.ThreadPoolExecutor(o.threads)

    def get(one: tuple[str, int, int]) -> bytes:
        key, begin, end = one
        body: bytes = client.get_object(Bucket=o.bucket, Key=key, Range=f"bytes={begin}-{end - 1}")["Body"].read()
        return body

    if o.scan:
        return lambda: ([body] for batch in batches for body in pool.map(get, batch))
    return lambda: (list(pool.map(get, batch)) for batch in batches)


def remote_epoch(o: Any) -> Any:
    """A shuffled epoch of objects, each an image."""
    client, pool = _client(o), concurrent.futures.ThreadPoolExecutor(o.threads)

    def turn() -> Any:
        batches = drawn.shuffled(o, o.images)
        order = [f"files/{row:06d}.jpg" for rows in batches for row in rows.tolist()]
        bodies = pool.map(lambda key: client.get_object(Bucket=o.bucket, Key=key)["Body"].read(), order)
        for rows in batches:
            yield [next(bodies) for _ in rows]

    return turn
