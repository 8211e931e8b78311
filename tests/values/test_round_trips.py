"""Each column type × nulls × empty values, through Arrow, Parquet, pandas and Polars, and back by append and by import: every cell."""

import uuid

import ml_dtypes
import numpy as np
import penstock as ps
import pyarrow.parquet as pq
import pytest
from penstock.importers import import_data
from penstock.values.dtypes import DTYPES, numpy_dtype
from penstock.views.sample import unwrap

pytestmark = pytest.mark.local


def elements(dtype, count):
    """Return values of a dtype, among them its extremes, NaN and infinities."""
    wanted = numpy_dtype(dtype)
    if dtype == "bool":
        some = np.array([True, False])
    elif dtype in ("timestamp", "duration"):
        some = np.array([0, 1, -1, 1_577_836_800_123_456, -62_135_596_800_000_000], np.int64).view(wanted)
    elif dtype == "time":
        some = np.array([0, 1, 86_399_999_999], np.int64).view(wanted)
    elif wanted.kind in "iu":
        some = np.array([np.iinfo(wanted).min, np.iinfo(wanted).max, 0, 1], wanted)
    else:
        limits = ml_dtypes.finfo(wanted if wanted.kind != "c" else np.float32 if dtype == "complex64" else np.float64)
        some = np.array([0.5, np.nan, np.inf, -0.0, float(limits.max), float(limits.tiny)])
        if wanted.kind == "c":
            parts = np.stack([some, some[::-1]], axis=1).astype(np.float32 if dtype == "complex64" else np.float64)
            some = parts.reshape(-1).view(wanted)
        some = some.astype(wanted)
    return np.resize(some, count)


def tensors(dtype, *shapes):
    return [elements(dtype, int(np.prod(shape)) + at)[at:].reshape(shape) for at, shape in enumerate(shapes)]


PIXELS = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
# For each column type: values, and empty values, if it has any.
TYPES = {dtype: (ps.Scalar(dtype), list(elements(dtype, 4)), []) for dtype in DTYPES}
TYPES |= {f"fixed {dtype}": (ps.Tensor((2, 3), dtype), tensors(dtype, (2, 3), (2, 3), (2, 3)), []) for dtype in DTYPES}
TYPES |= {f"list {dtype}": (ps.Tensor((None,), dtype), tensors(dtype, (1,), (7,), (2,)), tensors(dtype, (0,))) for dtype in DTYPES}
TYPES |= {f"rows {dtype}": (ps.Tensor((None, 2), dtype), tensors(dtype, (1, 2), (3, 2)), tensors(dtype, (0, 2))) for dtype in DTYPES}
TYPES |= {
    f"free {dtype}": (ps.Tensor((None, 2, None), dtype), tensors(dtype, (1, 2, 3), (3, 2, 1)), tensors(dtype, (0, 2, 3), (4, 2, 0)))
    for dtype in DTYPES
}
TYPES |= {
    "text": (ps.Text(), ["a", "é\0🙂", "x" * 300, "null", "NaN"], [""]),
    "bytes": (ps.Bytes(), [b"a", b"\0\xff", b"x" * 300], [b""]),
    "json": (ps.Json(), ["text", 1, 2.5, True, {"a": [1, None, {"b": {}}]}, [[], [1]], {"2": 2**70}], [{}, [], ""]),
    "label": (ps.Label(["cat", "dog", "é"]), ["dog", "cat", "é"], []),
    "labels": (ps.Labels(["cat", "dog"]), [["dog", "cat", "dog"], ["cat"]], [[]]),
    "category": (ps.Category(), ["x", "y", "x", "null"], [""]),
    "image": (ps.Image(), [PIXELS, PIXELS[:, :5], PIXELS[:, :, 0]], []),
    "mask": (ps.Mask(), [PIXELS[:, :, 0], PIXELS[:3, :, 1]], []),
    "boxes": (ps.Boxes("xywh"), [[[1, 2, 3, 4]], [[0.5, 2, 3, 4], [5, 6, 7, 8]]], [np.zeros((0, 4))]),
    "keypoints": (ps.Keypoints(2, 3), [np.ones((1, 2, 3)), np.zeros((4, 2, 3))], [np.zeros((0, 2, 3))]),
    "free keypoints": (ps.Keypoints(), [np.ones((1, 5, 2)), np.zeros((4, 2, 2))], [np.zeros((0, 3, 2)), np.zeros((2, 0, 2))]),
}
# How the values of a column are nulls and empty values.
PATTERNS = {
    "no nulls": lambda values, empty: [*values, *values[:1]],
    "nulls": lambda values, empty: [None, *values[:2], None, *values[2:], None],
    "only nulls": lambda values, empty: [None, None],
    "empty": lambda values, empty: [*empty, *values[:1], *empty],
    "only empty": lambda values, empty: [*empty, *empty],
    "empty and nulls": lambda values, empty: [*empty, None, *values[:1], None, *empty],
    "no samples": lambda values, empty: [],
}
WAYS = ["arrow", "parquet", "pandas", "polars"]


