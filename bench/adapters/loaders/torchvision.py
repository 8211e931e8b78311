"""torchvision with a DataLoader whose workers persist."""
# /// script
# dependencies = ["torch==2.15.0", "torchvision==0.29.2", "numpy==2.4.6", "pillow==13.0.0"]
# ///

from __future__ import annotations

from typing import Any

import crops
import drawn
import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, images: Any, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


def photos(o: Any) -> Any:
    torch.set_num_threads(1)
    augment = crops.of_bytes(o.path)
    images = Images(drawn.photographs(o), lambda file: augment(file.read_bytes()))
    loader = torch.utils.data.DataLoader(images, o.batch, shuffle=True, num_workers=o.threads, persistent_workers=True)
    return lambda: loader


BILINEAR = InterpolationMode.BILINEAR
TRANSFORMS = {
    "rotation, nearest": v2.RandomRotation(30),
    "rotation, bilinear": v2.RandomRotation(30, BILINEAR),
    "affine, bilinear": v2.RandomAffine(15, (0.1, 0.1), (0.8, 1.2), 10, BILINEAR),
    "colour jitter": v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "colour jitter without hue": v2.ColorJitter(0.4, 0.4, 0.4),
    "grayscale": v2.Grayscale(3),
    "blur, 9 × 9": v2.GaussianBlur(9),
    "erasing": v2.RandomErasing(1.0),
}


def transforms(o: Any) -> Any:
    """One transform of images in memory, in a DataLoader without workers. `path` is tensor, or pil with a conversion to tensors at the end."""
    torch.set_num_threads(o.threads)
    images, transform = np.load(f"{o.place}/images.npy"), TRANSFORMS[o.case]
    given: Any = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    if o.path == "pil":
        given, transform = [Image.fromarray(image) for image in images], v2.Compose([transform, v2.PILToTensor()])
    loader = torch.utils.data.DataLoader(Images(given, transform), o.batch)
    return lambda: loader
