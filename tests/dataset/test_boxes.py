"""Boxes and their labels are checked when they are added: by every call, and by a rule that refuses, keeps, clips or drops them."""

import io

import numpy as np
import penstock as ps
import pyarrow as pa
import pytest
from PIL import Image as Pillow

NAN, INF = float("nan"), float("inf")
WRONG = {
    "xyxy": [[NAN, 0, 1, 1], [0, 0, INF, 1], [5, 0, 4, 1], [0, 5, 1, 4], [0, 0, 1, -INF]],
    "xywh": [[NAN, 0, 1, 1], [0, 0, INF, 1], [5, 0, -1, 1], [0, 5, 1, -0.5]],
    "cxcywh": [[0, NAN, 1, 1], [-INF, 0, 1, 1], [5, 0, -1, 1], [0, 5, 1, -0.5]],
}
GOOD = {"xyxy": [1, 2, 3, 4], "xywh": [1, 2, 3, 4], "cxcywh": [4, 4, 2, 2]}
CASES = [(form, box) for form, boxes in WRONG.items() for box in boxes]


def picture(width=20, height=12, orientation=None):
    out, exif = io.BytesIO(), Pillow.Exif()
    if orientation:
        exif[0x0112] = orientation
    Pillow.fromarray(np.zeros((height, width, 3), np.uint8)).save(out, "JPEG", exif=exif)
    return out.getvalue()


def dataset(root, form="xyxy", **more):
    return ps.create(
        root, {"image": ps.Image(), "boxes": ps.Boxes(form, of="image"), "labels": ps.Labels(["a", "b", "c"], of="boxes"), **more}
    )


@pytest.mark.parametrize("given", ["lists", "arrays", "arrow", "rows", "stream"])
@pytest.mark.parametrize(("form", "box"), CASES)
def test_append_refuses_wrong_boxes_with_their_row(root, form, box, given):
    ds = dataset(root, form)
    boxes = [[GOOD[form]] * 2, None, [], [GOOD[form], box]]
    table = {
        "lists": {"boxes": boxes},
        "arrays": {"boxes": [None if each is None else np.array(each, "f4").reshape(-1, 4) for each in boxes]},
        "arrow": pa.table({"boxes": pa.array(boxes, pa.list_(pa.list_(pa.float64())))}),
        "rows": [{"boxes": each} for each in boxes],
        "stream": ({"boxes": each} for each in boxes),
    }[given]
    with pytest.raises(ps.InvalidInputError, match=rf"row 3 contains the {form} box") as caught:
        ds.append(table)
    assert (caught.value.column, caught.value.rows, caught.value.code) == ("boxes", [3], "invalid-value") and "drop" in caught.value.hint
    assert len(ds) == 0


@pytest.mark.parametrize("form", WRONG)
def test_every_call_refuses_wrong_boxes(root, form):
    ds = dataset(root, form, key="int32")
    box = WRONG[form][-1]
    ids = ds.append({"boxes": [[GOOD[form]]], "key": [1]}).row_ids
    calls = [
        lambda tx: tx.append({"boxes": [[box]]}),
        lambda tx: tx.update({"boxes": [[box]]}, row_ids=ids),
        lambda tx: tx.upsert({"boxes": [[box]], "labels": [["a"]], "key": [1]}, key="key"),
        lambda tx: tx.overwrite({"boxes": [[box]]}),
        lambda tx: tx.add_column("more", ps.Boxes(form), fill=[box]),
        lambda tx: ds.stage({"boxes": [[box]]}),
        lambda tx: tx.append([{"boxes": [box]}] * 3000),
    ]
    with ds.transaction() as tx:
        for call in calls:
            with pytest.raises(ps.InvalidInputError, match="expected finite numbers"):
                call(tx)
    assert ds["boxes"][0].tolist() == [GOOD[form]] and len(ds) == 1


