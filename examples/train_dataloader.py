"""Migrate from a DataLoader step by step: `python examples/train_dataloader.py FOLDER`.

1. A folder of images with torchvision.  2. The same DataLoader on a Penstock dataset, with our sampler, which can resume.
3. `ds.loader`: the same samples without worker processes, decoded and augmented in the core.
"""

import pathlib
import sys
import tempfile
import time

import numpy as np
import penstock as ps
import torch
from penstock import transforms as T
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

BATCH = 32


def photographs(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(256):
        place = folder / ("stripes" if number % 2 else "spots")
        place.mkdir(parents=True, exist_ok=True)
        y, x = np.mgrid[0:240, 0:320]
        wave = np.sin(x / rng.uniform(4, 9)) if number % 2 else np.sin(x / rng.uniform(4, 9)) * np.sin(y / rng.uniform(4, 9))
        Image.fromarray((128 + 90 * wave[..., None] + rng.normal(0, 9, (240, 320, 3))).clip(0, 255).astype(np.uint8)).save(
            place / f"{number}.jpg", quality=92
        )


def timed(name: str, batches) -> None:
    began, seen = time.perf_counter(), 0
    for images, labels in batches:
        assert images.shape[1:] == (3, 160, 160) and len(images) == len(labels)
        seen += len(labels)
    print(f"{name}: {seen} images, {seen / (time.perf_counter() - began):,.0f}/s")


def main(folder: pathlib.Path) -> None:
    photographs(folder / "photographs")
    augment = v2.Compose([v2.RandomResizedCrop(160), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    before = torch.utils.data.DataLoader(datasets.ImageFolder(folder / "photographs", augment), batch_size=BATCH, shuffle=True)
    timed("1. ImageFolder + DataLoader", before)

    ps.importers.import_data(folder / "photographs", folder / "dataset")  # Needed only once; or run: penstock import photographs dataset
    ds = ps.open(folder / "dataset")
    keep = v2.Compose([v2.RandomResizedCrop(160), v2.RandomHorizontalFlip()])

    def collate(samples):
        batch = ps.torch.collate(samples)
        return torch.stack([keep(image) for image in batch["image"]]), batch["label"]

    sampler = ps.torch.Sampler(ds, batch_size=BATCH, seed=0)
    moving = torch.utils.data.DataLoader(ds.torch(["image", "label"]), batch_size=BATCH, sampler=sampler, collate_fn=collate)
    timed("2. the same DataLoader, our dataset and order", moving)
    state = sampler.state_dict(batches=5)  # The state to store in a checkpoint after 5 batches.

    loader = ds.loader(
        batch_size=BATCH, shuffle=True, seed=0, columns=["image", "label"], output="torch",
        transform=[T.RandomResizedCrop(160), T.RandomHorizontalFlip()],
    )  # fmt: skip
    timed("3. ds.loader", ((batch["image"], batch["label"]) for batch in loader.stream(1)))
    loader.load_state_dict(state)
    assert sum(len(batch["label"]) for batch in loader.stream(1)) == len(ds) - 5 * BATCH
    print("done: the state from step 2 was resumed in step 3")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
