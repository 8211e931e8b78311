"""What an attacker found in imports of manifests and annotations, and of sources that were imported already."""

import functools
import io
import json

import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sample_inputs
from penstock import importers
from PIL import Image as Pillow
from servers import left_empty
from test_manifests import png, write

# The polygons of these annotations are imported only as masks: test_annotations.py is about their refusal.
import_data = functools.partial(importers.import_data, ignore=["polygons"])

COCO = {
    "images": [{"id": 1, "file_name": "1.png", "height": 12, "width": 20}, {"id": 2, "file_name": "2.png", "height": 12, "width": 20}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 3, 4, 5], "segmentation": [[2, 3, 6, 3, 6, 8, 2, 8]]},
        {"id": 2, "image_id": 2, "category_id": 2, "bbox": [1, 1, 2, 2], "caption": "text"},
    ],
    "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
}


def coco(folder, change=None, name="annotations.json"):
    found = json.loads(json.dumps(COCO))
    if change is not None:
        change(found)
    return write(folder, {"1.png": png(1), "2.png": png(2), name: json.dumps(found)}) / name


def named(ds, column="labels"):
    words = ds.vocabulary(column)
    return [None if codes is None else [words[code] for code in codes.tolist()] for codes in ds[column][:]]


def test_labels_are_matched_by_name(tmp_path, root):
    """The same names have other codes in the destination."""
    path = coco(tmp_path / "coco")
    ps.create(root, {**import_schema(path, tmp_path), "labels": ps.Labels(["emu", "dog", "cat"])})
    import_data(path, root)
    assert named(ps.open(root)) == [["cat"], ["dog"]]
    import_data(path, root.with_name("given"), types={"labels": ps.Labels(["dog", "cat"])}, masks="class")
    given = ps.open(root.with_name("given"))
    assert named(given) == [["cat"], ["dog"]] and given["mask"][0].max() == 2
    files = {"images/a.png": png(1), "labels/a.txt": "1 0.5 0.5 0.1 0.1\n", "classes.txt": "cat\ndog\n"}
    import_data(write(tmp_path / "boxes", files), root.with_name("yolo"), types={"labels": ps.Labels(["dog", "cat"])})
    assert named(ps.open(root.with_name("yolo"))) == [["dog"]]
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog"])})
    ps.create(root.with_name("hub"), {"label": ps.Label(["dog", "cat"])})
    import_data(datasets.Dataset.from_dict({"label": [0, 1, -1]}, features=features), root.with_name("hub"))
    assert ps.open(root.with_name("hub")).to_arrow()["label"].to_pylist() == ["cat", "dog", None]
    with pytest.raises(ps.InvalidInputError, match="'dog', which is not a label"):
        import_data(path, root.with_name("less"), types={"labels": ps.Labels(["cat"])})


def import_schema(path, tmp_path):
    import_data(path, tmp_path / "schema")
    return dict(ps.open(tmp_path / "schema").schema)


@pytest.mark.parametrize("form", ["xyxy", "xywh", "cxcywh"])
def test_boxes_are_converted_to_the_form_of_the_column(tmp_path, root, form):
    wanted = {"xyxy": [2, 3, 6, 8], "xywh": [2, 3, 4, 5], "cxcywh": [4, 5.5, 4, 5]}[form]
    import_data(coco(tmp_path / "coco"), root, types={"boxes": ps.Boxes(form, of="image")})
    assert ps.open(root)["boxes"][0].tolist() == [wanted]
    files = {"images/a.png": png(1), "labels/a.txt": f"0 {4 / 20} {5.5 / 12} {4 / 20} {5 / 12}\n", "classes.txt": "cat\n"}
    import_data(write(tmp_path / "boxes", files), root.with_name("yolo"), types={"boxes": ps.Boxes(form, of="image")})
    assert np.allclose(ps.open(root.with_name("yolo"))["boxes"][0], [wanted], atol=1e-5)


@pytest.mark.parametrize("value", [map(str, ["cat"]), {"cat"}, {"cat": 1}, 5, iter(["cat"])])
def test_labels_that_are_no_list_are_refused(value):
    ds = ps.create(f"memory://labels-no-list-{id(value)}", {"classes": ps.Labels(["cat"])})
    with pytest.raises(ps.InvalidInputError, match="expected a list of labels"):
        ds.append({"classes": [["cat"], value]})


def test_manifests_of_other_folders_are_other_sources(tmp_path, root):
    for place in ("one", "two"):
        folder = write(tmp_path / place, {"a.png": png(len(place) + ord(place[0])), "rows.csv": "file\na.png\n"})
        assert import_data(folder / "rows.csv", root, types={"file": ps.Image()}, mode="skip-existing").samples == 1
    again = import_data(tmp_path / "two" / "rows.csv", root, types={"file": ps.Image()}, mode="skip-existing")
    assert (again.samples, again.skipped) == (0, 1)


