"""Compare transforms of images, boxes, masks, keypoints, and tensors with torchvision and plain NumPy."""

from __future__ import annotations

import io

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

pytestmark = pytest.mark.local  # These tests create their own datasets, so one store is enough.


def photograph(height, width, seed, quality=90):
    """Return a JPEG picture with gradients, edges and some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(3, 60) + rng.uniform(0, 6)) + np.cos(y / rng.uniform(3, 60)) for _ in range(3)]
    pixels = 128 + 50 * np.stack(waves, -1) + rng.normal(0, 4, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=quality, subsampling=2)
    return out.getvalue()


def pixels_of(encoded):
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded)).convert("RGB"))).permute(2, 0, 1)


SIZES = [(375, 500), (240, 320), (500, 375), (64, 64), (97, 201), (800, 1200)]


@pytest.fixture(scope="module")
def ds():
    made = ps.create(
        "memory://transforms-test",
        {
            "image": ps.Image(),
            "boxes": ps.Boxes(of="image"),
            "mask": ps.Mask(of="image"),
            "points": ps.Keypoints(2, of="image"),
            "tags": ps.Tensor((None,), "int64"),
        },
    )
    images = [photograph(*size, seed) for seed, size in enumerate(SIZES)]
    boxes = [
        np.array([[5, 6, width * 0.7, height * 0.5], [0, 0, 3, 3], [width - 30, height - 20, width, height]], np.float32)
        for height, width in SIZES
    ]
    masks = [(np.add.outer(np.arange(height), np.arange(width)) // 17 % 5).astype(np.uint8) for height, width in SIZES]
    points = [np.array([[[1, 2], [width / 2, height / 3]]], np.float32) for height, width in SIZES]
    made.append({"image": images, "boxes": boxes, "mask": masks, "points": points, "tags": [[7, 8, 9]] * len(SIZES)})
    return made, images, boxes, masks, points


def loaded(ds, *transforms, columns=("image",), **options):
    return next(iter(ds.loader(batch_size=len(SIZES), transform=list(transforms), columns=list(columns), **options)))


def close(found, expected, most=2, mean=0.5):
    difference = np.abs(found.astype(np.int64) - expected.astype(np.int64))
    assert difference.max() <= most and difference.mean() <= mean, (difference.max(), difference.mean())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(224, 224), (50, 300), (700, 64)])
def test_resize_of_equal_pixels_is_torchvisions(size, interpolation):
    # Image columns store arrays as PNG, so differences between JPEG decoders do not matter.
    rng = np.random.default_rng(1)
    arrays = [np.array(Image.open(io.BytesIO(photograph(*shape, 3)))) for shape in ((375, 500), (200, 210))]
    if interpolation == "bilinear":  # Bicubic resizing clips overshoots between two passes, which torchvision runs in the opposite order.
        arrays.append(rng.integers(0, 256, (120, 90, 3), dtype=np.uint8))
    ds = ps.create(f"memory://resize-{size}-{interpolation}", {"image": ps.Image()})
    ds.append({"image": arrays})
    batch = next(iter(ds.loader(batch_size=len(arrays), transform=[T.Resize(size, interpolation=interpolation)])))
    how = v2.InterpolationMode(interpolation)
    for found, array in zip(batch["image"], arrays, strict=True):
        expected = v2.functional.resize(torch.from_numpy(array).permute(2, 0, 1), list(size), interpolation=how, antialias=True)
        close(found, expected.permute(1, 2, 0).numpy())


def test_resize_by_the_shorter_side_then_centre_crop_is_torchvisions(ds):
    made, images, *_ = ds
    batch = loaded(made, T.Resize(72), T.CenterCrop(64))
    both = v2.Compose([v2.Resize(72, antialias=True), v2.CenterCrop(64)])
    for found, image in zip(batch["image"], images, strict=True):
        expected = both(pixels_of(image)).permute(1, 2, 0).numpy().astype(float)
        error = ((found.astype(float) - expected) ** 2).mean()
        assert 10 * np.log10(255**2 / max(error, 1e-9)) > 34
    listed = loaded(made, T.Resize(72), ragged=["image"])["image"]
    assert [image.shape[:2] for image in listed] == [v2.Resize(72)(pixels_of(image)).shape[1:] for image in images]
    limited = loaded(made, T.Resize(72, max_size=80), ragged=["image"])["image"]
    assert [image.shape[:2] for image in limited] == [v2.Resize(72, max_size=80)(pixels_of(image)).shape[1:] for image in images]


def test_centre_crop_pad_and_flips_are_torchvisions_exactly(ds):
    made, images, *_ = ds
    for ours, theirs in (
        (T.CenterCrop((60, 61)), v2.CenterCrop((60, 61))),
        (T.CenterCrop(300), v2.CenterCrop(300)),
        (T.Pad((3, 5), fill=7), v2.Pad((3, 5), fill=7)),
        (T.Pad((1, 2, 3, 4)), v2.Pad((1, 2, 3, 4))),
        (T.RandomHorizontalFlip(1), v2.RandomHorizontalFlip(1)),
        (T.RandomVerticalFlip(1), v2.RandomVerticalFlip(1)),
    ):
        for found, image in zip(loaded(made, ours, ragged=["image"])["image"], images, strict=True):
            assert (found == theirs(pixels_of(image)).permute(1, 2, 0).numpy()).all(), ours


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
def test_crops_of_jpegs_are_those_of_the_whole_wherever_their_edges_lie(subsampling, progressive):
    """Colours are interpolated across block borders, which are 8 or 16 pixels apart. The crop edges cover every offset within a block."""
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (98, 101, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG", quality=95, subsampling=subsampling, progressive=progressive)
    made = ps.create(f"memory://edges-{subsampling}-{progressive}", {"image": ps.Image()})
    made.append({"image": [out.getvalue()]})
    [whole] = loaded(made)["image"]
    for size in range(1, 97):
        [found] = loaded(made, T.CenterCrop((size, size + 2)))["image"]
        top, left = round((98 - size) / 2), round((101 - size - 2) / 2)
        assert (found == whole[top : top + size, left : left + size + 2]).all(), size
        [found] = loaded(made, T.Pad((0, 0, -size, -size)))["image"]
        assert (found == whole[: 98 - size, : 101 - size]).all(), size


def test_crops_after_flips_are_cut_from_the_mirrored_image(ds):
    made, images, *_ = ds
    flips = T.RandomHorizontalFlip(1), T.RandomVerticalFlip(1), T.Pad((0, 0, -20, -10)), T.RandomHorizontalFlip(1)
    batch = loaded(made, *flips, ragged=["image"])
    for found, image in zip(batch["image"], images, strict=True):
        mirrored = pixels_of(image).flip(1, 2)[:, :-10, :-20].flip(2).permute(1, 2, 0).numpy()
        assert (found == mirrored).all()


def test_normalize_and_dtypes_are_torchvisions(ds):
    made, images, *_ = ds
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    batch = loaded(made, T.CenterCrop(60), T.RandomHorizontalFlip(1), T.Normalize(mean, std))
    theirs = v2.Compose([v2.CenterCrop(60), v2.RandomHorizontalFlip(1), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    for found, image in zip(batch["image"], images, strict=True):
        assert found.dtype == np.float32 and np.abs(found - theirs(pixels_of(image)).permute(1, 2, 0).numpy()).max() < 1e-5
    half = loaded(made, T.CenterCrop(60), T.ToDtype("float16", scale=True))["image"]
    assert half.dtype == np.float16 and half.min() >= 0 and half.max() <= 1
    tensors = loaded(made, T.CenterCrop(60), T.ToDtype(torch.bfloat16, scale=True), output="torch")["image"]
    assert tensors.dtype == torch.bfloat16 and tensors.shape == (6, 3, 60, 60) and tensors.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.long
def test_scaled_decoding_stays_close_to_full_decoding(ds):
    """Images much larger than the target are decoded at 1/2, 1/4, or 1/8 scale.

    For each target size, the median PSNR must be at least 40 dB, and the 5th percentile at least 36 dB.
    """
    made = ps.create("memory://scaled", {"image": ps.Image()})
    images = [photograph(900 + 17 * seed, 1300 - 11 * seed, seed, quality=94) for seed in range(24)]
    made.append({"image": images})
    # If one side shrinks much more than the other, the less reduced side determines the scale.
    for size in ((64, 64), (100, 100), (128, 128), (224, 224), (80, 600), (420, 70)):
        batch = next(iter(made.loader(batch_size=24, transform=[T.Resize(size, decode="fast")])))
        ratios = []
        for found, image in zip(batch["image"], images, strict=True):
            expected = v2.functional.resize(pixels_of(image), list(size), antialias=True).permute(1, 2, 0).numpy()
            error = ((found.astype(float) - expected) ** 2).mean()
            ratios.append(10 * np.log10(255**2 / max(error, 1e-9)))
        assert np.median(ratios) >= 40 and np.percentile(ratios, 5) >= 36, (size, np.median(ratios), np.percentile(ratios, 5))


def test_boxes_masks_and_keypoints_follow(ds):
    made, images, boxes, masks, points = ds
    columns = ("image", "boxes", "mask", "points")
    batch = loaded(
        made, T.Resize((100, 120), on=columns), T.RandomHorizontalFlip(1, on=columns), T.CenterCrop((80, 90), on=columns), columns=columns
    )
    theirs = v2.Compose([v2.Resize((100, 120)), v2.RandomHorizontalFlip(1), v2.CenterCrop((80, 90))])
    for index, (height, width) in enumerate(SIZES):
        canvas = {"format": "XYXY", "canvas_size": (height, width)}
        _, found, mask = theirs(
            tv_tensors.Image(pixels_of(images[index])),
            tv_tensors.BoundingBoxes(torch.from_numpy(boxes[index]), **canvas),
            tv_tensors.Mask(torch.from_numpy(masks[index])),
        )
        assert np.abs(batch["boxes"][index] - found.numpy()).max() < 0.01
        assert (batch["mask"][index] == mask.numpy()).all()
        x, y = points[index][0, :, 0] * 120 / width, points[index][0, :, 1] * 100 / height
        assert np.allclose(batch["points"][index][0], np.stack([119 - x - 15, y - 10], -1), atol=1e-3)


def test_small_boxes_go_and_take_their_tags_along(ds):
    made, *_ = ds
    batch = loaded(made, T.SanitizeBoundingBoxes(min_size=4, on=("boxes", "tags")), columns=("boxes", "tags"))
    assert all(len(boxes) == 2 for boxes in batch["boxes"])
    assert [tags.tolist() for tags in batch["tags"]] == [[7, 9]] * len(SIZES)


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_boxes_of_every_format_follow(format):
    made = ps.create(f"memory://format-{format}", {"image": ps.Image(), "boxes": ps.Boxes(format, of="image")})
    corners = torch.tensor([[4.0, 6.0, 30.0, 20.0]])
    rows = {"xyxy": corners, "xywh": torch.tensor([[4.0, 6, 26, 14]]), "cxcywh": torch.tensor([[17.0, 13, 26, 14]])}[format]
    made.append({"image": [np.zeros((40, 60, 3), np.uint8)], "boxes": [rows.numpy()]})
    batch = next(iter(made.loader(batch_size=1, transform=[T.RandomHorizontalFlip(1, on=("image", "boxes"))])))
    theirs = v2.RandomHorizontalFlip(1)(tv_tensors.BoundingBoxes(rows, format=format.upper(), canvas_size=(40, 60)))
    assert np.allclose(batch["boxes"][0], theirs.numpy())


def test_random_resized_crops_have_the_right_size_and_spread(ds):
    made = ps.create("memory://spread", {"image": ps.Image(), "where": ps.Keypoints(2, of="image")})
    y, x = np.mgrid[0:200, 0:300]
    gradient = np.stack([x * 255 // 300, y * 255 // 200, np.zeros_like(x)], -1).astype(np.uint8)
    made.append({"image": [gradient] * 400, "where": [np.array([[[0, 0], [300, 200]]], np.float32)] * 400})
    loader = made.loader(batch_size=400, transform=[T.RandomResizedCrop(32, scale=(0.2, 0.6), on=("image", "where"))])
    batch = next(iter(loader))
    assert batch["image"].shape == (400, 32, 32, 3)
    corners = np.stack([item[0] for item in batch["where"]])
    widths, heights = 32 * 300 / (corners[:, 1] - corners[:, 0]).T
    heights = heights * 200 / 300
    area, ratio = widths * heights / 60_000, widths / heights
    assert area.min() > 0.19 and area.max() < 0.61 and ratio.min() > 0.74 and ratio.max() < 1.35
    assert 0.37 < area.mean() < 0.43 and 0.9 < np.exp(np.log(ratio).mean()) < 1.1
    left = -corners[:, 0, 0] * widths / 32
    shown = batch["image"][:, 16, 0, 0].astype(float) * 300 / 255
    assert np.abs(shown - left).max() < 6  # The pixels and the keypoints agree on the crop position.


def test_two_views_of_one_image_from_one_read(ds):
    made, *_ = ds
    loader = made.loader(
        batch_size=len(SIZES), outputs={"large": "image", "small": "image", "tags": "tags"},
        transform=[T.RandomResizedCrop(48, on="large"), T.RandomResizedCrop(24, on="small"), T.RandomHorizontalFlip(on="small")],
    )  # fmt: skip
    batch = next(iter(loader))
    assert batch["large"].shape == (6, 48, 48, 3) and batch["small"].shape == (6, 24, 24, 3) and batch["tags"][0].tolist() == [7, 8, 9]


def test_tensors_are_cropped_padded_cast_and_normalised():
    rng = np.random.default_rng(0)
    volumes = rng.integers(-500, 500, (8, 9, 10, 11)).astype(np.int16)
    made = ps.create("memory://volumes", {"volume": ps.Tensor((9, 10, 11), "int16"), "loose": ps.Tensor((None, None), "float32")})
    made.append({"volume": volumes, "loose": [np.full((i + 3, 5), i, np.float32) for i in range(8)]})
    batch = next(
        iter(
            made.loader(
                batch_size=8,
                transform=[
                    T.RandomCrop((4, 5, 6), on="volume"),
                    T.ToDtype("float32", on="volume"),
                    T.Normalize([100], [50], on="volume"),
                    T.CenterCrop((3, 7), on="loose"),
                ],
            )
        )
    )
    assert batch["volume"].shape == (8, 4, 5, 6) and batch["volume"].dtype == np.float32 and batch["loose"].shape == (8, 3, 7)
    for index, volume in enumerate(batch["volume"]):
        wanted = np.rint(volume * 50 + 100).astype(np.int16)
        windows = np.lib.stride_tricks.sliding_window_view(volumes[index], (4, 5, 6)).reshape(-1, 4, 5, 6)
        assert (windows == wanted).all((1, 2, 3)).sum() == 1
    assert (batch["loose"][4][:, 0] == 0).all() and (batch["loose"][4][:, 1:6] == 4).all()
    padded = next(iter(made.loader(batch_size=8, transform=[T.Pad((1, 0, 0, 2, 0, 0), fill=9, on="volume")])))["volume"]
    assert padded.shape == (8, 10, 12, 11) and (padded[:, 0] == 9).all() and (padded[:, 1:, :10] == volumes).all()


def test_tokens_are_cut_into_chunks():
    made = ps.create("memory://tokens", {"tokens": ps.Tensor((None,), "int32"), "text": ps.Text()})
    made.append({"tokens": [np.arange(1, n + 1) for n in (3, 50, 8)], "text": ["one two", "three", None]})
    batch = next(iter(made.loader(batch_size=3, columns=["tokens"], transform=[T.TokenChunks(8, pad=-1, on="tokens")])))["tokens"]
    assert batch.shape == (3, 8) and batch.dtype == np.int32
    assert batch[0].tolist() == [1, 2, 3, -1, -1, -1, -1, -1] and batch[2].tolist() == list(range(1, 9)) and (np.diff(batch[1]) == 1).all()


def test_text_is_tokenized_a_batch_at_a_time():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 1, "two": 2, "three": 3, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = ps.create("memory://texts", {"text": ps.Text()})
    made.append({"text": ["one two", "three", None]})
    batch = next(iter(made.loader(batch_size=3, nulls={"text": ""}, transform=[T.Tokenize(tokenizer, on="text", length=3)])))
    assert batch["input_ids"].tolist() == [[1, 2, 0], [3, 0, 0], [0, 0, 0]] and batch["attention_mask"].sum(1).tolist() == [2, 1, 0]
    tokenizer.enable_padding(pad_id=9)
    for length in (None, 1, 4):
        batch = next(iter(made.loader(batch_size=2, transform=[T.Tokenize(tokenizer, on="text", length=length)])))
        assert batch["input_ids"].tolist() == [([1, 2, 0, 0])[: length or 2], ([3, 9, 0, 0])[: length or 2]]
        assert batch["attention_mask"].tolist() == [([1, 1, 0, 0])[: length or 2], ([1, 0, 0, 0])[: length or 2]]
    tokenizer.no_padding()
    with pytest.raises(ps.InvalidInputError, match="Tokenize needs `words`") as caught:
        next(iter(made.loader(batch_size=3, nulls={"text": ""}, transform=[T.Tokenize(tokenizer, on="words")])))
    assert "in Tokenize(on='words', length=None, pad=0), for step 0" in "".join(caught.value.__notes__)


def test_every_kind_of_image_becomes_rgb(ds):
    def png(array, mode):
        out = io.BytesIO()
        Image.fromarray(array, mode).save(out, "PNG")
        return out.getvalue()

    rng = np.random.default_rng(0)
    grey, rgba = rng.integers(0, 256, (9, 8), dtype=np.uint8), rng.integers(0, 256, (9, 8, 4), dtype=np.uint8)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(photograph(40, 60, 5))).save(turned, "JPEG", exif=exif)
    made = ps.create("memory://kinds", {"image": ps.Image()})
    made.append({"image": [png(grey, "L"), png(rgba, "RGBA"), turned.getvalue()]})
    images = next(iter(made.loader(batch_size=3, ragged=["image"])))["image"]
    colours, alpha = rgba[..., :3].astype(int), rgba[..., 3:].astype(int)
    assert (images[0] == grey[..., None]).all() and (images[1] == (colours * alpha + 255 * (255 - alpha) + 127) // 255).all()
    assert images[2].shape == (60, 40, 3) and (images[2] == made[2]["image"]).all()
    assert [image.shape for image in images] == [(9, 8, 3), (9, 8, 3), (60, 40, 3)]


def test_damaged_images_raise_or_are_replaced(ds):
    good = photograph(60, 80, 1)
    made = ps.create("memory://damaged", {"image": ps.Image(), "number": "int64"})
    made.append({"image": [good if index % 5 else good[: len(good) * 3 // 4] for index in range(20)], "number": range(20)})
    with pytest.raises(ps.CorruptError, match=r"cannot load `image` of sample 0 \(row id") as caught:
        next(iter(made.loader(batch_size=10, transform=[T.Resize((20, 20))])))
    assert caught.value.code == "media-undecodable" and sorted(caught.value.rows) == [0, 5]
    runs = {}
    for policy in ("substitute", "mask"):
        for threads in (1, 3):
            loader = made.loader(
                batch_size=10,
                shuffle=True,
                seed=3,
                transform=[T.Resize((20, 20))],
                on_corrupt=policy,
                threads=threads,
                columns=["image", "number", "_valid"],
            )
            batches = list(loader.stream(1))
            assert [len(batch["number"]) for batch in batches] == [10, 10] and loader.stats()["refused"] >= 4
            assert all(number % 5 for batch in batches for number in batch["number"])
            assert sum(int((~batch["_valid"]).sum()) for batch in batches) == (4 if policy == "mask" else 0)
            runs[policy, threads] = np.concatenate([batch["number"] for batch in batches]).tolist()
    assert runs["substitute", 1] == runs["substitute", 3] == runs["mask", 1]
    bad = ps.create("memory://all-damaged", {"image": ps.Image()})
    bad.append({"image": [good[: len(good) * 3 // 4]] * 4})
    with pytest.raises(ps.CorruptError, match="in a row"):
        next(iter(bad.loader(batch_size=2, on_corrupt="substitute")))


def test_transforms_that_do_not_fit_a_sample_say_which(ds):
    made, *_ = ds
    with pytest.raises(ps.InvalidInputError, match=r"cannot load `image` of sample 3 .*RandomCrop of 90"):
        loaded(made, T.RandomCrop(90))
    with pytest.raises(ps.InvalidInputError, match="follows an image"):
        made.loader(batch_size=2, transform=[T.RandomCrop(9, on="boxes")])
    wide = ps.create("memory://sizes", {"image": ps.Image(), "mask": ps.Mask(of="image")})
    wide.append({"image": [np.zeros((5, 6, 3), np.uint8)], "mask": [np.zeros((5, 7), np.uint8)]})
    with pytest.raises(ps.InvalidInputError, match="different size"):
        next(iter(wide.loader(batch_size=1, transform=[T.RandomCrop(2, on=("image", "mask"))])))


@pytest.mark.data
def test_real_photographs_and_hostile_ones(data):
    flowers = sorted((data / "photos-flowers").rglob("*.jpg"))[:60]
    made = ps.create("memory://flowers", {"image": ps.Image()})
    made.append({"image": flowers})
    ratios = []
    for start, batch in enumerate(made.loader(batch_size=20, transform=[T.Resize((64, 64))])):
        for found, path in zip(batch["image"], flowers[start * 20 :], strict=False):
            expected = v2.functional.resize(pixels_of(path.read_bytes()), [64, 64], antialias=True).permute(1, 2, 0).numpy()
            ratios.append(10 * np.log10(255**2 / max(((found.astype(float) - expected) ** 2).mean(), 1e-9)))
    assert np.median(ratios) >= 40 and np.percentile(ratios, 5) >= 34, (np.median(ratios), np.percentile(ratios, 5))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_columns_normalised_each_by_its_own_numbers(dtype):
    """Normalize equal-sized columns in turn on one thread. Each column has a different mean or deviation from the previous one."""
    values = np.random.default_rng(0).integers(0, 100, (7, 12, 20)).astype(dtype)
    numbers = {"a": ([0.1], [4]), "b": ([0.5], [4]), "c": ([0.5], [8]), "d": ([0], [4]), "e": ([0.1], [4])}
    scale = 1 if dtype == "float32" else np.iinfo(dtype).max
    made = ps.create(f"memory://normalised-{dtype}", {name: ps.Tensor((12, 20), dtype) for name in numbers})
    made.append({name: values for name in numbers})
    normalise = [T.Normalize(*both, on=name) for name, both in numbers.items()]
    batch = next(iter(made.loader(batch_size=7, threads=1, transform=normalise)))
    for name, ((mean,), (std,)) in numbers.items():
        np.testing.assert_allclose(batch[name], (values / scale - mean) / std, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.2, 0.3, 0.4]), ([0.1, 0.2, 0.3], [0.5]), ([0.5], [0.25])])
def test_one_number_of_normalize_is_for_all_channels(mean, std):
    made = ps.create(f"memory://one-number-{len(mean)}-{len(std)}", {"image": ps.Image(), "volume": ps.Tensor((4, 5, 3), "uint8")})
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    made.append({"image": list(pixels), "volume": pixels})
    for on in ("image", "volume"):
        batch = next(iter(made.loader(batch_size=2, columns=[on], transform=[T.Normalize(mean, std, on=on)])))
        np.testing.assert_allclose(batch[on], (pixels / 255 - mean) / std, rtol=1e-4, atol=1e-5)


def test_transforms_that_share_results_in_any_place_are_all_applied():
    """If two transforms share a result, their groups are merged so that all results move together."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 8, 3), dtype=np.uint8)
    made = ps.create("memory://joined-groups", {"image": ps.Image(), "mask": ps.Mask(of="image"), "depth": ps.Mask(of="image")})
    made.append({"image": list(pixels), "mask": list(pixels[..., 0]), "depth": list(pixels[..., 1])})
    orders = [(["image", "mask"], ["depth", "image"]), (["mask", "image"], ["image", "depth"]), (["depth", "mask"], ["image", "mask"])]
    for first, second in orders:
        batch = next(iter(made.loader(batch_size=3, transform=[T.RandomHorizontalFlip(1, on=first), T.RandomVerticalFlip(1, on=second)])))
        for name, plain in (("image", pixels), ("mask", pixels[..., 0]), ("depth", pixels[..., 1])):
            expected = plain[:, :, ::-1] if name in first else plain
            expected = expected[:, ::-1] if name in second else expected
            assert np.array_equal(np.asarray(batch[name]), expected), (first, second, name)
