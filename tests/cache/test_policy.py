"""Which bytes a cache keeps, and which ones are asked for again: exactly those that gave way, page by page, for the server and for datasets.

The cold store writes down each range that it is asked for. When blocks were used last is written into the files, so that no test waits.
"""

from __future__ import annotations

import random
import time

import pytest
from counting import Dataset, Node, counts, run
from extents import BLOCK_BYTES, PAGE_BYTES, Extent, extents_of, pages_of
from waiting import until

MIB = 1 << 20


@pytest.fixture
def node(tmp_path):
    """Return a function that starts a server with a budget."""
    started = []

    def start(budget, *options):
        started.append(Node(tmp_path / f"node-{len(started)}", budget, *options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_a_server_asks_for_the_missing_pages_only(node):
    one, choose = node("100MB"), random.Random(1)
    for key, bytes_ in (("small", 10_000), ("middle", 3 * MIB + 77), ("large", 11 * MIB + 1)):
        one.add(key, bytes_)
        cached = set()
        for _ in range(25):
            begin = choose.randrange(bytes_)
            end = min(bytes_, begin + choose.choice([1, 5000, 300_000, 3_000_000]))
            wanted = pages_of(begin, end)
            assert one.read(key, begin, end) == wanted - cached, (key, begin, end)
            cached |= wanted
        # The last page is short, and is asked for once, too.
        last = pages_of(bytes_ - 1, bytes_)
        assert one.read(key, bytes_ - 1, bytes_) == last - cached
        cached |= last
        one.restart()
        assert one.read(key, 0, bytes_) == pages_of(0, bytes_) - cached
        assert one.read(key, 0, bytes_) == set()
        [extent] = [extent for extent in extents_of(one.cache) if extent.name.startswith(f"bucket/{key}?")]
        assert extent.cached() == pages_of(0, bytes_)


def in_order(parts, cached, evicted_bytes):
    """Return the blocks whose eviction frees this many bytes, the least recently used first. Fails if no number of blocks does."""
    gone, freed = [], 0
    for block, _ in sorted(parts.items(), key=lambda part: part[1]):
        if freed == evicted_bytes:
            break
        gone.append(block)
        freed += len(cached[block]) * PAGE_BYTES
    assert freed == evicted_bytes, (gone, freed, evicted_bytes)
    return gone


def test_a_server_evicts_the_blocks_that_were_used_least_recently(node):
    """Blocks of one object are read in parts, touched, and pressed by another object."""
    one, choose = node("2400KB"), random.Random(4)
    bytes_ = 6 * MIB + 100
    one.add("big", bytes_)
    one.add("press", 2 * MIB)
    # Other numbers of pages of each block. The last block has a short page only.
    parts = {block: (block * MIB + 40_960, block * MIB + 40_960 + (40 + 10 * block) * PAGE_BYTES) for block in range(6)} | {
        6: (6 * MIB, bytes_)
    }
    for begin, end in parts.values():
        assert one.read("big", begin, end) == pages_of(begin, end)
    cached = {block: pages_of(*part) for block, part in parts.items()}
    before = counts(one.cache)
    assert before["evicted_bytes"] == 0 and before["bytes"] <= before["budget_bytes"] == 2_400_000
    [extent] = extents_of(one.cache)
    now = int(time.time())
    times = dict(zip(choose.sample(sorted(parts), len(parts)), range(now - 5000, now - 4000, 100), strict=False))
    one.server.process.kill()
    one.server.process.wait(300)
    extent.set_stamps(times)
    one.server.restart()
    # A byte of a block is enough to make it the last one that gives way.
    touched = sorted(times, key=times.get)[0]
    begin, _ = parts[touched]
    assert one.read("big", begin + 5000, begin + 5001) == set()
    times[touched] = now
    wanted = 0
    for number in range(4):
        assert one.read("press", number * 400_000, (number + 1) * 400_000 - 3000)
        wanted += 400_000
        found = counts(one.cache)
        assert found["bytes"] <= found["budget_bytes"]
    gone = in_order(times, cached, found["evicted_bytes"])
    assert 1 <= len(gone) < len(parts) - 1 and touched not in gone
    # At most a sixteenth of the budget more than what was needed, and the rest of a block.
    needed = before["bytes"] + wanted + 5 * PAGE_BYTES - 2_400_000
    most = max(len(pages) for pages in cached.values()) * PAGE_BYTES
    assert found["evicted_bytes"] <= needed + 2_400_000 // 16 + most
    stays = [block for block in parts if block not in gone]
    for block in stays:
        assert one.read("big", *parts[block]) == set(), (block, gone)
    for block in gone:
        assert one.read("big", *parts[block]) == cached[block], (block, gone)


def test_a_pinned_store_does_not_give_way(node):
    """A server fills its cache with two objects. While its store is pinned, what is read more is not kept."""
    one = node("1600KB")
    one.add("old", MIB)
    one.add("new", MIB)
    assert one.read("old", 0, MIB) == pages_of(0, MIB)
    [store] = [row["store"] for row in counts(one.cache)["stores"]]
    assert run("pin", store, "--cache", one.cache) == "pinned\n"
    for _ in range(2):
        # A part fits, and the rest passes by.
        assert pages_of(800_000, MIB) <= one.read("new", 0, MIB)
        assert one.read("old", 0, MIB) == set()
    assert counts(one.cache)["evicted_bytes"] == 0
    assert run("pin", store, "--cache", one.cache, "--remove") == "unpinned\n"
    # What a writer that is behind does not take is not kept, so once may not be enough.
    until(lambda: one.read("new", 0, MIB) is not None and counts(one.cache)["evicted_bytes"] > 0, "the old object gives way")
    found = counts(one.cache)
    assert found["bytes"] <= found["budget_bytes"]
    run("evict", store, "--cache", one.cache)
    assert counts(one.cache)["bytes"] == 0 and extents_of(one.cache) == []
    for key in ("old", "new"):
        # A server that still runs reads everything anew.
        assert one.read(key, 0, 300_000) == pages_of(0, 300_000)


@pytest.fixture
def dataset(tmp_path):
    made = Dataset(tmp_path / "cache", [500_000 + 30_011 * number for number in range(9)])
    yield made
    made.stop()


def blocks_of(pages):
    return {page * PAGE_BYTES // BLOCK_BYTES for page in pages}


def test_a_dataset_asks_again_for_what_gave_way_only(dataset):
    positions = [0, 2, 4, 6]
    [tail] = dataset.read(budget=":2600KB")
    pages = {position: dataset.read(position)[0] for position in positions}
    assert all(len(pages[position]) * PAGE_BYTES >= len(dataset.blobs[position]) for position in positions)
    assert dataset.read(*positions) == dataset.read() == [set()]
    [extent] = dataset.extents()
    cached = extent.cached()
    assert cached == tail.union(*pages.values())
    before = counts(dataset.cache)
    assert before["evicted_bytes"] == 0
    # The oldest block first.
    now, blocks = int(time.time()), sorted(blocks_of(cached))
    last = max(blocks)
    order = [*random.Random(6).sample(blocks[:-1], len(blocks) - 1), last]  # The end is read by each process.
    extent.set_stamps({block: now - 9000 + 100 * number for number, block in enumerate(order)})
    [pressed] = dataset.read(7)
    assert pressed and pressed.isdisjoint(cached - blocks_in(order[:-1], cached))
    found = counts(dataset.cache)
    assert found["bytes"] <= found["budget_bytes"] == 2_600_000
    by_block = {block: {page for page in cached if page * PAGE_BYTES // BLOCK_BYTES == block} for block in blocks}
    gone = in_order({block: number for number, block in enumerate(order)}, by_block, found["evicted_bytes"])
    lost = set().union(*(by_block[block] for block in gone))
    assert lost and last not in gone
    # What is kept is read without a request, and then what is lost is asked for: its pages and no others.
    assert Extent(extent.path).cached() == (cached - lost) | pressed
    whole = [position for position in positions if pages[position].isdisjoint(lost)]
    assert dataset.read(*whole, 7) == [set()]
    [first, *_] = [position for position in positions if not pages[position].isdisjoint(lost)]
    assert dataset.read(first) == [pages[first] & lost]


def blocks_in(blocks, pages):
    return {page for page in pages if page * PAGE_BYTES // BLOCK_BYTES in blocks}
