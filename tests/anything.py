"""A schema with every column kind and layout, random values for it, and seeds for the model tests."""

import os

import numpy as np
import penstock as ps

# Each run of tools/test.sh uses a different PENSTOCK_ROTATION and prints it. This number seeds the random tests.
_GIVEN = os.environ.get("PENSTOCK_ROTATION", "0")
ROTATION = 0 if _GIVEN == "all" else int(_GIVEN)
_COUNT = int(os.environ.get("PENSTOCK_MODEL_SEEDS", "60"))
SEEDS = range(ROTATION * _COUNT, (ROTATION + 1) * _COUNT)
SCHEMA = {
    "number": "int32", "flag": "bool", "time": "timestamp", "half": "float16", "fixed": ps.Tensor((3, 5), "float32"),
    "page": ps.Tensor((70, 1024), "uint8"), "packed": ps.Tensor((4,), "int64", codec="zstd"), "text": ps.Text(), "lz4": ps.Text(codec="lz4"),
    "meta": ps.Json(), "blob": ps.Bytes(), "label": ps.Label(["a", "b", "c"]), "word": ps.Category(), "other": ps.Category(codec="lz4"),
    "cloud": ps.Tensor((None, 3), "float32"), "twice": ps.Tensor((None, 2, None), "int16"), "tiled": ps.Tensor((None, None), "int16", tile=(5, 7)),
    "even": ps.Tensor((9, 9), "uint8", tile=(4, 4)), "boxes": ps.Boxes(), "mask": ps.Mask(), "image": ps.Image(), "points": ps.Keypoints(points=2),
    "classes": ps.Labels(["a", "b"]),
}  # fmt: skip


def values(rng, name, kind, count):
    """Return `count` random values for a column. Some values are null, and sizes range from zero to several checksum units."""
    size = lambda most: int(rng.choice([0, 1, 7, most]))  # noqa: E731

    def floats(*shape):
        """Return random floats, sometimes with a NaN, an infinity or a negative zero."""
        made = rng.random(shape, dtype=np.float32)
        if made.size and rng.random() < 0.3:
            made.reshape(-1)[rng.integers(made.size)] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
        return made

    made = {
        "number": lambda: int(rng.integers(-9, 9)), "flag": lambda: bool(rng.integers(2)), "time": lambda: int(rng.integers(1 << 50)),
        "half": lambda: float(floats(1)[0].astype(np.float16)), "fixed": lambda: floats(3, 5),
        "page": lambda: rng.integers(0, 256, (70, 1024), dtype=np.uint8), "packed": lambda: rng.integers(0, 3, 4),
        "text": lambda: "ü" * size(40_000), "lz4": lambda: "xy" * size(200), "meta": lambda: {"deep": [size(9), None, "é"]},
        "blob": lambda: rng.bytes(size(200_000)), "label": lambda: str(rng.choice(["a", "b", "c"])), "word": lambda: f"w{rng.integers(30)}",
        "other": lambda: f"w{rng.integers(5)}", "cloud": lambda: floats(size(9000), 3),
        "twice": lambda: rng.integers(0, 9, (size(3), 2, size(40))).astype(np.int16),
        "tiled": lambda: rng.integers(0, 9, (size(30), size(50))).astype(np.int16), "even": lambda: rng.integers(0, 9, (9, 9)).astype(np.uint8),
        "boxes": lambda: np.sort(rng.random((size(3), 2, 2), dtype=np.float32), axis=1).reshape(-1, 4), "mask": lambda: np.full((3, 4), size(7), np.uint8),
        "image": lambda: np.full((2, 5, 3), size(7), np.uint8), "points": lambda: rng.random((size(2), 2, 2), dtype=np.float32),
        "classes": lambda: rng.integers(0, 2, size(9)),
    }[name]  # fmt: skip
    return [None if rng.random() < 0.2 else made() for _ in range(count)]
