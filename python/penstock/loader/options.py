"""The options that `View.loader` accepts. They are checked before anything is read."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock import _core
from penstock.errors import InvalidInputError
from penstock.loader.order import Replacement, Window
from penstock.loader.ranks import ranks
from penstock.transforms import Transform
from penstock.values.checks import whole, whole_seed

EXTRAS = ("_row_id", "_position", "_step", "_valid", "_source")


@dataclasses.dataclass(kw_only=True)
class LoaderOptions:
    """The options of a loader, as in `View.loader`. Missing ranks are taken from the environment, and missing budgets from
    `ps.configure`.
    """

    batch_size: int | None = None
    global_batch_size: int | None = None
    shuffle: bool | Window | Replacement = False
    seed: int = 0
    columns: Sequence[str] | None = None
    transform: Sequence[Transform | Callable[..., Any]] = ()
    outputs: Mapping[str, str] | None = None
    output: str = "numpy"
    decode: bool = True
    last_batch: str = "short"
    rank: int | None = None
    world_size: int | None = None
    on_corrupt: str = "raise"
    nulls: Mapping[str, Any] | None = None
    ragged: Sequence[str] = ()
    order_block_samples: int | None = None
    memory_bytes: int | None = None
    threads: int | None = None
    python_workers: int = 0
    progress: bool = False
    pin: bool = False

    def __post_init__(self) -> None:
        rank, world_size = ranks(self.rank, self.world_size)
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise InvalidInputError("cannot make a loader: expected either batch_size (per rank) or global_batch_size")
        if self.batch_size is not None:
            self.global_batch_size = whole(self.batch_size, "batch_size", 1) * world_size
        batch = whole(self.global_batch_size, "global_batch_size", 1)
        if self.output not in ("numpy", "torch", "jax"):
            raise InvalidInputError(f"output={self.output!r}", hint="one of numpy, torch, jax")
        if self.last_batch not in ("short", "drop", "pad"):
            raise InvalidInputError(f"last_batch={self.last_batch!r}", hint="one of short, drop, pad")
        seed = whole_seed(self.seed)
        for what, given, kinds in (
            ("decode", self.decode, bool),
            ("pin", self.pin, bool),
            ("outputs", self.outputs, Mapping | None),
            ("nulls", self.nulls, Mapping | None),
        ):
            if not isinstance(given, kinds):
                raise InvalidInputError(f"{what}={given!r}", hint="see help(ps.View.loader)")
        self.settings = Settings(
            seed=seed,
            decode=self.decode,
            last_batch=self.last_batch,
            on_corrupt=self.on_corrupt,
            rank=rank,
            world_size=world_size,
            global_batch_size=batch,
            order_block_samples=batch if self.order_block_samples is None else whole(self.order_block_samples, "order_block_samples", 1),
            memory_bytes=_budget(self.memory_bytes, "memory_bytes", 0),
            threads=_budget(self.threads, "threads", 1),
        )
        self.python_workers = whole(self.python_workers, "python_workers", 0)
        if self.columns is not None:
            self.columns = _names(self.columns, "columns")
        self.ragged = tuple(dict.fromkeys(_names(self.ragged, "ragged")))

    def results(self, available: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Return a dict of result names to column names, and the extra columns, for a view with the columns `available`."""
        names = list(available) if self.columns is None else list(dict.fromkeys(self.columns))
        columns, extras = [name for name in names if name not in EXTRAS], [name for name in names if name in EXTRAS]
        outputs = {name: name for name in columns} if self.outputs is None else dict(self.outputs)
        if any(name in EXTRAS for name in outputs):
            raise InvalidInputError(f"outputs={self.outputs!r}: request {', '.join(EXTRAS)} in columns=")
        return outputs, extras


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options that the core needs as they are, with defaults filled in."""

    seed: int
    decode: bool
    last_batch: str
    on_corrupt: str
    rank: int
    world_size: int
    global_batch_size: int
    order_block_samples: int
    memory_bytes: int
    threads: int


def _budget(value: Any, what: str, place: int) -> int:
    return _core.configure()[place] if value is None else whole(value, what, 1)


def _names(given: Any, what: str) -> list[str]:
    wrong = InvalidInputError(f"{what}={given!r}, expected a list of names", hint=f"write {what}=[{given!r}]")
    try:
        names = list(given)
    except TypeError as error:
        raise wrong from error
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise wrong
    return names


# Options of other loaders: DataLoader, Hugging Face, FFCV, DALI, MosaicML Streaming and WebDataset.
_INSTEAD = {
    "num_workers": "threads=N for decoding, and python_workers=N for your own Python functions",
    "drop_last": 'last_batch="drop"',
    "pin_memory": 'batch["image"].pin_memory().to("cuda", non_blocking=True) for the tensors that you move',
    "pin_memory_device": 'batch["image"].pin_memory().to("cuda", non_blocking=True) for the tensors that you move',
    "collate_fn": "T.PerBatch(function) at the end of transform=[…]",
    "sampler": "ds.select(positions).loader(…), or shuffle=ps.Replacement(weights=…)",
    "batch_sampler": "ds.select(positions).loader(…), with batch_size=",
    "weights": "shuffle=ps.Replacement(weights=…)",
    "prefetch_factor": "memory_bytes=, which bounds how far batches are prepared ahead",
    "persistent_workers": "nothing: threads live as long as the loader",
    "worker_init_fn": "nothing: random numbers depend only on seed= and the sample",
    "generator": "seed=",
    "timeout": "storage_options={'timeout_seconds': …} when you open the dataset",
    "multiprocessing_context": "nothing: threads replace processes, except for python_workers=",
    "dataset": "nothing: call ds.loader(…) on the dataset",
    "transforms": "transform=[…]",
    "augmentations": "transform=[…]",
    "pipelines": "transform=[…]",
    "fields": "columns=[…]",
    "features": "columns=[…]",
    "order": "shuffle=True, False or ps.Window(bytes=…)",
    "shuffle_buffer_size": "shuffle=ps.Window(bytes=…)",
    "buffer_size": "shuffle=ps.Window(bytes=…)",
    "shuffle_seed": "seed=",
    "epochs": "for batch in loader.stream(epochs=N)",
    "num_epochs": "for batch in loader.stream(epochs=N)",
    "num_replicas": "world_size=, which defaults to that of torch.distributed",
    "num_threads": "threads=N",
    "device": 'output="torch", and batch["image"].to(device)',
    "return_tensors": 'output="torch"',
    "format": 'output="torch", "numpy" or "jax"',
    "batch": "batch_size=",
    "bs": "batch_size=",
}


def unknown_option(name: str) -> InvalidInputError:
    """Build the error for an unknown option."""
    known = [field.name for field in dataclasses.fields(LoaderOptions)]
    close = difflib.get_close_matches(name, known, 1)
    instead = _INSTEAD.get(name) or (f"{close[0]}=" if close else None)
    hint = f"write {instead}" if instead is not None else f"options: {', '.join(known)}"
    if instead is not None and instead.startswith("nothing: "):
        hint = f"leave it out: {instead.removeprefix('nothing: ')}"
    return InvalidInputError(f"loader(…) has no option `{name}`", hint=hint)
