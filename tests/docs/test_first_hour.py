"""The first hour of a user: from what people have to a first training batch, a notebook, and mistakes that a type checker finds."""

import pathlib
import re
import subprocess
import sys
import time

import nbclient
import nbformat
import pandas as pd
import penstock as ps
import pytest
import sample_inputs

ROOT = pathlib.Path(__file__).parent.parent.parent

# Each source: the import command, the lines to the first batch, and the same with `datasets` or torchvision and a DataLoader.
LOADER = """\
import penstock as ps
from penstock import transforms as T
ds = ps.open("pets")
loader = ds.loader(batch_size=8, shuffle=True, columns=["{image}", "label"], output="torch", transform=[T.RandomResizedCrop(64)])
batch = next(iter(loader))
images, labels = batch["{image}"], batch["label"]
"""
BOXES = """\
import penstock as ps
from penstock import transforms as T
ds, on = ps.open("pets"), ("image", "boxes")
loader = ds.loader(batch_size=8, shuffle=True, columns=["image", "boxes", "labels"], output="torch", transform=[T.Resize((64, 64), on=on)])
batch = next(iter(loader))
images, labels = batch["image"], batch["boxes"]
"""
OF_OTHERS = """\
{given}
from torch.utils.data import DataLoader
from torchvision.transforms import v2
import torch
crop = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(64)])
def change(rows):
    return {{"image": [crop(image.convert("RGB")) for image in rows["{image}"]], "label": [{label} for value in rows["label"]]}}
def collate(samples):
    return torch.stack([sample["image"] for sample in samples]), torch.tensor([sample["label"] for sample in samples])
images, labels = next(iter(DataLoader(source.with_transform(change), batch_size=8, shuffle=True, collate_fn=collate)))
"""
FOLDER = OF_OTHERS.format(
    given='from datasets import load_dataset\nsource = load_dataset("imagefolder", data_dir="photos", split="train")',
    image="image",
    label="value",
)
PARQUET = OF_OTHERS.format(
    given='from datasets import load_dataset\nsource = load_dataset("parquet", data_files="pets.parquet", split="train")',
    image="image",
    label="value",
)
TABLE = OF_OTHERS.format(
    given="""\
from datasets import Image, load_dataset
source = load_dataset("csv", data_files="labels.csv", split="train").cast_column("file", Image())""",
    image="file", label='["cat", "dog"].index(value)',
)  # fmt: skip
FRAME = OF_OTHERS.format(
    given="""\
from datasets import Dataset, Image
import pandas as pd
source = Dataset.from_pandas(pd.read_pickle("frame.pickle")).cast_column("file", Image())""",
    image="file", label='["cat", "dog"].index(value)',
)  # fmt: skip
COCO = """\
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2
from torch.utils.data import DataLoader
import torch
change = v2.Compose([v2.ToImage(), v2.Resize((64, 64))])
source = wrap_dataset_for_transforms_v2(CocoDetection("coco/images", "coco/annotations/instances.json", transforms=change), target_keys=["boxes", "labels"])
def collate(samples):
    return torch.stack([sample[0] for sample in samples]), [sample[1]["boxes"] for sample in samples]
images, labels = next(iter(DataLoader(source, batch_size=8, shuffle=True, collate_fn=collate)))
"""
YOLO = """\
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision import tv_tensors
from PIL import Image
import pathlib, torch
class Boxes(Dataset):
    def __init__(self, folder):
        self.images = sorted(pathlib.Path(folder, "images").rglob("*.jpg"))
        self.change = v2.Compose([v2.ToImage(), v2.Resize((64, 64))])
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        path = self.images[index]
        image = Image.open(path).convert("RGB")
        lines = pathlib.Path(str(path).replace("/images/", "/labels/")).with_suffix(".txt").read_text().splitlines()
        rows = torch.tensor([[float(word) for word in line.split()] for line in lines]).reshape(-1, 5)
        boxes = rows[:, 1:] * torch.tensor([image.width, image.height] * 2)
        boxes = tv_tensors.BoundingBoxes(boxes, format="CXCYWH", canvas_size=(image.height, image.width))
        return self.change(image, {"boxes": boxes, "labels": rows[:, 0].long()})
def collate(samples):
    return torch.stack([sample[0] for sample in samples]), [sample[1]["boxes"] for sample in samples]
images, labels = next(iter(DataLoader(Boxes("yolo"), batch_size=8, shuffle=True, collate_fn=collate)))
"""
IN_PYTHON = """\
import penstock as ps, pandas as pd
ps.importers.import_data(pd.read_pickle("frame.pickle"), "pets", types={"file": ps.Image(), "label": ps.Label(["cat", "dog"])})
"""
SOURCES = {
    "image folder": ("penstock import photos pets", LOADER.format(image="image"), FOLDER),
    "COCO": ("penstock import coco pets", BOXES, COCO),
    "YOLO": ("penstock import yolo pets", BOXES, YOLO),
    "Parquet of Hugging Face": ("penstock import pets.parquet pets", LOADER.format(image="image"), PARQUET),
    "CSV": ("penstock import labels.csv pets -t file=image -t label=label:cat,dog", LOADER.format(image="file"), TABLE),
    "pandas": (IN_PYTHON, LOADER.format(image="file"), FRAME),
}


