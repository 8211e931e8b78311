"""WebP images: pixels equal those from Pillow, which uses Google's decoder. Animations and damaged files are refused."""

import io

import numpy as np
import penstock as ps
import penstock.transforms as T
import pytest
from penstock.importers import import_data
from PIL import Image as Pillow
from PIL import ImageOps


def photograph(mode="RGB"):
    """Return a smooth picture, which suits lossy codecs."""
    y, x = np.mgrid[0:90, 0:121]
    channels = [127 + 120 * np.sin(x / (9 + c)) * np.cos(y / (13 - c)) for c in range(len(mode))]
    return Pillow.fromarray(np.stack(channels, -1).astype(np.uint8), mode)


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, format="WEBP", **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [True, False])
def test_pixels_equal_those_of_pillow(root, mode, lossless):
    body = encoded(photograph(mode), lossless=lossless, exact=True)
    ds = ps.create(root, {"image": ps.Image(), "stored": ps.Image(mode="stored")})
    ds.append({"image": [body], "stored": [body]})
    expected = np.asarray(Pillow.open(io.BytesIO(body)))
    found = ds[0]["stored"]
    assert found.shape == expected.shape and found.dtype == np.uint8 and ds[0]["image"].shape == (*expected.shape[:2], 3)
    # For lossy files, decoders may round upsampled colours differently.
    assert np.abs(found.astype(int) - expected).max() <= (0 if lossless else 2)
    assert ds.take([0], decode=False)["image"][0] == body
    [batch] = ds.loader(batch_size=1, columns=["stored"])
    assert (batch["stored"][0] == found).all()


def test_a_loader_crops_and_turns_them(root):
    exif = Pillow.Exif()
    exif[0x0112] = 6
    body = encoded(photograph(), lossless=True, exif=exif)
    ds = ps.create(root, {"image": ps.Image()})
    ds.append({"image": [body]})
    upright = ds[0]["image"]
    assert upright.shape == (121, 90, 3) and (upright == np.rot90(np.asarray(photograph()), -1)).all()
    [batch] = ds.loader(batch_size=1, transform=[T.CenterCrop(64)])
    assert (batch["image"][0] == upright[(121 - 64) // 2 :][:64, (90 - 64) // 2 :][:, :64]).all()


def with_exif_prefix(body):
    """Prefix the content of the EXIF chunk with `Exif` and two zero bytes, as in a JPEG. Some WebP writers do this."""
    parts, at = [], 12
    while at < len(body):
        name, size = body[at : at + 4], int.from_bytes(body[at + 4 : at + 8], "little")
        content = (b"Exif\0\0" if name == b"EXIF" else b"") + body[at + 8 : at + 8 + size]
        parts.append(name + len(content).to_bytes(4, "little") + content + b"\0" * (len(content) % 2))
        at += 8 + size + size % 2
    chunks = b"WEBP" + b"".join(parts)
    return b"RIFF" + len(chunks).to_bytes(4, "little") + chunks


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied_with_and_without_a_prefix(root, orientation):
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    body = encoded(photograph(), lossless=True, exif=exif)
    ds = ps.create(root, {"image": ps.Image(), "stored": ps.Image(exif_orientation=False)})
    bodies = [body, with_exif_prefix(body), with_exif_prefix(with_exif_prefix(body))]
    ds.append({"image": bodies, "stored": bodies})
    expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(body))))
    for position in range(3):
        assert np.array_equal(ds[position]["image"], expected)
        assert np.array_equal(ds[position]["stored"], np.asarray(photograph()))


def with_flags(body, flags):
    """Set the flags in the VP8X header of a WebP file."""
    assert body[12:16] == b"VP8X"
    return body[:20] + bytes([flags]) + body[21:]


