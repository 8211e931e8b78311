"""A loader's Python stages: parsing `transform=`, and running user functions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.loader.results.kinds import collated, formed
from penstock.loader.results.nulls import fill, has_nulls, nulls_of
from penstock.transforms import CenterCrop, ConvertBoxes, PerBatch, RandomCrop, Torchvision, Transform
from penstock.transforms.batch import Mixing
from penstock.transforms.of_torchvision import SampleGenerator, followers_of, of_torchvision
from penstock.views.concat import union_of
from penstock.views.readable import Batch
from penstock.views.view import View


@dataclasses.dataclass
class Stages:
    """Processes batches in Python: replaces nulls, adds extra columns, and applies functions. Picklable if the functions
    are.
    """

    # Transforms that the core applies.
    declared: list[dict[str, Any]]
    per_sample: list[Callable[..., Any]]
    per_batch: list[PerBatch]
    extras: list[str]
    nulls: dict[str, Any]
    # The results that `ragged=` makes lists.
    ragged: tuple[str, ...] = ()
    # The kind of each result of the core, and of those that `ragged=` names. Known once the core is open.
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    # Time spent in functions so far.
    seconds: float = 0.0

    @property
    def has_functions(self) -> bool:
        return bool(self.per_sample or self.per_batch)

    def left_to_python(self, results: Sequence[str]) -> list[str]:
        """Return the results that the core must not stack: functions may change their sizes, or nulls among them are replaced first."""
        return list(results) if self.per_sample else [*self.ragged, *self.nulls]

    def check_ragged(self, results: Sequence[str]) -> None:
        """Refuse names in `ragged=` that no batch can have. Functions of samples may add any name."""
        if not self.per_sample and (unknown := [name for name in self.ragged if name not in results]):
            raise InvalidInputError(
                f"ragged= names `{unknown[0]}`, which the loader does not return",
                hint=f"the loader returns {', '.join(results)}",
            )  # fmt: skip

    def names(self) -> list[str]:
        """Return the names of the functions, so that ranks can compare them."""
        return [function_name(fn) for fn in (*self.per_sample, *self.per_batch)]

    def apply(self, batch: Batch, about: dict[str, Any], number: int, seed: int) -> Batch:
        """Apply all Python stages except the output conversion. `number` is the step of this batch, counted from the start of epoch 0."""
        for name, nulls in about["nulls"].items():
            if name not in self.nulls:
                raise has_nulls(name, int(nulls.sum()))
        for name, values in batch.items():
            if name not in self.nulls and name not in about["nulls"] and (missing := nulls_of(values)):
                raise has_nulls(name, missing)
        for name, value in self.nulls.items():
            fill(name, value, batch, about["nulls"].get(name))
        for name in self.extras:
            values = {"_position": "position", "_source": "source", "_valid": "valid", "_row_id": "row_id"}.get(name)
            batch[name] = np.full(len(about["valid"]), number, np.int64) if values is None else about[values]
        began = time.perf_counter()
        batch = self._mapped(batch, about, number, seed) if self.per_sample else formed(batch, about["position"], self.kinds)
        for place, fn in enumerate(self.per_batch):
            with Noted(fn, f"step {number}"):
                batch = fn.drawn(batch, _random(seed, 1 + place, 0, number)) if isinstance(fn, Mixing) else fn(batch)
            if not isinstance(batch, dict):
                raise InvalidInputError(f"{fn!r} returned a {type(batch).__name__}, expected a dict of column names to values")
        self.seconds += time.perf_counter() - began
        return batch

    def _mapped(self, batch: Batch, about: dict[str, Any], number: int, seed: int) -> Batch:
        """Apply the per-sample functions."""
        samples = []
        for index in range(len(about["valid"])):
            sample = {name: values[index] for name, values in batch.items()}
            rng = _random(seed, 0, about["epoch"], int(about["draw"][index]))
            for fn in self.per_sample:
                with Noted(fn, f"sample {int(about['position'][index])} in step {number}"):
                    sample = fn(sample, rng) if takes_rng(fn) else fn(sample)
                if not isinstance(sample, dict):
                    raise InvalidInputError(f"{fn!r} returned a {type(sample).__name__}, expected a dict of column names to values")
            samples.append(sample)
        made = collated(samples, about["position"], batch, self.kinds)
        if lacking := [name for name in self.ragged if name not in made]:
            raise InvalidInputError(f"ragged= names `{lacking[0]}`, which your functions did not return: they returned {', '.join(made)}")
        return made


def _random(seed: int, purpose: int, epoch: int, number: int) -> np.random.Generator:
    """Return random numbers that depend on these numbers only."""
    return SampleGenerator(np.random.Philox(key=[seed, purpose], counter=[0, 0, epoch, number]))


def stages_of(
    transform: Sequence[Transform | Callable[..., Any]], outputs: Mapping[str, str], views: Sequence[View]
) -> tuple[list[dict[str, Any]], list[Callable[..., Any]], list[PerBatch]]:
    """Split transforms into core transforms, per-sample functions and per-batch functions, which must come in that order."""
    schema = views[0].schema
    if not isinstance(transform, list | tuple):
        raise InvalidInputError(f"transform={transform!r}, expected a list", hint="write transform=[…]")
    declared: list[dict[str, Any]] = []
    kinds = {name: schema[column] for name, column in outputs.items() if column in schema}
    samples: list[Callable[..., Any]] = []
    batches: list[PerBatch] = []
    for stage in transform:
        if isinstance(stage, Transform):
            if samples or batches:
                raise InvalidInputError(f"{stage!r} comes after a function", hint="put functions last")
            try:
                on = _on(stage, outputs, kinds)
                declared.append({"op": stage.op, "on": on, **stage.declared(), **_one_size(stage, on, kinds)})
                if isinstance(stage, ConvertBoxes):
                    format = declared[-1]["format"]
                    kinds |= {name: kinds[name].with_box_format(format) for name in on if name in kinds and kinds[name].box_format}
            except (TypeError, ValueError, OverflowError) as error:
                if isinstance(error, InvalidInputError):
                    raise
                raise InvalidInputError(f"{stage!r}: {error}") from error
        elif isinstance(stage, PerBatch):
            batches.append(stage.bound(functools.partial(_words, outputs, views)) if isinstance(stage, Mixing) else stage)
        elif isinstance(stage, type) and (issubclass(stage, Transform | PerBatch) or hasattr(stage, "forward")):
            prefix = "T." if issubclass(stage, Transform | PerBatch) else ""
            raise InvalidInputError(f"{stage.__name__} is a class", hint=f"write {prefix}{stage.__name__}(…)")
        elif callable(stage):
            if batches:
                raise InvalidInputError(f"{stage!r} comes after a per-batch function", hint="put T.PerBatch last")
            fn = Torchvision(stage) if of_torchvision(stage) else stage
            samples.append(fn.bound(outputs, kinds) if isinstance(fn, Torchvision) else fn)
            takes_rng(stage)  # Refuses functions with other parameters.
        else:
            raise InvalidInputError(
                f"{stage!r} is not a transform", hint="see penstock.transforms, or pass a function of (sample) or (sample, rng)"
            )
    given = set(outputs)
    for stage in batches:
        if twice := sorted(given.intersection(stage.gives)):
            raise InvalidInputError(
                f"{stage!r} adds `{twice[0]}`, which the batch already has",
                hint="rename the other column with outputs={…}; tokenize a second text in your own T.PerBatch",
            )  # fmt: skip
        given |= set(stage.gives)
    return declared, samples, batches


def _words(outputs: Mapping[str, str], views: Sequence[View], name: str) -> list[str] | None:
    """Return the words of a result, or None if it has none."""
    column = outputs.get(name, name)
    coded = all(column in view.schema and view.schema[column].is_coded for view in views)
    return union_of([view.vocabulary(column) for view in views])[0] if coded else None


def _one_size(stage: Transform, on: Sequence[str], kinds: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Return the crop size as a single length if it is one number and all columns are one-dimensional tensors. For images, one number
    is the side of a square.
    """
    lines = all(name in kinds and kinds[name].is_array and kinds[name].rank == 1 for name in on)
    size = stage.declared().get("size") if lines and isinstance(stage, CenterCrop | RandomCrop) else None
    return {} if size is None or len(np.atleast_1d(getattr(stage, "size", ()))) != 1 else {"size": size[:1]}


