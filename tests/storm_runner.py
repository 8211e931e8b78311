"""One writer of a storm (test_storms.py): commit until the count is reached, and note each attempt before the commit and its outcome after.

Each commit has its operation and what it read in its properties, so that the log can be replayed. Row ids 0 and 1 are counters that all writers
increment. Each writer also has a counter of its own, and appends and deletes samples.
"""

import json
import os
import random
import sys
import threading

import penstock as ps

COUNTERS = 2


def attempt(ds, rng, own, mine, token):
    """Make one commit. Returns whether it was made."""
    kind = rng.choice(["append", "append", "own", "shared", "shared", "delete"])
    if kind == "delete" and not mine:
        kind = "append"
    if kind == "append":
        with ds.transaction(token, properties={"op": "append"}) as tx:
            tx.append({"token": [token], "n": [0], "pad": ["x" * rng.choice([0, 10, 4000])]})
        mine.append((token, int(tx.receipt.row_ids[0])))
        return True
    if kind == "delete":
        target, row_id = mine.pop(rng.randrange(len(mine)))
        with ds.transaction(token, properties={"op": "delete", "target": target}) as tx:
            tx.delete(row_ids=[row_id])
        return True
    row = own if kind == "own" else rng.randrange(COUNTERS)
    ds.refresh()
    value = int(ds.take(row_ids=[row])["n"][0])
    tx = ds.transaction(token, properties={"op": "add", "row": row, "read": value})
    if int(tx.take([row])["n"][0]) != value:
        tx.abort()
        return False
    tx.update({"n": [value + 1]}, row_ids=[row])
    tx.commit()
    return True


def work(uri, name, count, out, seed):
    rng, ds, mine = random.Random(seed), ps.open(uri), []
    for number in range(count):
        token = f"{name}-{seed}-{number}"
        os.write(out, json.dumps({"begin": token}).encode() + b"\n")
        try:
            outcome = "done" if attempt(ds, rng, COUNTERS + int(name.split(".")[0]), mine, token) else "skipped"
        except ps.ConflictError:
            outcome = "conflict"
        except ps.UnavailableError as error:
            outcome = error.code
        os.write(out, json.dumps({"end": token, "outcome": outcome}).encode() + b"\n")


def main():
    uri, name, count, notes, seed, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    out = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    each = [threading.Thread(target=work, args=(uri, f"{name}.{index}", count, out, seed * 100 + index)) for index in range(threads)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()


if __name__ == "__main__":
    main()