def new(kind, values):
    ds = ps.create(f"memory://round-{uuid.uuid4()}", {"c": kind, "n": "int32"})
    ds.append({"c": values, "n": np.arange(len(values))})
    return ds


def same(ds, wanted):
    """Return whether two columns are equal bit for bit, with the words of categories instead of their codes."""
    if len(ds) != len(wanted):
        return f"{len(ds)} samples, expected {len(wanted)}"
    found, given = (view.take(range(len(view)), columns=["c"], decode=False)["c"] for view in (ds, wanted))
    for row in range(len(wanted)):
        one, other = unwrap(found, row), unwrap(given, row)
        if isinstance(wanted.schema["c"], ps.Category) and one is not None and other is not None:
            one, other = ds.vocabulary("c")[int(one)], wanted.vocabulary("c")[int(other)]
        if one is None or other is None or not hasattr(other, "dtype"):
            equal = one == other and type(one) is type(other)
        else:
            one, other = np.asarray(one), np.asarray(other)
            equal = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        if not equal:
            return f"row {row} is {one!r}, expected {other!r}"
    return True


def exported(ds, way, folder):
    """Return what `append` takes, what `import_data` takes, and whether the latter states the column types."""
    if way == "parquet":
        place = folder / f"{uuid.uuid4()}.parquet"
        ds.to_parquet(place)
        return pq.read_table(place), place, True
    table = getattr(ds, f"to_{way}")()
    return table, table, way == "arrow"


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", TYPES)
def test_every_type_comes_back_by_every_way(tmp_path, name, pattern):
    kind, values, empty = TYPES[name]
    given = PATTERNS[pattern](values, empty)
    if "empty" in pattern and not empty:
        given = PATTERNS["nulls"](values[:1], [])
    ds = new(kind, given)
    for way in WAYS:
        # A Polars frame has JSON as text, which is itself JSON: a string.
        wanted = new(kind, [None if value is None else ds.to_arrow()["c"][row].as_py() for row, value in enumerate(given)]) if (
            name == "json" and way == "polars"
        ) else ds  # fmt: skip
        table, source, typed = exported(ds, way, tmp_path)
        copy = ps.create(f"memory://round-{uuid.uuid4()}", dict(ds.schema))
        copy.append(table)
        assert same(copy, wanted) is True, (way, "append")
        place = f"memory://round-{uuid.uuid4()}"
        import_data(source, place, types=None if typed else dict(ds.schema))
        assert ps.open(place).schema == ds.schema, way
        assert same(ps.open(place), wanted) is True, (way, "import")


@pytest.mark.parametrize("way", ["pandas", "polars"])
@pytest.mark.parametrize(
    "name", ["text", "bytes", "category", *(dtype for dtype in DTYPES if dtype != "bfloat16" and "complex" not in dtype)]
)
def test_types_of_frames_are_inferred(name, way):
    kind, values, _ = TYPES[name]
    ds = new(kind, PATTERNS["nulls"](values, []))
    place = f"memory://inferred-{uuid.uuid4()}"
    import_data(getattr(ds, f"to_{way}")(), place)
    assert ps.open(place).schema["c"] == kind and same(ps.open(place), ds) is True
