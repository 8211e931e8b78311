"""Train with accelerate: `accelerate launch examples/train_accelerate.py FOLDER`, or `python examples/train_accelerate.py FOLDER`.

The loader divides batches among processes itself, so only the model and the optimiser are prepared.
"""

import itertools
import pathlib
import sys
import tempfile

import numpy as np
import penstock as ps
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits


def main(folder: pathlib.Path) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    if accelerator.is_main_process:
        data = load_digits()
        ds = ps.create(folder / "digits", {"x": ps.Tensor((8, 8), "float32"), "label": "int64"})
        ds.append({"x": (data.images / 16).astype(np.float32), "label": data.target})
    accelerator.wait_for_everyone()
    parts = ps.open(folder / "digits").split({"train": 0.8, "test": 0.2}, seed=0, by="label")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model, optimiser = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    loader = parts["train"].loader(
        global_batch_size=64, shuffle=True, seed=0, output="torch", rank=accelerator.process_index, world_size=accelerator.num_processes
    )
    accelerator.register_for_checkpointing(loader)  # `save_state` and `load_state` include the loader's position.

    def train(batches) -> None:
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["x"].to(accelerator.device)), batch["label"].to(accelerator.device))
            optimiser.zero_grad()
            accelerator.backward(loss)
            optimiser.step()

    train(itertools.islice(loader.stream(), 30))
    accelerator.save_state(folder / "checkpoint")
    there = loader.state_dict()
    train(itertools.islice(loader.stream(), 5))
    accelerator.load_state(folder / "checkpoint")
    assert loader.state_dict() == there, "back at step 30"
    train(loader.stream(12))
    [test] = parts["test"].loader(batch_size=len(parts["test"]), output="torch", rank=0, world_size=1)
    with torch.no_grad():
        right = (model(test["x"]).argmax(1) == test["label"]).float().mean().item()
    accelerator.print(f"done: {right:.1%} of the test digits correct")
    assert right > 0.9


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
