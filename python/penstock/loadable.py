"""The base class for everything that a loader can read. The signature of `loader(…)` is defined only here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never

if TYPE_CHECKING:
    from penstock.loader import Loader
    from penstock.loader.order import Replacement, Window
    from penstock.transforms import Transform

LastBatch = Literal["short", "drop", "pad"]


class Loadable:
    """Base class for views and mixtures."""

    # Over 6 parameters: each is a training option, passed by keyword and shown by help() and editors.
    def loader(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | Window | Replacement = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        transform: Sequence[Transform | Callable[..., Any]] = (),
        outputs: Mapping[str, str] | None = None,
        output: Literal["numpy", "torch", "jax"] = "numpy",
        decode: bool = True,
        last_batch: LastBatch = "short",
        rank: int | None = None,
        world_size: int | None = None,
        on_corrupt: Literal["raise", "substitute", "mask"] = "raise",
        nulls: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
        order_block_samples: int | None = None,
        memory_bytes: int | None = None,
        threads: int | None = None,
        python_workers: int = 0,
        progress: bool = False,
        pin: bool = False,
        **others: Never,
    ) -> Loader:
        """Make a loader: training batches in an order that does not depend on the number of ranks or threads, resumable at any step.

        Pass `batch_size` per rank, or `global_batch_size`. `shuffle`: True (a full permutation), False, `ps.Window` or `ps.Replacement`.
        `seed`: for the order and for random transforms. `columns` may include `_row_id`, `_position`, `_step`, `_valid` and `_source`.
        `outputs`: {result: column}, for example to return one column twice. `transform`: a list of `penstock.transforms`, then
        functions of `(sample)` or `(sample, rng)` or transforms of torchvision, then `T.PerBatch`. `decode=False` returns images as stored bytes. `output`: "numpy", "torch" or "jax".
        `last_batch`: "short", "drop" or "pad". `rank` and `world_size`: by default, those of torch.distributed or torchrun.
        `on_corrupt`: "raise", "substitute" (use another sample) or "mask" (use another sample and set `_valid` to False). `nulls`:
        {column: replacement value, or "mask" to add a column that marks the nulls}. `ragged`: results that are a list in every batch.
        `order_block_samples`: number of draws that are divided together among lanes or a mixture's sources; by default, a global batch.
        `memory_bytes` and `threads`: budgets, by default those of `ps.configure`. `python_workers`: number of processes that run your
        functions. `progress`: show a live progress line. `pin=True` protects the snapshot, and that of a loaded state, from garbage
        collection until `ds.unpin` is called. Pinning writes a record, so the dataset must be writable.

        Shapes: the kind of a column is the same in every batch. Images and masks are one array, (B, H, W, C) uint8; if their sizes differ,
        an error names the sample, unless `ragged=["image"]` asks for lists. C is 3 unless the column sets `mode`. In torch, images are
        (B, C, H, W) in channels_last memory. Fixed columns are (B, …) arrays, ragged columns are `Ragged`, and text and bytes are lists.
        The arrays, tensors and numbers that functions return are stacked, by the same rule. You own the batches and may write to them.
        Cost: prepares batches in advance, using up to `memory_bytes`. Resuming costs as much as one batch.
        Raises: InvalidInputError for invalid options, before anything is read; CorruptError, which names the damaged samples.

        >>> import penstock as ps
        >>> ds = ps.create("memory://loading", {"number": "int32"})
        >>> receipt = ds.append({"number": range(5)})
        >>> [batch["number"].tolist() for batch in ds.loader(batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        given = dict(locals())
        from penstock.loader import Loader, LoaderOptions, unknown_option

        if others:
            raise unknown_option(next(iter(others)))
        return Loader(self, LoaderOptions(**{field.name: given[field.name] for field in dataclasses.fields(LoaderOptions)}))