def test_calls_that_commit_by_themselves_take_a_rule_for_boxes(root):
    ds = ps.create(root, {"key": "int32", "boxes": ps.Boxes(), "labels": ps.Labels(["a"], of="boxes")})
    ids = ds.append({"key": [1, 2], "boxes": [[GOOD["xyxy"]]] * 2, "labels": [["a"]] * 2}).row_ids
    wrong, two = [[[NAN, 0, 1, 1], GOOD["xyxy"]]], [["a", "a"]]
    calls = [
        lambda **more: ds.update({"boxes": wrong, "labels": two}, row_ids=ids[:1], **more),
        lambda **more: ds.update({"key": [2], "boxes": wrong}, on="key", **more),
        lambda **more: ds.update({"labels": two}, row_ids=ids[1:], **more),
        lambda **more: ds.stage({"boxes": wrong, "labels": [["a"]]}, **more),
    ]
    for call in calls:
        with pytest.raises(ps.InvalidInputError) as caught:
            call()
        assert 'boxes="clip", "drop" or "keep"' in caught.value.hint or 'boxes="keep"' in caught.value.hint
        with pytest.raises(ps.InvalidInputError, match="boxes='never', expected refuse, keep, clip or drop"):
            call(boxes="never")
    calls[0](boxes="drop")
    assert ds[0]["boxes"].tolist() == [GOOD["xyxy"]] and ds[0]["labels"].tolist() == [0]
    for call in calls:
        made = call(boxes="keep")
    with ds.transaction() as tx:
        tx.add(made)
        tx.add_column("more", ps.Boxes())
    assert [len(each) for each in ds["boxes"]] == [2, 2, 2] and [len(each) for each in ds["labels"]] == [2, 2, 1]
    given = {"compute": lambda batch: [wrong[0]] * len(batch["key"]), "columns": ["key"]}
    with pytest.raises(ps.InvalidInputError, match="expected finite numbers"):
        ds.backfill("more", **given)
    assert ds.backfill("more", **given, boxes="drop") == 3 and [len(each) for each in ds["more"]] == [1, 1, 1]


def test_a_fill_is_checked_by_the_rule_of_the_transaction(root):
    ds = ps.create(root, {"boxes": ps.Boxes()})
    ds.append({"boxes": [[[0, 0, 1, 1]] * 2, []]})
    wrong, labels = [[NAN, 0, 1, 1], [0, 0, 1, 1]], ps.Labels(["a"], of="boxes")
    for rule in ("refuse", "drop"):
        with ds.transaction(boxes=rule) as tx:
            with pytest.raises(
                ps.InvalidInputError, match="column `labels`: a fill gives each sample 1, regardless of its number of `boxes`"
            ) as caught:
                tx.add_column("labels", labels, fill=["a"])
            assert 'boxes="keep"' in caught.value.hint and list(ds.schema) == ["boxes"]
    with ds.transaction(boxes="drop") as tx:
        tx.add_column("dropped", ps.Boxes(), fill=wrong)
    with ds.transaction(boxes="keep") as tx:
        tx.add_column("kept", ps.Boxes(), fill=wrong)
        tx.add_column("labels", labels, fill=["a"])
    assert ds[0]["dropped"].tolist() == [wrong[1]] and len(ds[0]["kept"]) == 2 and ds[0]["labels"].tolist() == [0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_box_has_one_label(root, count):
    ds = dataset(root)
    rows = {"boxes": [[GOOD["xyxy"]] * 2] * 2, "labels": [["a", "b"], ["a"] * count]}
    with pytest.raises(ps.InvalidInputError, match=rf"row 1 has {count} labels?, expected 2, one for each box in `boxes`") as caught:
        ds.append(rows)
    assert (caught.value.column, caught.value.rows) == ("labels", [1]) and len(ds) == 0
    with pytest.raises(ps.InvalidInputError, match="row 1 has"):
        ds.append(rows, boxes="drop")
    ds.append(rows, boxes="keep")
    ds.append({"boxes": [[GOOD["xyxy"]], None, None], "labels": [None, ["a"], None]})  # A null is not a list.
    ds.append({"boxes": [[GOOD["xyxy"]]]})
    assert len(ds) == 6


def test_labels_belong_to_boxes_or_keypoints(root):
    ds = ps.create(
        root, {"points": ps.Keypoints(2, 2), "labels": ps.Labels(["a"], of="points"), "tags": ps.Labels(["x"]), "boxes": ps.Boxes()}
    )
    assert ps.open(root).schema["labels"] == ps.Labels(["a"], of="points") and ds.schema["tags"].of is None
    with pytest.raises(ps.InvalidInputError, match="row 0 has 2 labels, expected 1, one for each box in `points`"):
        ds.append({"points": [[[[1, 2], [3, 4]]]], "labels": [["a", "a"]]})
    ds.append({"points": [[[[1, 2], [3, 4]]]], "labels": [["a"]], "tags": [[]], "boxes": [[[0, 0, 1, 1]] * 3]})
    with ds.transaction() as tx:
        tx.rename_column("points", "joints")
    assert ds.schema["labels"].of == "joints"
    with pytest.raises(ps.InvalidInputError, match="`labels` belongs to it"), ds.transaction() as tx:
        tx.drop_column("joints", force=True)
    for other in ("tags", "none"):
        with pytest.raises(ps.InvalidInputError, match=f"its labels belong to `{other}`"):
            ps.create(root.with_name("other"), {"tags": ps.Text(), "labels": ps.Labels(["a"], of=other)})


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "a"]])
def test_datasets_are_joined_whatever_their_labels_belong_to(root, names):
    one = dataset(root)
    other = ps.create(root.with_name("other"), {"boxes": ps.Boxes(of=None), "labels": ps.Labels(names)})
    one.append({"boxes": [[GOOD["xyxy"]]], "labels": [["a"]]})
    other.append({"boxes": [[]], "labels": [["a", "c"]]})
    both = ps.concat([one[["labels"]], other[["labels"]]])
    assert [[both.vocabulary("labels")[code] for code in codes] for codes in both["labels"][:]] == [["a"], ["a", "c"]]
    mixed = ps.mix({"one": one, "other": other})
    [batch] = mixed.loader(batch_size=2, columns=["labels"]) if hasattr(mixed, "loader") else [None]
    assert batch is None or sorted(len(codes) for codes in batch["labels"]) == [1, 2]


