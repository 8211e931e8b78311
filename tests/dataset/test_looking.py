"""What a user sees of a dataset: samples as text, and views as HTML."""

import html.parser

import numpy as np
import penstock as ps
import pytest
from penstock.views.html import thumbnail
from penstock.views.sample import Sample


def test_a_sample_prints_shapes_instead_of_values():
    values = {
        "image": np.zeros((45, 60, 3), np.uint8),
        "few": np.arange(3),
        "raw": bytes(5000),
        "text": "x" * 300,
        "json": {"a": [1] * 500},
        "no": None,
    }
    text = repr(Sample(values))
    assert text.startswith("{'image': <uint8 (45, 60, 3)>, 'few': array([0, 1, 2]), 'raw': <5,000 bytes>, 'text': 'xxx")
    assert len(text) < 400 and text.endswith("'no': None}") and repr(Sample(n=1)) == "{'n': 1}" == str(Sample(n=1))
    ds = ps.create("memory://looking-sample", {"image": ps.Image(), "n": "int32"})
    ds.append({"image": [values["image"]], "n": [7]})
    assert repr(ds[0]) == "{'image': <uint8 (45, 60, 3)>, 'n': np.int32(7)}" == repr(next(iter(ds))) == repr(ds.torch()[0])


class Parsed(html.parser.HTMLParser):
    """Counts tags, and refuses tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], {}, []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.setdefault(tag, []).append(dict(attributes))
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.setdefault(tag, []).append(dict(attributes))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_view_is_a_table_of_thumbnails_boxes_and_nulls_in_a_notebook():
    ds = ps.create(
        "memory://looking<html>",
        {
            "image": ps.Image(),
            "mask": ps.Mask(of="image"),
            "boxes": ps.Boxes("xywh", of="image"),
            "label": ps.Label(["cat", "<b>dog"]),
            "kind": ps.Category(),
            "text": ps.Text(),
            "vector": ps.Tensor((768,), "float32"),
            "<name>": "timestamp",
        },
    )
    image = np.zeros((300, 400, 3), np.uint8)
    ds.append(
        {
            "image": [image, image[:5, :4], None],
            "mask": [image[:, :, 0], None, None],
            "boxes": [[[10, 20, 30, 40], [50, 60, 70, 80]], [], None],
            "label": ["<b>dog", "cat", None],
            "kind": ["<i>x", None, None],
            "text": ["<script>alert(1)</script>", "a" * 5000, None],
            "vector": [np.zeros(768), None, None],
            "<name>": ["2020-01-01", None, None],
        }
    )
    page = Parsed(ds._repr_html_())
    words = " ".join(page.text)
    assert len(page.tags["svg"]) == 3 and len(page.tags["image"]) == 3 and len(page.tags["tr"]) == 4 and len(page.tags["th"]) == 9
    assert [{name: box[name] for name in ("x", "y", "width", "height")} for box in page.tags["rect"]] == [
        {"x": "10", "y": "20", "width": "30", "height": "40"},
        {"x": "50", "y": "60", "width": "70", "height": "80"},
    ]
    assert not {"script", "b>", "name"} & {*page.tags} and "<b>dog" in words and "<script>alert(1)</script>" in words and "<name>" in words
    assert words.count("null") == 12 and "<float32 (768,)>" in words and "2020-01-01" in words and len(words) < 3000
    assert page.tags["svg"][0] == {"width": "128", "height": "96", "viewbox": "0 0 400 300"}
    assert "3 samples" in words and "snapshot" in words and len(Parsed(ds.select([0] * 9)[["text"]]._repr_html_()).tags["tr"]) == 6
    many = ps.create("memory://looking-boxes", {"image": ps.Image(), "boxes": ps.Boxes(of="image")})
    many.append({"image": [image], "boxes": [np.ones((50_000, 4))]})
    assert len(many._repr_html_()) < 50_000
    assert "more samples" in ds.select([0] * 9)._repr_html_()
    empty = ps.create("memory://looking-empty", {"n": "int32"})
    assert "0 samples" in empty._repr_html_() and ps.create("memory://looking-none", {})._repr_html_()


def test_a_damaged_image_is_shown_as_null(tmp_path):
    ds = ps.create(tmp_path / "set", {"image": ps.Image(), "n": "int32"})
    good = tmp_path / "good.png"
    from PIL import Image

    Image.new("RGB", (40, 30)).save(good)
    body = good.read_bytes()
    ds.append({"image": [body, body[:-30]], "n": [1, 2]})
    page = Parsed(ds._repr_html_())
    assert len(page.tags["svg"]) == 1 and " ".join(page.text).count("null") == 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 1000), (1000, 1), (129, 128, 3), (7, 9, 4), (200, 100, 1)])
def test_thumbnails_are_small_and_means(shape):
    image = np.full(shape, 200, np.uint8)
    small = thumbnail(image, 128)
    assert max(small.shape[:2]) <= 128 and small.shape[2] in (3, 4) and (small == 200).all() and min(small.shape) >= 1
    assert (thumbnail(np.full(shape, 200 << 8, np.uint16), 128) == 200).all()
    if len(shape) == 2:
        assert thumbnail(image, 128, mask=True).shape == (*small.shape[:2], 3) or max(shape) > 128


def test_comparisons_with_floats_are_those_of_the_column():
    """As in NumPy and pandas, 0.1 equals a stored 0.1, whatever the dtype."""
    for dtype in ("float16", "float32", "float64"):
        ds = ps.create(f"memory://floats-{dtype}", {"x": dtype, "l": ps.Label(["cat", "dog"])})
        ds.append({"x": [0.1, 0.7, None], "l": ["cat", "dog", None]})
        stored = np.array([0.1, 0.7], dtype)
        assert (ds["x"] == 0.1).tolist() == [True, False, False] and (ds["x"] >= 0.7).tolist() == [*(stored >= 0.7), False]
        assert (ds["x"] == [0.1, 0.5, 0.7]).tolist() == [True, False, False] and (ds["x"] < 1).tolist() == [True, True, False]
        assert (ds["x"] == np.array([0.1, 0.7, 0], dtype)).tolist() == [True, True, False]
        assert 0.7 in ds["x"] and 0.3 not in ds["x"] and "dog" in ds["l"]
