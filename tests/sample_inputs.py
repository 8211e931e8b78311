"""The inputs that pages of the site name: photographs, tables, annotations, and datasets of other libraries."""

import io
import json
import pathlib
import shutil
import tarfile

import datasets
import numpy as np
from PIL import Image


def make(folder: pathlib.Path, count: int = 20) -> None:
    """Write all inputs except those of libraries that only one page needs."""
    photographs(folder / "photos", count)
    names = [f"photos/{path.parent.name}/{path.name}" for path in sorted((folder / "photos").rglob("*.jpg"))]
    rows = [f"{name},{name.split('/')[1]},{1990 + number}" for number, name in enumerate(names)]
    (folder / "labels.csv").write_text("\n".join(["file,label,year", *rows]) + "\n")
    (folder / "reviews.csv").write_text("text,label\n" + "a good film,good\na bad film,bad\n" * 6)
    coco(folder / "coco", names, folder)
    yolo(folder / "yolo", names, folder)
    shards(folder / "shards", names, folder)
    parquet(folder / "pets.parquet", names, folder)


def photographs(folder: pathlib.Path, count: int = 20) -> None:
    """Write small JPEG photographs of two classes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        place = folder / ["cat", "dog"][number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 60, (90, 120, 3), dtype=np.uint8) + np.uint8(150 * (number % 2))
        Image.fromarray(pixels).save(place / f"{number}.jpg")


def coco(folder: pathlib.Path, names: list[str], root: pathlib.Path) -> None:
    """Write COCO annotations of two classes."""
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    images, annotations = [], []
    for number, name in enumerate(names):
        shutil.copy(root / name, folder / "images" / f"{number}.jpg")
        images.append({"id": number, "file_name": f"{number}.jpg", "width": 120, "height": 90})
        for box in range(1 + number % 3):
            place = [10 + 20 * box, 10, 30, 40]
            annotations.append(
                {"id": len(annotations), "image_id": number, "category_id": 1 + box % 2, "bbox": place, "area": 1200, "iscrowd": 0}
            )
    classes = [{"id": 1, "name": "cell"}, {"id": 2, "name": "leaf"}]
    (folder / "annotations" / "instances.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": classes})
    )


def yolo(folder: pathlib.Path, names: list[str], root: pathlib.Path) -> None:
    for number, name in enumerate(names):
        part = "val" if number % 5 == 0 else "train"
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / "images" / part / f"{number}.jpg")
        (folder / "labels" / part / f"{number}.txt").write_text(f"{number % 2} 0.5 0.5 0.25 0.5\n")
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cell, leaf]\n")


def shards(folder: pathlib.Path, names: list[str], root: pathlib.Path) -> None:
    """Write two shards of WebDataset."""
    folder.mkdir()
    for part in range(2):
        with tarfile.open(folder / f"part-{part}.tar", "w") as shard:
            for name in names[part::2]:
                key = name.split("/")[-1].removesuffix(".jpg")
                label = str(int("/dog/" in name)).encode()
                for ending, content in (("jpg", (root / name).read_bytes()), ("cls", label)):
                    entry = tarfile.TarInfo(f"{key}.{ending}")
                    entry.size = len(content)
                    shard.addfile(entry, io.BytesIO(content))


def parquet(path: pathlib.Path, names: list[str], root: pathlib.Path) -> None:
    """Write a Parquet file as Hugging Face does, with the bytes of images and the names of classes."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    images = [{"bytes": (root / name).read_bytes(), "path": None} for name in names]
    datasets.Dataset.from_dict({"image": images, "label": [int("/dog/" in name) for name in names]}, features=features).to_parquet(path)


def lance(path: pathlib.Path, names: list[str], root: pathlib.Path) -> None:
    import lance as library
    import pyarrow as pa

    table = pa.table({"image": [(root / name).read_bytes() for name in names], "label": [name.split("/")[1] for name in names]})
    library.write_dataset(table, path)
