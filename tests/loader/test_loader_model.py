"""Compare random loaders with a model in plain Python. Other files test each feature alone, and this file tests combinations.

The model knows the appended samples and the sequence of draws, which a loader with `batch_size=1` returns. It also knows these
rules: which draws form a step, which sample replaces a damaged one, how nulls are filled, and how transforms change images and
their annotations.
"""

import io
import itertools
import random

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS
from penstock import transforms as T
from PIL import Image

SAMPLES, EPOCHS = 67, 2
ON = ("image", "mask", "boxes")
SCHEMA = {
    "id": "int64", "x": "int32", "f": ps.Tensor((3,), "float32"), "s": ps.Text(), "r": ps.Tensor((None,), "int16"), "t": ps.Tensor((6, 8), "int16"),
    "word": ps.Category(), "image": ps.Image(), "mask": ps.Mask(of="image"), "boxes": ps.Boxes(of="image"),
}  # fmt: skip
pytestmark = pytest.mark.local


def sample_of(number):
    """Return the sample with this number, as it was appended. None means null."""
    rng = np.random.default_rng(number)
    height, width = int(rng.integers(12, 40)), int(rng.integers(12, 40))
    x, y = int(rng.integers(0, width - 4)), int(rng.integers(0, height - 4))
    return {
        "id": number,
        "x": None if number % 7 == 2 else number * 3,
        "f": None if number % 6 == 1 else rng.random(3, np.float32),
        "s": None if number % 5 == 3 else f"sample {number}",
        "r": None if number % 8 == 4 else np.arange(number % 6, dtype=np.int16) + number,
        "t": None if number % 9 == 7 else rng.integers(-500, 500, (6, 8)).astype(np.int16),
        "word": None if number % 10 == 6 else f"word {number % 4}",
        "image": rng.integers(0, 256, (height, width, 3), dtype=np.uint8),
        "mask": rng.integers(0, 9, (height, width), dtype=np.uint8),
        "boxes": np.array([[x, y, x + 3, y + 4]], np.float32),
    }


def damaged(number):
    return number % 11 == 5


