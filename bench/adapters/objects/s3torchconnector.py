"""Amazon's connector for PyTorch: a map-style dataset of objects, in a DataLoader whose workers persist."""
# /// script
# dependencies = ["s3torchconnector==1.5.0", "torch==2.15.0", "numpy==2.4.6"]
# ///

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from s3torchconnector import S3ClientConfig, S3MapDataset


def _read(reader: Any) -> bytes:
    body: bytes = reader.read()
    return body


def remote_epoch(o: Any) -> Any:
    torch.set_num_threads(1)
    dataset = S3MapDataset.from_prefix(
        f"s3://{o.bucket}/files/",
        region="us-east-1",
        endpoint=o.endpoint,
        transform=_read,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    # Its client does not survive a fork. Workers are forked from a server that has only imported torch, so that they start quickly.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "s3torchconnector", "serving"])
    loader = torch.utils.data.DataLoader(
        dataset, o.batch, shuffle=True, num_workers=o.threads, persistent_workers=True, collate_fn=list, multiprocessing_context=context
    )
    return lambda: loader
