"""A plain training loop that stops and resumes: `python examples/train_loop.py FOLDER`."""

import itertools
import pathlib
import sys
import tempfile

import numpy as np
import penstock as ps
import torch
from sklearn.datasets import load_digits


def digits(folder: pathlib.Path) -> ps.Dataset:
    data = load_digits()
    ds = ps.create(folder / "digits", {"x": ps.Tensor((8, 8), "float32"), "label": "int64"})
    ds.append({"x": (data.images / 16).astype(np.float32), "label": data.target})
    return ds


def main(folder: pathlib.Path) -> None:
    torch.manual_seed(0)
    parts = digits(folder).split({"train": 0.8, "test": 0.2}, seed=0, by="label")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    loader = parts["train"].loader(batch_size=64, shuffle=True, seed=0, output="torch")

    def train(batches) -> float:
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return loss.item()

    train(itertools.islice(loader.stream(), 30))  # 23 steps are an epoch.
    # The checkpoint of a training run: the loader's state is a small dict of plain values.
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "loader": loader.state_dict()}, folder / "checkpoint.pt")
    found = torch.load(folder / "checkpoint.pt", weights_only=False)
    model.load_state_dict(found["model"])
    optimiser.load_state_dict(found["optimiser"])
    loader.load_state_dict(found["loader"])  # Continues with the next batch, in the middle of the second epoch.
    loss = train(loader.stream(12))
    [test] = parts["test"].loader(batch_size=len(parts["test"]), output="torch")
    with torch.no_grad():
        right = (model(test["x"]).argmax(1) == test["label"]).float().mean().item()
    print(f"done: loss {loss:.3f}, {right:.1%} of {len(test['label'])} test digits correct")
    assert right > 0.9


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