def test_an_import_that_left_something_out_is_no_reason_to_skip(tmp_path, root):
    folder = write(tmp_path, {"a.png": png(1), "rows.csv": "file\na.png\nb.png\n"})
    assert import_data(folder / "rows.csv", root, types={"file": ps.Image()}, on_error="skip").samples == 1
    with pytest.raises(ps.AlreadyExistsError, match="or part of them") as caught:
        import_data(folder / "rows.csv", root, types={"file": ps.Image()}, mode="skip-existing")
    assert "append" in caught.value.hint
    write(tmp_path, {"n.csv": "n\n1\n2\n3\n"})
    import_data(tmp_path / "n.csv", root.with_name("n"), limit=2)
    for mode in (None, "skip-existing"):
        with pytest.raises(ps.AlreadyExistsError, match="or part of them"):
            import_data(tmp_path / "n.csv", root.with_name("n"), mode=mode)
    assert import_data(tmp_path / "n.csv", root.with_name("n"), limit=2, mode="skip-existing").skipped == 2


def test_deleted_samples_are_imported_again(tmp_path, root):
    folder = write(tmp_path / "photos", {f"{row}.png": png(row) for row in range(3)})
    import_data(folder, root)
    ds = ps.open(root)
    with ds.transaction() as tx:
        tx.delete(row_ids=ds.take([1], columns=["_row_id"])["_row_id"])
    again = import_data(folder, root, mode="skip-existing")
    assert (again.samples, again.skipped) == (1, 2) and sorted(ps.open(root)["path"][:]) == ["0.png", "1.png", "2.png"]
    write(tmp_path, {"n.csv": "n\n1\n"})
    import_data(tmp_path / "n.csv", root.with_name("n"))
    with ps.open(root.with_name("n")).transaction() as tx:
        tx.delete(where="n = 1")
    with pytest.raises(ps.AlreadyExistsError, match="or part of them"):
        import_data(tmp_path / "n.csv", root.with_name("n"), mode="skip-existing")


def test_another_image_with_a_known_path_is_not_skipped(tmp_path, root):
    for place in ("one", "two"):
        write(tmp_path / place, {"cat/1.png": png(len(place) + ord(place[0])), "cat/2.png": png(2)})
    import_data(tmp_path / "one", root)
    with pytest.raises(ps.AlreadyExistsError, match="`cat/1"):
        import_data(tmp_path / "two", root)
    with pytest.raises(ps.Error, match="a different image with this path"):
        import_data(tmp_path / "two", root, mode="skip-existing")
    report = import_data(tmp_path / "two", root, mode="skip-existing", on_error="skip")
    assert (report.samples, report.skipped) == (0, 1) and [refusal.path for refusal in report.refused] == ["cat/1.png"]
    assert import_data(tmp_path / "two", root, mode="append").samples == 2


def test_a_grown_folder_says_what_is_there(tmp_path, root):
    folder = write(tmp_path / "photos", {"1.png": png(1)})
    import_data(folder, root)
    write(folder, {"2.png": png(2)})
    with pytest.raises(ps.AlreadyExistsError, match=r"`1.png`: the dataset already has a sample with this path"):
        import_data(folder, root)
    assert import_data(folder, root, mode="skip-existing", limit=1).samples == 1


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_text_column_named_path_is_no_key_of_a_table(tmp_path, root, form):
    import pyarrow.parquet as pq

    rows = pa.table({"path": ["a", "a"], "caption": ["one", "two"]})
    more = pa.table({"path": ["a", None], "caption": ["three", "four"]})
    for number, table in enumerate((rows, more)):
        path = tmp_path / f"{number}.{form}"
        pa.csv.write_csv(table, path) if form == "csv" else pq.write_table(table, path)
        assert import_data(path, root, mode="skip-existing").samples == 2
    assert len(ps.open(root)) == 4


def test_folders_of_classes_are_not_taken_for_annotations(tmp_path, root):
    folder = write(
        tmp_path / "birds", {"cat/1.png": png(1), "dog/2.png": png(2), "classes.txt": "cat\ndog\n", "data.yaml": "names: [cat, dog]\n"}
    )
    write(folder, {"meta.json": json.dumps(COCO)})
    importers.import_data(folder, root, ignore=["coco"])
    assert ps.open(root).schema["label"] == ps.Label(["cat", "dog"])
    with pytest.raises(ps.InvalidInputError, match="none of its 2 images has a text file"):
        import_data(folder, root.with_name("yolo"), format="yolo")


SPLITS = {
    "coco": ("annotations/instances_{}.json", "{}", ("train2017", "val2017")),
    "images": ("annotations/instances_{}.json", "images/{}", ("train", "val")),
    "beginnings": ("{}_annotations.json", "{}", ("train", "val")),
    "roboflow": ("{}/_annotations.coco.json", "{}", ("train", "valid")),
}


