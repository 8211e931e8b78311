"""Animations are refused, in PNG, WebP and Pillow's images alike: their first frame alone would lose the others in silence."""

from __future__ import annotations

import io
import itertools
import struct
import zlib

import numpy as np
import penstock as ps
import pytest
from PIL import Image

pytestmark = pytest.mark.local
PLACES = itertools.count()
FRAMES = [Image.fromarray(np.full((8, 9, 3), value, np.uint8)) for value in (10, 90, 200)]


def saved(kind, frames, **options):
    body = io.BytesIO()
    frames[0].save(body, kind, save_all=len(frames) > 1, append_images=frames[1:], **options)
    return body.getvalue()


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def with_chunk(png, added, before):
    """Add a chunk before the first one with this name."""
    at = png.index(before) - 4
    return png[:at] + added + png[at:]


STILL = saved("PNG", FRAMES[:1])
CONTROL = chunk(b"acTL", struct.pack(">II", 3, 0))
ANIMATED = {
    "PNG": saved("PNG", FRAMES), "WebP": saved("WEBP", FRAMES, lossless=True), "PNG, after other chunks": with_chunk(with_chunk(STILL, chunk(b"tEXt", b"acTL"), b"IDAT"), CONTROL, b"IDAT"),
    "PNG of grey": saved("PNG", [frame.convert("L") for frame in FRAMES]), "PNG of a palette": saved("PNG", [frame.convert("P") for frame in FRAMES]),
}  # fmt: skip
# The last one ends within a chunk, and the one before names the chunk in a text only.
STILLS = {
    "PNG": STILL, "WebP": saved("WEBP", FRAMES[:1], lossless=True), "a text": with_chunk(STILL, chunk(b"tEXt", b"acTL"), b"IDAT"),
    "after the pixels": with_chunk(STILL, CONTROL, b"IEND"),
}  # fmt: skip


def made(**columns):
    return ps.create(f"memory://animations-{next(PLACES)}", columns)


@pytest.mark.parametrize("validate", ["header", "decode"])
@pytest.mark.parametrize("mode", ["RGB", "stored"])
@pytest.mark.parametrize("name", list(ANIMATED))
def test_animations_of_all_formats_are_refused(name, mode, validate):
    ds = made(image=ps.Image(mode=mode))
    with pytest.raises(ps.UnsupportedError, match=rf"row 1 .*cannot decode {name[:3]}.*: it is an animation") as caught:
        ds.append({"image": [STILL, ANIMATED[name]]}, validate=validate)
    assert "frames as separate images" in caught.value.hint and caught.value.rows == [1]
    assert len(ds) == 0


@pytest.mark.parametrize("name", list(STILLS))
def test_still_images_are_kept(name):
    ds = made(image=ps.Image())
    ds.append({"image": [STILLS[name]]})
    assert ds[0]["image"].shape == (8, 9, 3) and (ds[0]["image"] == 10).all()


def test_animated_masks_are_refused():
    with pytest.raises(ps.UnsupportedError, match="it is an animation"):
        made(mask=ps.Mask()).append({"mask": [ANIMATED["PNG of grey"]]})


def test_a_header_that_is_cut_off_or_lies_about_its_size_does_no_harm():
    ds = made(image=ps.Image())
    for end in range(8, 60):
        with pytest.raises(ps.CorruptError):
            ds.append({"image": [STILL[:end]]}, validate="decode")
    long = with_chunk(STILL, struct.pack(">I", 2**32 - 1) + b"tEXt", b"IDAT")
    with pytest.raises(ps.CorruptError):
        ds.append({"image": [long]}, validate="decode")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_images_of_pillow_with_several_frames_are_refused(kind):
    opened = Image.open(io.BytesIO(saved(kind, FRAMES)))
    ds = made(image=ps.Image(), mask=ps.Mask())
    with pytest.raises(ps.InvalidInputError, match="row 1 is a Pillow image with 3 frames") as caught:
        ds.append({"image": [FRAMES[0], opened], "mask": [None, None]})
    assert "image.copy()" in caught.value.hint
    opened.seek(1)
    ds.append({"image": [opened.copy()], "mask": [None]})
    assert np.abs(ds[0]["image"].astype(int) - 90).max() <= 3


def test_a_photograph_with_a_preview_is_no_animation():
    """Cameras write MPO files: a JPEG with a second, smaller one behind it."""
    opened = Image.open(io.BytesIO(saved("MPO", FRAMES[:2])))
    assert opened.format == "MPO" and opened.n_frames == 2
    ds = made(image=ps.Image())
    ds.append({"image": [opened]})
    assert len(ds) == 1


@pytest.mark.parametrize("name", ["PNG", "WebP"])
def test_an_import_counts_animations_it_leaves_out(tmp_path, name):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / f"moving.{name.lower()}").write_bytes(ANIMATED[name])
    (folder / "still.png").write_bytes(STILL)
    with pytest.raises(ps.Error, match=r"moving.*it is an animation"):
        ps.importers.import_data(folder, tmp_path / "refused")
    report = ps.importers.import_data(folder, tmp_path / "kept", on_error="skip")
    assert report.samples == 1 and [refusal.code for refusal in report.refused] == ["unsupported-format"]
