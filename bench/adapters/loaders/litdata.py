"""LitData: chunks of 64 MB, its JPEG serialiser, and a loader whose workers persist."""
# /// script
# dependencies = ["litdata==0.2.76", "torch==2.15.0", "torchvision==0.29.2", "numpy==2.4.6", "pillow==13.0.0"]
# ///

from __future__ import annotations

import itertools
import pathlib
import shutil
from typing import Any

import drawn
import litdata
from litdata.streaming import downloader
from torchvision.transforms import v2


def _photo(path: str) -> dict[str, Any]:
    from PIL import Image

    return {"image": Image.open(path)}  # The serialiser stores the bytes of the file.


def _body(path: str) -> dict[str, Any]:
    return {"image": pathlib.Path(path).read_bytes()}


def _row(text: str) -> dict[str, Any]:
    return {"text": text, "label": len(text) % 3}


class Photos(litdata.StreamingDataset):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.augment = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])

    def __getitem__(self, index: Any) -> Any:
        return self.augment(super().__getitem__(index)["image"])


class Bodies(litdata.StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> Any:
        return bytes(super().__getitem__(index)["image"])  # Workers cannot send views of mapped memory.


def photos_write(o: Any, stored: Any = _photo) -> Any:
    def turn() -> int:
        files = [str(path) for path in drawn.photographs(o)]
        litdata.optimize(stored, files, f"{o.place}/litdata", chunk_bytes="64MB", num_workers=o.threads, start_method="fork")
        return len(files)

    return turn


def ingest(o: Any) -> Any:
    return photos_write(o, _body)


def photos(o: Any) -> Any:
    loader = litdata.StreamingDataLoader(
        Photos(f"{o.place}/litdata", shuffle=True), batch_size=o.batch, num_workers=o.threads, persistent_workers=True
    )
    return lambda: loader


def text_write(o: Any) -> Any:
    def turn() -> int:
        texts = pathlib.Path(o.source).read_text().split("\n")
        litdata.optimize(_row, texts, f"{o.place}/litdata", chunk_bytes="64MB", num_workers=1, start_method="fork")
        return len(texts)

    return turn


def text(o: Any) -> Any:
    """It has no takes: rows come in its own shuffled order, from one loader, epoch after epoch."""
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset(f"{o.place}/litdata", shuffle=True), batch_size=o.batch, num_workers=0)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: ({"text": batch["text"], "label": batch["label"].numpy()} for batch in itertools.islice(epochs, o.takes))


def remote_epoch(o: Any) -> Any:
    """Each process begins with an empty folder for downloaded chunks. Its workers start, and connect, in its turn."""
    shutil.rmtree(o.scratch, ignore_errors=True)
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # It has no option for endpoints without TLS.
    storage = {"endpoint_url": o.endpoint, "region_name": "us-east-1"}
    dataset = Bodies(f"s3://{o.bucket}/litdata", cache_dir=o.scratch, shuffle=True, storage_options=storage)
    loader = litdata.StreamingDataLoader(dataset, batch_size=o.batch, num_workers=o.threads, collate_fn=list)
    return lambda: loader