@pytest.mark.parametrize("layout", SPLITS)
def test_a_folder_with_annotations_for_each_split(tmp_path, root, layout):
    """Both splits have images of the same names and ids, but the classes have other ids."""
    file, images, splits = SPLITS[layout]
    for number, split in enumerate(splits):
        found = json.loads(json.dumps(COCO))
        if number:
            found["categories"] = [{"id": 1, "name": "dog"}, {"id": 2, "name": "emu"}]
        write(tmp_path / "set", {f"{images.format(split)}/{name}.png": png(10 * number + name) for name in (1, 2)})
        write(tmp_path / "set", {file.format(split): json.dumps(found)})
    write(tmp_path / "set", {"README.md": "text", "stray.png": png(7)})
    report = import_data(tmp_path / "set", root)
    assert report.samples == 4 and sorted(report.left_out) == ["README.md", "stray.png"]
    ds = ps.open(root)
    assert ds["path"][:] == [f"{images.format(split)}/{name}.png" for split in splits for name in (1, 2)]
    words = ds.vocabulary("split")
    assert [words[code] for code in ds["split"][:].tolist()] == [splits[0]] * 2 + [splits[1]] * 2
    assert named(ds) == [["cat"], ["dog"], ["dog"], ["emu"]] and ds.schema["labels"].names == ("cat", "dog", "emu")
    stored = ds.take(range(4), columns=["image"], decode=False)["image"]
    assert [bytes(body) for body in stored] == [png(number) for number in (1, 2, 11, 12)]
    again = import_data(tmp_path / "set", root, mode="skip-existing")
    assert (again.samples, again.skipped) == (0, 4)
    shuffled = [import_data(tmp_path / "set", root.with_name(str(seed)), limit=2, shuffle_seed=seed) for seed in range(8)]
    assert len({tuple(ps.open(root.with_name(str(seed)))["path"][:]) for seed in range(8)}) > 2 and all(
        one.samples == 2 for one in shuffled
    )


def test_images_of_coco_are_left_out_by_their_paths(tmp_path, root):
    for split in ("train", "val"):
        write(
            tmp_path / "set", {f"{split}/1.png": png(1), f"{split}/2.png": png(2), f"annotations/instances_{split}.json": json.dumps(COCO)}
        )
    report = import_data(tmp_path / "set", root, exclude=["val/2.png"])
    assert ps.open(root)["path"][:] == ["train/1.png", "train/2.png", "val/1.png"] and "val/2.png" in report.left_out
    for options in ({"exclude": ["*val*"]}, {"exclude": ["val/*"]}, {"include": ["*train.json"]}):
        again = import_data(tmp_path / "set", root, mode="skip-existing", **options)
        assert (again.samples, again.skipped) == (0, 2), "one split that is left has the same paths"
    one = tmp_path / "set" / "annotations" / "instances_val.json"
    for number, options in enumerate(({"exclude": ["*2.png"]}, {"include": ["1.png"]})):
        import_data(one, root.with_name(f"one-{number}"), **options)
        assert ps.open(root.with_name(f"one-{number}"))["path"][:] == ["1.png"]
    with pytest.raises(ps.InvalidInputError, match="select none of its images"):
        import_data(one, root.with_name("none"), include=["3.png"])


def test_the_images_of_a_split_are_those_in_its_folder(tmp_path, root):
    """Others have the same names."""
    write(tmp_path / "set", {"images/1.png": png(7), "images/2.png": png(8), "images/val/1.png": png(1), "images/val/2.png": png(2)})
    write(tmp_path / "set", {"annotations/instances_val.json": json.dumps(COCO)})
    import_data(tmp_path / "set" / "annotations" / "instances_val.json", root)
    stored = ps.open(root).take([0, 1], columns=["image"], decode=False)["image"]
    assert [bytes(body) for body in stored] == [png(1), png(2)]


