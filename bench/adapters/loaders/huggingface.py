"""Hugging Face datasets: an Arrow file on disk, mapped into memory, with a transform for each batch or sample."""
# /// script
# dependencies = ["datasets==5.2.0", "pyarrow==26.0.1", "torch==2.15.0", "torchvision==0.29.2", "numpy==2.4.6", "pillow==13.0.0"]
# ///

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import crops
import datasets
import drawn
import torch


def photos_write(o: Any) -> Any:
    def rows() -> Iterator[dict[str, Any]]:
        for path in drawn.photographs(o):
            yield {"image": path.read_bytes()}

    def turn() -> int:
        features = datasets.Features({"image": datasets.Value("large_binary")})
        made = datasets.Dataset.from_generator(rows, features=features, cache_dir=f"{o.place}/huggingface-cache")
        made.save_to_disk(f"{o.place}/huggingface")
        shutil.rmtree(f"{o.place}/huggingface-cache")
        return len(made)

    return turn


def photos(o: Any) -> Any:
    torch.set_num_threads(1)
    decode = crops.of_bytes(o.path)
    rows = datasets.load_from_disk(f"{o.place}/huggingface").select_columns("image")
    rows.set_transform(lambda batch: {"image": [decode(body) for body in batch["image"]]})
    loader = torch.utils.data.DataLoader(
        rows,
        o.batch,
        shuffle=True,
        num_workers=o.threads,
        persistent_workers=True,
        collate_fn=lambda found: torch.utils.data.default_collate([row["image"] for row in found]),
    )
    return lambda: loader


def text_write(o: Any) -> Any:
    def turn() -> int:
        texts, labels = drawn.texts(o)
        datasets.Dataset.from_dict({"text": texts, "label": labels}).save_to_disk(f"{o.place}/huggingface")
        return len(texts)

    return turn


def text(o: Any) -> Any:
    rows = datasets.load_from_disk(f"{o.place}/huggingface").with_format("arrow")

    def turn() -> Any:
        for wanted in drawn.random_rows(o, len(rows)):
            found = rows[wanted]
            yield {"text": found["text"].to_pylist(), "label": found["label"].to_numpy().copy()}

    return turn
