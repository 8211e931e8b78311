"""Tables that name files, annotations of COCO and YOLO, folders with splits, and imports that ran already."""

import json

import measured
import numpy as np
import pandas as pd
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock import _core
from penstock.importers import import_data
from servers import left_empty


def png(seed, height=12, width=20):
    pixels = np.random.default_rng(seed).integers(0, 255, height * width * 3, dtype=np.uint8)
    return bytes(_core.encode_png((height, width, 3), pixels))


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content, encoding="utf-8")
    return folder


@pytest.fixture
def named(tmp_path):
    """Four pictures and a sound, and tables of each form that name them."""
    folder = write(
        tmp_path / "named", {f"pictures/{seed}.png": png(seed) for seed in range(4)} | {"a.wav": b"RIFF\0\1", "b.wav": b"\xff\xfe"}
    )
    rows = [{"file": f"pictures/{row}.png", "sound": "ab"[row % 2] + ".wav", "n": row} for row in range(4)]
    table = pd.DataFrame(rows)
    table.to_csv(folder / "rows.csv", index=False)
    table.to_csv(folder / "rows.tsv", index=False, sep="\t")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table(table), folder / "rows.parquet")
    return folder


TYPES = {"file": ps.Image(), "sound": ps.Bytes()}


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet", "frame", "rows", "arrow"])
def test_tables_name_files(named, root, form):
    rows = pd.read_csv(named / "rows.csv")
    source = {"frame": rows, "rows": rows.to_dict("records"), "arrow": pa.table(rows)}.get(form, named / f"rows.{form}")
    where = named if form in ("frame", "rows", "arrow") else None
    report = import_data(source, root, types=TYPES, files=["sound"], root=where)
    ds = ps.open(root)
    assert report.samples == 4 and not report.refused
    batch = ds.take(range(4), decode=False)
    assert batch["file"] == [(named / "pictures" / f"{row}.png").read_bytes() for row in range(4)]
    assert batch["sound"] == [(named / f"{'ab'[row % 2]}.wav").read_bytes() for row in range(4)] and batch["n"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_files_that_cannot_be_read_are_refused_with_their_rows(named, root, form):
    rows = pd.read_csv(named / "rows.csv")
    rows.loc[1, "file"], rows.loc[2, "file"] = "pictures/none.png", "https://example.org/2.png"
    (named / "pictures" / "3.png").write_bytes(b"not a picture")
    path = named / f"broken.{form}"
    if form == "csv":
        rows.to_csv(path, index=False)
    elif form == "jsonl":
        rows.to_json(path, orient="records", lines=True)
    else:
        pq.write_table(pa.table(rows), path)
    with pytest.raises(ps.Error) as caught:
        import_data(path, root, types={"file": ps.Image()})
    assert caught.value.code == "source-not-found" and caught.value.column == "file" and left_empty(root)
    place = "line 2" if form == "jsonl" else "row 2" if form == "csv" else "row 1"
    assert f"broken.{form}: {place}" in str(caught.value) and "pictures/none.png" in str(caught.value)
    report = import_data(path, root, types={"file": ps.Image()}, on_error="skip")
    assert report.samples == 1 and [refusal.code for refusal in report.refused] == [
        "source-not-found",
        "invalid-value",
        "media-undecodable",
    ]
    report = import_data(path, root.with_name("nulls"), types={"file": ps.Image()}, on_error="null")
    found = ps.open(root.with_name("nulls"))
    assert report.samples == 4 and len(report.refused) == 3 and [sample["file"] is None for sample in found] == [False, True, True, True]


def test_an_empty_name_is_a_null_and_a_folder_is_refused(named, root):
    (named / "few.csv").write_text("file,n\n,1\npictures/0.png,2\npictures,3\n")
    report = import_data(named / "few.csv", root, types={"file": ps.Image()}, on_error="skip")
    assert [sample["file"] is None for sample in ps.open(root)] == [True, False]
    assert [refusal.message for refusal in report.refused] == ["cannot read column `file`: it is not a regular file"]


def test_named_files_need_little_memory(tmp_path, root):
    write(tmp_path / "large", {f"{row}.bin": bytes(2 << 20) for row in range(50)})
    (tmp_path / "large" / "rows.csv").write_text("file\n" + "".join(f"{row}.bin\n" for row in range(50)))
    ps.configure(memory_bytes=64 << 20)
    with measured.Grown() as grown:
        import_data(tmp_path / "large" / "rows.csv", tmp_path / "set", types={"file": ps.Bytes()}, files=["file"])
    assert grown.peak < 80 << 20, "two chunks of 16 MiB and their copies, of 100 MiB"


@pytest.mark.parametrize(("files", "says"), [(["n"], "is int64"), (["none"], "does not exist"), ("sound", "expected a list")])
def test_columns_of_files_are_checked(named, root, files, says):
    with pytest.raises(ps.InvalidInputError, match=says):
        import_data(named / "rows.csv", root, types=TYPES, files=files)
    assert left_empty(root)


def test_boxes_and_labels_in_tables(tmp_path, root):
    rows = [
        {"boxes": [[1, 2, 3, 4], [0, 0, 5, 5]], "classes": ["dog", "cat"]},
        {"boxes": [], "classes": []},
        {"boxes": None, "classes": None},
    ]
    types = {"boxes": ps.Boxes("xywh"), "classes": ps.Labels(["cat", "dog"])}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        place = root.with_name(name.partition(".")[2])
        import_data(tmp_path / name, place, types=types)
        batch = ps.open(place).take(range(3))
        assert [None if value is None else value.tolist() for value in batch["boxes"]] == [row["boxes"] for row in rows]
        assert [None if value is None else value.tolist() for value in batch["classes"]] == [[1, 0], [], None]


@pytest.fixture
def coco(tmp_path):
    """Three pictures with objects, one of which is a crowd, and captions."""
    images = [{"id": 10 * row, "file_name": f"{row}.png", "height": 12, "width": 20, "license": 1} for row in range(3)]
    objects = [
        {
            "id": 1,
            "image_id": 10,
            "category_id": 7,
            "bbox": [2, 3, 4, 5],
            "area": 20,
            "iscrowd": 0,
            "segmentation": [[2, 3, 6, 3, 6, 8, 2, 8]],
        },
        {"id": 2, "image_id": 0, "category_id": 3, "bbox": [0.5, 0, 10, 12], "segmentation": [[0, 0, 10, 0, 10, 12, 0, 12]]},
        {
            "id": 3,
            "image_id": 10,
            "category_id": 3,
            "bbox": [0, 0, 20, 12],
            "area": 240,
            "iscrowd": 1,
            "segmentation": {"size": [12, 20], "counts": [0, 240]},
        },
    ]
    found = {"images": images, "annotations": objects, "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]}
    folder = write(
        tmp_path / "coco", {f"images/val/{row}.png": png(row) for row in range(3)} | {"README.md": "# Read me", "LICENSE": "free"}
    )
    return write(folder, {"annotations/instances_val.json": json.dumps(found)}), found


def test_coco(coco, root):
    folder, _ = coco
    report = import_data(folder, root, ignore=["polygons"])
    ds = ps.open(root)
    assert (
        report.samples == 3 and not report.refused and list(ds.schema) == ["image", "path", "image_id", "boxes", "labels", "area", "crowd"]
    )
    assert ds.schema["boxes"] == ps.Boxes("xywh", of="image") and ds.schema["labels"] == ps.Labels(["cat", "dog"], of="boxes")
    batch = ds.take(range(3), decode=False)
    assert batch["image"] == [png(row) for row in range(3)] and batch["image_id"].tolist() == [0, 10, 20]
    assert [boxes.tolist() for boxes in batch["boxes"]] == [[[0.5, 0, 10, 12]], [[2, 3, 4, 5], [0, 0, 20, 12]], []]
    assert [codes.tolist() for codes in batch["labels"]] == [[0], [1, 0], []]
    assert [areas.tolist() for areas in batch["area"]] == [[120], [20, 240], []] and [crowd.tolist() for crowd in batch["crowd"]] == [
        [False],
        [False, True],
        [],
    ]
    [batch] = ds.loader(batch_size=3)
    assert batch["image"].shape == (3, 12, 20, 3) and len(batch["boxes"].values) == 3


@pytest.mark.parametrize("kind", ["class", "instance"])
def test_masks_of_coco(coco, root, kind):
    folder, _ = coco
    import_data(folder / "annotations" / "instances_val.json", root, masks=kind)
    first, second, third = ps.open(root)["mask"][:]
    one, other = (1, 2) if kind == "class" else (2, 1)
    assert first.shape == (12, 20) and (first[:, :10] == 1).all() and not first[:, 10:].any() and not third.any()
    assert (second[3:8, 2:6] == other).all() and (second == one).sum() == 240 - 20, "the small object is on top of the large one"


def test_captions_and_keypoints_of_coco(coco, root):
    folder, found = coco
    found["annotations"] = [{"id": 1, "image_id": 10, "caption": "a dog"}, {"id": 2, "image_id": 10, "caption": "two dogs"}]
    write(folder, {"annotations/captions.json": json.dumps(found)})
    import_data(folder / "annotations" / "captions.json", root, root=folder / "images" / "val")
    ds = ps.open(root)
    assert list(ds.schema) == ["image", "path", "image_id", "captions"] and ds["captions"][:] == [[], ["a dog", "two dogs"], []]
    found["annotations"] = [
        {"id": 1, "image_id": 10, "category_id": 7, "bbox": [2, 3, 4, 5], "keypoints": [1, 2, 2, 3, 4, 1]},
        {"id": 2, "image_id": 10, "category_id": 7, "bbox": [2, 3, 4, 5]},
    ]
    write(folder, {"annotations/person.json": json.dumps(found)})
    import_data(folder / "annotations" / "person.json", root.with_name("points"), root=folder / "images" / "val")
    points = ps.open(root.with_name("points"))["keypoints"][:]
    assert points[1].tolist() == [[[1, 2, 2], [3, 4, 1]], [[0, 0, 0], [0, 0, 0]]] and points[0].shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["annotations"][0].update(bbox=[1, 2, 3]), "annotation 1 has the bbox"),
        (lambda found: found["annotations"][0].update(category_id=99), "annotation 1 has the category 99"),
        (lambda found: found["annotations"][0].update(image_id=99), "there is no image 99"),
        (lambda found: found["images"][1].update(file_name="none.png"), "No such file"),
        (lambda found: found["images"][2].update(id=1.5), "the id is 1.5"),
        (lambda found: found["images"][1].pop("file_name"), "the image has no file_name"),
    ],
)
def test_broken_annotations_are_refused(coco, root, change, says):
    folder, found = coco
    change(found)
    path = folder / "annotations" / "instances_val.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ps.Error, match=says):
        import_data(path, root, ignore=["polygons"])
    assert left_empty(root)
    report = import_data(path, root, on_error="skip", ignore=["polygons"])
    assert report.samples == 3 - (says != "there is no image 99") and len(report.refused) >= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is not JSON"), ("[1]", "no row is an object"), ('{"images": [], "annotations": []}', "it lists no images"),
        ('{"images": 1, "annotations": []}', "it has no list `images`"), ('{"images": [{}], "annotations": [], "categories": [{"id": 1}]}', "a category has no name"),
        ('{"images": [{"id": 1, "file_name": "x.png"}], "annotations": []}', "are in none of"),
    ],
)  # fmt: skip
def test_other_json_is_refused(tmp_path, root, text, says):
    write(tmp_path, {"rows.json": text})
    with pytest.raises(ps.Error, match=says):
        import_data(tmp_path / "rows.json", root)
    assert left_empty(root)