def test_several_files_of_annotations_must_be_named(tmp_path, root):
    path = coco(tmp_path / "coco", name="instances_a.json")
    coco(tmp_path / "coco", name="captions_a.json")
    with pytest.raises(ps.InvalidInputError, match=r"has 2 annotation files: captions_a.json, instances_a.json") as caught:
        import_data(path.parent, root)
    assert "--include 'captions_*'" in caught.value.hint
    assert import_data(path.parent, root, include=["instances_*"]).samples == 2
    coco(tmp_path / "coco", name="instances_b.json")
    with pytest.raises(ps.InvalidInputError, match=r"has 2 annotation files: instances_a.json, instances_b.json"):
        import_data(path.parent, root, include=["instances_*"])
    for split in ("train", "val"):  # Both splits have the same images.
        coco(tmp_path / "two", name=f"instances_{split}.json")
    with pytest.raises(ps.InvalidInputError, match="is also the key of an earlier sample"):
        import_data(tmp_path / "two", root.with_name("two-splits"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["annotations"][0].update(iscrowd="0"), "iscrowd '0'"), (lambda found: found["annotations"][0].update(area="7"), "the area '7'"),
        (lambda found: found["annotations"][0].update(bbox=[float("nan"), 0, 1, 1]), "the bbox"), (lambda found: found["annotations"][0].update(bbox=[0, 0, 10**400, 1]), "the bbox"),
        (lambda found: found["annotations"][0].update(bbox=None), "the bbox None"), (lambda found: found["annotations"][0].pop("bbox"), "the bbox None"),
        (lambda found: found["annotations"][0].update(bbox=[0, 0, -1, 1]), "the bbox"), (lambda found: found["annotations"][0].update(category_id=[1]), "the category"),
        (lambda found: found["annotations"][0].update(image_id=[1]), "there is no image"), (lambda found: found["images"][0].update(id=[1]), "there is no image 1"),
        (lambda found: found["images"][0].update(file_name="\ud800.png"), "is not UTF-8"), (lambda found: found["images"][0].update(height=20, width=12), "20 × 12 pixels"),
        (lambda found: found["annotations"][0].update(keypoints=[1, 2, "x"]), "the keypoints"),
    ],
)  # fmt: skip
def test_broken_parts_of_coco_are_refused(tmp_path, root, change, says):
    path = coco(tmp_path / "coco", change)
    with pytest.raises(ps.Error, match=says):
        import_data(path, root)
    assert left_empty(root)
    report = import_data(path, root, on_error="skip")
    assert report.samples in (1, 2) and any(says in refusal.message for refusal in report.refused)
    assert all(refusal.code in ("invalid-value", "source-not-found") for refusal in report.refused)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["categories"][1].update(id=1), "two of its categories have the id 1"), (lambda found: found["images"][1].update(id=1), "two of its images have the id 1"),
        (lambda found: found["categories"][0].update(name=None), "a category has no name"), (lambda found: found["annotations"][0].update(segments_info=[]), "panoptic"),
    ],
)  # fmt: skip
def test_files_of_another_form_are_refused(tmp_path, root, change, says):
    with pytest.raises(ps.InvalidInputError, match=says):
        import_data(coco(tmp_path / "coco", change), root)


def test_every_null_is_reported(tmp_path, root):
    path = coco(tmp_path / "coco", lambda found: found["annotations"][1].update(bbox=[1]))
    report = import_data(path, root, on_error="null")
    sample = ps.open(root)[1]
    nulls = {name for name, value in sample.items() if value is None}
    assert nulls == {"boxes", "labels", "area", "crowd"} and sample["captions"] == ["text"] and len(report.refused) == 4


SEGMENTATIONS = [
    [[1, 2, 3, 4, 5]], "text", 5, [[None] * 6], [[float("nan")] * 6], [[1e9] * 6], {"size": [10**6, 10**6], "counts": "05"}, {"size": [20, 12], "counts": [240]},
    {"size": [12, 20], "counts": [10**9]}, {"size": [12, 20], "counts": "~~~"}, {"size": [12, 20], "counts": "0"}, {"size": [12, 20], "counts": [-1, 241]}, {"size": [-1, 20], "counts": []},
]  # fmt: skip


@pytest.mark.parametrize("outline", SEGMENTATIONS, ids=range(len(SEGMENTATIONS)))
def test_what_would_crash_the_drawing_of_masks_is_refused(tmp_path, root, outline):
    path = coco(tmp_path / "coco", lambda found: found["annotations"][0].update(segmentation=outline))
    report = import_data(path, root, masks="class", on_error="null")
    assert report.samples == 2 and [refusal.path for refusal in report.refused] == ["1.png"] and "segmentation" in report.refused[0].message
    assert ps.open(root)[0]["mask"] is None


def test_polygons_without_area_cover_no_pixels(tmp_path, root):
    """Tools write them for objects of one pixel. pycocotools would take four numbers for a box."""
    outline = [[1, 2, 3, 4], [5, 5], [], [2, 3, 6, 3, 6, 8, 2, 8]]

    def change(found):
        for annotation, drawn in zip(found["annotations"], (outline, [[1, 2, 9, 9]]), strict=True):
            annotation["segmentation"] = drawn

    import_data(coco(tmp_path / "coco", change), root, masks="class")
    import_data(coco(tmp_path / "other"), root.with_name("plain"), masks="class")
    with_lines, plain = ps.open(root)["mask"][:], ps.open(root.with_name("plain"))["mask"][:]
    assert np.array_equal(with_lines[0], plain[0]) and plain[0].any() and not with_lines[1].any()


def test_sizes_beyond_the_limit_are_refused(tmp_path, root):
    path = coco(tmp_path / "coco", lambda found: found["images"][0].update(height=10**6, width=10**7))
    report = import_data(path, root, masks="class", on_error="skip")
    assert report.samples == 1 and any("images may have" in refusal.message for refusal in report.refused)


