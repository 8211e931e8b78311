"""`Loader`: batches of a view, in one order for any number of ranks and threads, resumable at any step. Made by `View.loader`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator, Philox  # Imported by name for the reason given in `view`.

from penstock import _core
from penstock.errors import ClosedError, InvalidInputError, NotFoundError
from penstock.order import Mix, Replacement, Source, Window, checked_mix, shares_of, whole, whole_seed
from penstock.report import Line, explained, size_text
from penstock.stages import check_nulls, collated, fill, nulls_of, stages_of
from penstock.transforms import Transform
from penstock.view import Batch, View

if TYPE_CHECKING:
    from penstock.workers import Pool

EXTRAS = ("_row_id", "_position", "_step", "_valid", "_source")
STATE_FORMAT = 1
# Version of the permutations, window orders and mixtures; crates/loader/tests/golden freezes their results.
PERMUTATION = 2
# Memory that fetching windows needs on top of their contents: thread stacks, plans, and freed memory that the allocator keeps.
FETCHING_BYTES = 24 << 20
# If a consumer waits for more than this share of the time, the loader is too slow; below it, the wait may be for the first batch.
STALLED = 0.1


class Loader:
    """Batches of a view or a mixture, for training. Iterate over it once per epoch.

    >>> import penstock as ps
    >>> ds = ps.create("memory://loader", {"number": "int32"})
    >>> receipt = ds.append({"number": range(10)})
    >>> loader = ds.loader(batch_size=4, shuffle=True, seed=1)
    >>> epoch = [batch["number"].tolist() for batch in loader]
    >>> len(loader), sorted(sum(epoch, [])) == list(range(10))
    (3, True)
    >>> again = ds.loader(batch_size=4, shuffle=True, seed=1)
    >>> again.load_state_dict(loader.state_dict(step=1))
    >>> [batch["number"].tolist() for batch in again] == epoch[1:]
    True
    """

    def __init__(
        self,
        source: View | Mix,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool | Window | Replacement = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        transform: Sequence[Transform | Callable[..., Any]] = (),
        outputs: Mapping[str, str] | None = None,
        output: str = "numpy",
        decode: bool = True,
        last_batch: str = "short",
        rank: int | None = None,
        world_size: int | None = None,
        on_corrupt: str = "raise",
        nulls: Mapping[str, Any] | None = None,
        order_block_samples: int | None = None,
        memory_bytes: int | None = None,
        threads: int | None = None,
        python_workers: int = 0,
        progress: bool = False,
        pin: bool = False,
    ) -> None:
        self.rank, self.world_size = _ranks(rank, world_size)
        if (batch_size is None) == (global_batch_size is None):
            raise InvalidInputError(
                "cannot make a loader: expected one of batch_size (per rank) and global_batch_size", code="invalid-argument"
            )
        if batch_size is not None:
            global_batch_size = whole(batch_size, "batch_size", 1) * self.world_size
        self.global_batch_size = whole(global_batch_size, "global_batch_size", 1)
        if output not in ("numpy", "torch", "jax"):
            raise InvalidInputError(f"output={output!r}", code="invalid-argument", hint="one of numpy, torch, jax")
        if last_batch not in ("short", "drop", "pad"):
            raise InvalidInputError(f"last_batch={last_batch!r}", code="invalid-argument", hint="one of short, drop, pad")
        self.output, self.last_batch, self.decode, self.on_corrupt = output, last_batch, decode, on_corrupt
        self.seed = whole_seed(seed)
        for what, given, kinds in (
            ("decode", decode, bool),
            ("pin", pin, bool),
            ("outputs", outputs, Mapping | None),
            ("nulls", nulls, Mapping | None),
        ):
            if not isinstance(given, kinds):
                raise InvalidInputError(f"{what}={given!r}", code="invalid-argument", hint="see help(ps.View.loader)")
        self.order_block_samples = (
            self.global_batch_size if order_block_samples is None else whole(order_block_samples, "order_block_samples", 1)
        )
        if columns is not None:
            listed: list[str] = [] if isinstance(columns, str) else _listed(columns)
            if isinstance(columns, str) or not all(isinstance(name, str) for name in listed):
                raise InvalidInputError(f"columns={columns!r}, expected a list of names", hint=f"write columns=[{columns!r}]")
            columns = listed
        given = {"": (source, 1.0)} if isinstance(source, View) else source.sources
        views = {name: (view._as_it_is(), weight) for name, (view, weight) in given.items()}  # The views do not move on append.
        first = next(iter(views.values()))[0]
        names = list(first.schema) if columns is None else list(dict.fromkeys(columns))
        self._columns = [name for name in names if name not in EXTRAS]
        self._extras = [name for name in names if name in EXTRAS]
        self._outputs = {name: name for name in self._columns} if outputs is None else dict(outputs)
        if any(name in EXTRAS for name in self._outputs):
            raise InvalidInputError(f"outputs={outputs!r}: request {', '.join(EXTRAS)} in columns=", code="invalid-argument")
        self._declared, self._per_sample, self._per_batch = stages_of(transform, self._outputs, first)
        self._nulls = dict(nulls or {})
        defaults = _core.configure()
        self.memory_bytes = defaults[0] if memory_bytes is None else whole(memory_bytes, "memory_bytes", 1)
        self.threads = defaults[1] if threads is None else whole(threads, "threads", 1)
        self.python_workers = whole(python_workers, "python_workers", 0)
        self.progress, self.pin = progress, pin
        self._mix: dict[str, Any] | None = None
        if isinstance(source, Mix):
            shares = shares_of({name: weight for name, (_, weight) in views.items()})
            self._mix = {"shares": shares, "epoch_samples": source.epoch_samples, "exhausted": source.exhausted}
        self._shuffle = shuffle
        columns_read = list(dict.fromkeys(self._outputs.values()))
        self._sources = [Source.ordered(name, view, shuffle, columns_read, self.order_block_samples) for name, (view, _) in views.items()]
        self._read_before = self._counted()
        # Epoch and draw at which step 0 begins.
        self._base = (0, 0)
        self._core = self._open(self._base)
        schema, results = first.schema, self._core.results()
        self._images = frozenset(name for name, _, _, image in results if image)
        check_nulls(self._nulls, results, {name: schema[column].type for name, column in self._outputs.items()})
        self._step = 0  # The next batch to deliver, counted from the core's base.
        self._go_on = True  # Whether the next iteration resumes at `_step`; if not, it begins the next epoch.
        self._turn = 0
        self._inside: set[tuple[int, int]] = set()  # (process, thread) pairs that wait for a batch now.
        self._agreed = self.world_size == 1
        self._inside_seconds = self._function_seconds = 0.0
        self._elapsed_seconds = 0.0
        self._given = np.zeros(4, np.int64)  # Delivered batches, samples and bytes; damaged samples.
        # Totals of closed cores and workers: times, peak memory, and storage operations of workers.
        self._spent: dict[str, int] = {}
        self._peak_bytes = 0
        self._read_there: dict[str, int] = {}
        self._pool: Pool | None = None
        self._keep()

    def _open(self, base: tuple[int, int]) -> _core.Loader:
        held = self._window_bytes()
        beside = FETCHING_BYTES if held else 0
        declared = {
            "names": [source.name for source in self._sources],
            "outputs": list(self._outputs.items()),
            "transform": self._declared,
            "decode": self.decode,
            "seed": self.seed,
            "orders": [source.order for source in self._sources],
            "mix": self._mix,
            "order_block_samples": self.order_block_samples,
            "global_batch_size": self.global_batch_size,
            "last_batch": self.last_batch,
            "base": base,
            "rank": self.rank,
            "world_size": self.world_size,
            "row_ids": "_row_id" in self._extras,
            "on_corrupt": self.on_corrupt,
            "threads": self.threads,
            "memory_bytes": self.memory_bytes,
            "sample_bytes": int(max(source.fetched_bytes + self._tail_bytes(source) for source in self._sources)),
            "window_bytes": held + beside,
        }
        views, files = [source.view._view for source in self._sources], [source.view._files for source in self._sources]
        core = _core.Loader(views, files, [source.weights for source in self._sources], _json(declared))
        workers = max(1, self._processes)  # Each worker holds its own windows.
        batches = 2 * core.least_bytes  # The current batch and the one delivered before it.
        need = workers * (held + batches + beside)
        if held and need > self.memory_bytes:
            raise InvalidInputError(
                f"the window takes up to {size_text(held)} on each rank{' and in each worker' if workers > 1 else ''}, two batches "
                f"take {size_text(batches)} and fetching takes {size_text(beside)}: {size_text(need)} in total, but memory_bytes is "
                f"{size_text(self.memory_bytes)}",
                code="invalid-argument",
                hint=f"memory_bytes={int(1.5 * need)}, or a smaller window",
            )  # fmt: skip
        return core

    def _tail_bytes(self, source: Source) -> float:
        """Return the bytes of data-file tails per fetched sample; 0 if the tails that a batch needs are kept."""
        if source.window_runs:
            return 0.0  # The window holds its tails.
        draws = self.global_batch_size // self.world_size
        need, _ = source.tail_bytes(draws)
        if need > self.memory_bytes:
            raise InvalidInputError(
                f"a batch of {draws} samples comes from data files whose tails take {size_text(need)}, but memory_bytes is "
                f"{size_text(self.memory_bytes)}",
                code="invalid-argument",
                hint=f"memory_bytes={2 * need}, a smaller batch, ps.Window, or ps.configure(memory_bytes={4 * need}) to keep the tails",
            )
        return need / max(1, draws)

    def _window_bytes(self) -> int:
        """Return the most window bytes that this rank holds: those of its lanes, or of all lanes in a mixture.

        A mixture deals draws differently, so a rank may draw from any lane.
        """
        parts = 1 if self._mix else self.world_size
        tails = sum(source.tail_bytes(2 * source.window_runs // parts)[0] for source in self._sources)
        return int(sum(source.held_bytes for source in self._sources) / parts) + tails

    @property
    def _processes(self) -> int:
        """Number of Python workers to use; 0 if there are no functions for them to run."""
        return self.python_workers if self._per_sample or self._per_batch else 0

    def _keep(self) -> None:
        """Pin the snapshots that are read if `pin` is set; only rank 0 does so."""
        for source in self._sources if self.pin and self.rank == 0 else ():
            source.view._pin(f"loader-{source.view.snapshot}")

    # Iteration

    def __len__(self) -> int:
        """Number of batches in a full epoch; a state loaded in mid-epoch leaves fewer."""
        return self._core.steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch: the rest of the epoch in which a state was loaded, or else the next epoch.

        With a shuffle, the loader makes the first batches of the following epoch while this one ends; `stream(1)` does not.
        After an early break, the next iteration begins the next epoch. Batches made ahead are kept until then, or until `close()`.
        """
        return self._iterate(1, beyond=self._shuffle is not False)

    def stream(self, epochs: int | None = None) -> Iterator[Batch]:
        """Yield the batches of `epochs` epochs, or without end. Each epoch is begun while the one before it ends."""
        return self._iterate(None if epochs is None else whole(epochs, "epochs", 0), beyond=False)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start at the beginning of `epoch`."""
        self._rebase((whole(epoch, "epoch", 0), 0))

    def _rebase(self, base: tuple[int, int]) -> None:
        self.close()
        core = self._open(base)
        self._note_spent([self._core.stats()])
        self._core, self._base = core, base
        self._step, self._go_on = 0, True

    def _note_spent(self, counts: Sequence[Mapping[str, int]]) -> None:
        self._peak_bytes = max(self._peak_bytes, sum(count["peak_bytes"] for count in counts))
        times = ({name: value for name, value in count.items() if name.endswith("_ns")} for count in counts)
        self._spent = _sum(self._spent, *times)

    def _end_of_epoch(self, step: int) -> int:
        """Return the first step of the epoch after that of `step`."""
        first, steps = self._core.first_steps, len(self)
        return first if step < first else first + ((step - first) // steps + 1) * steps

    def _iterate(self, epochs: int | None, beyond: bool) -> Iterator[Batch]:
        if not len(self) or epochs == 0:
            return
        me = (os.getpid(), threading.get_ident())
        if any(pid == me[0] and thread != me[1] for pid, thread in self._inside):
            self._turn += 1  # Stop the other thread too: its progress would change the batches of this one.
            raise _two_threads()
        self._inside.add(me)
        try:
            if self._passes_what_is_left() and epochs is not None:
                epochs -= 1
                if not epochs:
                    return
            first, steps = self._core.first_steps, len(self)
            within = self._step % first if self._step < first else (self._step - first) % steps
            if not self._go_on and within:
                self._step = self._end_of_epoch(self._step)
            self._go_on = False
            self._turn += 1
            turn = self._turn
            end = None if epochs is None else self._end_of_epoch(self._step) + (epochs - 1) * steps
            self._start(2**62 if beyond or end is None else end)
            if not self._agreed:
                self._agree()
            if turn != self._turn:
                raise _two_threads()
        finally:
            self._inside.discard(me)
        mark = time.perf_counter()
        line = Line(self) if self.progress else None
        try:
            while end is None or self._step < end:
                began = time.perf_counter()
                self._inside.add(me)
                try:
                    if turn != self._turn:
                        raise _two_threads()
                    batch = self._next()
                finally:
                    self._inside.discard(me)
                if turn != self._turn:
                    raise _two_threads()
                now = time.perf_counter()
                self._inside_seconds += now - began
                self._elapsed_seconds, mark = self._elapsed_seconds + now - mark, now
                if line:
                    line.update()
                yield batch
                if turn != self._turn:
                    raise ClosedError("this iteration is over: another iteration of the same loader has begun", code="loader-closed")
        finally:
            if line:
                line.close()
            if turn == self._turn and not beyond:
                self._end()

    def _passes_what_is_left(self) -> bool:
        """Skip the rest of an epoch if the loaded state leaves no batch of it, and return whether it was skipped.

        A skipped rest counts as an epoch without batches.
        """
        epoch, draw = self._base
        if self._step or not draw or self._core.first_steps:
            return False
        left = self._core.epoch_samples - draw
        warnings.warn(
            f"epoch {epoch} has {left} samples left after the loaded state, fewer than a batch of {self.global_batch_size}: "
            'last_batch="drop" drops them, so this iteration has no batches',
            stacklevel=4,
        )
        self._rebase((epoch + 1, 0))
        return True

    def _start(self, end: int) -> None:
        if not self._processes:
            self._core.start(self._step, end)
        elif self._pool is None or not self._pool.goes_on(self._step):
            from penstock.workers import Pool

            self._end()
            self._pool = Pool(self, self._processes, self._step, end)

    def _end(self) -> None:
        self._core.close()
        if self._pool is not None:
            self._pool.close()
            self._note_spent(list(self._pool.spent.values()))
            self._read_there = _sum(self._read_there, *self._pool.read.values())
            self._pool = None

    def _next(self) -> Batch:
        given = self._core.next() if self._pool is None else self._pool.next()
        if given is None:
            raise ClosedError("this loader was closed during iteration", code="loader-closed")
        batch = self._as_output(given[0] if self._pool is not None else self._staged(self._core, *given))
        # Count the batch only once nothing can fail: a state must not skip an undelivered batch.
        self._step += 1
        self._given += np.array([1, len(given[1]["valid"]), given[1]["bytes"], len(given[1]["refused"])])
        return batch

    def _staged(self, core: _core.Loader, batch: Batch, about: dict[str, Any]) -> Batch:
        """Apply all Python stages except the output conversion to a batch of `core`."""
        epoch, draw = core.begin_of(about["step"])
        number = epoch * len(self) + draw // self.global_batch_size
        for name, nulls in about["nulls"].items():
            if name not in self._nulls:
                raise _has_nulls(name, int(nulls.sum()))
        for name, values in batch.items():
            if name not in self._nulls and name not in about["nulls"] and (missing := nulls_of(values)):
                raise _has_nulls(name, missing)
        for name, value in self._nulls.items():
            fill(name, value, batch, about["nulls"].get(name))
        for name in self._extras:
            values = {"_position": "position", "_source": "source", "_valid": "valid", "_row_id": "row_id"}.get(name)
            batch[name] = np.full(len(about["valid"]), number, np.int64) if values is None else about[values]
        began = time.perf_counter()
        if self._per_sample:
            batch = self._mapped(batch, about, number)
        for fn in self._per_batch:
            with _Noted(fn, f"step {number}"):
                batch = fn(batch)
            if not isinstance(batch, dict):
                raise InvalidInputError(
                    f"{fn!r} returned a {type(batch).__name__}, expected a dict of column to values", code="invalid-argument"
                )
        self._function_seconds += time.perf_counter() - began
        return batch

    def _mapped(self, batch: Batch, about: dict[str, Any], number: int) -> Batch:
        """Apply the per-sample functions."""
        samples = []
        for index in range(len(about["valid"])):
            sample = {name: values[index] for name, values in batch.items()}
            rng = Generator(Philox(key=[self.seed, 0], counter=[0, 0, about["epoch"], int(about["draw"][index])]))
            for fn in self._per_sample:
                with _Noted(fn, f"sample {int(about['position'][index])} in step {number}"):
                    sample = fn(sample, rng)
                if not isinstance(sample, dict):
                    raise InvalidInputError(
                        f"{fn!r} returned a {type(sample).__name__}, expected a dict of column to value", code="invalid-argument"
                    )
            samples.append(sample)
        return collated(samples, about["position"], batch)

    def _as_output(self, batch: Batch) -> Batch:
        if self.output == "torch":
            from penstock.torch import tensors

            return tensors(batch, self._images)
        if self.output == "jax":
            from penstock.jax import arrays

            return arrays(batch)
        return batch

    def _begin_of(self, step: Any) -> tuple[int, int]:
        """Return the epoch and draw at which a step begins; steps count from the start of epoch 0."""
        epoch, within = divmod(whole(step, "step", 0), max(1, len(self)))
        return epoch, within * self.global_batch_size

    # State

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the state of the loader now, or at `step` (counted from the start of epoch 0): a few hundred bytes as JSON.

        The state is the same on all ranks and does not depend on batches made ahead. Cost: no reads.
        """
        if step is None:
            epoch, draw = self._core.begin_of(self._step)
        else:
            epoch, draw = self._begin_of(step)
        return {**self._order_state(), "epoch": epoch, "draw": draw}

    def _order_state(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT, "permutation": PERMUTATION, "sources": [source.state() for source in self._sources], "mix": self._mix, "seed": self.seed,
            "order_block_samples": self.order_block_samples, "global_batch_size": self.global_batch_size, "last_batch": self.last_batch,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the same samples in the same order, for any ranks, threads and budgets.

        The state's snapshot, seed and order replace this loader's; this loader's options decide how batches are cut.
        Cost: opens the state's snapshot if it differs. Raises: InvalidInputError for a different dataset or selection,
        NotFoundError if the snapshot no longer exists.
        """
        try:
            if (state["format"], state["permutation"]) != (STATE_FORMAT, PERMUTATION):
                theirs, ours = f"{state['format']}.{state['permutation']}", f"{STATE_FORMAT}.{PERMUTATION}"
                raise InvalidInputError(
                    f"cannot load a state of format {theirs}: this release reads {ours}", code="invalid-argument",
                    hint="its order would differ here; continue with the release that saved the state",
                )  # fmt: skip
            sources = list(state["sources"])
            mix = checked_mix(state["mix"], len(sources))
            epoch, draw, seed = whole(state["epoch"], "epoch", 0), whole(state["draw"], "draw", 0), whole_seed(state["seed"])
            block = whole(state["order_block_samples"], "order_block_samples", 1)
            if len(sources) != len(self._sources):
                raise InvalidInputError(
                    f"cannot load the state: it has {len(sources)} sources, this loader has {len(self._sources)}", code="invalid-argument"
                )
            found = [own.loaded(state_of) for own, state_of in zip(self._sources, sources, strict=True)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InvalidInputError | NotFoundError):
                raise
            raise InvalidInputError(
                f"this is not a loader state: {error!r}", code="invalid-argument", hint="pass a result of state_dict()"
            ) from error
        before = self._sources, self._mix, self.seed, self.order_block_samples
        was = self._core.begin_of(self._step)
        self._sources, self._mix, self.seed, self.order_block_samples = found, mix, seed, block
        try:
            self._rebase((epoch, draw))
            if draw > self._core.epoch_samples:
                raise InvalidInputError(f"this is not a loader state: draw {draw} of {self._core.epoch_samples}", code="invalid-argument")
            self._keep()
        except Exception:
            self._sources, self._mix, self.seed, self.order_block_samples = before
            self._rebase(was)
            raise

    def batch_at(self, step: int) -> Batch:
        """Make the batch of one step, counted from the start of epoch 0, without moving the loader: to inspect a loss spike."""
        base = self._begin_of(step)
        if not len(self):
            raise InvalidInputError("the loader has no batches", code="invalid-argument")
        core = self._open(base)
        core.start(0, 1)
        try:
            given = core.next()
        finally:
            core.close()
        if given is None:
            raise InvalidInputError("the loader has no batches", code="invalid-argument")
        return self._as_output(self._staged(core, *given))

    def _agree(self) -> None:
        """Check that all ranks are about to read the same, if torch.distributed connects them."""
        self._agreed = True
        distributed = sys.modules.get("torch.distributed")
        if (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() != self.world_size
        ):
            return
        functions = [_function_name(fn) for fn in (*self._per_sample, *self._per_batch)]
        state = {
            **self.state_dict(), "step": self._step, "transform": self._declared, "outputs": self._outputs, "decode": self.decode,
            "on_corrupt": self.on_corrupt, "functions": functions, "nulls": {name: repr(value) for name, value in self._nulls.items()},
        }  # fmt: skip
        mine = (hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest(), state, self.rank)
        all_of_them: list[Any] = [None] * self.world_size
        distributed.all_gather_object(all_of_them, mine)
        ranks = [rank for *_, rank in all_of_them]
        if sorted(ranks) != list(range(self.world_size)):
            raise InvalidInputError(
                f"ranks do not agree on their numbers: the loaders of processes 0 to {self.world_size - 1} have ranks {ranks}",
                code="invalid-argument",
                hint="omit rank and world_size, or give each process its own rank",
            )
        for rank, (digest, theirs, _) in enumerate(all_of_them):
            if digest != all_of_them[0][0]:
                differing = [name for name in state if theirs[name] != all_of_them[0][1][name]]
                text = "; ".join(f"{name}: {all_of_them[0][1][name]!r} on rank 0, {theirs[name]!r} on rank {rank}" for name in differing)
                raise InvalidInputError(f"ranks do not agree on what to load: {text}", code="invalid-argument")

    # Reporting

    def _counted(self) -> dict[str, int]:
        return _sum(*(source.view.stats() for source in {source.view._counts(): source for source in self._sources}.values()))

    def _read(self) -> dict[str, int]:
        """Return counts of storage operations since this loader was made, including those of workers."""
        here = {name: value - self._read_before.get(name, 0) for name, value in self._counted().items()}
        pools = self._pool.read.values() if self._pool else ()
        return {name: value for name, value in _sum(here, self._read_there, *pools).items() if value}

    def stats(self, step_seconds: float | None = None) -> dict[str, Any]:
        """Return statistics since this loader was made. Those of Python workers are as of their last batches.

        `seconds`: time from batch to batch. It includes your own work between batches, but not the start of threads and workers.
        `samples_per_second`, `bytes_per_second`: rates over `seconds`. `waiting_seconds`: your wait for batches; `stall`: its share.
        `stages`: seconds of all threads by stage; `occupancy`: their share of the threads' time. `function_seconds`: time in your
        callables, in all processes. `kept_bytes`: batches that you still hold. `peak_bytes`: the most memory used and reserved
        for batches made ahead and for windows. `read`: storage operations. `refused`: damaged samples.
        `accelerator_utilisation`, given `step_seconds`: what an accelerator with that step time would reach.
        """
        pools = self._pool.spent.values() if self._pool else ()
        counts = _sum(self._spent, self._core.stats(), *pools)
        elapsed = max(self._elapsed_seconds, 1e-9)
        batches, samples, size, refused = self._given.tolist()
        waiting, functions = self._inside_seconds, self._function_seconds + counts.get("function_ns", 0) / 1e9
        processes = max(1, self._processes)
        threads = processes * max(1, self.threads // processes)
        answer: dict[str, Any] = {
            "batches": batches, "samples": samples, "bytes": size, "seconds": elapsed,
            "samples_per_second": samples / elapsed, "bytes_per_second": size / elapsed,
            "waiting_seconds": waiting, "stall": min(1.0, waiting / elapsed), "function_seconds": functions,
            "stages": {stage: counts[f"{stage}_ns"] / 1e9 for stage in ("fetch", "gather", "transform")},
            "occupancy": {stage: counts[f"{stage}_ns"] / 1e9 / elapsed / threads for stage in ("gather", "transform")},
            "kept_bytes": counts["kept_bytes"], "peak_bytes": max(self._peak_bytes, counts["peak_bytes"]), "refused": refused, "read": self._read(),
        }  # fmt: skip
        if step_seconds is not None and batches:
            busy = sum(counts[f"{stage}_ns"] for stage in ("gather", "transform")) / 1e9 / threads + functions / processes
            # A stalled consumer receives batches as fast as they are made.
            made = elapsed if waiting > STALLED * elapsed else max(busy, waiting)
            answer["accelerator_utilisation"] = step_seconds / max(step_seconds, made / batches)
        return answer

    def explain(self) -> str:
        """Describe what an epoch costs and how well it is shuffled. Cost: reads only the manifest."""
        return "\n".join(f"{what:<16}{text}" for what, text in explained(self).items())

    def ceiling(self) -> Iterator[Batch]:
        """Yield the first batch of epoch 0 once per batch of an epoch: measures the speed of training without loading.

        Every batch is the same object, so changes to it persist.
        """
        batch = self.batch_at(0)
        for _ in range(len(self)):
            yield batch

    def close(self) -> None:
        """Stop all threads and workers of this loader; it can be iterated again. Repeated calls are harmless."""
        self._turn += 1
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<penstock.Loader of {', '.join(source.view.uri for source in self._sources)}: {len(self)} batches of {self.global_batch_size}>"


class _Noted:
    """Context manager that adds to an exception which user function raised it, and for which sample or step."""

    def __init__(self, fn: Callable[..., Any], place: str) -> None:
        self.fn, self.place = fn, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        text = f"in {self.fn!r}, for {self.place} of the loader"
        if isinstance(error, StopIteration):  # StopIteration would end a generator on its way.
            raise RuntimeError(f"StopIteration {text}") from error
        error.add_note(text)


def _two_threads() -> ClosedError:
    text = "two threads iterate over this loader at once: each batch would reach only one of them"
    return ClosedError(text, code="loader-closed", hint="give each thread its own loader, or pass batches through a queue")


def _has_nulls(name: str, count: int) -> InvalidInputError:
    error = InvalidInputError(
        f"column `{name}` has {count} nulls in this batch", code="invalid-value",
        hint=f'choose a replacement: nulls={{"{name}": value}}, or "mask" for a column `{name}_valid`',
    )  # fmt: skip
    error.column = name
    return error


def _function_name(fn: Any) -> str:
    """Name a function so that ranks can compare it: module, qualified name, and a hash of its code."""
    fn = getattr(fn, "fn", fn)
    code = getattr(fn, "__code__", None)
    body = hashlib.sha256(code.co_code).hexdigest()[:8] if code is not None else ""
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)} {body}".strip()


def _sum(*counts: Mapping[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else from torch.distributed, else from torchrun's environment, else of a single process."""
    if (rank is None) != (world_size is None):
        raise InvalidInputError("expected both rank and world_size, or neither", code="invalid-argument")
    if rank is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        try:
            rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        except ValueError as error:
            raise InvalidInputError(f"RANK and WORLD_SIZE in the environment: {error}", code="invalid-argument") from error
    size = whole(world_size, "world_size", 1)
    if not 0 <= whole(rank, "rank", 0) < size:
        raise InvalidInputError(f"rank={rank} with world_size={size}: ranks go from 0 to {size - 1}", code="invalid-argument")
    return int(rank), size


def _listed(values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        return [None]


def _json(declared: dict[str, Any]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise InvalidInputError(f"{value!r} in the loader's options is neither a number nor text", code="invalid-argument")

    try:
        return json.dumps(declared, default=plain, allow_nan=False)
    except ValueError as error:
        raise InvalidInputError("numbers of transforms must be finite", code="invalid-argument") from error
