"""Loaders inside the workers of a torch DataLoader: refused if each worker would deliver every sample again."""

from __future__ import annotations

import penstock as ps
import pytest
import torch

pytestmark = pytest.mark.local


class Stream(torch.utils.data.IterableDataset):
    """A loader wrapped for a DataLoader, as users write it. `where` says where the loader is made."""

    def __init__(self, uri, options, shared=None, share=False):
        self.uri, self.options, self.loader, self.share = uri, options, shared, share

    def __iter__(self):
        options, worker = dict(self.options), torch.utils.data.get_worker_info()
        if self.share and worker is not None:
            options |= {"rank": worker.id, "world_size": worker.num_workers}
        loader = self.loader if self.loader is not None else ps.open(self.uri).loader(**options)
        for batch in loader.stream(1):
            yield batch["n"].tolist()


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "dataset", {"n": "int64"})
    made.append({"n": range(40)})
    return made


def delivered(stream, workers, **options):
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers, **options)
    return sorted(number for batch in loader for number in batch)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("made", ["in the worker", "before the fork"])
def test_a_loader_in_several_workers_is_refused(ds, workers, made):
    shared = ds.loader(batch_size=8) if made == "before the fork" else None
    with pytest.raises(ps.InvalidInputError, match=f"one of {workers} workers of a DataLoader") as caught:
        delivered(Stream(ds.uri, {"batch_size": 8}, shared), workers)
    assert "leave out the DataLoader" in str(caught.value) and "ps.torch.Sampler" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("made", ["in the worker", "before the fork"])
def test_a_loader_in_one_worker_delivers_each_sample_once(ds, workers, made):
    shared = ds.loader(batch_size=8, shuffle=True) if made == "before the fork" else None
    assert delivered(Stream(ds.uri, {"batch_size": 8, "shuffle": True}, shared), workers) == list(range(40))


@pytest.mark.long
def test_one_worker_runs_functions_in_processes(ds):
    assert delivered(Stream(ds.uri, {"batch_size": 8, "transform": [unchanged], "python_workers": 2}), 1) == list(range(40))


def unchanged(sample):
    return sample


@pytest.mark.parametrize("workers", [2, 4])
def test_loaders_whose_ranks_count_the_workers_share_the_samples(ds, workers):
    assert delivered(Stream(ds.uri, {"batch_size": 2}, share=True), workers) == list(range(40))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_do_not_count_the_workers_are_refused(ds, world_size):
    """Both workers of this rank would read the same share."""
    with pytest.raises(ps.InvalidInputError, match="one of 2 workers"):
        delivered(Stream(ds.uri, {"batch_size": 2, "rank": 1, "world_size": world_size}), 2)


def test_a_loader_in_a_spawned_worker_is_refused_with_a_hint(ds):
    with pytest.raises(ps.InvalidInputError, match="cannot pickle or copy a Loader") as caught:
        delivered(Stream(ds.uri, {}, ds.loader(batch_size=8)), 2, multiprocessing_context="spawn")
    assert "state_dict" in str(caught.value)
