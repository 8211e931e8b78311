"""Generated annotations, with zeros, absent fields and crowds: what is imported is what pycocotools reads. YOLO with many classes."""

import contextlib
import io
import json
import random

import numpy as np
import penstock as ps
import pytest
from anything import SEEDS
from penstock.importers import import_data
from test_manifests import png, write

pytestmark = pytest.mark.local
POINTS = 3


def segmentation(rng, height, width):
    """Return an outline of each form that COCO knows, or one that covers nothing."""
    from pycocotools import mask as drawing

    kind = rng.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        return []
    if kind == 2:
        return [[0, 0, 3, 3], [rng.randrange(width), rng.randrange(height)]]  # Lines and points cover nothing.
    if kind == 3:
        shape = np.asfortranarray(np.random.default_rng(rng.randrange(1 << 30)).integers(0, 2, (height, width)).astype(np.uint8))
        runs = drawing.encode(shape)
        return {"size": [height, width], "counts": runs["counts"].decode()}
    if kind == 4:
        cuts = sorted(rng.randrange(height * width + 1) for _ in range(rng.randint(0, 4)))
        return {"size": [height, width], "counts": np.diff([0, *cuts, height * width]).tolist()}
    return [[rng.uniform(0, side) for _ in range(rng.randint(3, 6)) for side in (width, height)] for _ in range(rng.randint(1, 3))]


def annotation(rng, number, image, categories, with_points):
    made = {
        "id": number,
        "image_id": image["id"],
        "category_id": rng.choice(categories)["id"],
        "bbox": [rng.choice([0, 0.0, rng.uniform(0, 30), rng.randrange(20)]) for _ in range(4)],
    }
    optional = {
        "area": rng.choice([0, 0.0, rng.uniform(0, 500), rng.randrange(100)]),
        "iscrowd": rng.choice([0, 0, 1]),
        "segmentation": segmentation(rng, image["height"], image["width"]),
    }
    if with_points:
        flags = [rng.randrange(3) for _ in range(POINTS)]
        optional["keypoints"] = [
            value
            for flag in flags
            for value in ((rng.uniform(0, 20), rng.randrange(12), flag) if flag or rng.random() < 0.5 else (0, 0, 0))
        ]
        optional["num_keypoints"] = sum(flag > 0 for flag in flags)
    made |= {name: value for name, value in optional.items() if rng.random() < 0.75}
    return made if rng.random() < 0.9 else dict(reversed(made.items()))


def generated(rng):
    """Return annotations of a few images. Ids begin at 0, have gaps, and are in no order."""
    images = [
        {"id": number, "file_name": f"{number}.png", "height": rng.randint(1, 16), "width": rng.randint(1, 16)}
        for number in [0, *rng.sample(range(1, 50), rng.randint(1, 4))]
    ]
    categories = [{"id": number, "name": f"class {number}"} for number in rng.sample(range(95), rng.choice([1, 3, 80]))]
    if rng.random() < 0.3:  # Two classes of one name.
        categories[-1]["name"] = categories[0]["name"]
    with_points = rng.random() < 0.5
    empty = rng.choice(images)  # An image without objects, as COCO has many.
    others = [image for image in images if image is not empty]
    annotations = [annotation(rng, number, rng.choice(others), categories, with_points) for number in range(rng.choice([0, 1, 12]))]
    for part in (images, categories, annotations):
        rng.shuffle(part)
    return {"images": images, "annotations": annotations, "categories": categories}