def stored(name, sample):
    if name != "image":
        return sample[name]
    out = io.BytesIO()
    Image.fromarray(sample["image"]).save(out, "PNG")
    return out.getvalue()[: -len(out.getvalue()) // 2] if damaged(sample["id"]) else out.getvalue()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    roots = []
    for place in range(3):
        root = tmp_path_factory.mktemp("model") / "ds"
        ds = ps.create(root, SCHEMA)
        for begin, end in ((0, 30), (30, SAMPLES)):
            samples = [sample_of(place * 1000 + number) for number in range(begin, end)]
            ds.append({name: [stored(name, sample) for sample in samples] for name in SCHEMA})
        roots.append(root)
    return roots


def twice(sample, rng):
    return {**sample, "twice": sample["id"] * 2}


# Each function below returns a transform and its model, which takes an image, a mask, and boxes.


def flip(axis):
    def model(image, mask, boxes):
        long = image.shape[axis]
        boxes = boxes.copy()
        low, high = 1 - axis, 3 - axis
        boxes[:, [low, high]] = long - boxes[:, [high, low]]
        return np.flip(image, axis), np.flip(mask, axis), boxes

    return (T.RandomVerticalFlip, T.RandomHorizontalFlip)[axis](1.0, on=ON), model


def crop(height, width):
    """Crop at the centre, padding with zeros where the image is too small. If the padding is odd, the extra zero is at the end."""

    def model(image, mask, boxes):
        rows, columns = image.shape[:2]
        lack_y, lack_x = max(0, height - rows), max(0, width - columns)
        border = ((lack_y // 2, (lack_y + 1) // 2), (lack_x // 2, (lack_x + 1) // 2))
        image, mask = np.pad(image, (*border, (0, 0))), np.pad(mask, border)
        top, left = round((image.shape[0] - height) / 2), round((image.shape[1] - width) / 2)
        moved = boxes + np.array([border[1][0] - left, border[0][0] - top] * 2, np.float32)
        moved = np.clip(moved, 0, np.array([width, height] * 2, np.float32))
        return image[top : top + height, left : left + width], mask[top : top + height, left : left + width], moved

    return T.CenterCrop((height, width), on=ON), model


def resize(height, width, exact):
    def model(image, mask, boxes):
        rows, columns = image.shape[:2]

        def places(size, old, offset):
            """Return the source index of each output pixel, computed in single precision as in PyTorch."""
            return np.minimum(((np.arange(size, dtype=np.float32) + np.float32(offset)) * np.float32(old / size)).astype(int), old - 1)

        at = 0.5 if exact else 0
        scale = np.array([width / columns, height / rows] * 2)
        return (
            image[places(height, rows, at)][:, places(width, columns, at)],
            mask[places(height, rows, 0)][:, places(width, columns, 0)],
            (boxes * scale).astype(np.float32),
        )

    return T.Resize((height, width), interpolation="nearest-exact" if exact else "nearest", on=ON), model


def pad(left, top, right, bottom):
    def model(image, mask, boxes):
        border = ((top, bottom), (left, right))
        return (
            np.pad(image, (*border, (0, 0)), constant_values=3),
            np.pad(mask, border, constant_values=3),
            boxes + np.float32([left, top] * 2),
        )

    return T.Pad((left, top, right, bottom), fill=3, on=ON), model


def chain_of(rng):
    """Return random transforms and their model."""
    makers = [
        lambda: flip(0),
        lambda: flip(1),
        lambda: crop(rng.randint(3, 45), rng.randint(3, 45)),
        lambda: resize(rng.randint(2, 50), rng.randint(2, 50), rng.random() < 0.5),
        lambda: pad(*(rng.randint(0, 5) for _ in range(4))),
    ]
    steps = [rng.choice(makers)() for _ in range(rng.randint(0, 4))]
    scales = [
        ([rng.uniform(-1, 1) for _ in range(channels)], [rng.uniform(0.5, 2) for _ in range(channels)])
        for channels in rng.choices((1, 3), k=rng.randint(0, 2))
    ]
    transforms = [transform for transform, _ in steps]
    if scales and rng.random() < 0.5:
        transforms.append(T.ToDtype("float32", scale=True, on="image"))
    transforms += [T.Normalize(mean, std, on="image") for mean, std in scales]

    def model(sample):
        image, mask, boxes = sample["image"], sample["mask"], sample["boxes"]
        for _, step in steps:
            image, mask, boxes = step(image, mask, boxes)
        if scales:
            image = image / 255
        for mean, std in scales:
            image = (image - mean) / std
        return {"image": image, "mask": mask, "boxes": boxes}

    return transforms, model


class Configuration:
    """A random loader configuration, determined by a seed."""

    def __init__(self, seed, roots):
        rng = random.Random(seed)
        self.roots, self.rng, access = roots, rng, rng.choice(["mapped", "buffered", "direct", "auto"])
        count = rng.choice([1, 1, 2, 3])
        views, self.datasets = [], []
        for root in rng.sample(roots, count):
            ds = ps.open(root, io=access)
            chosen = rng.choice(["all", "part", "doubles"])
            some = rng.sample(range(SAMPLES), 40) if chosen == "part" else rng.choices(range(SAMPLES), k=50)
            self.datasets.append(ds)
            views.append(ds if chosen == "all" else ds.select(some))
        self.views = views
        self.source = (
            views[0]
            if count == 1
            else ps.mix({f"source {at}": (view, rng.randint(1, 5)) for at, view in enumerate(views)}, epoch_samples=90)
        )
        self.images = rng.random() < 0.6
        self.columns = [
            name
            for name in SCHEMA
            if (self.images or name not in ON) and (count == 1 or name != "word") and (name in ("id", "image") or rng.random() < 0.8)
        ]
        transforms, self.model = chain_of(rng) if all(name in self.columns for name in ON) else ([], None)
        self.workers = 1 if rng.random() < 0.1 else 0
        self.functions = [twice] if self.workers or rng.random() < 0.3 else []
        fills = {"x": [-1, 0], "f": [0.5], "s": ["", "none"], "t": [7], "word": []}
        self.nulls = {name: rng.choice(["mask", *fills.get(name, [])]) for name in self.columns if name in (*fills, "r")}
        shuffle = rng.choice([False, True, True, ps.Window(bytes=rng.choice([3_000, 20_000, 200_000]), lanes=rng.choice([1, 2, 4]))])
        block = rng.choice([12, 24, 60])
        self.ordered = {"shuffle": shuffle, "seed": rng.randint(0, 1 << 40), "order_block_samples": block}
        self.on_corrupt = rng.choice(["substitute", "mask"]) if "image" in self.columns else rng.choice(["raise", "substitute", "mask"])
        self.last_batch, self.world, self.transforms = rng.choice(["short", "drop", "pad"]), rng.choice([1, 1, 2, 3]), transforms

    def loader(self, batch_size, rank):
        return self.source.loader(
            batch_size=batch_size, rank=rank, world_size=self.world, columns=[*self.columns, "_position", "_source", "_valid", "_row_id"], nulls=self.nulls,
            on_corrupt=self.on_corrupt, last_batch=self.last_batch, transform=[*self.transforms, *self.functions], python_workers=self.workers,
            memory_bytes=64 << 20, ragged=[name for name in ("image", "mask") if name in self.columns], **self.ordered,
        )  # fmt: skip

    def sequence(self):
        """Return the ids of each epoch's draws, using a loader that reads only the `id` column."""
        loader = self.source.loader(batch_size=1, columns=["id"], memory_bytes=64 << 20, **self.ordered)
        loader.load_state_dict(self.loader(1, 0).state_dict())  # The window length depends on that loader's columns.
        return [[int(batch["id"][0]) for batch in loader] for _ in range(EPOCHS)]

    def given(self, ids, draw):
        """Return the id expected at a draw, and whether it belongs to the drawn sample rather than a stand-in."""
        number, tried, ahead = ids[draw], 0, {0}
        while "image" in self.columns and damaged(number):
            further = next(far % len(ids) for far in itertools.count((2 << tried) - 1) if far % len(ids) not in ahead)
            ahead.add(further)
            number, tried = ids[(draw + further) % len(ids)], tried + 1
        return number, tried == 0


def same(got, expected, name, where):
    if name == "image" and expected.dtype.kind == "f":
        assert got.dtype == np.float32 and np.allclose(got, expected, atol=1e-5), where
    else:
        assert np.asarray(got).shape == np.asarray(expected).shape and np.allclose(got, expected, atol=1e-4), (where, got, expected)


def check_rows(config, batch, where):
    """Check that all columns of each row in a batch match the sample with that row's id."""
    rows = len(batch["id"])
    for row in range(rows):
        sample = sample_of(int(batch["id"][row]))
        changed = config.model(sample) if config.model else sample
        source = config.datasets[int(batch["_source"][row])]
        assert source.uri == str(config.roots[sample["id"] // 1000]) and int(batch["_position"][row]) == sample["id"] % 1000, where
        for name in config.columns:
            place = (where, row, name)
            if name in config.nulls:
                rule = config.nulls[name]
                if rule == "mask":
                    assert batch[f"{name}_valid"].shape == (rows,) and bool(batch[f"{name}_valid"][row]) == (sample[name] is not None), (
                        place
                    )
                if sample[name] is None:
                    if rule != "mask" and name in ("f", "t"):
                        same(batch[name][row], np.full(SCHEMA[name].shape, rule), name, place)
                    elif rule != "mask":
                        assert batch[name][row] == rule, place
                    continue
            if name in ON:
                same(np.asarray(batch[name][row]), changed[name], name, place)
            elif name in ("s", "id", "x"):
                assert batch[name][row] == sample[name], place
            elif name == "word":
                assert source.vocabulary("word")[int(batch[name][row])] == sample[name], place
            else:
                assert np.array_equal(batch[name][row], sample[name]), place
        if config.functions:
            assert batch["twice"][row] == 2 * sample["id"], where


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_what_a_loader_gives_is_what_the_model_says(datasets, part):
    for seed in SEEDS[part::6]:
        config = Configuration(seed, datasets)
        sequence, batch_size = config.sequence(), config.rng.randint(1, 20)
        whole, length = batch_size * config.world, len(sequence[0])
        loaders = [config.loader(batch_size, rank) for rank in range(config.world)]
        cut_at, epochs = config.rng.randint(0, length), []
        for epoch in range(EPOCHS):
            steps = list(itertools.zip_longest(*loaders))
            expected_steps = length // whole if config.last_batch == "drop" else -(-length // whole)
            assert len(steps) == expected_steps, seed
            for step, batches in enumerate(steps):
                where, begin = (seed, epoch, step), step * whole
                draws = range(begin, min(length, begin + whole))
                wanted = [config.given(sequence[epoch], draw) for draw in draws]
                ids = np.concatenate([batch["id"] for batch in batches])
                valid = np.concatenate([batch["_valid"] for batch in batches])
                expected = [number for number, own in wanted if own or config.on_corrupt == "substitute"]
                assert ids[valid].tolist() == expected, where
                assert {len(batch["id"]) for batch in batches} == {
                    batch_size if config.last_batch == "pad" or len(draws) == whole else -(-len(draws) // config.world)
                }, where
                for batch in batches:
                    check_rows(config, batch, where)
            epochs.append(steps)
        # A loader resumed from a mid-epoch state returns the rest of the epoch.
        step = min(cut_at // whole, len(epochs[0]))
        other = config.loader(batch_size, 0)
        other.load_state_dict(loaders[0].state_dict(step=step))
        rest = [batch["id"].tolist() for batch in other]
        assert rest == [batches[0]["id"].tolist() for batches in epochs[0][step:]] or step == len(epochs[0]), seed
        if len(epochs[0]) > step:
            first = config.loader(batch_size, 0).batch_at(step)
            assert first["id"].tolist() == epochs[0][step][0]["id"].tolist(), seed
