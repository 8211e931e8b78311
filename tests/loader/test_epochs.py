"""How epochs, samples, and outputs differ, and which state a resume restores."""

import itertools

import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T


@pytest.fixture
def thousand(tmp_path):
    ds = ps.create(tmp_path / "thousand", {"n": "int64"})
    ds.append({"n": np.arange(1000)})
    return ds


def numbers(loader):
    return [number for batch in loader for number in batch["n"].tolist()]


@pytest.mark.local
@pytest.mark.parametrize("last_batch", ["drop", "short", "pad"])
@pytest.mark.parametrize("first,second", [(64, 48), (48, 64), (10, 1000), (7, 13)])
def test_a_resume_with_another_batch_size_continues_at_the_same_draw(thousand, last_batch, first, second):
    """Batches before and after a resume match those of an uninterrupted loader, except for the samples that `drop` omits."""
    options = {"shuffle": True, "seed": 5, "last_batch": last_batch, "columns": ["n"]}
    whole = thousand.loader(batch_size=1, **options)
    sequence = [number for _ in range(3) for number in numbers(whole)]
    one = thousand.loader(batch_size=first, **options)
    given = [number for batch in itertools.islice(iter(one), 3) for number in batch["n"].tolist()]
    two = thousand.loader(batch_size=second, **options)
    two.load_state_dict(one.state_dict())
    at = len(given)
    if last_batch == "drop" and 1000 - at < second:
        with pytest.warns(UserWarning, match=f"{1000 - at} samples left"):
            rest = numbers(two)
    else:
        rest = numbers(two)
    assert given == sequence[:at]
    if last_batch == "drop":
        assert rest == sequence[at : at + (1000 - at) // second * second]
    else:
        assert rest[: 1000 - at] == sequence[at:1000]
    following = numbers(two)
    assert following[:500] == sequence[1000 : 1000 + len(following[:500])], "the next epoch starts from the beginning"


@pytest.mark.local
def test_augmentation_differs_from_epoch_to_epoch_and_sample_to_sample(tmp_path):
    ds = ps.create(tmp_path / "set", {"image": ps.Image(), "v": ps.Tensor((40, 40), "uint16")})
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    ds.append({"image": [picture] * 6, "v": np.arange(9600).reshape(6, 40, 40).astype(np.uint16) % 1600})
    for transform in (T.RandomResizedCrop(16, on="image"), T.RandomCrop(16, on="image"), T.RandomCrop(16, on="v")):
        column = transform.on[0] if isinstance(transform.on, tuple | list) else transform.on
        loader = ds.loader(batch_size=6, seed=1, columns=[column], transform=[transform])
        epochs = [np.stack(list(batch[column])) for _ in range(4) for batch in loader]
        for one, two in itertools.combinations(range(4), 2):
            assert not np.array_equal(epochs[one], epochs[two]), f"epochs {one} and {two}"
        assert len({part.tobytes() for part in epochs[0]}) > 3, "samples of one epoch"
        again = ds.loader(batch_size=6, seed=1, columns=[column], transform=[transform])
        assert all(np.array_equal(np.stack(list(batch[column])), epoch) for epoch, batch in zip(epochs[:1], again, strict=True))


@pytest.mark.local
@pytest.mark.parametrize("workers", [0, 2])
def test_functions_get_other_numbers_in_every_epoch(thousand, workers):
    loader = thousand.loader(batch_size=100, seed=2, columns=["n"], transform=[noise], python_workers=workers)
    epochs = [np.concatenate([batch["n"] for batch in loader]) for _ in range(3)]
    for one, two in itertools.combinations(epochs, 2):
        assert not np.array_equal(one, two)
    assert len(np.unique(epochs[0])) > 900
    again = thousand.loader(batch_size=50, seed=2, columns=["n"], transform=[noise])
    assert np.array_equal(np.concatenate([batch["n"] for batch in again]), epochs[0])


def noise(sample, rng):
    return {"n": sample["n"] * 0 + rng.integers(1 << 40)}


@pytest.mark.local
def test_the_block_of_a_state_decides_how_sources_mix(thousand):
    """A mixture shuffles within blocks whose size depends on the batch size. A resumed loader uses the saved block size."""
    mixed = ps.mix({"low": (thousand.select(range(300)), 2), "high": (thousand.select(range(300, 1000)), 5)}, epoch_samples=700)
    one = mixed.loader(batch_size=35, shuffle=True, seed=3, columns=["n"])
    sequence = numbers(one)
    state = mixed.loader(batch_size=35, shuffle=True, seed=3, columns=["n"]).state_dict()
    for batch_size in (20, 70, 175):
        other = mixed.loader(batch_size=batch_size, shuffle=True, seed=3, columns=["n"])
        assert numbers(other) != sequence, "without the state, the loader's own batch size determines the block size"
        other = mixed.loader(batch_size=batch_size, shuffle=True, seed=3, columns=["n"])
        other.load_state_dict(state)
        assert numbers(other) == sequence
    windowed = thousand.loader(batch_size=40, shuffle=ps.Window(bytes=1600, lanes=4), seed=3, columns=["n"])
    state, sequence = windowed.state_dict(), numbers(windowed)
    other = thousand.loader(batch_size=60, shuffle=ps.Window(bytes=1600, lanes=4), seed=3, columns=["n"])
    other.load_state_dict(state)
    assert numbers(other) == sequence


@pytest.mark.local
def test_two_results_of_one_image_are_augmented_apart(tmp_path):
    ds = ps.create(tmp_path / "set", {"image": ps.Image(), "other": ps.Image()})
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    ds.append({"image": [picture] * 12, "other": [picture] * 12})
    for outputs in ({"a": "image", "b": "image"}, {"a": "image", "b": "other"}):
        for made in (
            lambda on: T.RandomResizedCrop(16, on=on),
            lambda on: T.RandomCrop(16, on=on),
            lambda on: T.RandomHorizontalFlip(on=on),
        ):
            [batch] = ds.loader(batch_size=12, outputs=outputs, transform=[made("a"), made("b")])
            assert any(not np.array_equal(a, b) for a, b in zip(batch["a"], batch["b"], strict=True))
            [batch] = ds.loader(batch_size=12, outputs=outputs, transform=[made(["a", "b"])])
            assert all(np.array_equal(a, b) for a, b in zip(batch["a"], batch["b"], strict=True))
