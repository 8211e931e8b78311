"""Annotations that an import does not store: they are refused by kind and counted, and never dropped in silence."""

import json

import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.cli import app
from penstock.importers import import_data
from penstock.importers.pictures.drawing import Instances, outlines_of
from servers import left_empty
from test_manifests import png, write
from typer.testing import CliRunner

VOC = """<annotation><filename>a.png</filename><object><name>cat</name>
<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></object></annotation>"""
CVAT = '<?xml version="1.0"?><annotations><image id="0" name="a.png" width="20" height="12"></image></annotations>'
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "height": 12, "width": 20}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 3, 4, 5]}],
    "categories": [{"id": 1, "name": "cat"}],
}
LABELME = {"imagePath": "a.png", "shapes": [{"label": "cat", "points": [[1, 1], [2, 2]]}]}
TABLE = pa.table({"file_name": ["a.png"], "text": ["a cat"]})
PHOTOS = {"a.png": png(1), "b.png": png(2), "README.md": "# photographs\n"}


def parquet_bytes():
    out = pa.BufferOutputStream()
    pq.write_table(TABLE, out)
    return out.getvalue().to_pybytes()


# What lies beside images, its kind, and how many files.
BESIDE = {
    "voc": ({"Annotations/a.xml": VOC, "Annotations/b.xml": VOC.replace("a.png", "b.png")}, 2),
    "voc-beside": ({"a.xml": VOC}, 1),
    "xml": ({"annotations.xml": CVAT}, 1),
    "table": ({"metadata.jsonl": '{"file_name": "a.png", "text": "a cat"}\n{"file_name": "b.png", "text": "a dog"}\n'}, 1),
    "table-csv": ({"train.csv": "file,label\na.png,cat\n", "test.tsv": "file\tlabel\nsub/b.png\tcat\n"}, 2),
    "table-parquet": ({"metadata.parquet": parquet_bytes()}, 1),
    "table-gz": ({"labels.csv.gz": b"\x1f\x8b"}, 1),
    "coco": ({"labels.json": json.dumps(COCO)}, 1),
    "json": ({"a.json": json.dumps(LABELME), "b.json": json.dumps(LABELME)}, 2),
    "yolo": ({"a.txt": "0 0.5 0.5 0.2 0.2\n"}, 1),
    "captions": ({"a.txt": "a cat on a mat\n", "b.caption": "a dog"}, 2),
    "lists": ({"train.txt": "a.png 3\nb.png 4\n"}, 1),
    "arrays": ({"labels.mat": b"MATLAB", "boxes.npy": b"\x93NUMPY"}, 2),
    "masks": ({"masks/a.png": png(3), "masks/b.png": png(4)}, 2),
    "masks-of-voc": ({"SegmentationClass/a.png": png(3)}, 1),
    "masks-beside": ({"a_mask.png": png(3)}, 1),
}


@pytest.mark.parametrize("name", BESIDE)
def test_annotations_beside_images_are_refused_by_kind(tmp_path, root, name):
    files, count = BESIDE[name]
    kind = name.partition("-")[0]
    folder = write(tmp_path / "photos", {**PHOTOS, **files})
    with pytest.raises(ps.UnsupportedError) as caught:
        import_data(folder, root)
    assert caught.value.code == "unsupported-format" and left_empty(root)
    assert f"{count} " in caught.value.message and f"({kind})" in caught.value.message and min(files) in caught.value.message
    assert f"--ignore {kind}" in caught.value.hint
    with pytest.raises(ps.UnsupportedError):
        import_data(folder, root, ignore=["keypoints"])
    report = import_data(folder, root, ignore=[kind])
    assert (
        report.samples == 2
        and report.left_out_kinds == {kind: count, "other": 1}
        and sorted(report.left_out) == sorted([*files, "README.md"])
    )
    assert "label" not in ps.open(root).schema, "masks are not a class"


def test_several_kinds_are_named_together(tmp_path, root):
    folder = write(tmp_path / "photos", {**PHOTOS, "a.xml": VOC, "metadata.jsonl": '{"file_name": "a.png"}\n'})
    with pytest.raises(ps.UnsupportedError) as caught:
        import_data(folder, root)
    assert "(voc)" in caught.value.message and "(table)" in caught.value.message and "penstock import" in caught.value.hint
    with pytest.raises(ps.UnsupportedError, match=r"\(table\)"):
        import_data(folder, root, ignore=["voc"])
    assert import_data(folder, root, ignore=["voc", "table"]).left_out_kinds == {"voc": 1, "table": 1, "other": 1}
    with pytest.raises(ps.InvalidInputError, match="vocs") as unknown:
        import_data(folder, root, ignore=["vocs"])
    assert "voc, " in unknown.value.hint


