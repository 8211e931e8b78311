"""A tour of Penstock on real data: write three commits, open old snapshots, read back bit for bit, and train a classifier.
Kill it in the middle of an epoch, resume, change samples in place, merge a branch, and verify.

Usage: python examples/demo.py [--data FOLDER] [--keep FOLDER]
Data: the 1,797 handwritten digits and two photographs that ship with scikit-learn; with --data, your own images.
"""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import penstock as ps
import torch
from penstock import transforms as T
from penstock.cli.terminal.show import size_text, table, type_text
from penstock.cli.versions.graph import lanes
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits, load_sample_images
from sklearn.decomposition import PCA

console = Console(width=min(Console().width, 140))
ACCURACY_BAR = 0.95
TEST_DIGITS = 360
TILE = 64


def digits() -> tuple[list[bytes], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return each digit's PNG, label and 16-dimensional embedding (PCA), in a fixed shuffled order."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    pixels = (data.images[order] * 15).astype(np.uint8)  # 0…16 → 0…240
    embedding = PCA(16, random_state=0).fit_transform(data.data[order]).astype(np.float32)
    return [encoded(image, "PNG") for image in pixels], data.target[order], embedding


def encoded(pixels: np.ndarray[Any, Any], format: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format, quality=92)
    return out.getvalue()


def tiles() -> tuple[list[bytes], list[np.ndarray[Any, Any]]]:
    """Cut the photographs into JPEG tiles. Draw a box around each tile's pixels from the photograph's brightest fifth, if any."""
    images, boxes = [], []
    for photo in load_sample_images().images:
        bright = np.quantile(photo.mean(2), 0.8)
        for y in range(0, photo.shape[0] - TILE + 1, TILE):
            for x in range(0, photo.shape[1] - TILE + 1, TILE):
                tile = photo[y : y + TILE, x : x + TILE]
                rows, columns = np.nonzero(tile.mean(2) > bright)
                found = [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]] if len(rows) else []
                images.append(encoded(tile, "JPEG"))
                boxes.append(np.array(found, dtype=np.float32).reshape(-1, 4))
    return images, boxes


def write(root: pathlib.Path) -> tuple[ps.Dataset, dict[str, list[bytes]]]:
    """Create the dataset in three commits. Return it and the encoded images."""
    pngs, labels, embedding = digits()
    jpegs, boxes = tiles()
    ds = ps.create(
        root,
        {
            "image": ps.Image(), "label": ps.Label([str(digit) for digit in range(10)]), "embedding": ps.Tensor((16,), "float32"),
            "boxes": ps.Boxes("xyxy", of="image"), "source": ps.Category(),
        },
    )  # fmt: skip
    cut = len(pngs) - TEST_DIGITS
    for name, part in (("train", slice(0, cut)), ("test", slice(cut, None))):
        count = len(pngs[part])
        ds.append(
            {"image": pngs[part], "label": labels[part], "embedding": embedding[part], "source": [f"digits/{name}"] * count},
            message=f"{count} digits to {name}",
        )
    ds.append(
        {"image": jpegs, "boxes": boxes, "source": ["photographs"] * len(jpegs)},
        message=f"{len(jpegs)} tiles from two photographs, with boxes",
        validate="decode",
    )
    return ds, {"digits": pngs, "tiles": jpegs}


def show_time_travel(ds: ps.Dataset) -> None:
    rows = table("the contents of each commit", "snapshot", "samples", "message", "sources")
    for commit in reversed(ds.log()):
        then = ps.open(ds.uri, snapshot=commit.snapshot)
        rows.add_row(commit.snapshot[:14] + "…", str(len(then)), commit.message, ", ".join(then.vocabulary("source")) or "—")
    console.print(rows)


def show_disk(ds: ps.Dataset) -> None:
    rows = table("storage on disk", "column", "type", "stored", "blocks", "data files")
    for name, entry in ds.layout().items():
        rows.add_row(name, type_text(ds.schema[name]), size_text(entry["stored_bytes"]), str(entry["blocks"]), str(entry["data_files"]))
    console.print(rows)
    files = [file for file in pathlib.Path(ds.uri).rglob("*") if file.is_file()]
    for folder in sorted({file.parent for file in files}):
        here = [file for file in files if file.parent == folder]
        console.print(f"  {folder.relative_to(ds.uri)}/: {len(here)} objects, {size_text(sum(file.stat().st_size for file in here))}")


def check_bytes(ds: ps.Dataset, written: list[bytes]) -> None:
    """Read every image back in random order, and compare its bytes with those written."""
    order = np.random.default_rng(1).permutation(len(ds))
    stored = ds.take(order, columns=["image"], decode=False)["image"]
    wrong = sum(stored[place] != written[position] for place, position in enumerate(order))
    if wrong:
        sys.exit(f"FAILED: {wrong} images differ from what was written")
    console.print(f"[bold]read back[/]: {len(order)} images in random order, every byte as written")


