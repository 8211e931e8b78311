"""The loader in training: ragged inputs, DataLoader with our sampler, Python workers, files loaded in place, PyTorch, and examples."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import penstock as ps
import psutil
import pytest
from penstock import transforms as T
from PIL import Image

pytestmark = pytest.mark.local  # These tests create their own datasets, so one store is enough.
EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "dataset", {"x": ps.Tensor((4,), "float32"), "number": "int64", "tokens": ps.Tensor((None,), "int64")})
    made.append(
        {"x": np.arange(4000, dtype=np.float32).reshape(1000, 4), "number": range(1000), "tokens": [range(n % 7) for n in range(1000)]}
    )
    return made


# Python workers need functions defined at module level.
def scaled(sample, rng):
    return {"number": sample["number"], "x": sample["x"] * rng.random(), "large": np.full(2000, sample["number"], np.float32)}


def fails(sample, rng):
    if sample["number"] == 500:
        raise ValueError("five hundred")
    return sample


def dies(sample, rng):
    os.kill(os.getpid(), signal.SIGKILL)


def same(one, other):
    for a, b in zip(one, other, strict=True):
        assert list(a) == list(b) and all((a[name] == b[name]).all() for name in a)


def test_processes_give_what_threads_give(ds):
    options = {"batch_size": 64, "shuffle": True, "seed": 4, "columns": ["x", "number"], "transform": [scaled]}
    here, there = ds.loader(**options), ds.loader(**options, python_workers=2)
    same(here.stream(2), there.stream(2))
    state = here.state_dict(step=5)
    here.load_state_dict(state)
    there.load_state_dict(state)
    same(here.stream(1), there.stream(1))
    batch = next(iter(there))
    batch["large"][:] = 1  # The consumer owns the memory.
    there.close()
    assert there.stats()["samples"] > 2000
    assert not [child for child in psutil.Process().children() if "penstock.loader.workers" in " ".join(child.cmdline())]


def test_errors_of_processes_come_through(ds):
    with pytest.raises(ValueError, match="five hundred") as caught:
        list(ds.loader(batch_size=100, columns=["number"], transform=[fails], python_workers=2))
    assert "for sample 500" in "".join(caught.value.__notes__)
    with pytest.raises(ps.InternalError, match="exit code -9"):
        list(ds.loader(batch_size=100, columns=["number"], transform=[dies], python_workers=1))
    assert not [child for child in psutil.Process().children() if "penstock.loader.workers" in " ".join(child.cmdline())]


def test_a_worker_killed_with_unread_messages_is_named(ds):
    loader = ds.loader(batch_size=1, columns=["x", "number"], transform=[scaled], python_workers=1)  # Each batch is sent in a single write.
    batches = iter(loader)
    next(batches)
    assert loader._pool.workers[0][1].poll(60), "the second batch is in the pipe"
    [worker] = [child for child in psutil.Process().children() if "penstock.loader.workers" in " ".join(child.cmdline())]
    worker.suspend()
    next(batches)  # The suspended worker never reads the message about free space, so the kernel resets the connection.
    worker.kill()
    with pytest.raises(ps.InternalError, match="exit code -9") as caught:
        list(batches)
    assert "out-of-memory" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_with_our_sampler_gives_our_order(ds, workers):
    import torch  # Not at the top: Python workers import this module, and torch takes two seconds.

    def run(rank, world, state=None, batches=None):
        sampler = ps.torch.Sampler(ds, batch_size=30, seed=3, rank=rank, world_size=world)
        if state:
            sampler.load_state_dict(state)
        loader = torch.utils.data.DataLoader(
            ds.torch(["number"]), batch_size=30, sampler=sampler, collate_fn=ps.torch.collate, num_workers=workers
        )
        seen = []
        for _ in range(2):
            for batch in loader:
                seen.append(batch["number"].tolist())
                if batches and len(seen) == batches:
                    return seen, sampler.state_dict(batches=batches)
        return seen, len(sampler)

    for world in (1, 2):
        for rank in range(world):
            ours = ds.loader(batch_size=30, shuffle=True, seed=3, rank=rank, world_size=world, columns=["number"])
            expected = [batch["number"].tolist() for batch in ours.stream(2)]
            seen, length = run(rank, world)
            assert seen == expected and length == sum(map(len, expected)) // 2
            some, state = run(rank, world, batches=7)
            assert some + run(rank, world, state)[0][: len(expected) - 7] == expected


def test_ragged_values_become_what_models_want(ds):
    import torch

    batch = next(iter(ds.loader(batch_size=8, columns=["tokens"])))["tokens"]
    padded = batch.to_padded(-1, multiple_of=4)
    assert padded.values.shape == (8, 8) and padded.mask.sum() == sum(range(7))
    assert [row[mask].tolist() for row, mask in zip(padded.values, padded.mask, strict=True)] == [item.tolist() for item in batch]
    assert batch.cu_seqlens.tolist() == [0, 0, 1, 3, 6, 10, 15, 21, 21] and batch.cu_seqlens.dtype == np.int32
    tensors = next(iter(ds.loader(batch_size=8, columns=["tokens"], output="torch")))["tokens"]
    nested = tensors.to_nested()
    assert nested.layout == torch.jagged and [item.tolist() for item in nested.unbind()] == [item.tolist() for item in batch]
    assert isinstance(tensors.to_padded().values, torch.Tensor) and tensors.cu_seqlens.dtype == torch.int32
    boxes = ps.Ragged.from_arrays([np.ones((2, 3), "float32"), np.zeros((0, 3), "float32"), np.full((1, 3), 2, "float32")])
    values, mask = boxes.to_padded(9)
    assert values.shape == (3, 2, 3) and mask.tolist() == [[True, True], [False, False], [True, False]] and (values[1] == 9).all()
    maps = ps.Ragged.from_arrays([np.ones((2, 3)), np.ones((1, 5))])
    assert maps.to_padded(multiple_of=2).values.shape == (2, 2, 6) and maps.cu_seqlens.tolist() == [0, 2, 3]


def test_npy_files_are_loaded_in_place(tmp_path):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(20, 40, 50)).astype(np.float32)
    for number, array in enumerate(arrays):
        (tmp_path / f"class{number % 2}").mkdir(exist_ok=True)
        np.save(tmp_path / f"class{number % 2}" / f"{number:02}.npy", array)
    for io in ("auto", "direct", "buffered"):
        files = ps.files(tmp_path / "**" / "*.npy", io=io)
        loader = files.loader(batch_size=6, shuffle=True, seed=1, transform=[T.CenterCrop((40, 50), on="array")])
        seen = []
        for batch in loader.stream(1):
            for array, path, label in zip(batch["array"], batch["path"], batch["label"], strict=True):
                number = int(pathlib.Path(path).stem)
                assert (array == arrays[number]).all() and files.labels[label] == f"class{number % 2}"
                seen.append(number)
        assert sorted(seen) == list(range(20))
    again = ps.files(tmp_path / "**" / "*.npy").loader(batch_size=6)
    again.load_state_dict(loader.state_dict(step=2))
    assert [int(pathlib.Path(path).stem) for batch in again for path in batch["path"]] == seen[12:]
    np.save(tmp_path / "class0" / "00.npy", arrays[0][:30])
    ragged = ps.files(tmp_path / "class0" / "*.npy").loader(batch_size=10)
    assert next(iter(ragged))["array"][0].shape == (30, 50)
    with pytest.raises(ps.InvalidInputError, match="cannot load the state"):
        ps.files(tmp_path / "**" / "*.npy").loader(batch_size=6).load_state_dict(loader.state_dict())
    listed = ps.files(tmp_path / "class1" / "*.npy")
    np.save(tmp_path / "class1" / "01.npy", arrays[0][:3])
    with pytest.raises(ps.CorruptError, match=r"as listed|bytes"):
        list(listed.loader(batch_size=2))


def test_image_files_are_loaded_in_place_and_bad_patterns_are_refused(tmp_path):
    for number in range(6):
        Image.fromarray(np.full((20 + number, 30, 3), number * 40, np.uint8)).save(tmp_path / f"{number}.png")
    loader = ps.files(tmp_path / "*.png").loader(batch_size=3, transform=[T.Resize((8, 8))])
    images = np.concatenate([batch["image"] for batch in loader])
    assert images.shape == (6, 8, 8, 3) and images[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160, 200]
    with pytest.raises(ps.NotFoundError, match="no files match"):
        ps.files(tmp_path / "*.npy")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ps.InvalidInputError, match=r"\.png, \.txt"):
        ps.files(tmp_path / "*")
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.save(tmp_path / "b.npy", np.zeros(3, np.int32))
    with pytest.raises(ps.InvalidInputError, match="int32"):
        ps.files(tmp_path / "*.npy")
    with pytest.raises(ps.UnsupportedError, match="penstock import"):
        ps.files(tmp_path / "*.png")[0]
    (tmp_path / "c.npy").write_bytes(b"no array")
    with pytest.raises(ps.InvalidInputError, match=r"c\.npy"):
        ps.files(tmp_path / "c.npy")


def test_torch_batches_are_tensors_without_a_copy(ds):
    import torch

    batch = next(iter(ds.loader(batch_size=16, shuffle=True, output="torch")))
    assert batch["x"].dtype == torch.float32 and batch["number"].dtype == torch.int64 and batch["x"].is_contiguous()
    batch["x"].mul_(2)


@pytest.mark.long
@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("train_*.py")))
def test_examples_run(script, tmp_path):
    most = 73 if script == "train_dataloader.py" else 60
    assert len((EXAMPLES / script).read_text().splitlines()) <= most
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done = subprocess.run([sys.executable, EXAMPLES / script, str(folder)], capture_output=True, text=True, timeout=300)
        # DDP leaves threads of gloo running, which rarely abort a process that has finished: github.com/pytorch/pytorch/pull/179291.
        if not (script == "train_torchrun.py" and "terminate called without an active exception" in done.stderr):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout


RANKS = """
import json, os, sys
import numpy as np, torch.distributed as dist
import penstock as ps
dist.init_process_group("gloo")
ds = ps.open(sys.argv[1])
loader = ds.loader(global_batch_size=60, shuffle=True, seed=int(sys.argv[2].split(",")[dist.get_rank()]), columns=["number"],
    **({"rank": 0, "world_size": 2} if "one-rank" in sys.argv else {}))