YOLO = {
    "ultralytics": ("images/{split}/{name}.png", "labels/{split}/{name}.txt"),
    "roboflow": ("{split}/images/{name}.png", "{split}/labels/{name}.txt"),
    "beside": ("{split}/{name}.png", "{split}/{name}.txt"),
}


@pytest.mark.parametrize("form", YOLO)
def test_yolo(tmp_path, root, form):
    image, label = YOLO[form]
    files = {
        image.format(split=split, name=name): png(row) for row, (split, name) in enumerate([("train", "a"), ("train", "b"), ("val", "c")])
    }
    files |= {label.format(split="train", name="a"): "1 0.5 0.5 0.2 0.5\n0 0 0 0.5 0 0.5 1\n", label.format(split="val", name="c"): ""}
    files["data.yaml"] = "train: ../train/images\nnames:\n  0: cat\n  1: dog\n" if form == "beside" else "names: [cat, dog]\n"
    report = import_data(write(tmp_path / "yolo", files), root, ignore=["polygons"])
    ds = ps.open(root)
    assert report.samples == 3 and report.left_out == ["data.yaml"] and ds.schema["labels"] == ps.Labels(["cat", "dog"], of="boxes")
    batch = ds.take(range(3))
    order = np.argsort(batch["path"])
    assert [ds.vocabulary("split")[batch["split"][row]] for row in order] == ["train", "train", "val"]
    assert [batch["boxes"][row].tolist() for row in order] == [[[10, 6, 4, 6], [5, 6, 10, 12]], [], []]
    assert [batch["labels"][row].tolist() for row in order] == [[1, 0], [], []]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2 0.5 0.5 0.1 0.1", "line 1 has class 2, but there are 2 names"), ("0 0.5 0.5 0.1", "line 1 has 3 numbers after the class"),
        ("0 50 50 10 10", "expected fractions of the image"), ("cat 0.5 0.5 0.1 0.1", "expected numbers"), ("0.5 0.5 0.5 0.1 0.1", "has class 0.5"),
        ("0 nan 0.5 0.1 0.1", "expected fractions"), ("0 0.1 0.1 0.2 0.2 0.3 0.3 0.4", "line 1 has 7 numbers"),
    ],
)  # fmt: skip
def test_broken_lines_are_refused(tmp_path, root, line, says):
    files = {"images/a.png": png(1), "images/b.png": png(2), "labels/a.txt": line + "\n", "classes.txt": "cat\ndog\n"}
    folder = write(tmp_path / "yolo", files)
    with pytest.raises(ps.Error, match=says) as caught:
        import_data(folder, root)
    assert "labels/a.txt" in str(caught.value) and left_empty(root)
    report = import_data(folder, root, on_error="skip")
    assert report.samples == 1 and len(report.refused) == 1
    report = import_data(folder, root.with_name("nulls"), on_error="null")
    assert report.samples == 2 and ps.open(root.with_name("nulls"))[0]["boxes"] is None


