"""Boxes of several formats: `T.ConvertBoxes`, and mixtures and joined views of datasets whose boxes differ in format."""

from __future__ import annotations

import itertools

import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock import transforms as T

pytestmark = pytest.mark.local
FORMATS = ["xyxy", "xywh", "cxcywh"]
PLACES = itertools.count()
RNG = np.random.default_rng(7)
CORNERS = [np.sort(RNG.integers(0, 200, (count, 2, 2)), axis=1).reshape(count, 4).astype(np.float32) / 4 for count in (3, 0, 1, 2, 5, 1)]


def in_format(corners, form):
    low, high = corners[:, :2], corners[:, 2:]
    return {
        "xyxy": corners, "xywh": np.concatenate([low, high - low], axis=1), "cxcywh": np.concatenate([(low + high) / 2, high - low], axis=1),
    }[form]  # fmt: skip


def made(form, corners=CORNERS, nulls=()):
    ds = ps.create(
        f"memory://box-formats-{next(PLACES)}",
        {"image": ps.Image(), "boxes": ps.Boxes(form, of="image"), "labels": ps.Tensor((None,), "int64")},
    )
    boxes = [None if row in nulls else in_format(rows, form) for row, rows in enumerate(corners)]
    pixels = [np.full((60, 50, 3), row, np.uint8) for row in range(len(corners))]
    ds.append({"image": pixels, "boxes": boxes, "labels": [np.arange(len(rows)) for rows in corners]})
    return ds


def same(got, form, corners=CORNERS):
    for found, expected in zip(got, corners, strict=True):
        assert np.array_equal(found, in_format(expected, form)), (found, in_format(expected, form))


def in_arrow(table):
    return [np.array(boxes["data"], np.float32).reshape(-1, 4) for boxes in table.column("boxes").to_pylist()]


def only(loader):
    [batch] = loader
    return batch


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_boxes_are_converted_between_all_formats(stored, to):
    ds = made(stored)
    for transform in ([T.ConvertBoxes(to)], [T.ConvertBoxes("cxcywh"), T.ConvertBoxes(to.upper())], [T.ConvertBoxes(to, on="boxes")]):
        batch = only(ds.loader(batch_size=6, transform=transform))
        assert isinstance(batch["boxes"], ps.Ragged)
        same(batch["boxes"], to)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("before", [True, False])
def test_the_place_of_a_conversion_does_not_matter_to_transforms(to, before):
    moves = [T.RandomHorizontalFlip(1.0), T.Resize((120, 50)), T.SanitizeBoundingBoxes(on=("boxes", "labels"))]
    transform = [T.ConvertBoxes(to), *moves] if before else [*moves, T.ConvertBoxes(to)]
    batch = only(made("xywh").loader(batch_size=6, transform=transform))
    expected = []
    for corners in CORNERS:
        moved = np.stack([50 - corners[:, 2], 2 * corners[:, 1], 50 - corners[:, 0], 2 * corners[:, 3]], axis=1)
        sides = moved[:, 2:] - moved[:, :2]
        expected.append(moved[(sides >= 1).all(axis=1) & (sides.prod(axis=1) >= 1)])
    same(batch["boxes"], to, expected)
    assert [len(labels) for labels in batch["labels"]] == [len(boxes) for boxes in expected]


@pytest.mark.parametrize("to", FORMATS)
def test_transforms_of_torchvision_know_the_converted_format(to):
    v2 = pytest.importorskip("torchvision.transforms.v2")
    batch = only(made("xywh").loader(batch_size=6, transform=[T.ConvertBoxes(to), v2.RandomHorizontalFlip(1.0)]))
    same(batch["boxes"], to, [np.stack([50 - c[:, 2], c[:, 1], 50 - c[:, 0], c[:, 3]], axis=1) for c in CORNERS])


