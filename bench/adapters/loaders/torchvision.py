"""torchvision with a DataLoader whose workers persist."""
# /// script
# dependencies = ["torch==2.15.0", "torchvision==0.29.2", "numpy==2.4.6", "pillow==13.0.0"]
# ///

from __future__ import annotations

import pathlib
from typing import Any

import crops
import serving
import torch


class Photos(torch.utils.data.Dataset[Any]):
    def __init__(self, source: str, path: str) -> None:
        self.files, self.augment = sorted(pathlib.Path(source).rglob("*.jpg")), crops.of_bytes(path)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.augment(self.files[index].read_bytes())


def photos(o: Any) -> Any:
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(Photos(o.source, o.path), o.batch, shuffle=True, num_workers=o.threads, persistent_workers=True)
    return lambda: loader


if __name__ == "__main__":
    serving.serve(globals())
