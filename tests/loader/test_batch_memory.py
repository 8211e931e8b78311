"""Batches reuse the memory of batches that were dropped. What a consumer wrote there never shows in later ones."""

from __future__ import annotations

import io

import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T
from PIL import Image

pytestmark = pytest.mark.local
# Up to 16 batches are prepared ahead, which have memory of their own.
SAMPLES, EPOCHS = 400, 6


def picture(number):
    pixels = np.random.default_rng(number).integers(0, 256, (72 + number % 5, 64, 3), dtype=np.uint8)
    made = io.BytesIO()
    Image.fromarray(pixels).save(made, "JPEG" if number % 2 else "PNG")
    return made.getvalue()


@pytest.fixture(scope="module")
def ds():
    """A dataset whose batches of 64 have at least 64 KiB in most columns, with nulls, fills, earlier dtypes and empty values."""
    rng = np.random.default_rng(1)
    ds = ps.create(
        "memory://batch-memory",
        {
            "fixed": ps.Tensor((24, 24, 3), "uint8"), "wide": ps.Tensor((300,), "int32"), "ragged": ps.Tensor((None, 7), "float32"),
            "tiled": ps.Tensor((70, 70), "float32", tile=(32, 32)), "image": ps.Image(), "mask": ps.Mask(of="image"), "boxes": ps.Boxes(of="image"),
            "flag": "bool",
        },
    )  # fmt: skip

    def some(values, every):
        return [None if number % every == 3 else value for number, value in enumerate(values)]

    ds.append({
        "fixed": some(rng.integers(0, 256, (SAMPLES, 24, 24, 3), dtype=np.uint8), 5),
        "wide": some(rng.integers(-9, 9, (SAMPLES, 300), dtype=np.int32), 7),
        "ragged": some([rng.random((number % 90, 7), dtype=np.float32) for number in range(SAMPLES)], 11),
        "tiled": some(rng.random((SAMPLES, 70, 70), dtype=np.float32), 6),
        "image": [picture(number) for number in range(SAMPLES)],
        "mask": [np.full((72 + number % 5, 64), number % 256, np.uint8) for number in range(SAMPLES)],
        "boxes": [np.tile(np.float32([[1, 2, 30, 40]]), (number % 4, 1)) for number in range(SAMPLES)],
        "flag": [number % 3 == 0 for number in range(SAMPLES)],
    })  # fmt: skip
    with ds.transaction() as tx:
        tx.widen_column("wide", "int64")
        tx.add_column("late", ps.Tensor((300,), "float32"))
        tx.update({"wide": rng.integers(-9, 9, (3, 300))}, row_ids=[1, 2, 399])
    return ds


def arrays(value):
    """Return the arrays within a column of a batch."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, list | tuple):
        return [array for part in value for array in arrays(part)]
    if isinstance(value, ps.Ragged):
        return [value.values, value.offsets, value.shapes]
    return [np.asarray(value.data), np.asarray(value.mask)] if isinstance(value, np.ma.MaskedArray) else []


def shown(batch):
    """Return what a consumer sees of a batch, apart from the values below nulls."""
    return {name: [None if sample is None else np.array(sample, copy=True) for sample in values] for name, values in batch.items()}


STEPS = {
    "plain": [],
    "crops": [
        T.RandomCrop((40, 48), padding=9),
        T.RandomHorizontalFlip(),
        T.RandomErasing(0.7),
        T.Normalize(mean=(0.5,) * 3, std=(0.2,) * 3),
    ],
    "rotations": [T.RandomRotation(40), T.CenterCrop((64, 64)), T.SanitizeBoundingBoxes(on=("boxes",))],
    "functions": [T.Resize((48, 48)), lambda sample: {**sample, "own": np.arange(500) * int(sample["flag"])}],
}


@pytest.mark.parametrize(
    ("columns", "steps"),
    [
        (["fixed", "wide", "late", "ragged"], "plain"),
        (["tiled", "flag"], "plain"),
        *((["image", "mask", "boxes", "flag"], steps) for steps in STEPS),
    ],
)
def test_what_was_written_into_batches_does_not_show_in_later_ones(ds, columns, steps):
    ragged = ["image", "mask"] if steps == "plain" and "image" in columns else []
    nulls = {name: "mask" for name in columns if name in ("fixed", "wide", "late", "ragged", "tiled")}
    kept, seen, places = [], [], []
    with ds.loader(
        batch_size=64, columns=columns, shuffle=True, seed=4, transform=STEPS[steps], nulls=nulls, ragged=ragged, last_batch="pad"
    ) as loader:
        for epoch in range(EPOCHS):
            for batch in loader:
                if epoch == 0:
                    kept.append(batch)  # As long as it is held, its memory is not used again.
                seen.append(shown(batch))
                for array in (array for value in batch.values() for array in arrays(value)):
                    places += [array.ctypes.data] if array.nbytes >= 64 << 10 else []
                    if epoch > 0 and array.flags.writeable:
                        array.reshape(-1).view(np.uint8)[:] = 0xA5
        state = loader.state_dict()
    # NumPy allocates the arrays that are made from the results of Python functions, and lists.
    assert len(set(places)) < len(places) or ragged or steps == "functions", "memory is used again"
    del kept, batch
    # The same epochs, while every batch is held.
    with ds.loader(
        batch_size=64, columns=columns, shuffle=True, seed=4, transform=STEPS[steps], nulls=nulls, ragged=ragged, last_batch="pad"
    ) as loader:
        held = [list(loader) for _ in range(EPOCHS)]
        assert loader.state_dict() == state
    expected = [shown(batch) for epoch in held for batch in epoch]
    assert len(expected) == len(seen) == 7 * EPOCHS
    for batch, other in zip(seen, expected, strict=True):
        assert batch.keys() == other.keys()
        for name, values in batch.items():
            for found, wanted in zip(values, other[name], strict=True):
                assert (found is None) == (wanted is None), name
                assert found is None or np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f"), name