def test_wrong_conversions_are_refused():
    ds = made("xyxy")
    for transform, text in (
        (T.ConvertBoxes("yxyx"), "format='yxyx'"), (T.ConvertBoxes("xywh", on="image"), "does not fit `image`"),
        (T.ConvertBoxes("xywh", on="labels"), "does not fit `labels`"), (T.ConvertBoxes("xywh", on="other"), "`other`, which the loader"),
    ):  # fmt: skip
        with pytest.raises(ps.InvalidInputError, match=text):
            ds.loader(batch_size=1, transform=[transform])
    with pytest.raises(ps.InvalidInputError, match="returns no boxes"):
        ds.loader(batch_size=1, columns=["image"], transform=[T.ConvertBoxes("xywh")])


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMATS, FORMATS)))
def test_joined_views_have_the_format_of_the_first(first, second):
    """Every read path gives the same boxes, and those that are in this format already are not rounded."""
    odd = [rows / np.float32(3) for rows in CORNERS]
    one, two = made(first, odd), made(second)
    both = ps.concat([one, two])
    assert both.schema["boxes"].format == first
    kept = one.take(range(6))["boxes"]
    reads = {
        "take": both.take(range(12))["boxes"], "slice": both[0:12]["boxes"], "sample": [both[i]["boxes"] for i in range(12)],
        "column": both["boxes"][:], "iteration": [sample["boxes"] for sample in both], "batches": [b for batch in both.batches(5) for b in batch["boxes"]],
        "torch": [both.torch()[i]["boxes"] for i in range(12)], "loader": [b for batch in both.loader(batch_size=4) for b in batch["boxes"]],
        "function": [b for batch in both.loader(batch_size=4, transform=[lambda sample: sample]) for b in batch["boxes"]],
        "select": both.select(range(12)).take(range(12))["boxes"], "arrow": in_arrow(both.to_arrow()),
        "scan": in_arrow(pa.Table.from_batches(both.scan(batch_size=4))), "stream": in_arrow(pa.table(both)),
        "dataset": in_arrow(both.to_arrow_dataset().to_table(columns=["boxes"])),
    }  # fmt: skip
    for how, boxes in reads.items():
        boxes = list(boxes)
        for found, expected in zip(boxes[:6], kept, strict=True):
            assert np.array_equal(found, expected), how
        same(boxes[6:], first)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMATS, FORMATS)))
def test_mixed_views_have_the_format_of_the_first(first, second):
    one, two = made(first), made(second, nulls=[3])
    mixed = ps.mix({"one": one, "two": two})
    for transform, to in (([], first), ([T.ConvertBoxes("cxcywh")], "cxcywh")):
        seen = 0
        for batch in mixed.loader(batch_size=4, columns=["boxes", "_source", "_position"], transform=transform, nulls={"boxes": "mask"}):
            for boxes, source, position in zip(batch["boxes"], batch["_source"], batch["_position"], strict=True):
                if (source, position) == (1, 3):
                    assert boxes is None
                else:
                    assert np.array_equal(boxes, in_format(CORNERS[position], to)), (source, position)
                seen += 1
        assert seen == 12


def test_boxes_of_different_images_are_still_refused():
    one = made("xyxy")
    other = ps.create("memory://box-formats-other", {"image": ps.Image(), "boxes": ps.Boxes("xywh"), "labels": ps.Tensor((None,), "int64")})
    with pytest.raises(ps.InvalidInputError, match="column `boxes`"):
        ps.concat([one, other])
    with pytest.raises(ps.InvalidInputError, match="column `boxes` differs"):
        ps.mix({"one": one, "other": (other, 1)}).loader(batch_size=1)


def without_image(form, corners=CORNERS):
    ds = ps.create(f"memory://box-formats-{next(PLACES)}", {"boxes": ps.Boxes(form), "labels": ps.Tensor((None,), "int64")})
    if corners is not None:
        ds.append(
            {"boxes": [*(in_format(rows, form) for rows in corners), None], "labels": [*(np.arange(len(rows)) for rows in corners), None]}
        )
    return ds


