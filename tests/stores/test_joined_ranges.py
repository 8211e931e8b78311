"""Test how many ranges a take requests."""

import numpy as np
import penstock as ps
import pytest
from handles import spent


@pytest.mark.local
def test_neighbouring_blocks_are_read_in_ranges_of_megabytes(tmp_path):
    ps.create(tmp_path / "set", {"v": ps.Tensor((1024,), "float32"), "t": ps.Bytes()}).append(
        {"v": np.zeros((8192, 1024), np.float32), "t": [bytes(500)] * 8192}
    )
    ds = ps.open(tmp_path / "set", io="buffered")
    ds.take([0])
    for column, stored in (("v", 4096 * 4096), ("t", 4096 * 500)):
        cost = spent(ds, lambda column=column: ds.take(np.arange(4096), columns=[column]))
        assert cost["ranges"] <= 3 and cost["range_bytes"] <= 1.01 * stored, (column, cost)


@pytest.mark.local
@pytest.mark.parametrize("apart_bytes,ranges", [(1_000, 1), (10_000, 1), (100_000, 1), (500_000, 2)])
def test_blocks_near_each_other_are_one_range(bucket, apart_bytes, ranges):
    """A range also covers the bytes between two values if reading them costs less than sending a second request."""
    ds = ps.create(bucket, {"v": ps.Bytes()})
    ds.append({"v": [b"a" * 40_000, b"b" * apart_bytes, b"c" * 40_000, b"d" * 600_000]})
    fresh = ps.open(bucket)
    fresh.take([3])  # The handle has now cached the tail.
    assert spent(fresh, lambda: fresh.take([0, 2]))["ranges"] == ranges


@pytest.mark.local
def test_streamed_samples_are_joined_anywhere_in_a_file(tmp_path):
    """Units of 64 KiB are read together, also far from the beginning of the file."""
    ps.create(tmp_path / "set", {"x": ps.Tensor((1 << 20,), "uint8")}).append({"x": np.ones((48, 1 << 20), np.uint8)})
    ds = ps.open(tmp_path / "set", io="direct")
    ds.take([0])
    cost = spent(ds, lambda: ds.take(range(40, 48)))
    assert cost["direct_bytes"] >= 8 << 20 and cost["ranges"] <= 6 * 8, cost
