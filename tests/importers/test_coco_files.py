"""Annotations of COCO as other tools write them: ids that are texts, and images in folders of any name."""

import json

import numpy as np
import penstock as ps
import pytest
from penstock.importers import import_data
from servers import left_empty
from test_manifests import png, write


def annotations(image_ids, category_ids=(1, 2), names=("1.png", "2.png")):
    return {
        "images": [{"id": number, "file_name": name, "height": 12, "width": 20} for number, name in zip(image_ids, names, strict=True)],
        "annotations": [
            {"id": f"a{place}", "image_id": number, "category_id": category_ids[place], "bbox": [place, 0, 4, 5]}
            for place, number in enumerate(image_ids)
        ],
        "categories": [{"id": number, "name": name} for number, name in zip(category_ids, ("cat", "dog"), strict=True)],
    }


@pytest.mark.parametrize("ids", [("a", "b"), ("1", "2"), (1, "x")])
@pytest.mark.parametrize("categories", [(1, 2), ("c1", "c2"), ("1", 2)])
@pytest.mark.parametrize("masks", [None, "class"])
def test_ids_are_numbers_or_texts(tmp_path, root, ids, categories, masks):
    found = annotations(ids, categories)
    found["annotations"][0]["segmentation"] = [[0, 0, 4, 0, 4, 5, 0, 5]] if masks else []
    path = write(tmp_path / "coco", {"1.png": png(1), "2.png": png(2), "annotations.json": json.dumps(found)}) / "annotations.json"
    import_data(path, root, masks=masks)
    ds = ps.open(root)
    assert ds["image_id"][:] == [str(number) for number in ids] and [codes.tolist() for codes in ds["labels"][:]] == [[0], [1]]
    assert [boxes.tolist() for boxes in ds["boxes"][:]] == [[[0, 0, 4, 5]], [[1, 0, 4, 5]]]


def test_a_number_may_be_a_text_beside_its_objects(tmp_path, root):
    found = annotations([1, 2])
    for annotation in found["annotations"]:
        annotation |= {"image_id": str(annotation["image_id"]), "category_id": str(annotation["category_id"])}
    path = write(tmp_path / "coco", {"1.png": png(1), "2.png": png(2), "annotations.json": json.dumps(found)}) / "annotations.json"
    import_data(path, root)
    assert ps.open(root)["image_id"][:].tolist() == [1, 2] and [len(boxes) for boxes in ps.open(root)["boxes"][:]] == [1, 1]
    found["images"][1]["id"] = "1"
    path.write_text(json.dumps(found))
    with pytest.raises(ps.InvalidInputError, match="two of its images have the id 1"):
        import_data(path, root.with_name("twice"))


@pytest.mark.parametrize("bad", [True, 1.5, None, "", [1], "\ud800"])
def test_other_ids_are_refused(tmp_path, root, bad):
    found = annotations([1, 2])
    found["images"][0]["id"] = bad
    path = write(tmp_path / "coco", {"1.png": png(1), "2.png": png(2), "annotations.json": json.dumps(found)}) / "annotations.json"
    with pytest.raises(ps.InvalidInputError):
        import_data(path, root)
    assert left_empty(root)
    assert import_data(path, root, on_error="skip").samples == 1


@pytest.mark.parametrize("place", ["img", "data/train/rgb", "a/b/c/d", "pictures of birds"])
@pytest.mark.parametrize("json_place", ["annotations/instances.json", "coco.json", "labels/coco_train.json"])
@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("inner", ["", "sub/"])
def test_images_may_be_in_any_folder_below_the_source(tmp_path, root, place, json_place, as_folder, inner):
    files = {f"{place}/{inner}{number}.png": png(number) for number in (1, 2)}
    found = annotations([1, 2], names=[f"{inner}1.png", f"{inner}2.png"])
    folder = write(tmp_path / "coco", {**files, json_place: json.dumps(found), "other/3.png": png(3)})
    report = import_data(folder if as_folder else folder / json_place, root)
    stored = ps.open(root).take([0, 1], columns=["image"], decode=False)["image"]
    assert report.samples == 2 and [bytes(body) for body in stored] == [png(1), png(2)]
    assert report.left_out == (["other/3.png"] if as_folder else [])


