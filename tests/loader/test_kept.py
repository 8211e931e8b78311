"""What a loader keeps of an object store in its own memory. If everything fits, each byte is fetched once, in long ranges. If not, what is read
next is kept, and the rest is fetched once in each epoch.
"""

import io
import itertools
import os
import pathlib
import re
import uuid

import measured
import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T
from PIL import Image

SAMPLES, SMALLEST, LARGEST, BATCH = 600, 50_000, 90_000, 16


def blobs():
    random = np.random.default_rng(7)
    return [random.bytes(int(size)) for size in random.integers(SMALLEST, LARGEST, SAMPLES)]


@pytest.fixture(scope="module")
def filled(minio):
    """Create 42 MB of blobs in MinIO, and return their place and the blobs."""
    place, bodies = minio.place("kept/dataset"), blobs()
    ds = ps.create(place, {"blob": ps.Bytes(), "number": "int32"})
    ds.append({"blob": bodies[:400], "number": range(400)})
    ds.append({"blob": bodies[400:], "number": range(400, SAMPLES)})
    return place, bodies


@pytest.fixture
def small_block_cache(empty_cache):
    """Make the process's cache of blocks too small for the blobs."""
    before = ps.configure()["memory_bytes"]
    ps.configure(memory_bytes=32 << 20)
    yield
    ps.configure(memory_bytes=before)


def counted(ds, work):
    """Run `work`, and return the ranges and bytes that were requested meanwhile."""
    before = ds.stats()
    work()
    after = ds.stats()
    return after["ranges"] - before["ranges"], after["range_bytes"] - before["range_bytes"]


def read(loader, bodies):
    """Read an epoch, compare each blob, and return the order of the numbers."""
    order = []
    for batch in loader:
        assert all(blob == bodies[number] for blob, number in zip(batch["blob"], batch["number"], strict=True))
        order += batch["number"].tolist()
    return order


def numbers(loader):
    return [number for batch in loader for number in batch["number"].tolist()]


def expected(seed, epochs, **options):
    """Return the orders of a loader that reads local memory."""
    ds = ps.create(f"memory://kept-{uuid.uuid4().hex}", {"number": "int32"})
    ds.append({"number": range(400)})
    ds.append({"number": range(400, SAMPLES)})
    loader = ds.loader(batch_size=BATCH, shuffle=True, seed=seed, **options)
    return [numbers(loader) for _ in range(epochs)]


def test_what_fits_is_fetched_once_in_long_ranges(filled, small_block_cache):
    place, bodies = filled
    ds, total = ps.open(place), sum(map(len, bodies))
    orders = []
    with ds.loader(batch_size=BATCH, shuffle=True, seed=1, memory_bytes=96 << 20) as loader:
        explained = loader.explain()
        ranges, received = counted(ds, lambda: orders.append(read(loader, bodies)))
        later = counted(ds, lambda: orders.extend(read(loader, bodies) for _ in range(2)))
    assert total <= received <= 1.02 * total
    assert ranges <= SAMPLES / 5 + 10, "neighbours come in one range"
    assert later == (0, 0)
    assert orders == expected(1, 3)
    assert re.search(r"kept +all 4\d\.\d MiB are fetched once", explained), explained
    about = int(re.search(r"about ([\d,]+) per rank", explained)[1].replace(",", ""))
    assert abs(ranges - about) <= 0.1 * about + 4, (ranges, explained)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("memory_mib", "least_fits"), [(24, 0.3), (40, 0.5), (50, 0.7)])
def test_of_what_does_not_fit_what_is_read_next_is_kept(filled, small_block_cache, memory_mib, least_fits, shuffle):
    place, bodies = filled
    ds, total, most = ps.open(place), sum(map(len, bodies)), memory_mib << 20
    orders, counts = [], []
    with ds.loader(batch_size=BATCH, shuffle=shuffle, seed=2, memory_bytes=most) as loader:
        explained = loader.explain()
        batches = loader.stream(3)
        for _ in range(3):
            counts.append(counted(ds, lambda: orders.append(read(itertools.islice(batches, len(loader)), bodies))))
        assert loader.stats()["peak_bytes"] <= most
    assert orders == (expected(2, 3) if shuffle else [list(range(SAMPLES))] * 3)
    room, again = map(
        float,
        re.search(
            r"kept +up to ([\d.]+) MiB of 4\d\.\d MiB, the data that is read next.*\. ([\d.]+) MiB are fetched again", explained
        ).groups(),
    )
    assert room * 2**20 >= least_fits * total, explained
    assert total <= counts[0][1] <= 1.02 * total, "once in the first epoch"
    assert counts[0][0] <= SAMPLES * 0.75, "neighbours come in one range"
    told, size = re.search(r"about ([\d,]+) per rank and epoch, which transfer ([\d.]+) MiB", explained).groups()
    assert abs(counts[0][0] - int(told.replace(",", ""))) <= 0.1 * counts[0][0] + 4, (counts, explained)
    assert abs(counts[0][1] - float(size) * 2**20) <= 0.1 * counts[0][1], (counts, explained)
    for requests, received in counts[1:]:
        assert abs(received - again * 2**20) <= 0.05 * total, (counts, explained)
        assert received <= total - 0.85 * room * 2**20 and requests <= SAMPLES * 0.75