def test_a_link_that_leads_to_itself_is_refused(tmp_path, root):
    folder = write(tmp_path / "photos", {"cat/1.png": png(1)})
    (folder / "cat" / "2.png").symlink_to("2.png")
    report = import_data(folder, root, on_error="skip")
    assert report.samples == 1 and [refusal.path for refusal in report.refused] == ["cat/2.png"]


def test_compressed_runs_are_drawn(tmp_path, root):
    from pycocotools import mask as drawing

    shape = np.asfortranarray(np.random.default_rng(0).integers(0, 2, (12, 20)).astype(np.uint8))
    runs = drawing.encode(shape)
    runs = {"size": [12, 20], "counts": runs["counts"].decode()}
    import_data(coco(tmp_path / "coco", lambda found: found["annotations"][0].update(segmentation=runs)), root, masks="instance")
    assert (ps.open(root)["mask"][0] == shape).all()


def test_images_that_are_turned_have_upright_boxes(tmp_path, root):
    out = io.BytesIO()
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.fromarray(np.zeros((20, 40, 3), np.uint8)).save(out, "JPEG", exif=exif)
    folder = write(
        tmp_path / "yolo", {"images/a.JPG": out.getvalue(), "labels/a.txt": "\ufeff0 0.5 0.5 0.5 0.5\r\n", "classes.txt": "\ufeffcat\n"}
    )
    import_data(folder, root)
    assert ps.open(root)["boxes"][0].tolist() == [[10, 20, 10, 20]] and ps.open(root).vocabulary("labels") == ["cat"]
    found = {
        "images": [{"id": 1, "file_name": "a.JPG", "height": 20, "width": 40}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}],
    }
    found["categories"] = [{"id": 1, "name": "cat"}]
    write(tmp_path / "yolo" / "images", {"coco.json": json.dumps(found)})
    with pytest.raises(ps.InvalidInputError, match=r"20 × 40 pixels \(upright\), but its annotations say 40 × 20"):
        import_data(tmp_path / "yolo" / "images" / "coco.json", root.with_name("coco"))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"classes.txt": "cat\n\ndog\n"}, "line 2 is empty"), ({"data.yaml": "names: {0: cat, 2: dog}\n"}, "codes of its names"), ({"data.yaml": "names: [\n"}, "data.yaml"),
        ({"a.yaml": "names: [x]\n", "b.yaml": "names: [y]\n"}, "name different classes"), ({"data.yaml": "names: [cat]\nkpt_shape: [x, 2]\n"}, "its kpt_shape is"),
        ({"classes.txt": "k\xe4se\n".encode("latin-1")}, "not UTF-8"), ({"data.yaml": "names: " + "[" * 5000}, "data.yaml"),
    ],
)  # fmt: skip
def test_wrong_names_of_classes_are_refused(tmp_path, root, files, says):
    folder = write(tmp_path / "yolo", {"images/a.png": png(1), "labels/a.txt": "0 0.5 0.5 0.5 0.5\n", **files})
    with pytest.raises(ps.InvalidInputError, match=says):
        import_data(folder, root)


def test_names_such_as_no_stay_text(tmp_path, root):
    files = {"JPEGImages/a.png": png(1), "labels/a.TXT": "1 0.5 0.5 0.5 0.5\n", "data.yaml": "names: [no, yes]\n"}
    import_data(write(tmp_path / "boxes", files), root)
    assert named(ps.open(root)) == [["yes"]]


def test_large_or_strange_yaml_files_do_not_matter(tmp_path, root):
    import os

    folder = write(tmp_path / "photos", {"1.png": png(1), "large.yaml": "names: [x]\n" + "a: {b: [1, 2]}\n" * 200_000})
    os.mkfifo(folder / "pipe.yaml")
    assert import_data(folder, root, on_error="skip", exclude=["*.yaml"]).samples == 1


@pytest.mark.parametrize(
    "options", [{"types": ["x"]}, {"root": 5}, {"shuffle_seed": [1]}, {"shuffle_seed": -1}, {"files": 5}, {"mode": "x"}, {"limit": "3"}]
)
def test_wrong_options_are_refused(tmp_path, root, options):
    folder = write(tmp_path / "photos", {"1.png": png(1)})
    with pytest.raises(ps.InvalidInputError):
        import_data(folder, root, **options)
    assert left_empty(root)


def test_relative_paths_in_rows_are_found_below_root(tmp_path, root):
    import pathlib

    write(tmp_path / "photos", {"1.png": png(1)})
    import_data([{"file": pathlib.Path("1.png")}], root, root=tmp_path / "photos")
    assert ps.open(root).take([0], decode=False)["file"] == [png(1)]


def test_frames_with_empty_lists_round_trip():
    ds = ps.create("memory://empty-lists", {"classes": ps.Labels(["cat"]), "x": ps.Tensor((None,), "float32")})
    ds.append({"classes": [[], ["cat"]], "x": [[], [1]]})
    ds.append(ds.to_pandas())
    assert [codes.tolist() for codes in ds["classes"][:]] == [[], [0]] * 2
    with pytest.raises(ps.InvalidInputError, match="the column is ragged"):
        ds.loader(batch_size=2, nulls={"classes": np.array([0])})