def keystrokes(code: str) -> int:
    """Count the characters that are typed: indentation is the editor's."""
    return sum(len(line.strip()) + 1 for line in code.strip().splitlines())


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCES)
def test_from_a_source_to_a_first_batch(name, tmp_path, monkeypatch):
    """One command and at most eight lines, fewer keystrokes than with other libraries, and the same shapes."""
    command, ours, theirs = SOURCES[name]
    sample_inputs.make(tmp_path, 100)
    for place in ("photos", "coco", "yolo"):
        (tmp_path / place / "README.md").write_text("# Pets\n")
        (tmp_path / place / "LICENSE").write_text("CC0\n")
    pd.read_csv(tmp_path / "labels.csv").to_pickle(tmp_path / "frame.pickle")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    shapes = []
    begun = time.monotonic()
    if command.startswith("penstock"):
        subprocess.run([pathlib.Path(sys.executable).parent / "penstock", *command.split()[1:]], check=True, capture_output=True)
    else:
        exec(command, {})
    for code in (ours, theirs):
        names = {}
        exec(code, names)
        shapes.append((tuple(names["images"].shape), len(names["labels"])))
        print(f"{name}: {time.monotonic() - begun:.1f} s, {keystrokes(command if code is ours else '') + keystrokes(code)} keystrokes")
        begun = time.monotonic()
    assert len(ps.open("pets")) == 100
    assert shapes[0] == shapes[1] == ((8, 3, 64, 64), 8)
    assert len(ours.strip().splitlines()) <= 8
    assert keystrokes(command) + keystrokes(ours) < keystrokes(theirs)


