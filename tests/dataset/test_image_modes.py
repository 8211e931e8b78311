"""The pixels that loaders return (modes, interpolation, exact decoding and stacking), and the memory that large images need."""

from __future__ import annotations

import io
import json

import measured
import numpy as np
import penstock as ps
import pytest
import torch
import torchvision.transforms.v2.functional as F
from penstock import transforms as T
from PIL import Image
from torchvision.transforms import InterpolationMode

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (9, 8), dtype=np.uint8)
RGB = RNG.integers(0, 256, (9, 8, 3), dtype=np.uint8)
RGBA = RNG.integers(0, 256, (9, 8, 4), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (9, 8), dtype=np.uint16)
DEEP_RGB = RNG.integers(0, 65536, (9, 8, 3), dtype=np.uint16)


def loaded(images, mode, **options):
    ds = ps.create(f"memory://modes-{RNG.integers(1 << 60)}", {"image": ps.Image(mode=mode), "number": "int64"})
    ds.append({"image": images, "number": range(len(images))})
    return next(iter(ds.loader(batch_size=len(images), columns=["image"], **options)))["image"]


def on_white(rgba):
    white = Image.new("RGBA", rgba.shape[1::-1], (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, Image.fromarray(rgba)).convert("RGB")).astype(int)


def test_rgb_repeats_grey_and_composites_alpha_onto_white():
    images = loaded([GREY, RGB, RGBA], "RGB")
    assert images.shape == (3, 9, 8, 3) and images.dtype == np.uint8
    assert (images[0] == GREY[..., None]).all() and (images[1] == RGB).all()
    assert np.abs(images[2] - on_white(RGBA)).max() <= 1


def test_grey_is_pillows_luma():
    images = loaded([GREY, RGB], "L")
    assert images.shape == (2, 9, 8, 1)
    assert (images[0, ..., 0] == GREY).all() and (images[1, ..., 0] == np.asarray(Image.fromarray(RGB).convert("L"))).all()


def test_rgba_keeps_alpha_and_fills_it():
    images = loaded([RGBA, RGB, GREY], "RGBA")
    assert (images[0] == RGBA).all() and (images[1, ..., :3] == RGB).all() and (images[1:, ..., 3] == 255).all()


def test_deep_grey_keeps_sixteen_bits_and_white_stays_white():
    images = loaded([DEEP, GREY], "I;16", output="numpy")
    assert images.dtype == np.uint16 and (images[0, ..., 0] == DEEP).all() and (images[1, ..., 0] == GREY.astype(int) * 257).all()
    half = loaded([DEEP], "I;16", transform=[T.ToDtype("float32", scale=True)])
    assert np.allclose(half[0, ..., 0], DEEP / 65535)


def test_stored_gives_each_as_it_is():
    images = loaded([DEEP_RGB, RGBA, GREY], "stored", ragged=["image"])
    assert isinstance(images, list) and [image.dtype for image in images] == [np.uint16, np.uint8, np.uint8]
    assert (images[0] == DEEP_RGB).all() and (images[1] == RGBA).all() and (images[2][..., 0] == GREY).all()
    alike = loaded([DEEP_RGB, DEEP_RGB], "stored", transform=[T.CenterCrop(4)])
    assert alike.dtype == np.uint16 and (alike[1] == DEEP_RGB[2:6, 2:6]).all()


def test_unknown_modes_and_mixed_depths_in_arithmetic_are_refused():
    with pytest.raises(ps.InvalidInputError, match="mode='CMYK'"):
        ps.Image(mode="CMYK")
    with pytest.raises(ps.InvalidInputError, match="differ in channels and bits"):
        loaded([GREY], "stored", transform=[T.Normalize([0.5], [0.5])])


def test_a_mode_stays_with_the_dataset(tmp_path):
    ps.create(tmp_path / "a", {"image": ps.Image(mode="L")})
    assert ps.open(tmp_path / "a").schema["image"].mode == "L"


