"""A server and a dataset with a cache, before a cold store that writes down which pages it is asked for."""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
import subprocess
import sys
import urllib.request
from typing import Any

import penstock as ps
import servers
import wrong_s3
from extents import PAGE_BYTES, Extent, extents_of, pages_of
from typer.testing import CliRunner


def run(*words: object) -> str:
    """Run a command of the cache and return what it prints."""
    from penstock.cli import app

    result = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def counts(cache: pathlib.Path) -> dict[str, Any]:
    return json.loads(run("status", "--cache", cache, "--json"))[0]


class Node:
    """A server before a cold store that writes down what it is asked for."""

    def __init__(self, folder: pathlib.Path, budget: str, *options: str) -> None:
        self.serving = wrong_s3.serving()
        self.state, given = self.serving.__enter__()
        environment = {"AWS_ENDPOINT_URL": given["endpoint_url"], "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "r"}
        folder.mkdir()
        self.cache = folder / "cache"
        options = ("--anonymous", "--cache", f"{self.cache}:{budget}", "--revalidate", "never", *options)
        self.server = servers.Penstock(folder, "s3://bucket", *options, environment=environment)

    def add(self, key: str, bytes_: int) -> None:
        self.state.objects[f"bucket/{key}"] = random.Random(key).randbytes(bytes_)

    def extent(self, key: str) -> Extent:
        [extent] = [extent for extent in extents_of(self.cache) if extent.name.startswith(f"bucket/{key}?")]
        return extent

    def restart(self) -> None:
        self.server.process.kill()
        self.server.process.wait(300)
        self.server.restart()

    def read(self, key: str, begin: int, end: int) -> set[int]:
        """Read a range, compare it, and return the pages that the cold store was asked for."""
        del self.state.asked[:]
        asked = urllib.request.Request(f"{self.server.endpoint}/bucket/{key}", headers={"Range": f"bytes={begin}-{end - 1}"})
        found = urllib.request.urlopen(asked, timeout=300).read()
        whole = self.state.objects[f"bucket/{key}"]
        assert found == whole[begin:end]
        return asked_pages(self.state, f"bucket/{key}", len(whole))

    def stop(self) -> None:
        self.server.stop()
        self.serving.__exit__(None, None, None)


def asked_pages(state: wrong_s3.State, name: str, object_bytes: int) -> set[int]:
    """Return the pages of an object that were asked for. None is asked for twice, and only whole ones are."""
    pages: set[int] = set()
    for method, own, range_ in state.asked:
        if own != name:
            continue
        assert method == "GET", "no version is asked for again"
        begin, end = range_[0], range_[1] + 1
        assert begin % PAGE_BYTES == 0 and (end % PAGE_BYTES == 0 or end == object_bytes)
        assert pages.isdisjoint(pages_of(begin, end))
        pages |= pages_of(begin, end)
    return pages


READ = """
import hashlib, sys, penstock as ps
uri, cache, endpoint, *positions = sys.argv[1:]
options = {"endpoint_url": endpoint, "access_key_id": "x", "secret_access_key": "y", "region": "r"}
ds = ps.open(uri, cache=cache, storage_options=options)
for position in map(int, positions):
    print(hashlib.md5(ds[position]["blob"]).hexdigest())
"""


class Dataset:
    """A dataset before a cold store that writes down what it is asked for. Each read is by a new process, which has nothing in memory."""

    def __init__(self, cache: pathlib.Path, *appends: list[int]) -> None:
        """Make a data file of samples with these lengths for each append."""
        self.serving = wrong_s3.serving()
        self.state, self.options = self.serving.__enter__()
        self.cache, self.uri = cache, "s3://bucket/pets"
        self.blobs: list[bytes] = []
        self.names: list[str] = []
        ds = ps.create(self.uri, {"blob": ps.Bytes()}, storage_options=self.options)
        for lengths in appends:
            blobs = [random.Random(len(self.blobs) + number).randbytes(length) for number, length in enumerate(lengths)]
            ds.append({"blob": blobs})
            self.blobs += blobs
            self.names += [name for name in self.state.objects if "/d/" in name and name not in self.names]
        assert len(self.names) == len(appends)

    def read(self, *positions: int, budget: str = "") -> list[set[int]]:
        """Read samples, compare them, and return the pages of each data file that the cold store was asked for."""
        del self.state.asked[:]
        command = [sys.executable, "-c", READ, self.uri, f"{self.cache}{budget}", self.options["endpoint_url"], *map(str, positions)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert found == [hashlib.md5(self.blobs[position]).hexdigest() for position in positions]
        return [asked_pages(self.state, name, len(self.state.objects[name])) for name in self.names]

    def extents(self) -> list[Extent]:
        """Return the extents of the data files."""
        found = {extent.name.rpartition("/")[2]: extent for extent in extents_of(self.cache)}
        return [found[name.rpartition("/")[2]] for name in self.names]

    def stop(self) -> None:
        self.serving.__exit__(None, None, None)
