"""Damage of every part of an extent's file: what is read is right, by a server and as a dataset, and exactly what was damaged is fetched again."""

from __future__ import annotations

import pytest
from counting import Dataset, Node, counts
from extents import PAGE_BYTES, Extent, pages_of

BYTES = 21_000  # Six pages, the last one of 520 bytes.


def damages(extent: Extent):
    """Yield for each kind of damage its name, a function that does it, and the pages that are fetched again. None: all of them."""
    last = extent.pages - 1
    size = extent.footer + 32
    for name, page in (("first page", 0), ("page in the middle", extent.pages // 2), ("last page", last)):
        length = min(PAGE_BYTES, extent.object_bytes - page * PAGE_BYTES)
        for where, at in (("first byte", 0), ("last byte", length - 1)):
            yield f"{where} of {name}", lambda at=page * PAGE_BYTES + at: extent.flip(at, 3), {page}
        for byte in (0, 3):
            yield f"checksum of {name}", lambda at=extent.table + 4 * page + byte: extent.flip(at, 6), {page}
    yield "time of last use", lambda: extent.flip(extent.stamps + 1), set()
    parts = [("identity", extent.identity, extent.identity_bytes), ("note", extent.note, extent.note_bytes), ("footer", extent.footer, 28)]
    for name, at, length in parts:
        for place in {0, length - 1} if length else ():
            yield f"byte {place} of {name}", lambda at=at + place: extent.flip(at, 5), None
    for bytes_ in (0, 1, PAGE_BYTES, extent.object_bytes, size - 1, size + 1, size + PAGE_BYTES):
        yield f"cut or lengthened to {bytes_}", lambda bytes_=bytes_: resize(extent, bytes_), None


def resize(extent, bytes_):
    with extent.path.open("r+b") as file:
        file.truncate(bytes_)


def check_counts(before, found, kinds):
    """Damaged pages are counted once. What was mended uses the space of what was damaged, unless a whole file was lost."""
    pages = [again for again in kinds if again is not None]
    assert found["corrupt_pages"] - before["corrupt_pages"] == sum(map(len, pages))
    assert found["bytes"] <= found["budget_bytes"]
    assert found["bytes"] == before["bytes"] or len(pages) < len(kinds)


@pytest.mark.parametrize("first_read", ["whole", "end"])
def test_a_server_sends_no_damaged_byte(tmp_path, first_read):
    node = Node(tmp_path / "node", "50MB")
    try:
        keys = [f"{number:02d}" for number in range(40)]
        for key in keys:
            node.add(key, BYTES)
            node.read(key, 0, BYTES)
        each = [list(damages(node.extent(key))) for key in keys]
        kinds = [kinds[number] for number, kinds in enumerate(each) if number < len(kinds)]
        assert len(kinds) > 25
        if first_read == "end":
            kinds = [kind for kind in kinds if kind[2] is not None]
        node.server.process.kill()
        node.server.process.wait(300)
        before = counts(node.cache)
        for _, damage, _ in kinds:
            damage()
        node.server.restart()
        all_pages, last = pages_of(0, BYTES), pages_of(BYTES - 1, BYTES)
        for key, (kind, _, again) in zip(keys, kinds, strict=False):
            end = set()
            if first_read == "end":
                # What is not asked for is not fetched.
                end = node.read(key, BYTES - 100, BYTES)
                assert end == (last if again is None else again & last), kind
            assert node.read(key, 0, BYTES) | end == (all_pages if again is None else again), kind
            # It was mended: nothing is fetched any more.
            assert node.read(key, 0, BYTES) == node.read(key, BYTES - 1, BYTES) == set(), kind
        assert all(node.extent(key).cached() == all_pages for key in keys)
        check_counts(before, counts(node.cache), [again for _, _, again in kinds])
    finally:
        node.stop()


@pytest.mark.parametrize("read", ["all samples", "one sample of each file"])
def test_a_dataset_has_no_damaged_byte(tmp_path, read):
    """A data file that is cached as a whole is read as one that is mapped, and another one by ranges."""
    dataset = Dataset(tmp_path / "cache", *([9000, 300_000] for _ in range(36)))
    try:
        positions = range(72) if read == "all samples" else range(0, 72, 2)
        dataset.read(*positions, budget=":50MB")
        extents = dataset.extents()
        cached = [extent.cached() for extent in extents]
        assert all((len(pages) == extent.pages) == (read == "all samples") for pages, extent in zip(cached, extents, strict=True))
        before = counts(dataset.cache)
        expected, names, done = [], [], []
        for number, extent in enumerate(extents):
            kinds = [kind for kind in damages(extent) if not kind[2] or kind[2] <= cached[number]]
            if read != "all samples":
                kinds = [kind for kind in kinds if kind[2] is not None]
            if number < len(kinds):
                name, damage, again = kinds[number]
                damage()
                names.append(name)
                done.append(again)
                expected.append(cached[number] if again is None else again)
            else:
                expected.append(set())
        assert len(names) > (20 if read == "all samples" else 8)
        found = dataset.read(*positions)
        assert found == expected, [(name, one, other) for name, one, other in zip(names, found, expected, strict=False) if one != other]
        check_counts(before, counts(dataset.cache), done)
        assert dataset.read(*positions) == [set()] * len(extents)
        assert [extent.cached() for extent in dataset.extents()] == cached
    finally:
        dataset.stop()
