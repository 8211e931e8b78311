"""The augmentation of the photographs workload for loaders that leave it to torchvision: a random crop to 224 pixels, and a flip."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


def of_bytes(path: str) -> Callable[[bytes], Any]:
    """Return a function from JPEG bytes to a uint8 tensor of (3, 224, 224). `path` is tensor or pil, whichever is faster on a machine."""
    import numpy as np
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    if path == "pil":
        from PIL import Image

        in_pil = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return lambda body: in_pil(Image.open(io.BytesIO(body)).convert("RGB"))
    in_tensors = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
    return lambda body: in_tensors(decode_jpeg(torch.from_numpy(np.frombuffer(body, np.uint8).copy()), mode=ImageReadMode.RGB))
