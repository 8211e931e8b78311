"""Train with the Trainer of Hugging Face: `python examples/train_trainer.py FOLDER`. It gets our loader instead of a DataLoader."""

import pathlib
import sys
import tempfile

import numpy as np
import penstock as ps
import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments

COLUMNS = {"x": "x", "labels": "label"}  # The model's arguments, and the columns that they come from.


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, x, labels):
        logits = self.model(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class LoaderTrainer(Trainer):
    """The arguments `train_dataset` and `eval_dataset` are views. Our loaders read them, at the batch sizes of the arguments."""

    def get_train_dataloader(self):
        size, seed = self.args.train_batch_size, self.args.seed
        return self.train_dataset.loader(batch_size=size, shuffle=True, seed=seed, outputs=COLUMNS, output="torch")

    def get_eval_dataloader(self, eval_dataset=None):
        view = self.eval_dataset if eval_dataset is None else eval_dataset
        return view.loader(batch_size=self.args.eval_batch_size, outputs=COLUMNS, output="torch")


def accuracy(found) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main(folder: pathlib.Path) -> None:
    data = load_digits()
    ds = ps.create(folder / "digits", {"x": ps.Tensor((8, 8), "float32"), "label": "int64"})
    ds.append({"x": (data.images / 16).astype(np.float32), "label": data.target})
    parts = ds.split({"train": 0.8, "test": 0.2}, seed=0, by="label")
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(folder / "run", per_device_train_batch_size=64, num_train_epochs=5, learning_rate=1e-2, **options)
    views = {"train_dataset": parts["train"], "eval_dataset": parts["test"]}
    trainer = LoaderTrainer(Classifier(), arguments, **views, compute_metrics=accuracy)
    trainer.train()
    right = trainer.evaluate()["eval_right"]
    print(f"done: {right:.1%} of the test digits correct")
    assert right > 0.9


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