@pytest.mark.parametrize(
    "files",
    [
        {"notes.csv": "day,weather\n1,rain\n", "settings.json": '{"camera": 1}', "feed.xml": "<rss></rss>", "LICENSE.txt": "You may use all of it.\n"},
        {"SHA256SUMS": "ab a.png\n", "index.html": "<a href='a.png'>a</a>", "resize.py": "open('a.png')\n", "notes.md": "a.png is a cat\n"},
    ],
)  # fmt: skip
def test_other_files_are_no_annotations(tmp_path, root, files):
    report = import_data(write(tmp_path / "photos", {**PHOTOS, **files}), root)
    assert report.samples == 2 and report.left_out_kinds == {"other": len(files) + 1}


def test_what_a_user_leaves_out_is_not_refused(tmp_path, root):
    folder = write(tmp_path / "photos", {**PHOTOS, "a.xml": VOC, "masks/a.png": png(3)})
    report = import_data(folder, root, exclude=["*.xml", "masks/*"])
    assert report.left_out_kinds == {"unselected": 2, "other": 1}
    report = import_data(folder, root.with_name("some"), include=["b.png"])
    assert report.samples == 1 and report.left_out_kinds == {"unselected": 4}


def test_classes_named_like_masks_remain_classes(tmp_path, root):
    folder = write(tmp_path / "photos", {"masks/1.png": png(1), "faces/2.png": png(2)})
    assert import_data(folder, root).samples == 2 and ps.open(root).vocabulary("label") == ["faces", "masks"]


YOLO = {"images/a.png": png(1), "images/b.png": png(2), "classes.txt": "cat\ndog\n"}


def test_polygons_of_yolo_are_refused_and_counted(tmp_path, root):
    polygon = "0 0 0 0.5 0 0.5 1\n"
    folder = write(tmp_path / "yolo", {**YOLO, "labels/a.txt": "1 0.5 0.5 0.2 0.5\n" + polygon * 2, "labels/b.txt": polygon})
    with pytest.raises(ps.UnsupportedError, match=r"3 polygons in 2 files.*\(polygons\)") as caught:
        import_data(folder, root)
    assert "labels/a.txt" in caught.value.message and "--ignore polygons" in caught.value.hint and left_empty(root)
    report = import_data(folder, root, ignore=["polygons"])
    assert report.left_out_kinds == {"polygons": 3, "other": 1}
    assert [boxes.tolist() for boxes in ps.open(root)["boxes"][:]] == [[[10, 6, 4, 6], [5, 6, 10, 12], [5, 6, 10, 12]], [[5, 6, 10, 12]]]


def test_keypoints_of_yolo_are_refused_and_counted(tmp_path, root):
    files = {**YOLO, "data.yaml": "names: [cat, dog]\nkpt_shape: [2, 3]\n", "labels/a.txt": "1 0.5 0.5 0.2 0.5 0.1 0.1 2 0.2 0.2 1\n"}
    folder = write(tmp_path / "yolo", files)
    with pytest.raises(ps.UnsupportedError, match=r"1 .*kpt_shape.*\(keypoints\)"):
        import_data(folder, root)
    report = import_data(folder, root, ignore=["keypoints"])
    assert report.left_out_kinds == {"keypoints": 1, "other": 2} and ps.open(root)["boxes"][0].tolist() == [[10, 6, 4, 6]]


def test_labels_of_yolo_without_an_image_are_refused(tmp_path, root):
    folder = write(tmp_path / "yolo", {**YOLO, "labels/a.txt": "1 0.5 0.5 0.2 0.5\n", "labels/gone.txt": "1 0.5 0.5 0.2 0.5\n"})
    with pytest.raises(ps.UnsupportedError, match=r"1 .*\(yolo\), such as `labels/gone.txt`"):
        import_data(folder, root)
    assert import_data(folder, root, ignore=["yolo"]).left_out_kinds["yolo"] == 1


def coco(folder, change=lambda found: None, **more):
    found = json.loads(json.dumps(COCO))
    change(found)
    return write(folder, {"a.png": png(1), "annotations.json": json.dumps(found), **more}) / "annotations.json"