@pytest.mark.parametrize(
    ("source", "types"),
    [("photos", {}), ("./photos/", {}), ("yolo", {}), ("yolo/data.yaml", {}), ("coco", {}), ("coco/annotations/instances.json", {}),
     ("labels.csv", {"file": ps.Image()}), ("pets.parquet", {})],
)  # fmt: skip
def test_sources_may_be_relative_to_the_current_folder(source, types, tmp_path, monkeypatch):
    """Also when they are imported again, from another folder: the digest of a source does not depend on how it is named."""
    sample_inputs.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert import_data(source, "set", types=types).samples == 20
    image = "file" if types else "image"
    assert {pixels.shape for pixels in ps.open("set").take(range(20))[image]} == {(90, 120, 3)}
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ps.AlreadyExistsError):
        import_data(f"{tmp_path.name}/{source}", tmp_path / "set", types=types)


def test_a_limit_takes_no_more_rows_of_a_generator_and_is_the_end_of_the_progress():
    taken, seen = [], []

    def rows():
        for number in range(10_000):
            taken.append(number)
            yield {"n": number}

    assert import_data(rows(), "memory://limited-generator", limit=10).samples == 10 and len(taken) == 10
    rows_at_hand = [{"n": number} for number in range(100)]
    assert import_data(rows_at_hand, "memory://limited-list", limit=10, progress=lambda *said: seen.append(said)).samples == 10
    assert seen == [(10, 10, "rows")]


def test_parquet_of_hugging_face_may_name_files(tmp_path, monkeypatch):
    """`datasets` writes only the paths of images that are local files. They are relative to the file, or to `root`."""
    sample_inputs.photographs(tmp_path / "data" / "photos")
    paths = sorted(path.relative_to(tmp_path / "data").as_posix() for path in (tmp_path / "data").rglob("*.jpg"))
    images = pa.array([{"bytes": None, "path": path} for path in paths[:3]] + [{"bytes": png(1), "path": "x"}, None])
    pq.write_table(pa.table({"image": images}), tmp_path / "data" / "pets.parquet")
    pq.write_table(pa.table({"image": images}), tmp_path / "elsewhere.parquet")
    assert import_data(tmp_path / "data" / "pets.parquet", tmp_path / "set", types={"image": ps.Image()}).samples == 5
    ds = ps.open(tmp_path / "set")
    assert [None if image is None else image.shape for image in ds.take(range(5))["image"]] == [(90, 120, 3)] * 3 + [(12, 20, 3), None]
    elsewhere = tmp_path / "elsewhere.parquet"
    assert import_data(elsewhere, tmp_path / "rooted", types={"image": ps.Image()}, root=tmp_path / "data").samples == 5
    with pytest.raises(ps.Error, match=r"photos/cat/0\.jpg") as caught:
        import_data(elsewhere, tmp_path / "lost", types={"image": ps.Image()})
    assert "row 0" in str(caught.value) and left_empty(tmp_path / "lost")


def test_annotations_find_their_images_from_any_folder(tmp_path, monkeypatch):
    """The places of images and labels do not depend on how the source is named."""
    sample_inputs.make(tmp_path)
    monkeypatch.chdir(tmp_path / "coco" / "annotations")
    assert import_data("instances.json", tmp_path / "beside").samples == 20
    monkeypatch.chdir(tmp_path / "coco")
    assert import_data(".", tmp_path / "here").samples == 20
    boxes = []
    for folder, source in (("yolo/images/train", "."), ("yolo/images", "train"), ("", "yolo/images/train")):
        monkeypatch.chdir(tmp_path / folder)
        made = tmp_path / f"yolo-{len(boxes)}"
        import_data(source, made, format="yolo", types={"labels": ps.Labels(["cell", "leaf"])})
        boxes.append(sum(len(each) for each in ps.open(made)["boxes"][:]))
    assert boxes == [16] * 3


def test_a_data_yaml_names_its_folder_and_its_splits(tmp_path):
    sample_inputs.make(tmp_path)
    config = tmp_path / "cfg" / "pets.yaml"
    write(tmp_path / "cfg", {"pets.yaml": "path: ../yolo\ntrain: images/train\nnames: [cell, leaf]\n"})
    report = import_data(config, tmp_path / "train")
    ds = ps.open(tmp_path / "train")
    assert report.samples == 16 and sum(name.endswith(".jpg") for name in report.left_out) == 4 and set(ds["split"][:].tolist()) == {0}
    config.write_text("path: ../yolo\ntrain: images/train\nval: [images/val]\ntest:\nnames: [cell, leaf]\n")
    assert import_data(config, tmp_path / "both").samples == 20 and ps.open(tmp_path / "both").vocabulary("split") == ["train", "val"]
    config.write_text("path: ../yolo\ntrain: images/nowhere\nnames: [cell, leaf]\n")
    with pytest.raises(ps.NotFoundError, match="images/nowhere"):
        import_data(config, tmp_path / "none")
    assert import_data(tmp_path / "yolo" / "data.yaml", tmp_path / "own").left_out == []
    config.write_text("names: [cell]\n" + "#" * (2 << 20))
    with pytest.raises(ps.InvalidInputError, match="names no classes"):  # YAML is slow: large files are never parsed.
        import_data(config, tmp_path / "none")