def test_names_of_classes_are_wanted(tmp_path, root):
    folder = write(tmp_path / "yolo", {"images/a.png": png(1), "labels/a.txt": "1 0.5 0.5 0.2 0.5\n"})
    with pytest.raises(ps.InvalidInputError, match="the names of its classes") as caught:
        import_data(folder, root)
    assert "labels=labels:cat,dog" in caught.value.hint
    assert import_data(folder, root, types={"labels": ps.Labels(["cat", "dog"])}).samples == 1


def test_folders_of_splits(tmp_path, root):
    folder = write(tmp_path / "set", {f"{split}/{name}/1.png": png(1) for split in ("train", "val") for name in ("cat", "dog")})
    write(folder, {"README.md": "# Read me", "train/0.png": png(2)})
    report = import_data(folder, root)
    ds = ps.open(root)
    assert report.left_out == ["README.md"] and list(ds.schema) == ["image", "path", "split", "label"]
    words = ds.vocabulary("split")
    found = [(words[sample["split"]], None if sample["label"] is None else ds.vocabulary("label")[sample["label"]]) for sample in ds]
    assert found == [("train", None), ("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")]
    import_data(folder, root.with_name("whole"), split=False)
    assert ps.open(root.with_name("whole")).vocabulary("label") == ["train", "train/cat", "train/dog", "val/cat", "val/dog"]
    write(folder, {"other/cat/1.png": png(3)})
    with pytest.raises(ps.InvalidInputError, match="outside"):  # Labels would be `train/cat` and `other/cat`.
        import_data(folder, root.with_name("other"))