def test_little_of_what_does_not_fit_is_not_kept(filled, small_block_cache):
    place, bodies = filled
    with ps.open(place).loader(batch_size=BATCH, shuffle=True, seed=2, memory_bytes=8 << 20) as loader:
        assert "the data that is read next" not in loader.explain()
        assert [read(loader, bodies)] == expected(2, 1)
        assert loader.stats()["peak_bytes"] <= 8 << 20


def test_a_column_that_is_cropped_is_not_fetched_whole(minio, small_block_cache):
    place, rng = minio.place("kept-cropped/dataset"), np.random.default_rng(1)
    volumes = rng.integers(0, 1000, (60, 80, 70, 60)).astype(np.int16)  # 40 MB.
    ps.create(place, {"v": ps.Tensor((80, 70, 60), "int16"), "number": "int32"}).append({"v": volumes, "number": range(60)})
    ds = ps.open(place)
    with ds.loader(batch_size=4, transform=[T.CenterCrop((8, 70, 60), on="v")], memory_bytes=96 << 20) as loader:
        batches = []
        _, received = counted(ds, lambda: batches.extend(loader))
    assert all((batch["v"] == volumes[batch["number"], 36:44]).all() for batch in batches)
    assert received <= 0.3 * volumes.nbytes


@pytest.mark.parametrize("memory_mib", [96, 40])
def test_a_resumed_loader_and_ranks_read_what_they_would_have(filled, small_block_cache, memory_mib):
    place, bodies = filled
    ds = ps.open(place)
    (whole,) = expected(3, 1)
    options = {"batch_size": BATCH, "shuffle": True, "seed": 3, "memory_bytes": memory_mib << 20}
    with ds.loader(**options) as loader:
        seen = []
        for batch in loader:
            seen += batch["number"].tolist()
            if len(seen) >= SAMPLES / 3:
                break
        state = loader.state_dict()
    with ds.loader(**options) as loader:
        loader.load_state_dict(state)
        assert seen + read(loader, bodies) == whole
    parts = []
    for rank in range(2):
        with ds.loader(**options | {"batch_size": BATCH // 2}, rank=rank, world_size=2) as loader:
            parts.append(read(loader, bodies))
    assert sorted(parts[0] + parts[1]) == list(range(SAMPLES))
    # Every third step, as a process of several would make them.
    with ds.loader(**options) as loader:
        loader._core.start(1, len(loader), 3)
        found = []
        while (batch := loader._core.next()) is not None:
            found += batch[0]["number"].tolist()
    assert found == [number for step in range(1, -(-SAMPLES // BATCH), 3) for number in whole[step * BATCH : (step + 1) * BATCH]]


def unchanged(sample):
    return sample


@pytest.mark.parametrize(
    "options", [{"rank": 1, "world_size": 3, "batch_size": 8}, {"python_workers": 2, "transform": [unchanged], "batch_size": BATCH}]
)
def test_explain_foretells_what_ranks_and_workers_fetch(filled, small_block_cache, options):
    place, bodies = filled
    with ps.open(place).loader(**options, shuffle=True, seed=8, memory_bytes=160 << 20) as loader:
        explained = loader.explain()
        read(loader.stream(1), bodies)
        found = loader.stats()["read"]
    told, size = re.search(r"about ([\d,]+) per rank and epoch, which transfer ([\d.]+) MiB", explained).groups()
    assert "are fetched once" in explained
    assert abs(found["ranges"] - int(told.replace(",", ""))) <= 0.1 * found["ranges"] + 4, (found, explained)
    assert abs(found["range_bytes"] - float(size) * (1 << 20)) <= 0.1 * found["range_bytes"], (found, explained)


def test_a_mixture_keeps_each_of_its_sources(filled, minio, small_block_cache):
    place, bodies = filled
    ds = ps.open(place)
    both = ps.mix({"low": (ds.select(range(300)), 1), "high": (ds.select(range(300, SAMPLES)), 1)})
    with both.loader(batch_size=BATCH, shuffle=True, seed=4, memory_bytes=96 << 20) as loader:
        first = counted(ds, lambda: read(loader, bodies))
        second = counted(ds, lambda: read(loader, bodies))
    assert first[0] <= SAMPLES / 4 and second[1] <= 0.1 * first[1]


def test_larger_batches_than_expected_get_the_memory(minio, small_block_cache):
    """Images of unequal sizes: how much a batch needs is known when the first one has been read."""
    random = np.random.default_rng(3)

    def image(number):
        out = io.BytesIO()
        pixels = random.integers(0, 256, (400 + number % 7, 500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(out, "JPEG", quality=80)
        return out.getvalue()

    images = [image(number) for number in range(240)]
    place = minio.place("kept-images/dataset")
    ps.create(place, {"image": ps.Image(), "number": "int32"}).append({"image": images, "number": range(240)})
    ds = ps.open(place)
    budget = (sum(map(len, images)) >> 20) + 24 << 20  # Beside all images, this is less than two batches.
    with ds.loader(batch_size=24, shuffle=True, seed=1, ragged=["image"], memory_bytes=budget) as loader:
        assert "are fetched once" in loader.explain()
        for _ in range(2):
            seen = []
            for batch in loader:
                for pixels, number in zip(batch["image"], batch["number"], strict=True):
                    assert pixels.shape == (400 + number % 7, 500, 3)
                seen += batch["number"].tolist()
            assert sorted(seen) == list(range(240))
        assert 20 << 20 <= loader.stats()["peak_bytes"] <= budget


def test_a_damaged_block_is_reported_by_the_batch_that_needs_it(minio, small_block_cache):
    place, bodies = minio.place("kept-damaged/dataset"), blobs()
    ps.create(place, {"blob": ps.Bytes(), "number": "int32"}).append({"blob": bodies, "number": range(SAMPLES)})
    client, prefix = minio.client(), place.removeprefix("s3://").partition("/")[2]
    bucket = place.removeprefix("s3://").partition("/")[0]
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]]
    (key,) = [key for key in keys if client.head_object(Bucket=bucket, Key=key)["ContentLength"] > 1 << 20]
    body = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    body[body.index(bodies[123][:64]) + 1000] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(body))
    ds = ps.open(place)
    with (
        ds.loader(batch_size=BATCH, shuffle=True, seed=5, memory_bytes=96 << 20) as loader,
        pytest.raises(ps.CorruptError, match="sample 123"),
    ):
        list(loader)
    with ds.loader(batch_size=BATCH, shuffle=True, seed=5, memory_bytes=96 << 20, on_corrupt="substitute") as loader:
        seen = numbers(loader)
    assert len(seen) == SAMPLES and 123 not in seen


def test_a_fork_begins_its_own_epoch(filled, small_block_cache):
    place, bodies = filled
    ds = ps.open(place)
    with ds.loader(batch_size=BATCH, shuffle=True, seed=7, memory_bytes=96 << 20) as loader:
        steps = iter(loader)
        first = next(steps)["number"].tolist()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = ds.loader(batch_size=BATCH, shuffle=True, seed=7, memory_bytes=96 << 20)
                status = 0 if read(own, bodies)[:BATCH] == first else 2
                own.close()
            finally:
                os._exit(status)
        rest = [number for batch in steps for number in batch["number"].tolist()]
        assert sorted(first + rest) == list(range(SAMPLES))
        assert os.waitpid(child, 0)[1] == 0


MEASURED = """
import sys, penstock as ps
from measured import Grown
ps.configure(memory_bytes=32 << 20, threads=2)
ds = ps.open(sys.argv[1])
list(ds.select(range(8)).loader(batch_size=8).stream(1))
with Grown() as grown:
    with ds.loader(batch_size=16, shuffle=True, memory_bytes=int(sys.argv[2])) as loader:
        assert sum(len(batch["blob"]) for batch in loader.stream(3)) == 3 * len(ds)
print(grown.peak)
"""


def test_anonymous_memory_stays_within_the_budget(filled):
    place, _ = filled
    # Other tests that run now have locks (of multiprocessing) and servers.
    shared = lambda: {path for path in pathlib.Path("/dev/shm").iterdir() if not path.name.startswith(("sem.mp-", "penstock-servers-"))}  # noqa: E731
    before, budget = shared(), 96 << 20
    grown = int(measured.run(MEASURED, place, budget))
    consumed = 2 * BATCH * LARGEST  # The consumer's batch, as `bytes`, and the one before.
    assert 40 << 20 <= grown <= 1.1 * budget + consumed, grown / (1 << 20)
    assert shared() <= before