def _on(stage: Transform, outputs: Mapping[str, str], kinds: Mapping[str, ColumnType]) -> list[str]:
    """Return the results to which a transform applies: those that it names, or the only image and what follows it. `kinds` are their types."""
    on = getattr(stage, "on", None)
    if on is not None:
        names = [on] if isinstance(on, str) else list(on)
        if not all(isinstance(name, str) for name in names):
            raise InvalidInputError(f"on={on!r}, expected a name or a list of names")
        return names
    if isinstance(stage, ConvertBoxes):
        if boxes := [name for name, kind in kinds.items() if kind.box_format]:
            return boxes
        raise InvalidInputError("ConvertBoxes: the loader returns no boxes", hint="declare the columns as ps.Boxes")
    images = [name for name, kind in kinds.items() if kind.is_image]
    if len(images) != 1:
        raise InvalidInputError(f"{type(stage).__name__} needs on=: there are {len(images)} images, expected one", hint="write on=…")
    return [*images, *followers_of(images[0], outputs, kinds, type(stage).__name__)] if stage.moves else images


class Noted:
    """Context manager that adds a note to an exception, naming the user function that raised it and the sample or step."""

    def __init__(self, fn: Callable[..., Any], place: str) -> None:
        self.fn, self.place = fn, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        text = f"in {self.fn!r}, for {self.place} of the loader"
        if isinstance(error, StopIteration):  # Otherwise, the caller's iterator would end silently.
            raise RuntimeError(f"StopIteration {text}") from error
        error.add_note(text)


@functools.lru_cache(maxsize=256)
def takes_rng(fn: Callable[..., Any]) -> bool:
    """Return whether a per-sample function takes `(sample, rng)` rather than `(sample)`.

    A second parameter with a default value is not one for `rng`, unless that is its name.

    >>> takes_rng(lambda sample, rng: sample), takes_rng(lambda sample: sample), takes_rng(lambda sample, size=3: sample)
    (True, False, False)
    """
    try:
        # A module of torch takes what its `forward` takes.
        found = inspect.signature(getattr(fn, "forward", fn))
    except (ValueError, TypeError):  # A function in C without a signature.
        return False
    places = [parameter for parameter in found.parameters.values() if parameter.kind in _POSITIONAL]
    second = places[1] if len(places) > 1 else None
    for arguments in ((None, None), (None,)):
        optional = second is not None and second.default is not inspect.Parameter.empty and second.name != "rng"
        try:
            found.bind(*arguments)
        except TypeError:
            continue
        if len(arguments) == 1 or not optional:
            return len(arguments) == 2
    raise InvalidInputError(
        f"{fn!r} takes {found}, expected a function of (sample) or (sample, rng)",
        hint="bind the other parameters: functools.partial(fn, size=3)",
    )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def function_name(fn: Any) -> str:
    """Name a function by its module, qualified name and a hash of its code, so that ranks can compare it."""
    fn = getattr(fn, "fn", fn)
    code = getattr(fn, "__code__", None)
    body = hashlib.sha256(code.co_code).hexdigest()[:8] if code is not None else ""
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)} {body}".strip()