def test_polygons_of_coco_are_refused_unless_they_are_drawn(tmp_path, root):
    path = coco(tmp_path / "coco", lambda found: found["annotations"][0].update(segmentation=[[2, 3, 6, 3, 6, 8, 2, 8]]))
    with pytest.raises(ps.UnsupportedError, match=r"1 polygon.*\(polygons\)") as caught:
        import_data(path, root)
    assert "--masks" in caught.value.hint and left_empty(root)
    assert import_data(path, root, ignore=["polygons"]).left_out_kinds == {"polygons": 1}
    assert import_data(path, root.with_name("drawn"), masks="instance").left_out_kinds == {}
    path = coco(tmp_path / "empty", lambda found: found["annotations"][0].update(segmentation=[]))
    assert import_data(path, root.with_name("without")).left_out_kinds == {}


def test_other_fields_of_coco_are_refused_and_counted(tmp_path, root):
    def change(found):
        found["annotations"][0].update(attributes={"occluded": True}, score=0.5, ignore=0, num_keypoints=0, custom=[])
        found["images"][0].update(license=1, date_captured="2014", extra={"name": "x"}, neg_category_ids=[1])

    path = coco(tmp_path / "coco", change)
    with pytest.raises(ps.UnsupportedError, match=r"`attributes` \(1\), `neg_category_ids` \(1\), `score` \(1\)"):
        import_data(path, root)
    assert import_data(path, root, ignore=["fields"]).left_out_kinds == {"fields": 3}


def test_annotations_beside_those_of_coco_are_refused(tmp_path, root):
    path = coco(tmp_path / "coco", **{"a.xml": VOC, "panoptic_val/a.png": png(2), "thumbnails/a.jpg": b"x"})
    with pytest.raises(ps.UnsupportedError, match=r"\(voc\).*\(masks\)|\(masks\).*\(voc\)"):
        import_data(path.parent, root)
    assert import_data(path.parent, root, ignore=["voc", "masks"]).left_out_kinds == {"voc": 1, "masks": 1, "other": 1}


ROWS = [{"n": row, "objects": {"bbox": [[1.0, 2.0, 3.0, 4.0]] * row, "category": [1] * row}} for row in range(3)]
LISTED = [{"n": row, "objects": [{"bbox": [1.0, 2.0, 3.0, 4.0], "category": 1}] * row} for row in range(3)]


@pytest.mark.parametrize("rows", [ROWS, LISTED], ids=["columns", "list"])
@pytest.mark.parametrize("form", ["rows", "jsonl", "parquet", "arrow-file", "arrow", "hub"])
def test_objects_in_a_column_are_refused(tmp_path, root, rows, form):
    source = {"rows": rows, "arrow": pa.Table.from_pylist(rows)}.get(form)
    if form == "jsonl":
        source = write(tmp_path, {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}) / "rows.jsonl"
    if form == "parquet":
        source = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
    if form == "arrow-file":
        source = tmp_path / "rows.arrow"
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(str(source), table.schema) as out:
            out.write_table(table)
    if form == "hub":
        source = pytest.importorskip("datasets").Dataset.from_list(rows)
    with pytest.raises(ps.UnsupportedError, match=r"`objects`.*bbox.*\(objects\)") as caught:
        import_data(source, root)
    assert "objects=json" in caught.value.hint and "--ignore objects" in caught.value.hint and left_empty(root)
    report = import_data(source, root, ignore=["objects"])
    assert list(report.left_out_kinds) == ["objects"] and list(ps.open(root).schema) == ["n"]
    place = root.with_name("json")
    assert import_data(source, place, types={"objects": ps.Json()}).left_out_kinds == {}
    assert ps.open(place)["objects"][2] == rows[2]["objects"]
    import_data(source, place, mode="append")  # The destination says that it is JSON.


@pytest.mark.parametrize("form", ["rows", "arrow"])
def test_a_column_of_boxes_is_refused_unless_its_type_is_given(root, form):
    rows = [{"n": 1, "bbox": [[1.0, 2.0, 3.0, 4.0]]}, {"n": 2, "bbox": []}]
    source = rows if form == "rows" else pa.Table.from_pylist(rows)
    with pytest.raises(ps.UnsupportedError, match=r"`bbox`.*a list of boxes \(objects\)") as caught:
        import_data(source, root)
    assert "--type bbox=boxes:xywh" in caught.value.hint
    assert import_data(source, root, types={"bbox": ps.Boxes("xywh")}).samples == 2 and ps.open(root)["bbox"][0].tolist() == [[1, 2, 3, 4]]


