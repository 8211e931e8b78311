"""Runs transforms of torchvision v2 on the samples of a loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.transforms.base import On


def of_torchvision(fn: Any) -> bool:
    """Return whether a function is a transform of torchvision, a function of its, or a module of torch with such transforms."""
    # Other modules of torch may contain such transforms and take the whole sample.
    inner = fn.children() if (type(fn).__module__, type(fn).__name__) == ("torch.nn.modules.container", "Sequential") else ()
    return _is_function(fn) or any(_is_transform(one) for one in (fn, *inner))


def _is_transform(fn: Any) -> bool:
    return any(str(kind.__module__).startswith("torchvision.transforms") for kind in type(fn).__mro__)


def _is_function(fn: Any) -> bool:
    """Return whether a function of torchvision takes one image."""
    return inspect.isfunction(fn) and (fn.__module__ or "").startswith("torchvision.transforms")


class SampleGenerator(np.random.Generator):
    """The random numbers of one sample, and the forms that torchvision's transforms have given its boxes so far."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        super().__init__(bits)
        self.formats: dict[str, str] = {}


def followers_of(image: str, outputs: Mapping[str, str], kinds: Mapping[str, ColumnType], transform: str) -> list[str]:
    """Return the results whose coordinates are `of` an image. Refuses those of no image, because nothing says whether they move with it.

    `kinds` has the type of each result.
    """
    alone = [name for name, kind in kinds.items() if kind.moves and kind.belongs_to is None]
    if alone:
        raise InvalidInputError(
            f"{transform} moves `{image}`, but nothing specifies whether `{alone[0]}` moves with it",
            hint=f'name what moves: on=("{image}", "{alone[0]}"); or declare the column with of="{outputs[image]}"',
        )
    return [name for name, kind in kinds.items() if kind.belongs_to == outputs[image]]


class Torchvision:
    """Apply a transform of torchvision to columns of each sample. In `transform=[…]`, such transforms can also be listed as they are.

    `on`: by default, the only image, and the boxes, masks and keypoints `of` it. Images are (H, W, C) before and after, and the transform
    gets `tv_tensors`. Its random numbers depend on the seed, the epoch and the sample only. Cost: runs in Python, in one thread; the
    transforms of this module run in the core, on all threads.

    >>> import numpy as np, penstock as ps
    >>> from penstock import transforms as T
    >>> from torchvision.transforms import v2
    >>> ds = ps.create("memory://torchvision", {"image": ps.Image(), "boxes": ps.Boxes(of="image")})
    >>> receipt = ds.append({"image": [np.zeros((60, 80, 3), np.uint8)], "boxes": [[[10, 10, 30, 40]]]})
    >>> [batch] = ds.loader(batch_size=1, transform=[v2.RandomHorizontalFlip(p=1.0)])
    >>> batch["image"].shape, batch["boxes"][0].tolist()
    ((1, 60, 80, 3), [[50.0, 10.0, 70.0, 40.0]])
    """

    def __init__(self, transform: Callable[..., Any], on: On = None) -> None:
        _check(transform)
        self.fn, self.on = transform, on
        self._kinds: dict[str, ColumnType] = {}
        # The presets of models, and functions such as `functional.rotate`, take one image.
        self._takes_samples = not (type(transform).__module__.endswith("._presets") or _is_function(transform))

    def __repr__(self) -> str:
        name = f"{self.fn.__name__}" if _is_function(self.fn) else " ".join(repr(self.fn).split())
        return f"Torchvision({name})"

    def _images(self, given: Mapping[str, Any]) -> list[str]:
        return [name for name in given if self._kinds[name].is_image]

    def bound(self, outputs: Mapping[str, str], kinds: Mapping[str, ColumnType]) -> Torchvision:
        """Return the same transform for the results of a loader, which have these types."""
        images = [name for name, kind in kinds.items() if kind.is_image]
        if self.on is None:
            if len(images) != 1:
                raise InvalidInputError(
                    f"{self!r} needs on=: there are {len(images)} images, expected one",
                    hint='write T.Torchvision(transform, on=("image", "boxes"))',
                )
            names = [*images, *followers_of(images[0], outputs, kinds, repr(self))]
        else:
            names = [self.on] if isinstance(self.on, str) else list(self.on)
        if unknown := [name for name in names if name not in kinds]:
            raise InvalidInputError(
                f"{self!r} applies to `{unknown[0]}`, which the loader does not return", hint=f"the loader returns {', '.join(outputs)}"
            )
        if not self._takes_samples and (others := [name for name in names if not kinds[name].is_image]):
            raise InvalidInputError(
                f"{self!r} takes one image, so `{others[0]}` cannot follow it",
                hint=f"use a v2 transform, such as v2.RandomHorizontalFlip; or T.Torchvision(function, on={names[0]!r}) to leave `{others[0]}` as it is",
            )
        made = Torchvision(self.fn, names)
        # The image comes first, because boxes need its size.
        made._kinds = {name: kinds[name] for name in sorted(names, key=lambda name: not kinds[name].is_image)}
        return made

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        import torch

        given: dict[str, Any] = {}
        size: tuple[int, int] | None = None
        # A transform before this one may have converted the boxes to another form.
        formats = rng.formats if isinstance(rng, SampleGenerator) else {}
        leads = [name for name, kind in self._kinds.items() if kind.is_picture]
        if leads and all(sample[name] is None for name in leads):
            # Without their image, boxes and keypoints cannot be moved, so none are left.
            follow = [name for name, kind in self._kinds.items() if kind.moves and not kind.is_picture and sample[name] is not None]
            return {**sample, **{name: sample[name][:0] for name in follow}}
        for name, kind in self._kinds.items():
            if sample[name] is not None:
                given[name] = kind.to_torchvision(sample[name], size, formats.get(name))
                size = sample[name].shape[:2] if kind.is_picture else size
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(rng.integers(2**63)))  # `torch.manual_seed` would also seed the generators of GPUs.
            found = self.fn(given) if self._takes_samples else given | {name: self.fn(given[name]) for name in self._images(given)}
        formats |= {name: value.format.value for name, value in found.items() if hasattr(value, "canvas_size") and hasattr(value, "format")}
        return {**sample, **{name: _from_torch(value, self._kinds.get(name), sample.get(name)) for name, value in found.items()}}


def _check(transform: Any) -> None:
    """Refuse transforms of torchvision that do not apply to a sample as it is."""
    module, name = type(transform).__module__, type(transform).__name__
    if module in ("torchvision.transforms.transforms", "torchvision.transforms.autoaugment"):
        wrong, hint = "is a version 1 transform", f"write torchvision.transforms.v2.{name}(…)"
    elif name in ("MixUp", "CutMix"):
        wrong, hint = "mixes the samples of a batch", f"write T.{name}(…), after all per-sample functions"
    elif name == "SanitizeBoundingBoxes" and getattr(transform, "labels_getter", None) == "default":
        wrong = "does not know which column contains the labels"
        hint = 'write T.SanitizeBoundingBoxes(on=("boxes", "labels")), or v2.SanitizeBoundingBoxes(labels_getter=None)'
    else:
        for inner in getattr(transform, "transforms", None) or ():
            _check(inner)
        return
    raise InvalidInputError(f"torchvision's {name} {wrong}", hint=hint)


def _from_torch(value: Any, kind: ColumnType | None, before: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    array = value.detach().numpy()
    return np.ascontiguousarray(array if kind is None else kind.from_torchvision(array, before))
