"""FFCV.

It cannot store files unchanged. Recipe jpg re-encodes all pixels as JPEG at the quality of the source, as other systems store them. Recipe own
is that of its ImageNet example: images of at most 500 pixels, half of them as JPEG of quality 90, the others as raw pixels. Its JPEG decoder
uses the fast, less exact DCT. Its batches are views of buffers that it uses again.
"""
# /// script
# dependencies = [
#   "torch==2.15.0", "numpy==2.4.6", "numba==0.68.1", "opencv-python-headless==5.0.0.93", "tqdm==4.70.1", "pytorch-pfn-extras==0.9.0",
#   "fire==0.7.1", "psutil==7.2.2", "imgcat==0.6.0", "pandas==3.1.1", "assertpy==1.1", "terminaltables==3.1.10", "setuptools==84.2.1",
#   "h5py==3.16.0", "pillow==13.0.0",
# ]
# [tool.bench]
# build = ["ffcv==1.0.2"]
# apt = ["libturbojpeg0-dev", "libopencv-dev", "pkg-config", "g++"]
# ///

from __future__ import annotations

import pathlib
from typing import Any

import drawn
import numpy as np
from ffcv.fields import RGBImageField
from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, RandomTranslate, ToTensor
from ffcv.writer import DatasetWriter


class Images:
    """Arrays of pixels, or files of photographs."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        image = self.images[index]
        return (Image.open(image).convert("RGB") if isinstance(image, pathlib.Path) else image,)


def _image(o: Any) -> Any:
    if o.recipe == "own":
        return RGBImageField(write_mode="proportion", max_resolution=500, compress_probability=0.5, jpeg_quality=90)
    return RGBImageField(write_mode="jpg", jpeg_quality=o.quality)


def photos_write(o: Any) -> Any:
    def turn() -> int:
        files = drawn.photographs(o)
        DatasetWriter(f"{o.place}/ffcv-{o.recipe}.beton", {"image": _image(o)}, num_workers=o.threads).from_indexed_dataset(Images(files))
        return len(files)

    return turn


def _loader(path: str, o: Any, image: list[Any]) -> Any:
    loader = Loader(
        path, batch_size=o.batch, num_workers=o.threads, order=OrderOption.RANDOM, os_cache=True, drop_last=False,
        pipelines={"image": image},
    )  # fmt: skip
    return lambda: (batch[0] for batch in loader)


def photos(o: Any) -> Any:
    return _loader(
        f"{o.place}/ffcv-{o.recipe}.beton", o, [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), ToTensor()]
    )


def small_images_write(o: Any) -> Any:
    def turn() -> int:
        images = np.load(f"{o.place}/x.npy")
        fields = {"image": RGBImageField(write_mode="raw")}
        DatasetWriter(f"{o.place}/small.beton", fields, num_workers=2).from_indexed_dataset(Images(images))
        return len(images)

    return turn


def small_images(o: Any) -> Any:
    steps = [
        SimpleRGBImageDecoder(), RandomHorizontalFlip(), RandomTranslate(padding=4, fill=(0, 0, 0)),
        NormalizeImage(np.array([125.3, 123.0, 113.9]), np.array([51.6, 50.8, 51.3]), np.float32), ToTensor(),
    ]  # fmt: skip
    return _loader(f"{o.place}/small.beton", o, steps)