def test_an_import_that_ran_already_says_so(tmp_path, root):
    folder = write(tmp_path / "photos", {f"cat/{row}.png": png(row) for row in range(5)})
    first = import_data(folder, root)
    with pytest.raises(ps.AlreadyExistsError, match=f"commit {first.snapshot} .* already imported the same files") as caught:
        import_data(folder, root)
    assert caught.value.code == "already-imported" and "--mode append" in caught.value.hint
    again = import_data(folder, root, mode="skip-existing")
    assert (again.samples, again.skipped, again.snapshot) == (0, 5, first.snapshot) and len(ps.open(root)) == 5
    with pytest.raises(ps.AlreadyExistsError, match="is already a dataset"):
        import_data(folder, root, mode="create")
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(ps.AlreadyExistsError):
        import_data(moved, root)
    write(moved, {"cat/5.png": png(5), "dog/0.png": png(6)})
    with pytest.raises(ps.InvalidInputError, match="`dog`"):
        import_data(moved, root, mode="skip-existing")  # The label has no such name.
    (moved / "dog" / "0.png").unlink()
    grown = import_data(moved, root, mode="skip-existing")
    assert (grown.samples, grown.skipped) == (1, 5) and ps.open(root)["path"][:] == [f"cat/{row}.png" for row in range(6)]
    assert import_data(moved, root, mode="append").samples == 6