@pytest.mark.parametrize("sizes", [((9, 8), (4, 3)), ((9, 8), (20, 31)), ((64, 50), (23, 7)), ((5, 5), (5, 9))])
@pytest.mark.parametrize("name", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_nearest_is_torchvisions_for_images_and_masks(sizes, name, mode):
    (height, width), size = sizes
    image = RNG.integers(0, 256, (height, width, 3) if mode == "RGB" else (height, width), dtype=np.uint8)
    mask = RNG.integers(0, 9, (height, width), dtype=np.uint8)
    ds = ps.create(f"memory://nearest-{RNG.integers(1 << 60)}", {"image": ps.Image(mode=mode), "mask": ps.Mask(of="image")})
    ds.append({"image": [image], "mask": [mask]})
    batch = next(iter(ds.loader(batch_size=1, transform=[T.Resize(size, interpolation=name, on=("image", "mask"))])))
    planes = torch.from_numpy(image).permute(2, 0, 1) if mode == "RGB" else torch.from_numpy(image)[None]
    expected = F.resize_image(planes, list(size), interpolation=InterpolationMode(name)).permute(1, 2, 0).numpy()
    assert (batch["image"][0] == expected).all()
    assert (batch["mask"][0] == F.resize_mask(torch.from_numpy(mask)[None], list(size))[0].numpy()).all()


def photograph(height, width, seed=0):
    small = np.random.default_rng(seed).integers(0, 256, (height // 20, width // 20, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


@pytest.mark.parametrize("transform", [T.Resize((100, 150)), T.Resize(100)])
def test_a_resize_decodes_exactly_unless_fast_is_set(transform):
    body = photograph(800, 1200)
    full = torch.from_numpy(np.array(Image.open(io.BytesIO(body)))).permute(2, 0, 1)
    expected = F.resize_image(full, [100, 150], antialias=True).permute(1, 2, 0).numpy().astype(int)
    exact = loaded([body], "RGB", transform=[transform])[0]
    fast = loaded([body], "RGB", transform=[T.Resize(transform.size, decode="fast")])[0]
    assert np.abs(exact - expected).max() <= 2
    assert (fast != exact).any()


def test_a_random_crop_decodes_fast_unless_fast_is_off():
    body, crop = photograph(800, 1200), {"size": 100, "scale": (0.9, 1.0), "ratio": (1.4, 1.6)}
    default, fast, exact = (
        loaded([body], "RGB", transform=[T.RandomResizedCrop(**crop, **told)])[0].astype(int)
        for told in ({}, {"decode": "fast"}, {"decode": "exact"})
    )
    assert (default == fast).all() and (fast != exact).any()
    assert 10 * np.log10(255**2 / np.mean((fast - exact) ** 2)) > 29
    with pytest.raises(ps.InvalidInputError, match="decode='slow'"):
        loaded([body], "RGB", transform=[T.RandomResizedCrop(8, decode="slow")])


def test_images_of_one_size_are_stacked_without_a_transform():
    body = photograph(40, 60)
    stacked = loaded([body] * 3, "RGB", output="torch")
    assert stacked.shape == (3, 3, 40, 60) and stacked.is_contiguous(memory_format=torch.channels_last)
    torch.nn.Conv2d(3, 4, 3)(stacked.float())
    with pytest.raises(ps.InvalidInputError, match=r"`image` of sample 1 .*its shape is \[60, 40, 3\] uint8, but the first one"):
        loaded([body, photograph(60, 40)], "RGB")
    uneven = loaded([body, photograph(60, 40)], "RGB", ragged=["image"])
    assert [image.shape for image in uneven] == [(40, 60, 3), (60, 40, 3)]
    assert isinstance(loaded([body, None, body], "RGB", nulls={"image": "mask"}), list)


LARGE = """
import json, sys
import penstock as ps
from measured import Grown
from penstock import transforms as T

ds, budget = ps.open(sys.argv[1], io=sys.argv[5]), int(sys.argv[2])
transform = {"none": [], "normalise": [T.Normalize([0.5], [0.5])], "crop": [T.RandomResizedCrop(224)]}[sys.argv[3]]
next(iter(ds.select([0]).loader(batch_size=1, transform=[T.CenterCrop(8)])))
seen, refused = 0, ""
with Grown() as grown:
    try:
        loader = ds.loader(batch_size=int(sys.argv[4]), transform=transform, memory_bytes=budget, threads=int(sys.argv[6]))
        for batch in loader:
            seen += len(batch["image"])
    except ps.InvalidInputError as error:
        refused = str(error)
print(json.dumps([grown.peak, loader.stats()["peak_bytes"], seen, refused]))
"""


def large(ds, budget, what, batch, io="auto", threads=2):
    *found, refused = json.loads(measured.run(LARGE, ds.uri, budget, what, batch, io, threads))
    assert not refused, refused
    return found


@pytest.mark.long
@pytest.mark.local
def test_large_images_stay_within_the_budget_or_are_refused(tmp_path):
    ds = ps.create(tmp_path / "large", {"image": ps.Image()})
    ds.append({"image": [photograph(3000, 4000, seed) for seed in range(6)]})  # Each image takes 36 MB, or 144 MB as float32.
    for what, batch, budget in (("none", 1, 256 << 20), ("none", 2, 400 << 20), ("normalise", 1, 420 << 20), ("crop", 2, 160 << 20)):
        grown, peak, seen = large(ds, budget, what, batch)
        assert seen == 6
        assert peak <= budget and grown <= 1.1 * budget + (24 << 20), (what, grown / budget, peak / budget)


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("threads", [2, 8])
def test_a_refusal_comes_before_the_memory(tmp_path, io, threads):
    """The first batch fits, and the second one does not while the first is still held. Nothing may begin after that: the peak was 1.2 times
    the budget.
    """
    ds, budget = ps.create(tmp_path / "large", {"image": ps.Image()}), 256 << 20
    ds.append({"image": [photograph(3000, 4000, seed) for seed in range(6)]})
    for what, batch, delivered in (("normalise", 1, 1), ("none", 4, 0)):
        grown, peak, seen, refused = json.loads(measured.run(LARGE, ds.uri, budget, what, batch, io, threads))
        assert "cannot load a batch: it needs" in refused and "memory_bytes=" in refused
        assert seen == delivered and peak <= budget and grown <= budget, (what, grown / budget, peak / budget)


@pytest.mark.parametrize("mode", ["RGB", "L", "stored"])
@pytest.mark.parametrize("interpolation", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", [(7, 11), (40, 53)])
def test_a_flip_before_a_nearest_resize_moves_images_and_masks_alike(tmp_path, mode, interpolation, size):
    """Nearest resampling does not commute with a flip, so the flip must come first."""
    pixels = np.random.default_rng(0).integers(0, 256, (23, 31, 1), np.uint8)
    ds = ps.create(tmp_path / "ds", {"image": ps.Image(mode=mode), "mask": ps.Mask()})
    ds.append({"image": [np.repeat(pixels, 3, axis=2)], "mask": [pixels[..., 0]]})
    both = {"on": ["image", "mask"]}
    flips = [T.RandomHorizontalFlip(1.0, **both), T.RandomVerticalFlip(1.0, **both)]
    [batch] = ds.loader(batch_size=1, transform=[*flips, T.Resize(size, interpolation=interpolation, **both)])
    image, mask = np.asarray(batch["image"])[0], np.asarray(batch["mask"])[0]
    assert interpolation != "nearest" or (image[..., 0] == mask.reshape(size)).all()
    expected = F.resize(torch.from_numpy(pixels[::-1, ::-1, 0].copy())[None], list(size), interpolation=InterpolationMode(interpolation))
    assert (image[..., 0] == expected[0].numpy()).all()


def encoded(picture, kind):
    body = io.BytesIO()
    picture.save(body, "PNG" if kind == "PNG" else "JPEG", compress_level=1, progressive=kind == "progressive")
    return body.getvalue()


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("kind", ["progressive", "PNG"])
def test_what_decoders_take_beside_the_pixels_is_counted(tmp_path, kind):
    """At 12 MP, the coefficients of a progressive JPEG need 36 MB per thread."""
    ds = ps.create(tmp_path / "large", {"image": ps.Image()})
    ds.append({"image": [encoded(Image.open(io.BytesIO(photograph(3000, 4000, 1))), kind)] * 8})
    grown, peak, seen = large(ds, 256 << 20, "none", 1)
    assert seen == 8 and peak <= 256 << 20 and grown <= 192 << 20, (grown / (256 << 20), peak / (256 << 20))


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("kind", ["baseline", "progressive"])
@pytest.mark.parametrize(("height", "width"), [(1224, 1632), (2448, 3264)])
def test_memory_that_decoders_release_is_returned(tmp_path, kind, height, width):
    """The decoded images take 6 and 24 MB. If the allocator kept freed memory per thread, memory use could reach 1.5 times the budget."""
    ds = ps.create(tmp_path / "large", {"image": ps.Image()})
    ds.append({"image": [encoded(Image.open(io.BytesIO(photograph(height, width, 1))), kind)] * 12})
    for what, times in (("none", 5.2), ("normalise", 12)):
        budget = int(height * width * 3 * (times + (1.2 if kind == "progressive" else 0)))
        grown, peak, seen = large(ds, budget, what, 1)
        assert seen == 12 and peak <= budget and grown <= budget + (4 << 20), (what, grown / budget, peak / budget)


THREADS = """
import sys
import penstock as ps
from measured import Grown, anonymous
from penstock import transforms as T

ds = ps.open(sys.argv[1])
with Grown() as grown:
    for _ in ds.loader(batch_size=1, transform=[T.RandomResizedCrop(64)], threads=12, memory_bytes=128 << 20):
        pass
print(grown.peak, anonymous() - grown.before)
"""


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("kind", ["progressive", "PNG"])
def test_threads_keep_nothing_of_large_images(tmp_path, kind):
    ds = ps.create(tmp_path / "large", {"image": ps.Image()})
    ds.append({"image": [encoded(Image.open(io.BytesIO(photograph(3000, 4000, 1))), kind)] * 24})
    peak, after = map(int, measured.run(THREADS, ds.uri).split())
    assert peak <= 144 << 20 and after <= 48 << 20, (peak >> 20, after >> 20)


MIXED = """
import json, sys
import penstock as ps
from measured import Grown
from penstock import transforms as T

ds = ps.open(sys.argv[1])
with Grown() as grown:
    loader = ds.loader(batch_size=1, shuffle=True, seed=0, transform=[T.Resize((8, 8))], threads=8, memory_bytes=80 << 20)
    assert sum(len(batch["image"]) for batch in loader) == len(ds)
print(json.dumps([grown.peak, loader.stats()["peak_bytes"]]))
"""


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_large_images_that_come_late_wait_for_those_before(tmp_path, mode):
    """The memory that an image needs is unknown until its header has been read. By then, the loader may already be decoding
    another large image. A 12 MP image needs 69 MiB, even in CMYK.
    """
    bodies = []
    for height, width in ((3000, 4000), (2000, 3000), (400, 600)):
        body = io.BytesIO()
        Image.open(io.BytesIO(photograph(height, width, 1))).convert(mode).save(body, "JPEG")
        bodies.append(body.getvalue())
    ds = ps.create(tmp_path / "large", {"image": ps.Image()})
    ds.append({"image": bodies * 16})
    grown, peak = json.loads(measured.run(MIXED, ds.uri))
    assert peak <= 80 << 20 and grown <= 104 << 20, (grown >> 20, peak >> 20)


def png(mode, **options):
    body = io.BytesIO()
    Image.fromarray(np.arange(4, dtype=np.uint8).reshape(2, 2)).convert(mode).save(body, "PNG", **options)
    return body.getvalue()


def jpeg(mode):
    body = io.BytesIO()
    Image.new(mode, (8, 8)).save(body, "JPEG")
    return body.getvalue()


@pytest.mark.parametrize("validate", ["header", "decode"])
def test_what_no_reader_takes_for_a_mask_is_refused(root, validate):
    ds = ps.create(root, {"mask": ps.Mask()})
    for body in (png("RGB"), png("RGBA"), png("LA"), jpeg("RGB")):
        with pytest.raises(ps.CorruptError, match=r"cannot decode mask: it has [34] channels, expected 1"):
            ds.append({"mask": [body]}, validate=validate)
    good = [png("L"), png("P"), png("1"), jpeg("L"), png("L", transparency=2), png("I;16")]
    ds.append({"mask": good}, validate=validate)
    for row, body in enumerate(good):
        assert np.asarray(ds[row]["mask"]).shape[:2] == Image.open(io.BytesIO(body)).size[::-1]
    assert np.asarray(ds[4]["mask"]).reshape(2, 2).tolist() == [[0, 1], [2, 3]]
