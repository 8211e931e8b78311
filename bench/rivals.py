"""Run one loader in a separate process: `rivals.py TASK SYSTEM FOLDER WORKERS`.

For each line on stdin, the process runs an epoch and prints seconds, CPU seconds and samples as JSON. Each system uses its best
documented path, and the consumer touches every 64th byte.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BATCH = 128
CIFAR_BATCH = 512
MEAN, STD = [125.3, 123.0, 113.9], [51.6, 50.8, 51.3]


def touch(array: Any) -> int:
    flat = array.reshape(-1) if isinstance(array, np.ndarray) else array.contiguous().numpy().reshape(-1)
    return int(np.bitwise_xor.reduce(flat.view(np.uint8)[::64]))


def penstock_photos(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    import penstock as ps
    from penstock import transforms as T

    ds = ps.open(folder / "penstock")
    loader = ds.loader(batch_size=BATCH, shuffle=True, transform=[T.RandomResizedCrop(224), T.RandomHorizontalFlip()], threads=workers)
    return lambda: (batch["image"] for batch in loader.stream(1))


def ffcv_photos(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    image = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), ToTensor()]
    loader = Loader(
        str(folder / "photos.beton"), batch_size=BATCH, num_workers=workers, order=OrderOption.RANDOM, os_cache=True, drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )  # fmt: skip
    return lambda: (batch[0] for batch in loader)


def dali_photos(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    from nvidia.dali import fn, pipeline_def, types

    count = len(list((folder / "class").rglob("*.jpg")))

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None, seed=1)
    def pipeline() -> Any:
        jpegs, _ = fn.readers.file(file_root=str(folder / "class"), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            jpegs, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, resize_x=224, resize_y=224, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    pipe = pipeline()
    pipe.build()
    return lambda: (pipe.run()[0].as_array() for _ in range(-(-count // BATCH)))


def torchvision_photos(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    import torch
    from torchvision import datasets
    from torchvision.transforms import v2

    augment = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    dataset = datasets.ImageFolder(folder / "class", augment)
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
    return lambda: (batch[0] for batch in loader)


def litdata_photos(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    import io

    import litdata
    from PIL import Image
    from torchvision.transforms import v2

    augment = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    class Photos(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return augment(Image.open(io.BytesIO(super().__getitem__(index)["image"])))

    loader = litdata.StreamingDataLoader(Photos(str(folder / "litdata"), shuffle=True), batch_size=BATCH, num_workers=workers)
    return lambda: iter(loader)


def penstock_cifar(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    import penstock as ps
    from penstock import transforms as T

    mean, std = [m / 255 for m in MEAN], [s / 255 for s in STD]
    steps = [T.RandomHorizontalFlip(on="x"), T.RandomCrop(32, padding=4, on="x"), T.Normalize(mean, std, on="x")]
    loader = ps.open(folder / "cifar").loader(batch_size=CIFAR_BATCH, shuffle=True, transform=steps, threads=workers)
    return lambda: (batch["x"] for batch in loader.stream(1))


def ffcv_cifar(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, RandomTranslate, ToTensor

    image = [
        SimpleRGBImageDecoder(), RandomHorizontalFlip(), RandomTranslate(padding=4, fill=(0, 0, 0)),
        NormalizeImage(np.array(MEAN), np.array(STD), np.float32), ToTensor(),
    ]  # fmt: skip
    loader = Loader(
        str(folder / "cifar.beton"), batch_size=CIFAR_BATCH, num_workers=workers, order=OrderOption.RANDOM, os_cache=True, drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )  # fmt: skip
    return lambda: (batch[0] for batch in loader)


def _augmented(batch: Any, rng: Any) -> Any:
    """Pad by 4, crop to 32 x 32, flip and normalise a whole batch with NumPy, keeping rows of pixels contiguous."""
    count = len(batch)
    padded = np.zeros((count, 40, 40 * 3), np.uint8)
    padded[:, 4:36, 12:108] = batch.reshape(count, 32, 96)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (32, 96), axis=(1, 2))
    cut = windows[np.arange(count), rng.integers(0, 9, count), 3 * rng.integers(0, 9, count)]
    flipped = rng.random(count) < 0.5
    cut[flipped] = cut[flipped].reshape(-1, 32, 32, 3)[:, :, ::-1].reshape(-1, 32, 96)
    values = cut.astype(np.float32)
    values -= np.tile(np.array(MEAN, np.float32), 32)
    values *= np.tile(1 / np.array(STD, np.float32), 32)
    return values.reshape(count, 32, 32, 3)


def numpy_cifar(folder: pathlib.Path, workers: int) -> Callable[[], Iterator[Any]]:
    import concurrent.futures

    images, labels = np.load(folder / "cifar-x.npy", mmap_mode="r"), np.load(folder / "cifar-y.npy")

    def one(indices: Any) -> Any:
        rng = np.random.default_rng(int(indices[0]))
        labels[indices]
        return _augmented(images[indices], rng)

    def epoch() -> Iterator[Any]:
        order = np.random.default_rng().permutation(len(images))
        parts = [order[start : start + CIFAR_BATCH] for start in range(0, len(order), CIFAR_BATCH)]
        if workers == 1:
            yield from map(one, parts)
            return
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(one, part) for part in parts[: 2 * workers]]
            for part in [*parts[2 * workers :], *[None] * 2 * workers]:
                yield waiting.pop(0).result()
                if part is not None:
                    waiting.append(pool.submit(one, part))

    return epoch


def prepare(folder: pathlib.Path) -> None:
    """Convert the photographs in FOLDER/class/0 and the CIFAR-shaped arrays, if any, to the rivals' formats."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from PIL import Image

    paths = sorted((folder / "class").rglob("*.jpg"))
    quality = json.loads((folder / "quality").read_text())

    class Photos:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            return Image.open(paths[index]).convert("RGB"), 0

    # FFCV cannot store files unchanged: it re-encodes the pixels, here at the quality of the original files.
    writer = DatasetWriter(
        str(folder / "photos.beton"), {"image": RGBImageField(write_mode="jpg", jpeg_quality=quality), "label": IntField()}, num_workers=2
    )
    writer.from_indexed_dataset(Photos())
    if (folder / "cifar-x.npy").exists():
        images = np.load(folder / "cifar-x.npy")

        class Cifar:
            def __len__(self) -> int:
                return len(images)

            def __getitem__(self, index: int) -> Any:
                return images[index], index % 10

        writer = DatasetWriter(str(folder / "cifar.beton"), {"image": RGBImageField(write_mode="raw"), "label": IntField()}, num_workers=2)
        writer.from_indexed_dataset(Cifar())

    import litdata  # After this import, processes are spawned, not forked.

    litdata.optimize(_stored, [str(path) for path in paths], str(folder / "litdata"), chunk_bytes="64MB", num_workers=1)


def _stored(path: str) -> dict[str, Any]:
    return {"image": pathlib.Path(path).read_bytes(), "label": 0}


def processor_seconds() -> float:
    """Return the CPU seconds used by this process and its workers, including workers that have ended."""
    import psutil

    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    children = psutil.Process().children(recursive=True)
    return sum(spent.ru_utime + spent.ru_stime for spent in own) + sum(sum(child.cpu_times()[:2]) for child in children)


def main() -> None:
    task, system, place, workers = sys.argv[1:]
    if task == "prepare":
        prepare(pathlib.Path(place))
        return
    os.environ.setdefault("OMP_NUM_THREADS", workers)
    epoch = globals()[f"{system}_{task}"](pathlib.Path(place), int(workers))
    print("ready", flush=True)
    for _ in sys.stdin:
        began, spent, samples = time.perf_counter(), processor_seconds(), 0
        for batch in epoch():
            touch(batch)
            samples += len(batch)
        print(json.dumps([time.perf_counter() - began, processor_seconds() - spent, samples]), flush=True)


if __name__ == "__main__":
    main()