@pytest.mark.parametrize("form", WRONG)
def test_wrong_boxes_are_kept_or_dropped_with_their_labels(root, form):
    rng = np.random.default_rng(7)
    rows = []
    for row in range(50):
        boxes = [GOOD[form] if rng.random() < 0.7 else WRONG[form][rng.integers(len(WRONG[form]))] for _ in range(rng.integers(5))]
        labels = rng.integers(3, size=len(boxes)).tolist()
        rows.append({"boxes": None if row % 11 == 5 else boxes, "labels": None if row % 11 in (5, 7) else labels})
    table = {name: [row[name] for row in rows] for name in ("boxes", "labels")}
    kept = dataset(root.with_name("kept"), form)
    kept.append(table, boxes="keep")
    for row, boxes in enumerate(kept["boxes"][:]):
        assert np.array_equal(boxes, np.array(rows[row]["boxes"], "f4").reshape(-1, 4), equal_nan=True) if boxes is not None else True
    ds = dataset(root, form)
    with ds.transaction(boxes="drop") as tx:
        tx.append(table)
    for row, (boxes, labels) in enumerate(zip(ds["boxes"][:], ds["labels"][:], strict=True)):
        given, codes = rows[row]["boxes"], rows[row]["labels"]
        good = [] if given is None else [place for place, box in enumerate(given) if box == GOOD[form]]
        assert (boxes is None) == (given is None) and (boxes is None or boxes.tolist() == [GOOD[form]] * len(good)), row
        assert (labels is None) == (codes is None) and (labels is None or labels.tolist() == [codes[place] for place in good]), row


@pytest.mark.parametrize("image", ["bytes", "path", "array", "arrow"])
def test_boxes_are_clipped_at_the_borders_of_their_image(tmp_path, root, image):
    ds = dataset(root)
    (tmp_path / "a.jpg").write_bytes(picture())
    images = {"bytes": [picture()] * 3, "path": [tmp_path / "a.jpg"] * 3, "array": [np.zeros((12, 20, 3), np.uint8)] * 3}.get(image)
    images = pa.array([picture()] * 3) if images is None else images
    inside = [0.1, 0.3, 19.7, 11.9]
    boxes = [[inside, [-5, -5, 5, 5]], [[10, 10, 30, INF], [5, 5, 3, 3]], [[40, 40, 50, 50]]]
    ds.append({"image": images, "boxes": boxes, "labels": [["a", "b"], ["a", "b"], ["c"]]}, boxes="clip")
    wanted = [[np.float32(inside).tolist(), [0, 0, 5, 5]], [[10, 10, 20, 12], [5, 5, 5, 5]], [[20, 12, 20, 12]]]
    assert [found.tolist() for found in ds["boxes"][:]] == wanted
    with pytest.raises(ps.InvalidInputError, match="row 0 contains the xyxy box"):
        ds.append({"image": [picture()], "boxes": [[[NAN, 0, 1, 1]]]}, boxes="clip")


def test_boxes_without_their_images_are_not_clipped(root):
    ds = dataset(root)
    with pytest.raises(
        ps.InvalidInputError, match=r"cannot cut the boxes of `boxes`: its images, in `image`, are not in the same call"
    ) as caught:
        ds.append({"boxes": [[[-5, 0, 1, 1]]]}, boxes="clip")
    assert 'boxes="drop" or "keep"' in caught.value.hint and len(ds) == 0
    alone = ps.create(root.with_name("alone"), {"boxes": ps.Boxes()})
    with pytest.raises(ps.InvalidInputError, match="names no image column"):
        alone.append({"boxes": [[[-5, 0, 1, 1]]]}, boxes="clip")
    ds.append({"image": [None], "boxes": [[[-5, 0, 9000, 1]]]}, boxes="clip")
    assert ds["boxes"][0].tolist() == [[0, 0, 9000, 1]], "the size of an image that is null is not known"