def test_a_notebook_shows_thumbnails(tmp_path):
    sample_inputs.photographs(tmp_path / "photos")
    cells = [
        'import penstock as ps\nps.importers.import_data("photos", "pets")\nds = ps.open("pets")\nds',
        'ds.head(2)[["image", "label"]]',
        "ds[0]",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    done = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pages = [output["data"].get("text/html", "") for cell in done.cells for output in cell.outputs if "data" in output]
    assert pages[0].count("<image") == 5 and "data:image/png" in pages[0] and "20 samples" in pages[0]
    assert pages[1].count("<image") == 2
    assert "(90, 120, 3)" in done.cells[2].outputs[0]["data"]["text/plain"]


# Each line is a mistake that a type checker must find before the program runs.
PLANTED = """\
ps.create("x", {"n": "int64"}, messag="a")
ds.apend({"n": [1]})
ds.append()
ds.take(positions=[1], column=["n"])
ds.loader(batchsize=2)
ds.loader(batch_size="2")
ds.loader(batch_size=2, output="tensorflow")
ds.loader(batch_size=2, last_batch="keep")
ds.loader(batch_size=2, num_workers=4)
ds.loader(batch_size=2, transform=T.Resize(3))
ds.split([0.8, 0.2])
ds.split({"train": "80 %"})
ds.select_columns(3)
ds.head("5")
ds.sample()
ds.create_branch(5)
ds.merge()
ds.transaction(isolation=3)
T.Resize()
T.RandomRotation("left")
T.ColorJitter(brightnes=0.3)
ps.Label("cat", "dog")
ps.Tensor((3,))
ps.open("x", tags="v1")
ps.mix([ds])
ps.opened("x")
ps.Picture()
len(ds.snapshot()) + 1
"""


def test_a_type_checker_finds_mistakes_before_they_run(tmp_path):
    """mypy --strict finds at least nine in ten, and nothing wrong in the lines around them."""
    lines = PLANTED.splitlines()
    program = [
        "import penstock as ps",
        "from penstock import transforms as T",
        'ds = ps.open("x")',
        *lines,
        'print(ds.take([0])["n"], len(ds), ds.columns)',
    ]
    (tmp_path / "user.py").write_text("\n".join(program) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "user.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = {int(number) for number in re.findall(r"user\.py:(\d+): error", said)}
    assert found <= set(range(4, 4 + len(lines))), said
    missed = [line for number, line in enumerate(lines, 4) if number not in found]
    assert len(missed) <= len(lines) // 10, missed


def test_tokens_are_those_of_the_tokenizer():
    """Texts are cut and padded as the tokenizer itself does it: special tokens stay, on its own sides."""
    from penstock import transforms as T
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{word: 10 + at for at, word in enumerate("abcdefgh")}}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    texts = ["a b c d e f g h", "a b", ""]
    ds = ps.create("memory://tokens-of-others", {"t": ps.Text()})
    ds.append({"t": texts})
    for side in ("right", "left"):
        fast = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", padding_side=side, truncation_side=side)
        for length in (6, None):
            [batch] = ds.loader(batch_size=3, transform=[T.Tokenize(fast, on="t", length=length)])
            wanted = fast(texts, truncation=length is not None, max_length=length, padding="longest" if length is None else "max_length")
            assert batch["input_ids"].tolist() == wanted["input_ids"] and batch["attention_mask"].tolist() == wanted["attention_mask"]
    [batch] = ds.loader(batch_size=3, transform=[T.Tokenize(plain, on="t", length=6)])
    assert batch["input_ids"].tolist() == [[2, 10, 11, 12, 13, 3], [2, 10, 11, 3, 0, 0], [2, 3, 0, 0, 0, 0]]


def test_streams_and_arrays_of_hugging_face_keep_their_types():
    import datasets

    features = datasets.Features({"m": datasets.Array2D((2, 2), "float32"), "label": datasets.ClassLabel(names=["cat", "dog"])})
    given = datasets.Dataset.from_dict({"m": [[[1.0, 2.0], [3.0, 4.0]], None], "label": [1, 0]}, features=features)
    for number, source in enumerate((given, given.to_iterable_dataset())):
        ps.importers.import_data(source, f"memory://hf-arrays-{number}")
        ds = ps.open(f"memory://hf-arrays-{number}")
        assert ds.schema["m"] == ps.Tensor((2, 2), "float32") and ds.vocabulary("label") == ["cat", "dog"]
        assert ds[0]["m"].tolist() == [[1, 2], [3, 4]] and ds[1]["m"] is None and ds["label"][:].tolist() == [1, 0]
    with pytest.raises(ps.InvalidInputError, match=r"source\['train'\]"):
        ps.importers.import_data(datasets.DatasetDict({"train": given}), "memory://hf-dict")
