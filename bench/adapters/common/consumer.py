"""A training job of fixed speed: it takes a batch, computes for a while, and notes how long it waited and what was received.

consumer.py DATASET CACHE EPOCHS BATCH STEP_SECONDS RANK WORLD_SIZE BEGIN_TIME
"""

from __future__ import annotations

import json
import sys
import time

import penstock as ps

# A shorter wait is the hand-over of a batch, or another process on the same processors.
NO_STALL_SECONDS = 0.01
LOADER_BYTES = 128 << 20


def main() -> None:
    uri, cache, *numbers = sys.argv[1:]
    epochs, batch, step_seconds, rank, world_size, begin_time = int(numbers[0]), int(numbers[1]), *map(float, numbers[2:])
    # Little memory, so that what is read again comes from the cache or the store.
    ps.configure(memory_bytes=16 << 20)
    ds = ps.open(uri, cache=cache)
    share = {"global_batch_size": batch, "rank": int(rank), "world_size": int(world_size)} if world_size > 1 else {"batch_size": batch}
    loader = ds.loader(shuffle=True, seed=1, memory_bytes=LOADER_BYTES, **share)
    time.sleep(max(0.0, begin_time - time.time()))  # All jobs begin together.
    rows = []
    for _ in range(epochs):
        before, stalled, order, began = ds.stats()["received_bytes"], 0.0, [], time.perf_counter()
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            found = next(batches, None)
            waited = time.perf_counter() - asked
            stalled += waited if waited > NO_STALL_SECONDS else 0.0
            if found is None:
                break
            order += found["id"].tolist()
            time.sleep(step_seconds)  # The step of the training.
        rows.append({"cold_bytes": ds.stats()["received_bytes"] - before, "stalled_seconds": stalled,
                     "seconds": time.perf_counter() - began, "order": order})  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
