"""Converts arrays to tensors of torch, and values of samples to what torchvision calls them. Imports torch, so others import this only when needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.errors import InvalidInputError

Size = tuple[int, int] | None


def tensor_of(array: Any) -> torch.Tensor:
    """Return an array as a tensor, without a copy unless the array has negative strides."""
    array = np.ascontiguousarray(array) if any(stride < 0 for stride in array.strides) else array
    if array.dtype.kind in "mM":
        return torch.from_numpy(array.view(np.int64))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensor(value: Any) -> Any:
    """Convert an array. Other values stay."""
    return torch.from_numpy(np.array(value)) if _is_array(value) else value


def image(value: Any) -> Any:
    """Convert an image (H, W, C)."""
    from torchvision import tv_tensors

    return tv_tensors.Image(_pixels(value, "image").permute(2, 0, 1))


def mask(value: Any) -> Any:
    """Convert a mask (H, W)."""
    from torchvision import tv_tensors

    return tv_tensors.Mask(_pixels(value, "mask"))


def _pixels(value: Any, what: str) -> torch.Tensor:
    if not isinstance(value, np.ndarray):
        raise InvalidInputError(
            f"the {what} is {type(value).__name__}, expected an array",
            hint="leave out decode=False and ToPILImage: v2 transforms take tensors",
        )
    return torch.from_numpy(np.array(value))


def boxes(value: Any, format: str, size: Size) -> Any:
    """Convert boxes (N, 4) in an image of this height and width."""
    from torchvision import tv_tensors

    return tv_tensors.BoundingBoxes(_places(value, size, "boxes"), format=format, canvas_size=size) if _is_array(value) else value


def keypoints(value: Any, size: Size) -> Any:
    """Convert keypoints (N, points, 2) in an image of this height and width."""
    from torchvision import tv_tensors

    return tv_tensors.KeyPoints(_places(value, size, "keypoints"), canvas_size=size) if _is_array(value) else value


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _places(value: Any, size: Size, what: str) -> torch.Tensor:
    if size is None:
        raise InvalidInputError(f"{what} need their image: name both in on=", hint='write on=("image", "boxes")')
    return torch.from_numpy(np.array(value))