def yolo(folder, places, text="0 0.5 0.5 0.2 0.2\n"):
    """Write images and their boxes, and return the folder."""
    for seed, place in enumerate(places):
        write(folder, {f"{place}.png": png(seed), f"{place.replace('images', 'labels')}.txt": text})
    return folder


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("train: ../a/images/train\nval: images/val", {"../a/images/train/1": "train", "images/val/2": "val"}),
        ("train: ../images/val", {"images/val/2": "train"}),  # As Roboflow writes it.
        ("train: images\nval: images/val", {"images/test/3": "train", "images/val/2": "val"}),
        ("val: images/val\ntrain: images", {"images/test/3": "train", "images/val/2": "val"}),
        ("train: images/val\nval: images/val", {"images/val/2": None}),
        ("train: lists/train.txt\nval: lists/val.txt", {"images/test/3": "train", "images/val/2": "val"}),
        ("train: [images/test, ../a/images]\nval: images/val", {"../a/images/train/1": "train", "images/test/3": "train", "images/val/2": "val"}),
    ],
)  # fmt: skip
def test_a_data_yaml_names_places_anywhere(tmp_path, lines, wanted):
    yolo(tmp_path / "a", ["images/train/1"])
    folder = yolo(tmp_path / "b", ["images/val/2", "images/test/3"])
    write(
        folder,
        {"lists/train.txt": "../images/test/3.png\n", "lists/val.txt": "../images/val/2.png\n", "data.yaml": f"{lines}\nnames: [cat]\n"},
    )
    report = import_data(folder / "data.yaml", tmp_path / "ds")
    ds = ps.open(tmp_path / "ds")
    splits = [ds.vocabulary("split")[code] for code in ds["split"][:].tolist()] if "split" in ds.schema else [None] * len(ds)
    assert dict(zip((path.removesuffix(".png") for path in ds["path"][:]), splits, strict=True)) == wanted
    images = {"images/val/2.png", "images/test/3.png"}
    assert images & set(report.left_out) == images - {f"{path}.png" for path in wanted} and all(len(each) == 1 for each in ds["boxes"][:])
    again = import_data(folder / "data.yaml", tmp_path / "ds", mode="skip-existing")
    assert (again.samples, again.skipped) == (0, len(wanted))


def test_an_image_in_the_lists_of_two_splits_is_refused(tmp_path):
    folder = yolo(tmp_path / "b", ["images/1", "images/2"])
    write(folder, {"train.txt": "images/1.png\nimages/2.png\n", "val.txt": "images/2.png\n"})
    write(folder, {"data.yaml": "train: train.txt\nval: val.txt\nnames: [cat]\n"})
    with pytest.raises(ps.InvalidInputError, match=r"`images/2\.png` is in several splits"):
        import_data(folder / "data.yaml", tmp_path / "ds")
    report = import_data(folder / "data.yaml", tmp_path / "ds", split=False)
    assert report.samples == 2 and report.left_out == []
    write(folder, {"data.yaml": "train: images\nval: [val.txt]\nnames: [cat]\n"})
    with pytest.raises(ps.InvalidInputError, match=r"`images/2\.png` is in several splits"):
        import_data(folder / "data.yaml", tmp_path / "more")
    write(folder, {"data.yaml": "train: [train.txt, val.txt]\nnames: [cat]\n"})
    assert import_data(folder / "data.yaml", tmp_path / "more").samples == 2


def test_a_list_of_images_that_are_missing(tmp_path):
    folder = yolo(tmp_path / "b", ["images/1"])
    write(folder, {"train.txt": "images/1.png\nimages/2.png\n", "data.yaml": "train: train.txt\nnames: [cat]\n"})
    with pytest.raises(ps.NotFoundError, match=r"there is no file `.*images/2\.png`"):
        import_data(folder / "data.yaml", tmp_path / "ds")


def test_links_to_images_and_labels_have_boxes(tmp_path):
    folder = yolo(tmp_path / "b", ["images/1"])
    (tmp_path / "linked").mkdir()
    for name in ("images", "labels"):
        (tmp_path / "linked" / name).symlink_to(folder / name)
    write(tmp_path / "linked", {"data.yaml": "train: images\nnames: [cat]\n"})
    import_data(tmp_path / "linked", tmp_path / "ds")
    assert [len(boxes) for boxes in ps.open(tmp_path / "ds")["boxes"][:]] == [1]