@pytest.mark.parametrize("masks", [None, "class", "instance"])
def test_generated_annotations_are_what_pycocotools_reads(tmp_path, masks):
    from pycocotools.coco import COCO

    for seed in SEEDS:
        found = generated(random.Random(f"{masks} {seed}"))
        files = {image["file_name"]: png(image["id"], image["height"], image["width"]) for image in found["images"]}
        path = write(tmp_path / f"coco {seed}", {**files, "coco.json": json.dumps(found)}) / "coco.json"
        ignore = [] if masks else ["polygons"]
        import_data(path, tmp_path / f"set {seed}", masks=masks, ignore=ignore)
        ds = ps.open(tmp_path / f"set {seed}")
        with contextlib.redirect_stdout(io.StringIO()):
            known = COCO(str(path))
        counts = [category["name"] for category in found["categories"]]
        names = ds.vocabulary("labels")
        assert len(ds) == len(found["images"])
        for sample, image in zip(ds, found["images"], strict=True):
            place = (seed, image["id"])
            wanted = known.loadAnns(known.getAnnIds(imgIds=[image["id"]]))
            assert sample["image_id"] == image["id"] and sample["image"].shape[:2] == (image["height"], image["width"]), place
            assert np.array_equal(sample["boxes"], np.array([one["bbox"] for one in wanted], "f4").reshape(-1, 4)), place
            for label, one in zip(sample["labels"], wanted, strict=True):
                name = known.loadCats([one["category_id"]])[0]["name"]
                assert names[label] == (name if counts.count(name) == 1 else f"{name} {one['category_id']}"), place
            areas = [one["area"] if "area" in one else one["bbox"][2] * one["bbox"][3] for one in wanted]
            assert np.array_equal(sample["area"], np.array(areas, "f4")), place
            assert sample["crowd"].tolist() == [bool(one.get("iscrowd", 0)) for one in wanted], place
            if "keypoints" in ds.schema:
                points = [one.get("keypoints", [0] * 3 * POINTS) for one in wanted]
                assert np.array_equal(sample["keypoints"], np.array(points, "f4").reshape(-1, POINTS, 3)), place
            if masks:
                drawn = [drawn_by(known, one, (image["height"], image["width"])) for one in wanted]
                numbers = [int(code) + 1 for code in sample["labels"]] if masks == "class" else list(range(1, len(drawn) + 1))
                whole = np.zeros((image["height"], image["width"]), int)
                for at in sorted(range(len(drawn)), key=lambda at: -int(drawn[at].sum())):
                    whole[drawn[at]] = numbers[at]
                assert np.array_equal(sample["mask"], whole), place
            if masks == "instance":
                assert sample["masks"].shape == (len(drawn), image["height"], image["width"]), place
                assert all(np.array_equal(one, other) for one, other in zip(sample["masks"], drawn, strict=True)), place
        assert any("keypoints" in one for one in found["annotations"]) == ("keypoints" in ds.schema), seed


def drawn_by(known, one, size):
    """Return the mask that pycocotools draws. It refuses polygons that cover nothing."""
    outline = one.get("segmentation")
    outline = [polygon for polygon in outline if len(polygon) >= 6] if isinstance(outline, list) else outline
    return known.annToMask({**one, "segmentation": outline}).astype(bool) if outline else np.zeros(size, bool)


@pytest.mark.parametrize("form", ["list", "dict", "dict of text", "lines", "classes.txt"])
@pytest.mark.parametrize("classes", [80, 1000])
def test_many_classes_of_yolo_in_any_order(tmp_path, classes, form):
    """Codes of two and three digits sort otherwise as numbers than as text."""
    rng = random.Random(f"{classes} {form}")
    names = [f"name {number}" for number in rng.sample(range(classes), classes)]
    pairs = list(enumerate(names))
    rng.shuffle(pairs)
    described = {
        "list": f"names: {json.dumps(names)}\n",
        "dict": "names:\n" + "".join(f"  {code}: {name}\n" for code, name in pairs),
        "dict of text": "names:\n" + "".join(f"  '{code}': {name}\n" for code, name in pairs),
        "lines": "names:\n" + "".join(f"  - {name}\n" for name in names),
        "classes.txt": "\n".join(names) + "\n",
    }[form]
    files = {"classes.txt" if form == "classes.txt" else "data.yaml": described}
    codes = {f"{image}": [rng.randrange(classes) for _ in range(rng.randrange(40))] for image in range(20)}
    codes["20"] = [0, classes - 1, 9, 10, 99 % classes, 2]
    for image, of_image in codes.items():
        files |= {f"images/{image}.png": png(int(image)), f"labels/{image}.txt": "".join(f"{code} 0.5 0.5 0.25 0.5\n" for code in of_image)}
    import_data(write(tmp_path / "yolo", files), tmp_path / "set")
    ds = ps.open(tmp_path / "set")
    assert ds.vocabulary("labels") == names
    for sample in ds:
        image = sample["path"].removeprefix("images/").removesuffix(".png")
        assert [ds.vocabulary("labels")[code] for code in sample["labels"]] == [names[code] for code in codes[image]], image
        assert sample["boxes"].tolist() == [[10, 6, 5, 6]] * len(codes[image])