assert "one-rank" in sys.argv or (loader.rank, loader.world_size) == (dist.get_rank(), 2)
with open(f"{sys.argv[3]}/{dist.get_rank()}", "w") as out:
    json.dump([batch["number"].tolist() for batch in loader.stream(1)], out)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_torchrun_with_two_processes_gives_the_same_steps_and_checks_that_they_agree(ds, tmp_path):
    import json

    (tmp_path / "ranks.py").write_text(textwrap.dedent(RANKS))

    def run(seeds, *more):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-addr=127.0.0.1",
            "--master-port=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
        ]
        return subprocess.run(
            [*command, tmp_path / "ranks.py", ds.uri, seeds, str(tmp_path), *more], capture_output=True, text=True, timeout=300
        )

    done = run("5,5")
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    whole = [
        batch["number"].tolist()
        for batch in ds.loader(global_batch_size=60, shuffle=True, seed=5, columns=["number"], rank=0, world_size=1).stream(1)
    ]
    for one, two, both in zip(*ranks, whole, strict=True):
        assert one[: len(both) - len(both) // 2] + two == both or one + two == both
    wrong = run("5,6")
    assert wrong.returncode != 0 and "seed: 5 on rank 0, 6 on rank 1" in wrong.stderr
    twice = run("5,5", "one-rank")
    assert twice.returncode != 0 and "have ranks [0, 0]" in twice.stderr