def test_clipping_knows_turned_images_and_other_forms(root):
    ds = dataset(root, "xywh")
    ds.append({"image": [picture(orientation=6), picture()], "boxes": [[[10, 10, 30, 30]]] * 2}, boxes="clip")
    assert [boxes.tolist() for boxes in ds["boxes"][:]] == [[[10, 10, 2, 10]], [[10, 10, 10, 2]]]
    centre = dataset(root.with_name("centre"), "cxcywh")
    boxes = [[[0.1, 0.2, 0.1, 0.3], [0, 6, 4, 4], [5, 5, -1, 2]]]
    centre.append({"image": [picture()], "boxes": boxes}, boxes="clip")
    assert centre["boxes"][0].tolist() == [np.float32([0.1, 0.2, 0.1, 0.3]).tolist(), [1, 6, 2, 4], [5, 5, 0, 2]]
    with pytest.raises(ps.InvalidInputError, match="boxes='cut', expected refuse, keep, clip or drop"):
        centre.append({"boxes": [[]]}, boxes="cut")


@pytest.mark.parametrize("upright", [True, False])
@pytest.mark.parametrize("form", WRONG)
def test_clipping_leaves_boxes_within_the_image_as_it_is_read(root, form, upright):
    """For every orientation of EXIF, and for images that are lying, standing, square or null. Boxes may touch the borders."""
    kinds = {"image": ps.Image(exif_orientation=upright), "boxes": ps.Boxes(form, of="image"), "labels": ps.Labels(["a"], of="boxes")}
    ds = ps.create(root, kinds)
    shapes = [(20, 12), (12, 20), (16, 16)]
    images = [picture(*shape, orientation) for orientation in [None, *range(1, 9)] for shape in shapes] + [None]
    ds.append({"image": images, "boxes": [[]] * len(images)})
    boxes = []
    for image in ds["image"]:
        height, width = (50, 60) if image is None else image.shape[:2]
        corners = np.array([[0, 0, width, height], [width - 3, 1, width, 2], [1, height - 3, 2, height], [width, height, width, height]])
        low, size = corners[:, :2], corners[:, 2:] - corners[:, :2]
        parts = {"xyxy": (low, corners[:, 2:]), "xywh": (low, size), "cxcywh": (low + size / 2, size)}[form]
        boxes.append(np.concatenate(parts, axis=1).astype(np.float32))
    ds.append({"image": images, "boxes": boxes, "labels": [["a"] * 4] * len(images)}, boxes="clip")
    for row, (found, wanted) in enumerate(zip(ds["boxes"][len(images) :], boxes, strict=True)):
        assert found.tolist() == wanted.tolist(), row
    # One box is larger than each image, and is cut at all borders. Without an image, it is cut at zero.
    low, size = np.array([[-5, -5]]), np.array([[99, 99]])
    large = np.concatenate({"xyxy": (low, low + size), "xywh": (low, size), "cxcywh": (low + size / 2, size)}[form], axis=1)
    ds.append({"image": images, "boxes": [large] * len(images), "labels": [["a"]] * len(images)}, boxes="clip")
    for row, (found, image) in enumerate(zip(ds["boxes"][2 * len(images) :], ds["image"], strict=False)):
        height, width = (94, 94) if image is None else image.shape[:2]
        wanted = [width / 2, height / 2, width, height] if form == "cxcywh" else [0, 0, width, height]
        assert found.tolist() == [wanted], row


