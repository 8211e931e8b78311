"""Benchmark E47: requests, bytes and seconds for random samples and slabs of arrays on MinIO, against h5py and Zarr."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import penstock as ps

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
import servers

BUCKET = "bench"
SAMPLES, LENGTH, BATCH = 10_000, 25_000, 100  # 100 KB each, 1 GB in total
SIDE, WINDOW = 256, 64


def penstock_reads(name: str) -> Any:
    """Return a function that reads samples of a dataset by position, or windows of its only volume."""
    ds = ps.open(f"s3://{BUCKET}/{name}")
    return (lambda key: ds["x"][key]) if name == "samples" else lambda key: ds["x"][(0, *key)]


def h5py_reads(name: str, **options: Any) -> Any:
    import h5py
    import s3fs

    system = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], **options)
    array = h5py.File(system.open(f"{BUCKET}/arrays.h5"))[name]
    return lambda key: array[key]


def zarr_reads(name: str) -> Any:
    import zarr

    array = zarr.open_array(zarr_store(name), mode="r")
    return lambda key: array.oindex[key] if isinstance(key, np.ndarray) else array[key]


def zarr_store(name: str) -> Any:
    import zarr

    return zarr.storage.FsspecStore.from_url(f"s3://{BUCKET}/zarr/{name}", storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]})


def one_sample(read: Any) -> int:
    np.testing.assert_array_equal(read(17), value(17))
    return LENGTH * 4


def samples(read: Any) -> int:
    """Read 1,000 random samples in batches of 100, and return the bytes needed."""
    order = np.random.default_rng(1).permutation(SAMPLES)[:1000]
    for start in range(0, 1000, BATCH):
        batch = np.sort(order[start : start + BATCH])
        found = read(batch)
        assert found.shape == (BATCH, LENGTH)
        np.testing.assert_array_equal(found[7], value(int(batch[7])))
    return 1000 * LENGTH * 4


def slabs(read: Any) -> int:
    """Read 100 windows of 64³ at random positions, and return the bytes needed."""
    whole, lows = volume(), np.random.default_rng(2).integers(0, SIDE - WINDOW + 1, (100, 3))
    for row in lows:
        key = tuple(slice(int(low), int(low) + WINDOW) for low in row)
        np.testing.assert_array_equal(read(key), whole[key])
    return 100 * WINDOW**3 * 4


def value(position: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(position).random(LENGTH, np.float32)


def volume() -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).random((SIDE, SIDE, SIDE), np.float32)


def write(folder: pathlib.Path) -> None:
    """Write the same arrays for each system: h5py and Zarr with chunks of 64³ and 32³, Penstock with default and with chosen tiles."""
    import h5py
    import zarr

    data = np.stack([value(position) for position in range(SAMPLES)])
    ps.create(f"s3://{BUCKET}/samples", {"x": ps.Tensor((LENGTH,), "float32")}).append({"x": data})
    whole = volume()
    for name, tile in (("default", None), ("by-hand", (64, 32, 8))):
        ps.create(f"s3://{BUCKET}/volume-{name}", {"x": ps.Tensor(whole.shape, "float32", tile=tile)}).append({"x": [whole]})
    with h5py.File(folder / "arrays.h5", "w", libver="latest") as file:
        file.create_dataset("samples", data=data)
        file.create_dataset("64", data=whole, chunks=(64, 64, 64))
        file.create_dataset("32", data=whole, chunks=(32, 32, 32))
    arrays = {"samples": (data, (1, LENGTH)), "64": (whole, (64, 64, 64)), "32": (whole, (32, 32, 32))}
    for name, (values, chunks) in arrays.items():
        zarr.create_array(zarr_store(name), shape=values.shape, chunks=chunks, dtype="float32", compressors=None)[:] = values


AS_ASKED: dict[str, Any] = {"default_cache_type": "none"}  # s3fs fetches only the ranges that h5py requests, without read-ahead.
# For each case: the workload and a function that opens the array.
CASES: dict[str, tuple[Any, Any]] = {
    "one sample, penstock": (one_sample, lambda: penstock_reads("samples")),
    "one sample, h5py": (one_sample, lambda: h5py_reads("samples", **AS_ASKED)),
    "one sample, zarr": (one_sample, lambda: zarr_reads("samples")),
    "1,000 samples, penstock": (samples, lambda: penstock_reads("samples")),
    "1,000 samples, h5py": (samples, lambda: h5py_reads("samples", **AS_ASKED)),
    "1,000 samples, h5py with read-ahead": (samples, lambda: h5py_reads("samples")),
    "1,000 samples, zarr": (samples, lambda: zarr_reads("samples")),
    "100 slabs, penstock": (slabs, lambda: penstock_reads("volume-default")),
    "100 slabs, penstock with tile=(64, 32, 8)": (slabs, lambda: penstock_reads("volume-by-hand")),
    "100 slabs, h5py with chunks of 64³": (slabs, lambda: h5py_reads("64", **AS_ASKED)),
    "100 slabs, h5py with chunks of 32³": (slabs, lambda: h5py_reads("32", **AS_ASKED)),
    "100 slabs, zarr with chunks of 64³": (slabs, lambda: zarr_reads("64")),
    "100 slabs, zarr with chunks of 32³": (slabs, lambda: zarr_reads("32")),
}


def slices(folder: pathlib.Path) -> dict[str, Any]:
    """Run each case in a separate process (so that nothing is cached) through a proxy that counts requests and bytes."""
    (folder / "minio").mkdir()
    server = servers.Minio(folder / "minio")
    proxy = servers.Proxy(server.port)
    keys = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET, "AWS_REGION": "us-east-1"}
    os.environ |= {**keys, "AWS_ENDPOINT_URL": server.endpoint, "HDF5_USE_FILE_LOCKING": "FALSE"}
    results: dict[str, dict[str, float]] = {}
    try:
        server.client().create_bucket(Bucket=BUCKET)
        write(folder)
        server.client().upload_file(str(folder / "arrays.h5"), BUCKET, "arrays.h5")
        for name in CASES:
            proxy.faults("")
            environment = {**os.environ, "AWS_ENDPOINT_URL": proxy.endpoint}
            done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True, check=True)
            seconds, needed = map(float, done.stdout.split())
            counts = proxy.counts()
            results[name] = {"requests": counts["requests"], "bytes": counts["body_bytes"], "seconds": seconds, "needed": needed}
    finally:
        proxy.stop()
        server.stop()

    def line(name: str) -> str:
        case = results[name]
        return f"{name}: {case['requests']:,} requests, {case['bytes'] / case['needed']:.2f} × the bytes needed, {case['seconds']:.2f} s"

    def ratio(name: str, what: str) -> float:
        """Return our value divided by the best rival's, excluding rivals with read-ahead."""
        part = name.partition(", ")[0]
        rivals = [case for other, case in results.items() if other.startswith(part) and "penstock" not in other and "ahead" not in other]
        return results[name][what] / min(case[what] for case in rivals)

    ours, slab = "1,000 samples, penstock", "100 slabs, penstock with tile=(64, 32, 8)"
    return {
        "what": "E47: 10,000 samples of 100 KB and a volume of 256³ float32 on MinIO; each case opens a fresh handle, and the bodies of all replies count",
        "cases": results,
        "lines": [line(name) for name in results],
        "bars": [
            {"what": "1,000 samples: bytes received / needed", "value": results[ours]["bytes"] / results[ours]["needed"], "at_most": 1.1},
            {"what": "1,000 samples: requests / the best rival's", "value": ratio(ours, "requests"), "at_most": 1.0},
            {"what": "1,000 samples: bytes / the best rival's", "value": ratio(ours, "bytes"), "at_most": 1.1},
            {"what": "one cold sample after open: requests", "value": results["one sample, penstock"]["requests"] - 3, "at_most": 2},
            {"what": "100 slabs: requests / the best rival's", "value": ratio(slab, "requests"), "at_most": 1.0},
            {"what": "100 slabs: bytes / the best rival's", "value": ratio(slab, "bytes"), "at_most": 1.0},
        ],
    }


if __name__ == "__main__":
    work, opened = CASES[sys.argv[1]]
    began = time.perf_counter()
    needed = work(opened())
    print(time.perf_counter() - began, needed)