def test_images_in_several_folders_are_not_guessed(tmp_path, root):
    files = {f"{place}/{number}.png": png(number) for number in (1, 2) for place in ("full", "small")}
    path = write(tmp_path / "coco", {**files, "coco.json": json.dumps(annotations([1, 2]))}) / "coco.json"
    with pytest.raises(ps.NotFoundError, match=r"are in several folders: `.*full`, `.*small`") as caught:
        import_data(path, root)
    assert "--root" in caught.value.hint
    (path.parent / "small" / "2.png").unlink()
    assert import_data(path, root).samples == 2, "the folder that has more of them"
    with pytest.raises(ps.NotFoundError, match="nor in any folder under"):
        import_data(write(tmp_path / "none", {"coco.json": json.dumps(annotations([1, 2])), "x/3.png": png(3)}) / "coco.json", root)


@pytest.mark.parametrize(("rule", "left"), [("drop", [0, 3]), ("keep", [0, 1, 2, 3]), ("clip", [0, 1, 3])])
def test_wrong_boxes_of_coco_and_their_other_values(tmp_path, root, rule, left):
    """Four boxes: a good one, one of a negative width, one that is NaN, and one beyond the border."""
    boxes = [[1, 2, 3, 4], [5, 5, -2, 1], [float("nan"), 0, 1, 1], [15, 10, 10, 10]]
    found = annotations([1, 2])
    found["annotations"] = [
        {"id": place, "image_id": 1, "category_id": 1 + place % 2, "bbox": box, "area": place, "keypoints": [place, place, 2]}
        for place, box in enumerate(boxes)
        if rule != "clip" or place != 2
    ]
    path = write(tmp_path / "coco", {"1.png": png(1), "2.png": png(2), "annotations.json": json.dumps(found)}) / "annotations.json"
    with pytest.raises(ps.InvalidInputError, match="annotation 1 has the bbox"):
        import_data(path, root)
    report = import_data(path, root, boxes=rule)
    ds = ps.open(root)
    sample = ds[0]
    wanted = {"drop": [boxes[0], boxes[3]], "keep": boxes, "clip": [boxes[0], [5, 5, 0, 1], [15, 10, 5, 2]]}[rule]
    assert np.array_equal(sample["boxes"], np.array(wanted, "f4"), equal_nan=True) and sample["labels"].tolist() == [
        place % 2 for place in left
    ]
    assert sample["area"].tolist() == left and sample["keypoints"][:, 0, 0].tolist() == left and len(sample["crowd"]) == len(left)
    assert report.corrected_boxes == {"drop": 2, "keep": 0, "clip": 2}[rule]


@pytest.mark.parametrize(("rule", "count"), [("drop", 1), ("clip", 2), ("keep", 2)])
def test_wrong_boxes_of_yolo(tmp_path, root, rule, count):
    text = "0 0.5 0.5 0.2 0.5\n0 1.4 0.5 0.2 0.5\n"
    folder = write(tmp_path / "yolo", {"images/a.png": png(1), "labels/a.txt": text, "classes.txt": "cat\n"})
    with pytest.raises(ps.InvalidInputError, match="expected fractions"):
        import_data(folder, root)
    report = import_data(folder, root, boxes=rule)
    assert len(ps.open(root)["boxes"][0]) == len(ps.open(root)["labels"][0]) == count and report.corrected_boxes == (rule != "keep")


@pytest.mark.parametrize("chosen", [{"drop": ["image"]}, {"columns": ["boxes", "labels"]}])
def test_boxes_without_their_images_are_not_clipped(tmp_path, root, chosen):
    found = annotations([1, 2])
    found["annotations"][0]["bbox"] = [-5, 0, 100, 9]
    path = write(tmp_path / "coco", {"1.png": png(1), "2.png": png(2), "annotations.json": json.dumps(found)}) / "annotations.json"
    for on_error in ("raise", "skip"):
        with pytest.raises(ps.InvalidInputError, match='boxes="clip" cannot cut the boxes of `boxes`'):
            import_data(path, root, boxes="clip", on_error=on_error, **chosen)
    assert left_empty(root)


def test_categories_of_one_name_stay_apart(tmp_path, root):
    found = annotations([1, 2])
    found["categories"] = [{"id": 1, "name": "cat"}, {"id": 2, "name": "cat"}, {"id": 3, "name": "cat 1"}, {"id": 4, "name": "cat 2"}]
    found["annotations"] = [{"id": number, "image_id": 1, "category_id": number, "bbox": [0, 0, 4, 5]} for number in (1, 2, 3, 4)]
    path = write(tmp_path / "coco", {"1.png": png(1), "2.png": png(2), "annotations.json": json.dumps(found)}) / "annotations.json"
    import_data(path, root)
    ds = ps.open(root)
    assert ds[0]["labels"].tolist() == [0, 1, 2, 3] and ds.schema["labels"].names == ("cat 1 1", "cat 2 2", "cat 1", "cat 2")