@pytest.mark.parametrize("given", ["boxes", "labels"])
@pytest.mark.parametrize("where", ["stored", "own", "updated"])
def test_an_update_of_boxes_or_labels_alone_keeps_their_counts_equal(root, given, where):
    """The other column may be committed, new in this transaction, or changed by it."""
    ds = dataset(root)
    two, one = np.array([[0, 0, 1, 1], [0, 0, 2, 2]], "f4"), np.ones((1, 4), "f4")
    values = {"boxes": {1: one, 2: two + 1}, "labels": {1: ["b"], 2: ["b", "c"]}}
    ids = ds.append({"image": [picture()] * 3, "boxes": [two, two, None], "labels": [["a", "b"], ["a", "b"], None]}).row_ids
    with ds.transaction() as tx:
        if where == "own":
            ids = tx.append({"image": [picture()] * 3, "boxes": [two, two, None], "labels": [["a", "b"], ["a", "b"], None]})
        if where == "updated":
            tx.update({"boxes": [one, one, None], "labels": [["a"], ["a"], None]}, row_ids=ids)
        good, bad = (1, 2) if where == "updated" else (2, 1)
        for rows in ([bad, good, bad], [good, bad, bad]):
            with pytest.raises(
                ps.InvalidInputError, match=rf"`{given}`: row {rows.index(bad)} has {bad}, but `.*` has {good}: each box has one label"
            ) as caught:
                tx.update({given: [values[given][count] for count in rows]}, row_ids=ids)
            assert "both columns" in caught.value.hint and caught.value.rows == [rows.index(bad)]
        tx.update({given: [values[given][good], values[given][good], values[given][bad]]}, row_ids=ids)
        tx.update({given: [None]}, row_ids=ids[:1])
    with ds.transaction(boxes="keep") as tx:
        tx.update({given: [values[given][1], values[given][2]]}, row_ids=np.arange(2))
    with pytest.raises(ps.NotFoundError, match="row"):
        ds.update({given: [values[given][1]]}, row_ids=[77])


@pytest.mark.parametrize("given", ["boxes", "labels"])
def test_an_update_in_parts_names_the_row_of_the_whole_input(root, given, monkeypatch):
    ds = dataset(root)
    boxes, labels = np.ones((40, 1, 4), "f4"), [["a"]] * 40
    ids = ds.append({"boxes": boxes, "labels": labels}).row_ids
    values = {"boxes": [*boxes[:33], np.ones((2, 4), "f4"), *boxes[34:]], "labels": [*labels[:33], ["a", "b"], *labels[34:]]}
    monkeypatch.setattr(ps.changes.slices, "SLICE_BYTES", 200)
    with pytest.raises(ps.InvalidInputError, match=f"cannot update column `{given}`: row 33 has 2, but `.*` has 1: each box") as caught:
        ds.update({given: values[given]}, row_ids=ids)
    assert (caught.value.rows, caught.value.column, caught.value.code) == ([33], given, "invalid-value")


def test_a_concurrent_change_of_the_other_column_is_a_conflict(root):
    ds = dataset(root)
    ids = ds.append({"image": [picture()], "boxes": [[[0, 0, 1, 1]]], "labels": [["a"]]}).row_ids
    tx = ds.transaction()
    tx.update({"labels": [["b"]]}, row_ids=ids)
    ps.open(root).update({"boxes": [np.zeros((2, 4), "f4")], "labels": [["a", "a"]]}, row_ids=ids)
    with pytest.raises(ps.ConflictError):
        tx.commit()


def test_boxes_that_may_be_dropped_are_given_with_their_labels(root):
    ds = dataset(root)
    ids = ds.append({"image": [picture()], "boxes": [[[0, 0, 1, 1]] * 2], "labels": [["a", "b"]]}).row_ids
    with ds.transaction(boxes="drop") as tx:
        with pytest.raises(ps.InvalidInputError, match="cannot drop boxes from `boxes` without `labels`"):
            tx.update({"boxes": [[[3, 3, 1, 1], [0, 0, 2, 2]]]}, row_ids=ids)
        tx.update({"boxes": [[[3, 3, 1, 1], [0, 0, 2, 2]]], "labels": [["a", "b"]]}, row_ids=ids)
    assert ds[0]["boxes"].tolist() == [[0, 0, 2, 2]] and ds[0]["labels"].tolist() == [1]


@pytest.mark.parametrize("given", ["boxes", "labels"])
def test_changes_by_key_have_both_columns(root, given):
    ds = ps.create(root, {"key": "int64", "boxes": ps.Boxes(), "labels": ps.Labels(["a"], of="boxes")})
    ds.append({"key": [1], "boxes": [[[0, 0, 1, 1]]], "labels": [["a"]]})
    value = {"boxes": [[[0, 0, 1, 1]] * 2], "labels": [["a", "a"]]}
    with ds.transaction() as tx:
        for change in (lambda table: tx.upsert(table, key="key"), lambda table: tx.update(table, on="key")):
            with pytest.raises(ps.InvalidInputError, match=r"without .*: each box has one label"):
                change({"key": [1], given: value[given]})
            change({"key": [1], **value})
    assert len(ds[0]["boxes"]) == len(ds[0]["labels"]) == 2
