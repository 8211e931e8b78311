"""`Loader`: batches of a view, in an order that does not depend on the number of ranks or threads, resumable at any step. It is created
by the `loader` method of views and mixtures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

from penstock import _core
from penstock.errors import InvalidInputError, unpicklable
from penstock.loadable import Loadable
from penstock.loader.iteration import Iteration
from penstock.loader.mixture import Mix, shares_of
from penstock.loader.options import LoaderOptions
from penstock.loader.order import JOINED
from penstock.loader.position import Position, Turns
from penstock.loader.ranks import agree
from penstock.loader.recipe import Recipe
from penstock.loader.report import Totals, explained, sums
from penstock.loader.results.kinds import Made, check_masks, kinds_of
from penstock.loader.results.nulls import check_nulls
from penstock.loader.source import Source
from penstock.loader.stages import Stages, stages_of
from penstock.values.checks import whole
from penstock.views.concat import Concat, union_of
from penstock.views.readable import Batch
from penstock.views.view import View

if TYPE_CHECKING:
    from penstock.loader.workers import Pool


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

    def __init__(self, source: Loadable, options: LoaderOptions) -> None:
        given = source.sources if isinstance(source, Mix) else {"": (cast(View, source), 1.0)}
        if isinstance(source, Concat):
            given = {str(number): (part, 1.0) for number, part in enumerate(source.parts)}
        # These views stay at their snapshots after an append.
        views = {name: (view._as_it_is(), weight) for name, (view, weight) in given.items()}
        first = next(iter(views.values()))[0]
        outputs, extras = options.results(list(first.schema))
        nulls, ragged = dict(options.nulls or {}), tuple(options.ragged)
        stages = Stages(*stages_of(options.transform, outputs, [view for view, _ in views.values()]), extras, nulls, ragged)
        mix: dict[str, Any] | None = None
        if isinstance(source, Mix):
            shares = shares_of({name: weight for name, (_, weight) in views.items()})
            mix = {"shares": shares, "epoch_samples": source.epoch_samples, "exhausted": source.exhausted}
        if isinstance(source, Concat):
            mix = JOINED
        settings, read = options.settings, list(dict.fromkeys(outputs.values()))
        for view, _ in views.values():
            view._named(read)
        sources = [Source.ordered(name, view, options.shuffle, read, settings.order_block_samples) for name, (view, _) in views.items()]
        if isinstance(source, Concat):
            sources = Source.joined(sources, options.shuffle, len(source))
        self.options = options
        # Without functions, workers would have nothing to do.
        recipe = Recipe(sources, mix, outputs, stages, settings, options.python_workers if stages.has_functions else 0)
        self._read_before = recipe.counted()
        self._position = Position(recipe, recipe.open((0, 0)))
        schema, results = first.schema, self._core.results()
        self._images = frozenset(name for name, _, _, image in results if image)
        types = {name: schema[column] for name, column in outputs.items()}
        check_nulls(stages.nulls, results, types)
        stages.check_ragged([*types, *extras])
        stages.kinds = kinds_of(results, types, ragged, nulls)
        self._turns = Turns()
        self._agreed = settings.world_size == 1
        self._made = Made()
        self._totals = Totals()
        self._pool: Pool | None = None
        self._keep(recipe)

    @property
    def recipe(self) -> Recipe:
        return self._position.recipe

    @property
    def _core(self) -> _core.Loader:
        return self._position.core

    @property
    def rank(self) -> int:
        return self.options.settings.rank

    @property
    def world_size(self) -> int:
        return self.options.settings.world_size

    @property
    def global_batch_size(self) -> int:
        return self.options.settings.global_batch_size

    def _keep(self, recipe: Recipe) -> None:
        """If `pin` is set, pin the snapshots that the recipe reads. Only rank 0 does so."""
        for source in recipe.sources if self.options.pin and self.rank == 0 else ():
            source.view._pin(f"loader-{source.view.snapshot}")

    # Iteration

    def __len__(self) -> int:
        """Number of batches in a full epoch. After loading a state from the middle of an epoch, fewer batches remain."""
        return self._core.steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch: the rest of the epoch in which the loaded state was taken, or else the next epoch.

        When shuffling, the loader prepares the first batches of the following epoch while this one is ending; `stream(1)` does not.
        After an early break, the next iteration begins the next epoch. Batches prepared in advance are kept until then or until `close()`
        is called.
        """
        return Iteration(self, 1, beyond=self.options.shuffle is not False).batches()

    def stream(self, epochs: int | None = None) -> Iterator[Batch]:
        """Yield the batches of `epochs` epochs, or endlessly if `epochs` is None.

        The loader prepares the first batches of each epoch while the previous epoch is ending.
        """
        return Iteration(self, None if epochs is None else whole(epochs, "epochs", 0), beyond=False).batches()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start at the beginning of `epoch`."""
        base, recipe = (whole(epoch, "epoch", 0), 0), self.recipe
        self._move(Position(recipe, recipe.open(base), base))

    def _move(self, position: Position) -> None:
        self.close()
        before, self._position = self._position, position
        self.close()  # Another thread may have begun an iteration from the old position meanwhile.
        before.core.close()
        self._totals.note_spent([before.core.stats()])

    def _start(self, at: Position, end: int) -> None:
        if not at.recipe.processes:
            at.core.start(at.step, end)
        elif self._pool is None or not self._pool.continues_with(at.step):
            from penstock.loader.workers import Pool

            self._end()
            self._pool = Pool(at.recipe, at.core.begin_of(0), at.step, end)

    def _end(self) -> None:
        self._core.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            self._totals.note_spent(list(pool.spent.values()))
            self._totals.read = sums(self._totals.read, *pool.read.values())

    def _as_output(self, batch: Batch) -> Batch:
        if self.options.output != "numpy" and self.recipe.stages.has_functions:
            check_masks(batch)
        if self.options.output == "torch":
            from penstock.torch import tensors

            return tensors(batch, self._images)
        if self.options.output == "jax":
            from penstock.jax import arrays

            return arrays(batch)
        return batch

    def vocabulary(self, column: str) -> list[str]:
        """List the words of a label or category column in the order of its codes in batches. With several sources, these are the words of the
        first one, then others.

        >>> import penstock as ps
        >>> ds = ps.create("memory://loader-words", {"label": ps.Label(["cat", "dog"])})
        >>> ds.loader(batch_size=1).vocabulary("label")
        ['cat', 'dog']
        """
        return union_of([source.view.vocabulary(column) for source in self.recipe.sources])[0]

    # State

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: the number of epochs that are behind it, also after `load_state_dict`.

        >>> import penstock as ps
        >>> ds = ps.create("memory://epoch", {"n": "int64"})
        >>> receipt = ds.append({"n": range(4)})
        >>> loader = ds.loader(batch_size=2)
        >>> [(loader.epoch, len(list(loader))) for _ in range(2)], loader.epoch
        ([(0, 2), (1, 2)], 2)
        """
        return int(self._position.core.begin_of(self._position.step)[0])

    def state_dict(self, step: int | None = None, *, delivered: bool = True) -> dict[str, Any]:
        """Return the loader state, now or at `step` (counted from the start of epoch 0). It takes a few hundred bytes as JSON.

        A state counts the batches that were delivered. With `delivered=False`, it leaves out the batch that your loop still has in hand: the
        last one, until the loop asks for the next. Save that state when an exception or Ctrl-C ends the loop in mid-step.
        The state is the same on all ranks and does not depend on batches prepared in advance. Cost: no reads.

        >>> import penstock as ps
        >>> ds = ps.create("memory://in-hand", {"n": "int64"})
        >>> receipt = ds.append({"n": range(6)})
        >>> loader = ds.loader(batch_size=2)
        >>> batch = next(iter(loader))
        >>> loader.state_dict()["draw"], loader.state_dict(delivered=False)["draw"]
        (2, 0)
        """
        at = self._position
        if step is None:
            epoch, draw = at.core.begin_of(at.step - (at.in_hand and not delivered))
        elif not delivered:
            raise InvalidInputError(f"step={step} with delivered=False: expected only one of them")
        else:
            epoch, draw = at.core.begin_of_number(whole(step, "step", 0))
        return {**at.recipe.state(), "epoch": epoch, "draw": draw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. The samples that follow, and their order, do not depend on ranks, threads or budgets.

        The state's snapshot, seed and order replace those of this loader. This loader's options determine how samples form batches.
        Cost: opens the state's snapshot if it differs from this loader's. Raises: InvalidInputError for a different dataset or selection,
        NotFoundError if the snapshot no longer exists.
        """
        recipe, (epoch, draw) = self.recipe.loaded(state)
        core = recipe.open((epoch, draw))
        if draw > core.epoch_samples:
            raise InvalidInputError(f"this is not a loader state: draw {draw} is beyond the {core.epoch_samples} samples of an epoch")
        self._keep(recipe)
        self._move(Position(recipe, core, (epoch, draw)))

    def batch_at(self, step: int) -> Batch:
        """Make the batch of a step, counted from the start of epoch 0, without advancing the loader. Useful for inspecting a loss spike."""
        at = self._position
        base = at.core.begin_of_number(whole(step, "step", 0))
        given = None
        if len(self):
            with contextlib.closing(at.recipe.open(base)) as core:
                core.start(0, 1)
                given = core.next()
        if given is None:
            raise InvalidInputError("the loader has no batches")
        return self._as_output(at.recipe.finished(core, *given))

    def _agree(self) -> None:
        """Check that all ranks are about to read the same data."""
        self._agreed = True
        recipe = self.recipe
        state = {
            **self.state_dict(), "step": self._position.step, "transform": recipe.stages.declared, "outputs": recipe.outputs,
            "decode": recipe.settings.decode, "on_corrupt": recipe.settings.on_corrupt, "functions": recipe.stages.names(),
            "nulls": {name: repr(value) for name, value in recipe.stages.nulls.items()},
        }  # fmt: skip
        agree(self.world_size, self.rank, hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest(), state)

    # Reporting

    def _read(self) -> dict[str, int]:
        """Return counts of storage operations since this loader was made, including those of workers."""
        here = {name: value - self._read_before.get(name, 0) for name, value in self.recipe.counted().items()}
        pools = self._pool.read.values() if self._pool else ()
        return {name: value for name, value in sums(here, self._totals.read, *pools).items() if value}

    def stats(self, step_seconds: float | None = None) -> dict[str, Any]:
        """Return statistics since this loader was made. Python workers report their statistics with each batch.

        `seconds`: total time spent iterating. It includes your own work between batches, but not the time to start threads and workers.
        `samples_per_second`, `bytes_per_second`: rates over `seconds`. `waiting_seconds`: time spent waiting for batches; `stall`: that
        time as a share of `seconds`. `stages`: thread seconds by stage; `occupancy`: their share of the threads' total time.
        `function_seconds`: time spent in your functions, summed over all processes. `kept_bytes`: size of batches that you still hold.
        `peak_bytes`: the peak memory used and reserved for batches prepared in advance, for windows, and for what is kept for later batches. `read`: storage operations.
        `refused`: damaged samples. `accelerator_utilisation`, given `step_seconds`: the utilisation of an accelerator with that step time.
        """
        pools = self._pool.spent.values() if self._pool else ()
        counts = sums(self._totals.spent, self._core.stats(), *pools)
        functions = self.recipe.stages.seconds + counts.get("function_ns", 0) / 1e9
        processes = max(1, self.recipe.processes)
        threads = processes * max(1, self.options.settings.threads // processes)
        return {**self._totals.stats(counts, functions, processes, threads, step_seconds), "read": self._read()}

    def explain(self) -> str:
        """Describe the cost of an epoch and how well it is shuffled. Cost: plans up to 131,072 draws, and reads the tails of their data files."""
        return "\n".join(f"{what:<16}{text}" for what, text in explained(self).items())

    def ceiling(self) -> Iterator[Batch]:
        """Yield the first batch of epoch 0 once per step of an epoch, to measure the speed of training without loading.

        Every batch is the same object, so changes to it persist.
        """
        batch = self.batch_at(0)
        for _ in range(len(self)):
            yield batch

    def close(self) -> None:
        """Stop all threads and workers of this loader. The loader can be iterated again afterwards. Repeated calls are harmless."""
        self._turns.end()
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise unpicklable("a Loader", "make one where you need it, and pass its state: loader.state_dict()")

    def __repr__(self) -> str:
        return f"<penstock.Loader of {', '.join(source.view.uri for source in self.recipe.sources)}: {len(self)} batches of {self.global_batch_size}>"
