"""Two processes train one model: `torchrun --nproc-per-node=2 examples/train_torchrun.py FOLDER`.

If started without torchrun, the script restarts itself under torchrun. All ranks share one order. Checkpoints do not depend on the number
of ranks: the second half of this run loads the state of the first half and resumes with fewer samples per rank.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import penstock as ps
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits


def main(folder: pathlib.Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and not (folder / "digits").exists():
        data = load_digits()
        ds = ps.create(folder / "digits", {"x": ps.Tensor((8, 8), "float32"), "label": "int64"})
        ds.append({"x": (data.images / 16).astype(np.float32), "label": data.target})
    dist.barrier()
    ds = ps.open(folder / "digits")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    loader = ds.loader(global_batch_size=120, shuffle=True, seed=1, output="torch")  # Rank and world size come from torchrun.
    assert loader.world_size == dist.get_world_size()

    def train(batches):
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return loss.item()

    train(loader.stream(3))
    resumed = ds.loader(global_batch_size=90, shuffle=True, output="torch")
    resumed.load_state_dict(loader.state_dict())  # A few hundred bytes, identical on all ranks: store it in the checkpoint.
    loss = train(resumed.stream(8))
    if rank == 0:
        [batch] = ds.loader(batch_size=len(ds), output="torch", rank=0, world_size=1)
        right = (model.module(batch["x"]).argmax(1) == batch["label"]).float().mean().item()
        print(f"done: loss {loss:.3f}, {right:.1%} of the digits correct", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if "RANK" in os.environ:
        sys.exit(main(folder))
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    sys.exit(subprocess.run([*run, __file__, str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