def test_an_image_outside_the_splits_is_named(tmp_path):
    """Otherwise, the labels would silently be `train/cat` and `val/cat`."""
    write(
        tmp_path / "set",
        {f"{split}/{label}/{seed}.png": png(seed) for split in ("train", "val") for label in ("a", "b") for seed in range(2)},
    )
    write(tmp_path / "set", {"extra.png": png(9)})
    with pytest.raises(ps.InvalidInputError, match=r"extra\.png.*outside") as caught:
        import_data(tmp_path / "set", tmp_path / "ds")
    assert "exclude" in str(caught.value) and left_empty(tmp_path / "ds")
    assert import_data(tmp_path / "set", tmp_path / "ds", exclude=["extra.png"]).samples == 8
    assert ps.open(tmp_path / "ds").vocabulary("label") == ["a", "b"]
    assert import_data(tmp_path / "set", tmp_path / "classes", split=False).samples == 9


def test_parquet_files_named_by_split_have_a_split(tmp_path):
    """Otherwise, test data would silently join the training data."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("train-00000-of-00002", [0, 1]), ("train-00001-of-00002", [2]), ("test-00000-of-00001", [3])):
        pq.write_table(pa.table({"n": rows}), folder / f"{name}.parquet")
    assert import_data(folder, tmp_path / "ds").samples == 4
    ds = ps.open(tmp_path / "ds")
    assert {int(n): ds.vocabulary("split")[code] for n, code in zip(ds["n"][:], ds["split"][:], strict=True)} == {
        0: "train", 1: "train", 2: "train", 3: "test"
    }  # fmt: skip
    import_data(folder, tmp_path / "without", split=False)
    assert ps.open(tmp_path / "without").columns == ["n"]
    pq.write_table(pa.table({"n": [4]}), folder / "extra-0.parquet")
    with pytest.raises(ps.InvalidInputError, match=r"`extra-0\.parquet` is outside") as caught:
        import_data(folder, tmp_path / "more")
    assert "--no-split" in caught.value.hint and import_data(folder, tmp_path / "more", split=False).samples == 5
    (folder / "extra-0.parquet").unlink()
    (folder / "test-00000-of-00001.parquet").unlink()
    import_data(folder, tmp_path / "one")
    assert ps.open(tmp_path / "one").columns == ["n"]


@pytest.mark.parametrize(
    "names", [("train.parquet", "test.parquet"), ("train/0.parquet", "test/0.parquet"), ("data/train/a.parquet", "data/test/b.parquet")]
)
def test_parquet_files_and_folders_of_splits(tmp_path, names):
    for row, name in enumerate(names):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [row]}), tmp_path / "set" / name)
    import_data(tmp_path / "set", tmp_path / "ds")
    ds = ps.open(tmp_path / "ds")
    assert {ds.vocabulary("split")[code]: int(n) for n, code in zip(ds["n"][:], ds["split"][:], strict=True)} == {"train": 0, "test": 1}
    later = tmp_path / "later" / names[0]
    later.parent.mkdir(parents=True)
    pq.write_table(pa.table({"n": [7]}), later)
    for source in (tmp_path / "later", later.parent, later):
        import_data(source, tmp_path / "ds", mode="append")
        assert ps.open(tmp_path / "ds")["split"][-1:].tolist() == [ds.vocabulary("split").index("train")]


def test_numbers_in_one_file_and_texts_in_another_are_refused(tmp_path):
    (tmp_path / "set").mkdir()
    for name, values in (("a", ["x"]), ("b", [1])):
        pq.write_table(pa.table({"n": values}), tmp_path / "set" / f"{name}.parquet")
    with pytest.raises(ps.InvalidInputError, match="column `n` is int64, expected string"):
        import_data(tmp_path / "set", tmp_path / "ds")
    assert import_data(tmp_path / "set", tmp_path / "ds", types={"n": ps.Text()}).samples == 2


def test_datasets_of_hugging_face_with_transforms_and_lists_of_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"tags": datasets.Sequence(datasets.ClassLabel(names=["a", "b"])), "n": datasets.Value("int64")})
    given = datasets.Dataset.from_dict({"tags": [[1, 0], [], None], "n": [1, 2, 3]}, features=features)
    with pytest.raises(ps.InvalidInputError, match="with a transform"):
        import_data(given.with_transform(lambda rows: rows), tmp_path / "ds")
    import_data(given, tmp_path / "ds")
    ds = ps.open(tmp_path / "ds")
    assert ds.schema["tags"].names == ("a", "b") and named(ds, "tags") == [["b", "a"], [], None]
    given.to_parquet(tmp_path / "rows.parquet")
    ps.create(tmp_path / "other", {"tags": ps.Labels(["b", "a"]), "n": "int64"})
    import_data(tmp_path / "rows.parquet", tmp_path / "other")
    assert named(ps.open(tmp_path / "other"), "tags") == [["b", "a"], [], None]
