"""One iteration over a loader: from the turn that it takes to its last batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import ClosedError
from penstock.loader.position import this_thread
from penstock.loader.ranks import check_worker
from penstock.loader.report import Line
from penstock.views.readable import Batch

if TYPE_CHECKING:
    from penstock.loader.loader import Loader


class Iteration:
    """An iteration of some epochs, or endless if `epochs` is None. With `beyond`, the engine also prepares batches of the epoch that follows."""

    def __init__(self, loader: Loader, epochs: int | None, beyond: bool) -> None:
        self.loader, self.turns, self.epochs, self.beyond = loader, loader._turns, epochs, beyond

    def batches(self) -> Iterator[Batch]:
        """Yield the batches. Nothing happens before the first one is requested."""
        if not len(self.loader) or self.epochs == 0 or not self._begin():
            return
        at, mark = self.at, time.perf_counter()
        line = Line(self.loader) if self.loader.options.progress else None
        try:
            while self.end is None or at.step < self.end:
                began = time.perf_counter()
                batch = self._next()
                now = time.perf_counter()
                self.loader._totals.note_times(now - began, now - mark)
                mark = now
                if line:
                    line.update()
                # A state must count exactly the batches that were delivered. Python switches threads and handles signals only at calls
                # and at the ends of loops, so neither can come between this comparison and `yield`.
                if self.turns.current == self.turn:
                    at.in_hand = True
                    at.step += 1
                    try:
                        yield batch
                    except GeneratorExit:
                        raise  # The consumer left its loop, and may not have finished with the batch.
                    except BaseException:
                        at.in_hand = False  # An interrupt on the way to the next batch.
                        raise
                    at.in_hand = False
                self.turns.check(self.turn)
            self.turns.check(self.turn)
        finally:
            if line:
                line.close()
            if self.turns.current == self.turn and not self.beyond:
                self.loader._end()

    def _begin(self) -> bool:
        """Take the turn, and start the engine at the current step. Returns whether there are batches."""
        loader, me = self.loader, this_thread()
        self.turns.inside[me] = True  # Ctrl-C cannot arrive between an assignment and `try`.
        try:
            self.turns.check_alone(me)
            check_worker(loader.rank, loader.world_size)
            if self._passes_what_is_left() and self.epochs is not None:
                self.epochs -= 1
                if not self.epochs:
                    return False
            at = self.at = loader._position
            if not at.resumes and at.step and at.core.end_of_epoch(at.step - 1) != at.step:
                at.step = at.core.end_of_epoch(at.step)  # The last iteration ended early.
            at.resumes = False
            self.turn = self.turns.begin()
            if loader._position is not at:
                self.turns.end()  # Another thread moved this loader meanwhile.
            self.turns.check(self.turn)
            self.end = None if self.epochs is None else at.core.end_of_epoch(at.step) + (self.epochs - 1) * len(loader)
            loader._start(at, 2**62 if self.beyond or self.end is None else self.end)
            if self.turns.current != self.turn:
                loader._end()  # Another thread closed this loader meanwhile.
            if not loader._agreed:
                loader._agree()
            self.turns.check(self.turn)
            return True
        finally:
            self.turns.inside.pop(me, None)

    def _passes_what_is_left(self) -> bool:
        """Skip the rest of the epoch if it has no batch left after the loaded state, and return whether it was skipped.

        The skipped part counts as an epoch without batches.
        """
        at = self.loader._position
        epoch, draw = at.base
        if at.step or not draw or at.core.first_steps:
            return False
        left = at.core.epoch_samples - draw
        warnings.warn(
            f"epoch {epoch} has {left} samples left after the loaded state, fewer than a batch of {self.loader.global_batch_size}: "
            'last_batch="drop" drops them, so this iteration has no batches',
            stacklevel=4,
        )
        self.loader.set_epoch(epoch + 1)
        return True

    def _next(self) -> Batch:
        """Wait for the next batch, and finish it."""
        loader, at, me = self.loader, self.at, this_thread()
        self.turns.inside[me] = True
        try:
            self.turns.check(self.turn)
            self.turns.check_alone(me)
            source = loader._pool if at.recipe.processes else at.core  # Another thread may close this loader at any time.
            given = None if source is None else source.next()
            if given is None:
                raise ClosedError("this loader was closed during iteration", code="loader-closed")
            batch, about = given
            if not at.recipe.processes:
                batch = at.recipe.finished(at.core, batch, about)
            if at.recipe.stages.has_functions:
                loader._made.check(batch, at.step)
            batch = loader._as_output(batch)
            loader._totals.note_batch(about)
            return batch
        finally:
            self.turns.inside.pop(me, None)