def test_overlapping_instances_keep_all_their_pixels(tmp_path, root):
    from pycocotools import mask as drawing

    outlines = [
        [[0, 0, 16, 0, 16, 10, 0, 10]],
        [[4, 2, 20, 2, 20, 12, 4, 12]],
        {"size": [12, 20], "counts": [30, 40, 170]},
        [[1, 1, 2, 2]],
        [],
    ]

    def change(found):
        found["annotations"] = [
            {"id": number, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "segmentation": outline}
            for number, outline in enumerate(outlines)
        ]
        found["images"].append({"id": 2, "file_name": "a.png", "height": 12, "width": 20})

    import_data(coco(tmp_path / "coco", change), root, masks="instance", mode="append")
    ds = ps.open(root)
    first, second = ds["masks"][:]
    assert first.shape == (5, 12, 20) and first.dtype == bool and second.shape == (0, 12, 20)
    for place, outline in enumerate(outlines[:3]):
        runs = drawing.frPyObjects(outline, 12, 20)
        wanted = drawing.decode(drawing.merge(runs) if isinstance(runs, list) else runs).astype(bool)
        assert np.array_equal(first[place], wanted) and wanted.any(), place
    assert not first[3:].any() and (first[0] & first[1]).any() and ds["mask"][0].max() == 3


def test_masks_of_large_images_are_drawn_a_part_at_a_time(tmp_path, root):
    """Twelve masks of a megapixel are a tiled sample."""
    boxes = [[10 * number, 10, 600, 700] for number in range(12)]

    def change(found):
        found["images"][0].update(height=1000, width=1100)
        found["annotations"] = [
            {"id": at, "image_id": 1, "category_id": 1, "bbox": [x, y, w, h], "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]]}
            for at, (x, y, w, h) in enumerate(boxes)
        ]

    path = coco(tmp_path / "coco", change)
    write(path.parent, {"a.png": png(1, 1000, 1100)})
    import_data(path, root, masks="instance")
    ds = ps.open(root)
    found = ds["masks"][0]
    assert found.shape == (12, 1000, 1100)
    for place, (x, y, w, h) in enumerate(boxes):
        wanted = np.zeros((1000, 1100), bool)
        wanted[y : y + h, x : x + w] = True
        assert np.array_equal(found[place], wanted)
    assert np.array_equal(ds["masks"][0, 3:5, 5:50, 20:60], found[3:5, 5:50, 20:60])


def test_parts_of_the_masks_of_an_image_are_drawn_alone():
    rng = np.random.default_rng(3)
    boxes = rng.integers(5, 20, (5, 4))
    annotations = [{"id": at, "segmentation": [[x, y, x + w, y, x + w, y + h]]} for at, (x, y, w, h) in enumerate(boxes.tolist())]
    made = Instances((30, 40), outlines_of((30, 40), [*annotations, {"id": 5}]))
    whole = np.asarray(made)
    assert (
        made.shape == whole.shape == (6, 30, 40) and whole[:5].any(axis=(1, 2)).all() and not whole[5].any() and made.nbytes == whole.nbytes
    )
    for _ in range(200):
        starts = [rng.integers(size) for size in whole.shape]
        part = tuple(slice(start, rng.integers(start, size + 1)) for start, size in zip(starts, whole.shape, strict=True))
        assert np.array_equal(made[part], whole[part]), part


def test_the_command_names_and_counts_what_it_leaves_out(tmp_path):
    folder = write(tmp_path / "photos", {**PHOTOS, **BESIDE["voc"][0]})
    run = lambda *words: CliRunner().invoke(app, ["import", str(folder), str(tmp_path / "set"), *words])  # noqa: E731
    refused = run()
    assert refused.exit_code == 1 and "2 " in str(refused.exception) and "(voc)" in str(refused.exception)
    made = run("--ignore", "voc")
    assert made.exit_code == 0 and "left out 2 voc, 1 other: " in made.output, made.output
    again = run("--ignore", "voc", "--mode", "append", "--json")
    assert json.loads(again.output)["left_out_kinds"] == {"voc": 2, "other": 1}
