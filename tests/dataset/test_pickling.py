"""What may be pickled or copied: every public object does, or says in our words why not."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import penstock as ps
import pytest
from penstock import transforms as T

pytestmark = pytest.mark.local


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "dataset", {"n": "int64", "label": ps.Label(["cat", "dog"]), "r": ps.Tensor((None,), "int64")})
    made.append({"n": range(6), "label": [0, 1] * 3, "r": [[1], [2, 3]] * 3})
    return made


# Each object, and whether it can be pickled.
OBJECTS = {
    "Dataset": (lambda ds: ds, True),
    "View": (lambda ds: ds.select([3, 1]), True),
    "Column": (lambda ds: ds["n"], True),
    "Concat": (lambda ds: ps.concat([ds, ds.head(2)]), True),
    "Mix": (lambda ds: ps.mix({"a": ds, "b": (ds, 2)}), True),
    "Schema": (lambda ds: ds.schema, True),
    "Ragged": (lambda ds: ds.take([0, 1])["r"], True),
    "Sample": (lambda ds: ds[0], True),
    "Stage": (lambda ds: ds.stage({"n": [7], "label": [0], "r": [[1]]}), True),
    "Commit": (lambda ds: ds.log()[0], True),
    "Window": (lambda ds: ps.Window(bytes=100), True),
    "Replacement": (lambda ds: ps.Replacement(4), True),
    "Transform": (lambda ds: T.RandomCrop(3), True),
    "TorchDataset": (lambda ds: ds.torch(), True),
    "Loader": (lambda ds: ds.loader(batch_size=2), False),
    "Log": (lambda ds: ds.log(), False),
    "Sampler": (lambda ds: ps.torch.Sampler(ds, batch_size=2), False),
    "Transaction": (lambda ds: ds.transaction("a message"), False),
}
COPIES = {"pickle": lambda made: pickle.loads(pickle.dumps(made)), "deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("name", list(OBJECTS))
def test_every_object_is_pickled_and_copied_or_says_why_not(ds, name, how):
    make, works = OBJECTS[name]
    made = make(ds)
    if works:
        other = COPIES[how](made)
        assert type(other) is type(made)
        if hasattr(made, "__len__"):
            assert len(other) == len(made)
    else:
        with pytest.raises(ps.InvalidInputError, match=rf"(?i)cannot pickle (or copy )?a {name}") as caught:
            COPIES[how](made)
        assert caught.value.hint


def test_a_list_with_a_loader_says_why_it_cannot_be_copied(ds):
    with pytest.raises(ps.InvalidInputError, match="a Loader"):
        copy.deepcopy({"train": [ds.loader(batch_size=2)], "weights": np.zeros(3)})