class Classifier(torch.nn.Sequential):
    """A small convolutional network for 8 x 8 digits."""

    def __init__(self) -> None:
        nn = torch.nn
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.25), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def digits_of(ds: ps.Dataset, name: str) -> ps.View:
    """Return a view of the digits from one of the first two commits."""
    return ds.select(np.flatnonzero(ds["source"][:] == ds.vocabulary("source").index(f"digits/{name}")))


def loader_of(ds: ps.Dataset, name: str, shuffle: bool = True) -> ps.Loader:
    """Return a loader that yields batches of 64 as torch tensors, decoded and normalised in the core."""
    transform = [T.CenterCrop(8), T.Normalize([0.5], [0.5])]
    columns = ["image", "label", "_row_id"]
    return digits_of(ds, name).loader(batch_size=64, shuffle=shuffle, seed=7, columns=columns, transform=transform, output="torch")


def train(ds: ps.Dataset) -> float:
    """Train on the digits from the first commit, test on those from the second, and return the accuracy."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = Classifier()
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    epochs = 12
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} epochs  loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )
    loader = loader_of(ds, "train")
    with bar:
        task = bar.add_task("training", total=epochs, loss="-")
        for number, batch in enumerate(loader.stream(epochs), 1):
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if number % len(loader) == 0:
                bar.update(task, advance=1, loss=f"{loss.item():.3f}")
    model.eval()
    test = loader_of(ds, "test", shuffle=False)
    with torch.no_grad():
        right = sum(int((model(batch["image"]).argmax(1) == batch["label"]).sum()) for batch in test)
    stats = loader.stats()
    console.print(
        f"[bold]training[/]: {stats['samples_per_second']:,.0f} samples/s through ds.loader, "
        f"{100 * stats['stall']:.0f} % of the time waiting for data"
    )
    return right / TEST_DIGITS


def go_on(root: str, state: str) -> None:
    """Load batches from the given state. Print each batch's row ids and the state after it. Runs in a separate process."""
    loader = loader_of(ps.open(root), "train")
    loader.load_state_dict(json.loads(state))
    for batch in loader.stream(1):
        print(json.dumps([loader.state_dict(), batch["_row_id"].tolist()]), flush=True)
        time.sleep(0.01)  # Simulates a model's work.


def show_resume(ds: ps.Dataset) -> None:
    """Kill a training process in the middle of an epoch, resume in a new one, and compare with an uninterrupted epoch."""
    loader = loader_of(ds, "train")
    loader.set_epoch(3)
    first = json.dumps(loader.state_dict())
    whole = [batch["_row_id"].tolist() for batch in loader.stream(1)]

    def start(state: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, __file__, "--go-on", ds.uri, state], stdout=subprocess.PIPE, text=True)

    stop = len(whole) // 3
    killed = start(first)
    assert killed.stdout
    lines = [json.loads(killed.stdout.readline()) for _ in range(stop)]
    killed.kill()
    killed.wait()
    state = json.dumps(lines[-1][0])
    resumed = start(state)
    lines += [json.loads(line) for line in resumed.communicate()[0].splitlines()]
    if [ids for _, ids in lines] != whole:
        sys.exit("FAILED: the resumed epoch differs from the uninterrupted one")
    console.print(
        f"[bold]resume[/]: killed with kill -9 after batch {stop} of {len(whole)}, resumed in a new process from a state of {len(state)} bytes: "
        f"the same {sum(map(len, whole))} samples in the same order"
    )
    for name, batches in (("uninterrupted", whole), ("killed and resumed", [ids for _, ids in lines])):
        console.print(f"  {name:<20}… {batches[stop - 1][-3:]} │ {batches[stop][:4]} …", highlight=False)


def show_changes(ds: ps.Dataset) -> None:
    """Tag the dataset, correct two labels, delete some tiles, run into a conflict, and list what differs from the tag."""
    ds.create_tag("as written")
    rows = ds.take([0, 1], columns=["_row_id", "label"])
    other = ps.open(ds.uri)
    with ds.transaction("two corrections, fewer tiles") as tx:
        tx.update({"label": [int(9 - label) for label in rows["label"]]}, row_ids=rows["_row_id"])
        deleted = tx.delete(where="source = 'photographs' AND _row_id % 2 = 0")
        seen = tx.take(rows["_row_id"], columns=["label"])["label"].tolist()
    console.print(f"[bold]changed in place[/]: labels {rows['label'].tolist()} to {seen}, {deleted} tiles deleted, no image rewritten")
    try:
        with other.transaction("another correction") as tx:
            tx.update({"label": [5]}, row_ids=rows["_row_id"][:1])
        sys.exit("FAILED: two transactions changed the same label")
    except ps.ConflictError as error:
        console.print("[bold]conflict[/]:", end=" ")
        console.print(str(error).splitlines()[0], markup=False, highlight=False)
    found = {(entry.kind, entry.column): len(entry.row_ids) for entry in ds.diff("as written")}
    if found != {("deleted", None): deleted, ("changed", "label"): 2}:
        sys.exit(f"FAILED: the diff is {found}")
    console.print(
        f"[bold]diff[/] to the tag: {deleted} samples deleted, 2 labels changed; the tag still has {len(ps.open(ds.uri, tag='as written'))}"
    )


