"""The declared mode of an image column is what every read returns: a matrix of mode × stored image × read path × output."""

from __future__ import annotations

import functools
import io
import itertools

import numpy as np
import penstock as ps
import pytest
import torch
from penstock import transforms as T
from PIL import Image

pytestmark = pytest.mark.local
PLACES = itertools.count()
RNG = np.random.default_rng(1)
MODES = ["RGB", "L", "RGBA", "I;16", "stored"]


def encoded(mode, kind, **options):
    body = io.BytesIO()
    pixels = RNG.integers(0, 256, (12, 10, 4), dtype=np.uint8)
    whole = Image.fromarray(pixels)
    (whole.convert("RGB") if mode == "P" else whole).convert(mode).save(body, kind, **options)  # Otherwise, a palette keeps alpha.
    return body.getvalue()


def deep(*channels):
    return RNG.integers(0, 65536, (12, 10, *channels), dtype=np.uint16)


# Each kind of stored image: its value, and the channels and bits in which it is stored.
STORED = {
    "RGB JPEG": (encoded("RGB", "JPEG"), 3, 8), "grey JPEG": (encoded("L", "JPEG"), 1, 8), "CMYK JPEG": (encoded("CMYK", "JPEG"), 3, 8),
    "progressive JPEG": (encoded("RGB", "JPEG", progressive=True), 3, 8), "RGB PNG": (encoded("RGB", "PNG"), 3, 8), "grey PNG": (encoded("L", "PNG"), 1, 8),
    "RGBA PNG": (encoded("RGBA", "PNG"), 4, 8), "grey with alpha": (encoded("LA", "PNG"), 4, 8), "palette PNG": (encoded("P", "PNG"), 3, 8),
    "palette with alpha": (encoded("P", "PNG", transparency=3), 4, 8), "one bit": (encoded("1", "PNG"), 1, 8), "RGB WebP": (encoded("RGB", "WEBP", lossless=True), 3, 8),
    "RGBA WebP": (encoded("RGBA", "WEBP", lossless=True), 4, 8), "deep grey": (deep(), 1, 16), "deep RGB": (deep(3), 3, 16), "deep RGBA": (deep(4), 4, 16),
    "grey array": (RNG.integers(0, 256, (12, 10), dtype=np.uint8), 1, 8),
}  # fmt: skip


def fits(mode, channels, bits):
    return mode == "stored" or (channels == 1 if mode == "I;16" else bits == 8)


@functools.cache
def dataset(mode):
    """Return a dataset with every image that the mode holds, and their stored forms."""
    ds = ps.create(f"memory://modes-of-reads-{next(PLACES)}", {"image": ps.Image(mode=mode), "n": "int64"})
    chosen = [(value, channels, bits) for value, channels, bits in STORED.values() if fits(mode, channels, bits)]
    ds.append({"image": [value for value, _, _ in chosen], "n": range(len(chosen))})
    return ds, chosen


def shown(values, layout):
    """Return images as arrays (H, W, C)."""
    arrays = [np.asarray(value) for value in values]
    return [array.transpose(1, 2, 0) if layout == "CHW" else array for array in arrays]


def by_filter(ds):
    seen = []
    ds.filter(lambda sample: seen.append(sample["image"]) or True)
    return seen


def by_backfill(ds):
    seen = []

    def embed(batch):
        seen.extend(batch["image"])
        return np.zeros((len(batch["image"]), 1), np.float32)

    with ds.transaction() as tx:
        tx.add_column("embedding", ps.Tensor((1,), "float32"))
    ds.backfill("embedding", embed, columns=["image"])
    with ds.transaction() as tx:
        tx.drop_column("embedding", force=True)
    return seen


def by_transaction(ds):
    with ds.transaction() as tx:
        ids = ds.take(range(len(ds)), columns=["_row_id"])["_row_id"]
        return tx.take(ids)["image"]


def by_functions(ds):
    seen = []
    list(ds.loader(batch_size=3, transform=[lambda sample: seen.append(sample["image"]) or {"n": sample["n"]}]))
    return seen


def by_loader(output, **options):
    return lambda ds: [image for batch in ds.loader(batch_size=3, output=output, ragged=["image"], **options) for image in batch["image"]]


