"""Train with Lightning: `python examples/train_lightning.py FOLDER`. A data module puts the loader's state into the checkpoint."""

import pathlib
import sys
import tempfile

import lightning
import numpy as np
import penstock as ps
import torch
from sklearn.datasets import load_digits


class Digits(lightning.LightningDataModule):
    def __init__(self, ds: ps.Dataset) -> None:
        super().__init__()
        parts = ds.split({"train": 0.8, "test": 0.2}, seed=0, by="label")
        self.train = parts["train"].loader(batch_size=64, shuffle=True, seed=0, columns=["x", "label", "_row_id"], output="torch")
        self.test = parts["test"].loader(batch_size=64, output="torch")
        self.train_dataloader, self.val_dataloader = lambda: self.train, lambda: self.test
        self.state_dict, self.load_state_dict = self.train.state_dict, self.train.load_state_dict


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.seen: list[int] = []

    def training_step(self, batch, _):
        self.seen += batch["_row_id"].tolist()
        return torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["label"])

    def validation_step(self, batch, _):
        self.log("right", (self.model(batch["x"]).argmax(1) == batch["label"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def main(folder: pathlib.Path) -> None:
    data = load_digits()
    ds = ps.create(folder / "digits", {"x": ps.Tensor((8, 8), "float32"), "label": "int64"})
    ds.append({"x": (data.images / 16).astype(np.float32), "label": data.target})
    seen = []
    for epochs, checkpoint in ((2, None), (4, folder / "model.ckpt")):  # The second run continues with the third epoch, in its own order.
        trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, logger=False, default_root_dir=folder)
        model = Classifier()
        trainer.fit(model, datamodule=Digits(ds), ckpt_path=checkpoint)
        trainer.save_checkpoint(folder / "model.ckpt")
        seen += np.array(model.seen).reshape(2, -1).tolist()
    assert len({tuple(epoch) for epoch in seen}) == 4 and len({tuple(sorted(epoch)) for epoch in seen}) == 1
    print(f"done: {trainer.callback_metrics['right']:.1%} of the test digits correct")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
