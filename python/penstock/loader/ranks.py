"""Finds the rank of this process, and checks that all ranks are about to read the same data."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidInputError
from penstock.values.checks import whole


def ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the given rank and world size. If they are omitted, use those of torch.distributed or torchrun's environment, or assume a
    single process.
    """
    if (rank is None) != (world_size is None):
        raise InvalidInputError("expected both rank and world_size, or neither")
    if rank is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        try:
            rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        except ValueError as error:
            raise InvalidInputError(f"RANK and WORLD_SIZE in the environment: {error}") from error
    size = whole(world_size, "world_size", 1)
    if not 0 <= whole(rank, "rank", 0) < size:
        raise InvalidInputError(f"rank={rank} with world_size={size}: expected a rank from 0 to {size - 1}")
    return int(rank), size


def check_worker(rank: int, world_size: int) -> None:
    """Refuse a loader in one of several workers of a torch DataLoader, because each worker would deliver every sample again.

    A loader with rank = own_rank * num_workers + worker and world_size = all_ranks * num_workers delivers only this worker's share.
    """
    torch = sys.modules.get("torch.utils.data")
    worker = None if torch is None else torch.get_worker_info()
    if worker is None or worker.num_workers == 1 or (world_size % worker.num_workers == 0 and rank % worker.num_workers == worker.id):
        return
    raise InvalidInputError(
        f"cannot iterate over a loader in one of {worker.num_workers} workers of a DataLoader: each worker would deliver all samples again",
        hint="leave out the DataLoader: a loader decodes in threads, and python_workers= runs functions in processes; or use "
        "DataLoader(ds.torch(), sampler=ps.torch.Sampler(ds, batch_size=B)), or num_workers=1",
    )


def agree(world_size: int, rank: int, digest: str, state: Mapping[str, Any]) -> None:
    """If torch.distributed connects the ranks, check that all of them have the same digest. The error names the differences between
    their states.
    """
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is None
        or not distributed.is_available()
        or not distributed.is_initialized()
        or distributed.get_world_size() != world_size
    ):
        return
    all_of_them: list[Any] = [None] * world_size
    distributed.all_gather_object(all_of_them, (digest, state, rank))
    numbers = [number for *_, number in all_of_them]
    if sorted(numbers) != list(range(world_size)):
        raise InvalidInputError(
            f"ranks do not agree on their numbers: the loaders in processes 0 to {world_size - 1} have ranks {numbers}",
            hint="omit rank and world_size, or give each process its own rank",
        )
    for number, (theirs, other, _) in enumerate(all_of_them):
        if theirs != all_of_them[0][0]:
            first = all_of_them[0][1]
            differing = [name for name in state if other[name] != first[name]]
            text = "; ".join(f"{name}: {first[name]!r} on rank 0, {other[name]!r} on rank {number}" for name in differing)
            raise InvalidInputError(f"ranks do not agree on what to load: {text}")