PATHS = {
    "ds[i]": (lambda ds: [ds[i]["image"] for i in range(len(ds))], "HWC"), "ds[a:b]": (lambda ds: ds[0 : len(ds)]["image"], "HWC"),
    "ds[[…]]": (lambda ds: ds[list(range(len(ds)))]["image"], "HWC"), "take": (lambda ds: ds.take(range(len(ds)))["image"], "HWC"),
    "column": (lambda ds: ds["image"][:], "HWC"), "column[i]": (lambda ds: [ds["image"][i] for i in range(len(ds))], "HWC"),
    "part": (lambda ds: ds["image"][:, 0:12, 0:10], "HWC"), "iteration": (lambda ds: [sample["image"] for sample in ds], "HWC"),
    "batches": (lambda ds: [image for batch in ds.batches(3) for image in batch["image"]], "HWC"),
    "select": (lambda ds: ds.select(range(len(ds)))[:]["image"], "HWC"), "concat": (lambda ds: ps.concat([ds.head(2), ds.select(range(2, len(ds)))])[:]["image"], "HWC"),
    "filter": (by_filter, "HWC"), "backfill": (by_backfill, "HWC"), "transaction": (by_transaction, "HWC"), "functions": (by_functions, "HWC"),
    "torch()[i]": (lambda ds: [ds.torch()[i]["image"] for i in range(len(ds))], "HWC"),
    "torch() collated": (lambda ds: [image for batch in torch.utils.data.DataLoader(ds.torch(), batch_size=3, collate_fn=functools.partial(ps.torch.collate, ragged=["image"])) for image in batch["image"]], "CHW"),
    "to_torch": (lambda ds: ds.to_torch(["image"], ragged=["image"])["image"], "CHW"),
    "loader": (by_loader("numpy"), "HWC"), "loader, torch": (by_loader("torch"), "CHW"), "loader, jax": (by_loader("jax"), "HWC"),
    "loader, flipped twice": (by_loader("numpy", transform=[T.RandomHorizontalFlip(1.0), T.RandomHorizontalFlip(1.0)]), "HWC"),
    "loader of a concat": (lambda ds: by_loader("numpy")(ps.concat([ds.head(1), ds.select(range(1, len(ds)))])), "HWC"),
}  # fmt: skip


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("mode", MODES)
def test_every_read_returns_the_declared_mode(mode, path):
    ds, chosen = dataset(mode)
    read, layout = PATHS[path]
    images = shown(read(ds), layout)
    # A loader with no transform has decoded in the declared mode since the first release; others must agree with it.
    reference = [image for batch in ds.loader(batch_size=1) for image in batch["image"]]
    assert len(images) == len(chosen)
    for image, expected, (_, channels, bits) in zip(images, reference, chosen, strict=True):
        form = {"RGB": (3, 8), "L": (1, 8), "RGBA": (4, 8), "I;16": (1, 16), "stored": (channels, bits)}[mode]
        assert (image.shape, image.dtype.itemsize * 8) == ((12, 10, form[0]), form[1])
        assert np.array_equal(image, expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_those_of_pillow(mode):
    ds, chosen = dataset(mode)
    for sample, (value, channels, _) in zip(ds, chosen, strict=True):
        if not isinstance(value, bytes) or mode in ("I;16", "stored") or (channels, mode) == (4, "RGBA"):
            continue
        if channels == 4 or Image.open(io.BytesIO(value)).mode == "CMYK":
            continue  # Alpha on white and CMYK have tests of their own.
        expected = np.asarray(Image.open(io.BytesIO(value)).convert("RGB" if channels == 3 else "L").convert(mode)).astype(int)
        assert np.abs(sample["image"].reshape(expected.shape) - expected).max() <= 1, "Pillow's JPEG decoder may differ by one"


@pytest.mark.parametrize("mode", MODES)
def test_stored_bytes_and_previews_are_not_converted(mode):
    ds, chosen = dataset(mode)
    bodies = ds.take(range(len(ds)), decode=False)["image"]
    assert [body for body, (value, _, _) in zip(bodies, chosen, strict=True) if isinstance(value, bytes)] == [
        v for v, _, _ in chosen if isinstance(v, bytes)
    ]
    assert ds.to_arrow(["image"])["image"].to_pylist() == bodies
    html = ds._repr_html_()
    for _, channels, bits in chosen[:5]:
        assert f"uint{bits} (12, 10, {channels})" in html
    assert f"uint8 (12, 10, {chosen[0][1]})" in ps.concat([ds.head(1), ds])._repr_html_() or mode == "I;16"
    assert ds["image"].shape[3] == {"RGB": 3, "L": 1, "RGBA": 4, "I;16": 1, "stored": None}[mode]


@pytest.mark.parametrize("name", list(STORED))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("validate", ["header", "decode"])
def test_what_a_mode_cannot_hold_is_refused_at_append(mode, name, validate):
    value, channels, bits = STORED[name]
    ds = ps.create(f"memory://modes-of-reads-{next(PLACES)}", {"image": ps.Image(mode=mode)})
    good = RNG.integers(0, 256, (5, 5), dtype=np.uint8)
    if fits(mode, channels, bits):
        assert len(ds.append({"image": [good, value]}, validate=validate).row_ids) == 2
        return
    wanted = {("I;16", 8): "RGB", ("I;16", 16): "stored"}.get((mode, bits)) or ("I;16" if channels == 1 else "stored")
    for write in (
        lambda: ds.append({"image": [good, value]}, validate=validate),
        lambda: ds.stage({"image": [good, value]}),
        lambda: append_in_transaction(ds, [good, value]),
    ):
        with pytest.raises(ps.UnsupportedError, match=r"row 1 .*(16 bits per channel|channels), but mode") as caught:
            write()
        assert f'declare the column as ps.Image(mode="{wanted}")' in caught.value.hint and caught.value.rows == [1]
    assert len(ds) == 0
    again = ps.create(f"memory://modes-of-reads-{next(PLACES)}", {"image": ps.Image(mode=wanted)})
    again.append({"image": [value]}, validate=validate)
    assert again[0]["image"].shape[:2] == (12, 10)


def append_in_transaction(ds, images):
    with ds.transaction() as tx:
        tx.append({"image": images})


def test_an_update_and_an_upsert_refuse_what_the_mode_cannot_hold():
    ds = ps.create(f"memory://modes-of-reads-{next(PLACES)}", {"image": ps.Image(), "key": "int64"})
    good, bad = RNG.integers(0, 256, (5, 5), dtype=np.uint8), deep()
    ids = ds.append({"image": [good], "key": [1]}).row_ids
    for change in (lambda tx: tx.update({"image": [bad]}, row_ids=ids), lambda tx: tx.upsert({"image": [bad], "key": [1]}, key="key")):
        with pytest.raises(ps.UnsupportedError, match="16 bits per channel"), ds.transaction() as tx:
            change(tx)
    assert ds[0]["image"].dtype == np.uint8


@pytest.mark.parametrize("source", ["folder", "table", "arrow"])
def test_an_import_names_the_mode_to_declare(tmp_path, source):
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(deep()).save(folder / "deep.png")
    Image.fromarray(RNG.integers(0, 256, (5, 5, 3), dtype=np.uint8)).save(folder / "good.png")
    given, options = folder, {}
    if source == "table":
        (tmp_path / "table.csv").write_text("file,n\nphotos/good.png,1\nphotos/deep.png,2\n")
        given, options = tmp_path / "table.csv", {"types": {"file": ps.Image()}}
    elif source == "arrow":
        import pyarrow as pa

        bodies = [(folder / name).read_bytes() for name in ("good.png", "deep.png")]
        given, options = pa.table({"file": pa.array(bodies, pa.binary()), "n": [1, 2]}), {"types": {"file": ps.Image()}}
    with pytest.raises(ps.Error, match="16 bits per channel, but mode RGB has 8") as caught:
        ps.importers.import_data(given, tmp_path / "refused", **options)
    assert 'ps.Image(mode="I;16")' in str(caught.value)
    column = "image" if source == "folder" else "file"
    report = ps.importers.import_data(given, tmp_path / "kept", **{**options, "types": {column: ps.Image(mode="stored")}})
    assert report.samples == 2 and {image.dtype.name for image in ps.open(tmp_path / "kept")[column]} == {"uint8", "uint16"}
    skipped = ps.importers.import_data(given, tmp_path / "skipped", **options, on_error="skip")
    assert skipped.samples == 1 and len(skipped.refused) == 1


def test_the_command_line_declares_modes(tmp_path):
    from penstock.cli import app
    from typer.testing import CliRunner

    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(deep()).save(folder / "deep.png")
    runner = CliRunner()
    done = runner.invoke(app, ["import", str(folder), str(tmp_path / "a"), "-t", "image=image:I;16"])
    assert done.exit_code == 0, done.output
    assert ps.open(tmp_path / "a")[0]["image"].dtype == np.uint16
    done = runner.invoke(app, ["import", str(folder), str(tmp_path / "b"), "-t", "image=image:CMYK"])
    assert done.exit_code != 0 and "RGB, L, RGBA" in done.output + str(done.exception)


def test_files_in_place_that_a_mode_cannot_hold_keep_raising(tmp_path):
    """Nothing checks these when they are opened."""
    Image.fromarray(deep()).save(tmp_path / "deep.png")
    with pytest.raises(ps.UnsupportedError, match="16 bits per channel"):
        next(iter(ps.files(tmp_path / "*.png").loader(batch_size=1)))