@pytest.mark.parametrize("size", [100, 20_000, 5 << 20])
def test_a_changed_file_is_another_source(tmp_path, root, size):
    rows = "".join(f"{row:08}\n" for row in range(size // 9))
    write(tmp_path, {"rows.csv": "n\n" + rows})
    import_data(tmp_path / "rows.csv", root)
    for place in (0, len(rows) // 2 // 9 * 9, len(rows) - 9):
        write(tmp_path, {"rows.csv": "n\n" + rows[:place] + "99999999\n" + rows[place + 9 :]})
        with pytest.raises(ps.AlreadyExistsError, match="with different contents"):
            import_data(tmp_path / "rows.csv", root)
        assert write(tmp_path / "elsewhere", {"rows.csv": (tmp_path / "rows.csv").read_text()})
        assert import_data(tmp_path / "elsewhere" / "rows.csv", root, mode="append").samples == size // 9
        assert import_data(tmp_path / "rows.csv", root, mode="skip-existing").skipped == size // 9


def test_the_same_table_on_other_branches_and_after_a_reset(tmp_path, root):
    write(tmp_path, {"rows.csv": "n\n1\n2\n"})
    empty = ps.create(root, {"n": "int64"}).snapshot
    import_data(tmp_path / "rows.csv", root)
    ds = ps.open(root)
    ds.create_branch("other", empty)
    assert import_data(tmp_path / "rows.csv", root, branch="other").samples == 2
    ds.reset(empty)
    assert import_data(tmp_path / "rows.csv", root).samples == 2


def test_limits_and_shuffled_files(tmp_path, root):
    folder = write(tmp_path / "photos", {f"{row:02}.png": png(row) for row in range(30)})
    assert import_data(folder, root, limit=7).samples == 7 and ps.open(root)["path"][:] == [f"{row:02}.png" for row in range(7)]
    paths = []
    for place in ("one", "two"):
        import_data(folder, root.with_name(place), limit=7, shuffle_seed=3)
        paths.append(ps.open(root.with_name(place))["path"][:])
    assert paths[0] == paths[1] != sorted(paths[0]) and len(set(paths[0])) == 7
    write(tmp_path, {"rows.csv": "n\n" + "".join(f"{row}\n" for row in range(3000))})
    assert import_data(tmp_path / "rows.csv", root.with_name("rows"), limit=2500).samples == 2500
    assert import_data([{"n": row} for row in range(3000)], root.with_name("few"), limit=1).samples == 1
    with pytest.raises(ps.InvalidInputError, match="shuffle_seed=1: a csv file is read in order"):
        import_data(tmp_path / "rows.csv", root, shuffle_seed=1)
    for limit in (0, -1, 1.5):
        with pytest.raises(ps.InvalidInputError, match="limit"):
            import_data(folder, root, limit=limit)
    with pytest.raises(ps.InvalidInputError, match="mode='twice'"):
        import_data(folder, root, mode="twice")


def test_the_command_line_has_these_options(tmp_path, named, root):
    from penstock.cli import app
    from typer.testing import CliRunner

    run = lambda *words: CliRunner().invoke(app, [str(word) for word in words])  # noqa: E731
    made = run("import", named / "rows.csv", root, "-t", "file=image", "-t", "sound=bytes", "--files", "sound", "--limit", "3")
    assert made.exit_code == 0 and "imported 3 samples" in made.output, made.output
    again = run("import", named / "rows.csv", root, "--files", "sound", "--limit", "3")
    assert again.exit_code == 1 and "already imported the same files" in str(again.exception)
    skipped = run("import", named / "rows.csv", root, "--files", "sound", "--limit", "3", "--mode", "skip-existing", "--json")
    assert json.loads(skipped.output)["skipped"] == 3