def show_branches(ds: ps.Dataset) -> None:
    """Correct labels on a branch while main grows, merge both, and decide a conflict."""
    exp, rows = ds.create_branch("relabelled"), ds.take(range(4), columns=["_row_id", "label"])
    with exp.transaction("a second opinion") as tx:
        tx.update({"label": [7, 7]}, row_ids=rows["_row_id"][2:])
    image = ds.take([0], columns=["image"], decode=False)["image"]
    ds.append({"image": image, "label": [3], "source": ["digits/train"]}, message="one more digit")
    ds.merge("relabelled")
    labels = ds.take(row_ids=rows["_row_id"][2:], columns=["label"])["label"].tolist()
    if labels != [7, 7] or len(ds) != len(exp) + 1:
        sys.exit(f"FAILED: the merge has {len(ds)} samples and labels {labels}")
    console.print(f"[bold]merge[/] of a branch: 2 labels of the branch, 1 sample of main; parents {', '.join(ds.log()[0].parents)}")
    for handle, label in ((ds, 1), (exp, 2)):
        with handle.transaction("both change one label") as tx:
            tx.update({"label": [label]}, row_ids=rows["_row_id"][3:])
    try:
        ds.merge("relabelled")
        sys.exit("FAILED: a merge ignored a conflict")
    except ps.ConflictError as error:
        console.print("[bold]conflict[/]:", end=" ")
        console.print(str(error).splitlines()[0], markup=False, highlight=False)
    ds.merge("relabelled", on_conflict="theirs")
    if ds.take(row_ids=rows["_row_id"][3:], columns=["label"])["label"].tolist() != [2]:
        sys.exit("FAILED: the branch's label should have won")
    for drawing, commit in zip(lanes(ds.log(7)), ds.log(7), strict=True):
        lines = [line for line in (drawing.above, f"{drawing.line}  {commit.message}", drawing.below) if line]
        console.print("  " + "\n  ".join(lines), markup=False, highlight=False)


def measure(ds: ps.View) -> None:
    """Measure shuffled takes of 128 images, decoded and as stored, in images per second."""
    for what, decode in (("decoded", True), ("as stored", False)):
        done, begin, rng = 0, time.perf_counter(), np.random.default_rng(2)
        while time.perf_counter() - begin < 1:
            ds.take(rng.integers(0, len(ds), 128), columns=["image"], decode=decode)
            done += 128
        console.print(f"[bold]shuffled takes of 128, {what}[/]: {done / (time.perf_counter() - begin):,.0f} images/s")


def verify(ds: ps.Dataset) -> None:
    report = ds.verify()
    if report["problems"]:
        sys.exit(f"FAILED: verify found {report['problems']}")
    console.print(
        f"[bold]verify[/]: {report['commits']} commits, {report['data_files']} data files, {size_text(report['data_bytes'])}: every byte checked, no problems"
    )


def own_images(folder: str, root: pathlib.Path) -> None:
    """Import the user's images, show how they are stored, read them back, measure takes, and verify."""
    report = ps.importers.import_data(folder, root, on_error="skip", validate="decode")
    ds = ps.open(root)
    console.print(f"imported {report.samples} images from {folder}, refused {len(report.refused)}")
    for refusal in report.refused[:10]:
        console.print(f"  refused {refusal.path}: {refusal.message}", markup=False)
    if not len(ds):
        sys.exit("FAILED: no image could be imported")
    show_disk(ds)
    check_bytes(ds, [(pathlib.Path(folder) / path).read_bytes() for path in ds["path"][:]])
    measure(ds)
    verify(ds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder of your images; the parent folder of each image is its class")
    parser.add_argument("--keep", help="write the dataset to this folder and keep it")
    parser.add_argument("--go-on", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.go_on:
        go_on(*arguments.go_on)
        return
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    root = pathlib.Path(arguments.keep) if arguments.keep else scratch / "dataset"
    try:
        if arguments.data:
            own_images(arguments.data, root)
            return
        ds, written = write(root)
        console.print(f"wrote {len(ds)} samples to {root}")
        show_time_travel(ds)
        show_disk(ds)
        check_bytes(ds, written["digits"] + written["tiles"])
        accuracy = train(ds)
        show_resume(ds)
        console.print(f"[bold]accuracy[/] on {TEST_DIGITS} unseen digits: {100 * accuracy:.1f} % (bar {100 * ACCURACY_BAR:.0f} %)")
        if accuracy < ACCURACY_BAR:
            sys.exit("FAILED: the classifier is below the bar")
        show_changes(ds)
        show_branches(ds)
        measure(ds)
        verify(ds)
        console.print("[bold]done[/]" + (f": inspect the dataset with  .venv/bin/penstock head {root}" if arguments.keep else ""))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