@pytest.mark.parametrize(("stored", "to"), list(itertools.product(FORMATS, FORMATS)))
def test_what_arrow_notes_of_boxes_is_heeded_by_every_write(stored, to, tmp_path):
    source = without_image(stored)
    source.to_parquet(tmp_path / "structs.parquet")
    source.to_parquet(tmp_path / "lists.parquet", tensors="list")
    table = source.to_arrow()

    def updated(ds):
        ids = ds.append({"boxes": [None] * 7, "labels": [None] * 7}).row_ids
        ds.update(table.slice(0, 7), row_ids=ids)

    def in_transaction(ds):
        with ds.transaction() as tx:
            tx.append(source)

    writes = {
        "dataset": lambda ds: ds.append(source), "transaction": in_transaction, "table": lambda ds: ds.append(table), "update": updated,
        "reader": lambda ds: ds.append(source.scan(batch_size=2)), "stream": lambda ds: ds.append(iter([table.slice(0, 2), table.slice(2)])),
        "import": lambda ds: ps.importers.import_data(table, ds.uri), "structs": lambda ds: ps.importers.import_data(tmp_path / "structs.parquet", ds.uri),
        "lists": lambda ds: ps.importers.import_data(tmp_path / "lists.parquet", ds.uri), "joined": lambda ds: ds.append(ps.concat([ds, source])),
    }  # fmt: skip
    for how, write in writes.items():
        ds = without_image(to, None)
        write(ds)
        ds.refresh()
        boxes = [sample["boxes"] for sample in ds]
        assert len(boxes) == 7 and boxes[6] is None, how
        same(boxes[:6], to)


def test_files_of_two_formats_are_imported_into_one(tmp_path):
    for form in ("xywh", "xyxy"):
        without_image(form).to_parquet(tmp_path / f"{form}.parquet")
    ds = without_image("cxcywh", None)
    ps.importers.import_data(tmp_path, ds.uri)
    ds.refresh()
    boxes = [sample["boxes"] for sample in ds if sample["boxes"] is not None]
    same(boxes, "cxcywh", CORNERS * 2)


def test_boxes_of_an_unknown_format_are_refused():
    table = without_image("xyxy").to_arrow()
    field = table.schema.field("boxes")
    for noted in (b'{"type": "boxes", "format": "polar"}', b'{"type": "boxes", "format": 3}'):
        schema = table.schema.set(0, field.with_metadata({b"penstock.column": noted}))
        for write in (lambda ds, wrong: ds.append(wrong), lambda ds, wrong: ps.importers.import_data(wrong, ds.uri)):
            ds = without_image("xywh", None)
            with pytest.raises(ps.InvalidInputError, match=r"the boxes have the format `(polar|3)`, expected xyxy, xywh or cxcywh"):
                write(ds, table.cast(schema))
            ds.refresh()
            assert len(ds) == 0


@pytest.mark.parametrize("way", ["append", "update", "stream", "import", "import stream", "parquet"])
@pytest.mark.parametrize("of", ["boxes", "meta"])
def test_values_that_are_not_what_arrow_notes_are_named(tmp_path, way, of):
    good, bad = {"boxes": ([[0, 0, 1, 1]], [[0, 0, 1]]), "meta": ('{"a": 1}', "{")}[of]
    noted = {"boxes": b'{"type": "boxes", "format": "xyxy"}', "meta": b'{"type": "json"}'}[of]
    kind = {"boxes": pa.list_(pa.list_(pa.float32())), "meta": pa.large_string()}[of]
    field = pa.field(of, kind, metadata={b"penstock.column": noted})
    tables = [pa.table([pa.array(values, kind)], pa.schema([field])) for values in ([good] * 3, [good, bad, good])]
    table = pa.concat_tables(tables)
    ds = ps.create(f"memory://not-noted-{next(PLACES)}", {of: {"boxes": ps.Boxes("xywh"), "meta": ps.Json()}[of]})
    pq.write_table(table, tmp_path / "t.parquet")
    calls = {
        "append": lambda: ds.append(table), "update": lambda: ds.update(table, row_ids=range(6)), "stream": lambda: ds.append(iter(tables)),
        "import": lambda: ps.importers.import_data(table, ds.uri), "import stream": lambda: ps.importers.import_data(iter(tables), ds.uri),
        "parquet": lambda: ps.importers.import_data(tmp_path / "t.parquet", ds.uri),
    }  # fmt: skip
    with pytest.raises(ps.InvalidInputError, match=f"column `{of}`: ") as caught:
        calls[way]()
    assert caught.value.column == of and len(ds.refresh()) == 0 and ("t.parquet" in caught.value.message) == (way == "parquet")
    assert {"boxes": "row 4 has the shape (1, 3)", "meta": "row 4 is not JSON"}[of] in caught.value.message and caught.value.rows == [4]