@pytest.mark.parametrize("flags", [0x00, 0x04, 0x08, 0x0C, 0x10, 0x20, 0x3C])
@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_flags_that_disagree_with_the_chunks_change_no_pixels(root, mode, lossless, flags):
    """As in Google's decoder, the orientation is applied only if the flag announces it."""
    exif = Pillow.Exif()
    exif[0x0112] = 6
    body = encoded(photograph(mode), lossless=lossless, exact=True, exif=exif)
    ds = ps.create(root, {"image": ps.Image(mode="stored")})
    ds.append({"image": [body, with_flags(body, flags)]})
    upright, found = ds[0]["image"], ds[1]["image"]
    assert upright.shape == (121, 90, len(mode))
    assert np.array_equal(found, upright if flags & 0x08 else np.rot90(upright))
    assert found.shape[:2] == np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(with_flags(body, flags))))).shape[:2]


def test_exif_that_no_flag_announces_or_that_follows_the_container_is_ignored(root):
    exif = Pillow.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(photograph(), lossless=True), encoded(photograph(), lossless=True, exif=exif)
    chunk = turned[turned.index(b"EXIF") :]
    inside = b"RIFF" + (len(plain) - 8 + len(chunk)).to_bytes(4, "little") + plain[8:] + chunk
    outside = plain + chunk
    announced = with_flags(turned[: -len(chunk)], 0x08) + chunk
    announced = b"RIFF" + (len(announced) - 8 - len(chunk)).to_bytes(4, "little") + announced[8:]
    ds = ps.create(root, {"image": ps.Image()})
    ds.append({"image": [inside, outside, announced]})
    for position, body in enumerate([inside, outside, announced]):
        expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(body))))
        assert expected.shape == (90, 121, 3) and np.array_equal(ds[position]["image"], expected)


def test_flags_of_stripped_metadata_are_ignored(root):
    body = encoded(photograph(), lossless=True, icc_profile=b"profile")
    ds = ps.create(root, {"image": ps.Image()})
    ds.append({"image": [with_flags(body, body[20] | 0x0C)]}, validate="decode")
    assert np.array_equal(ds[0]["image"], np.asarray(photograph()))


def test_animations_masks_and_damage_are_refused(root, tmp_path):
    frames = [photograph(), photograph().rotate(90)]
    animation = encoded(frames[0], save_all=True, append_images=frames[1:])
    ds = ps.create(root, {"image": ps.Image()})
    with pytest.raises(ps.Error, match="it is an animation") as caught:
        ds.append({"image": [animation]})
    assert caught.value.code == "unsupported-format" and len(ds) == 0
    masks = ps.create(tmp_path / "masks", {"mask": ps.Mask()})
    with pytest.raises(ps.CorruptError, match="3 channels, expected 1"):
        masks.append({"mask": [encoded(photograph(), lossless=True)]})
    whole = encoded(photograph(), lossless=True)
    ds.append({"image": [whole[: len(whole) // 2]]})  # By default, an append checks only the header.
    with pytest.raises(ps.CorruptError, match="cannot decode WebP"):
        ds[0]
    with pytest.raises(ps.Error, match="cannot decode WebP"):
        ds.append({"image": [whole[: len(whole) // 2]]}, validate="decode")


def test_folders_of_webp(root, tmp_path):
    for name in ("cat/a.webp", "dog/b.webp"):
        (tmp_path / name).parent.mkdir()
        photograph().save(tmp_path / name, lossless=True)
    report = import_data(tmp_path, root, validate="decode")
    assert report.samples == 2 and not report.refused
    assert (ps.open(root)[1]["image"] == np.asarray(photograph())).all()
    [batch] = ps.files(tmp_path / "*" / "*.webp").loader(batch_size=2)
    assert (np.stack(batch["image"]) == np.asarray(photograph())).all()


@pytest.mark.data
def test_real_photographs(data, root):
    report = import_data(data / "photos-formats" / "webp", root, validate="decode", on_error="skip", include=["*.webp"])
    ds = ps.open(root)
    assert report.samples >= 4 and all("animation" in refusal.message for refusal in report.refused), report.refused
    for sample in ds:
        body = (data / "photos-formats" / "webp" / sample["path"]).read_bytes()
        expected = np.asarray(Pillow.open(io.BytesIO(body)))
        if expected.shape[2] == 3:
            assert np.abs(sample["image"].astype(int) - expected).max() <= 2, sample["path"]
        else:  # Colours on white.
            assert sample["image"].shape == (*expected.shape[:2], 3), sample["path"]
