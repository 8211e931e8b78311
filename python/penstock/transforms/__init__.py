"""Transforms that the core applies, with the names, defaults and units of torchvision v2. Pass them to `loader(transform=[…])`.

Each transform applies to the results named in `on`. By default, that is the only image, and if the transform moves pixels, the boxes, masks and
keypoints that are declared to be `of` it. Random numbers are drawn once per sample, so these follow the image. Images have the mode set by `ps.Image(mode=…)`, RGB uint8 by default, until ToDtype or
Normalize is applied. Tensors keep their own dtype; crops, pads and flips apply to their first dimensions. Functions of `(sample)` or `(sample, rng)`,
and transforms of torchvision v2, come after these transforms, and `PerBatch(fn)` and `Tokenize` come last.

>>> import numpy as np, penstock as ps
>>> from penstock import transforms as T
>>> ds = ps.create("memory://transforms", {"image": ps.Image(), "boxes": ps.Boxes(of="image")})
>>> receipt = ds.append({"image": [np.zeros((60, 80, 3), np.uint8)] * 4, "boxes": [[[10, 10, 30, 40]]] * 4})
>>> loader = ds.loader(batch_size=2, transform=[T.Resize((30, 40), on=("image", "boxes")), T.Normalize([0.5], [0.5], on="image")])
>>> batch = next(iter(loader))
>>> batch["image"].shape, str(batch["image"].dtype), batch["boxes"][0].tolist()
((2, 30, 40, 3), 'float32', [[5.0, 5.0, 15.0, 20.0]])
"""

from typing import TYPE_CHECKING, NoReturn

from penstock.transforms.base import Transform
from penstock.transforms.batch import CutMix, MixUp, PerBatch, Tokenize
from penstock.transforms.colour import ColorJitter, GaussianBlur, Grayscale, RandomErasing, RandomGrayscale
from penstock.transforms.geometry import (
    CenterCrop,
    Pad,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)
from penstock.transforms.of_torchvision import Torchvision
from penstock.transforms.values import ConvertBoxes, Normalize, SanitizeBoundingBoxes, ToDtype, TokenChunks

_INSTEAD = {
    "Affine": "T.RandomAffine",
    "ConvertBoundingBoxFormat": "T.ConvertBoxes",
    "Compose": "a list: transform=[…]",
    "Flip": "T.RandomHorizontalFlip",
    "HorizontalFlip": "T.RandomHorizontalFlip",
    "Lambda": "the function itself: transform=[function]",
    "PILToTensor": 'nothing: images are arrays, and tensors with output="torch"',
    "Rotate": "T.RandomRotation",
    "ToImage": 'nothing: images are arrays, and tensors with output="torch"',
    "ToTensor": 'T.ToDtype("float32", scale=True)',
    "VerticalFlip": "T.RandomVerticalFlip",
}


def _missing(name: str) -> NoReturn:
    instead = _INSTEAD.get(name, f"torchvision's, if it has one: T.Torchvision(v2.{name}(…), on=[…])")
    raise AttributeError(f"penstock.transforms has no `{name}`; write {instead}", name=name)


if not TYPE_CHECKING:  # A type checker must know which names exist.
    __getattr__ = _missing

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "ConvertBoxes",
    "CutMix",
    "GaussianBlur",
    "Grayscale",
    "MixUp",
    "Normalize",
    "Pad",
    "PerBatch",
    "RandomAffine",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "SanitizeBoundingBoxes",
    "ToDtype",
    "TokenChunks",
    "Tokenize",
    "Torchvision",
    "Transform",
]
