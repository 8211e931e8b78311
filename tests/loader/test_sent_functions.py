"""Functions that `python_workers=` sends: from scripts without a guard, `python -c`, notebooks and lambdas. What cannot be sent is named."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import penstock as ps
import pytest
from penstock import transforms as T

pytestmark = pytest.mark.local


@pytest.fixture
def ds(tmp_path):
    made = ps.create(tmp_path / "dataset", {"n": "int64"})
    made.append({"n": range(12)})
    return made


def numbers(loader):
    return [batch["n"].tolist() for batch in loader.stream(1)]


# Functions and classes of `__main__`, which use a global, a class and each other.
PROGRAM = """
import penstock as ps
from penstock import transforms as T

FACTOR = 3
print("begins")

class Odd(Exception):
    pass

class Pair:
    def __init__(self, n):
        self.n = n

def scaled(n):
    return n * FACTOR

def times(sample, rng):
    if sample["n"] == 11 and LAST:
        raise Odd("eleven")
    return {"n": scaled(sample["n"]), "pair": Pair(int(sample["n"]))}

class Method:
    def add(self, batch):
        return {**batch, "n": batch["n"] + 1}

ds = ps.open("dataset")
options = {"batch_size": 3, "python_workers": 2, "transform": [times, lambda sample: sample, T.PerBatch(Method().add)]}
LAST = False
batches = list(ds.loader(**options).stream(1))
print([batch["n"].tolist() for batch in batches])
print(all(type(pair) is Pair for batch in batches for pair in batch["pair"]))
LAST = True
try:
    list(ds.loader(**options).stream(1))
except Odd as error:
    print("raised", error)
"""
EXPECTED = ["begins", str([[3 * n + 1 for n in range(first, first + 3)] for first in range(0, 12, 3)]), "True", "raised eleven"]


@pytest.mark.parametrize("how", ["script", "python -c", "python -m"])
def test_functions_of_a_program_without_a_main_guard_are_sent(ds, tmp_path, how):
    """The program's own code runs once: workers do not import it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = {"script": ["program.py"], "python -c": ["-c", PROGRAM], "python -m": ["-m", "program"]}[how]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, EXPECTED), done.stderr


def test_functions_of_a_notebook_are_sent(ds, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(part) for part in PROGRAM.split("\n\n")]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = [
        output["text"]
        for cell in book.cells
        for output in cell["outputs"]
        if output["output_type"] == "stream" and output["name"] == "stdout"
    ]
    assert "".join(texts).splitlines() == EXPECTED


def test_lambdas_closures_and_callables_are_sent(ds):
    factor = 5

    class Adds:
        def __init__(self, number):
            self.number = number

        def __call__(self, sample):
            return {"n": sample["n"] + self.number}

    transform = [lambda sample, rng: {"n": sample["n"] * factor}, Adds(2), T.PerBatch(lambda batch: {"n": batch["n"] - 1})]
    assert numbers(ds.loader(batch_size=4, transform=transform, python_workers=2)) == [
        [5 * n + 1 for n in range(first, first + 4)] for first in (0, 4, 8)
    ]


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lock", "lock"), ("stream", "generator"), ("inner", "Loader"), ("elsewhere", "Dataset")],
)
def test_what_cannot_be_sent_is_named(ds, name, kind):
    elsewhere = ps.create(f"memory://sent-{name}", {"n": "int64"})
    objects = {"lock": LOCK, "stream": (n for n in range(3)), "inner": ds.loader(batch_size=2), "elsewhere": elsewhere}
    scope = {name: objects[name], "other": 3}
    exec(f"def uses(sample):\n    return {{'n': sample['n'] + other * len(str({name}))}}", scope)
    with pytest.raises(ps.InvalidInputError, match=rf"cannot send .*uses.* to python_workers: it uses `{name}`, a {kind}") as caught:
        numbers(ds.loader(batch_size=4, transform=[scope["uses"]], python_workers=1))
    assert "inside the function" in str(caught.value)


def test_a_dataset_in_memory_cannot_be_sent():
    ds = ps.create("memory://sent-too", {"n": "int64"})
    ds.append({"n": [1]})
    with pytest.raises(ps.InvalidInputError, match=r"cannot send this loader to python_workers.*memory://"):
        numbers(ds.loader(batch_size=1, transform=[lambda sample: sample], python_workers=1))


def test_a_module_that_workers_cannot_import_is_named(ds, tmp_path):
    program = """
    import sys, types
    import penstock as ps
    module = types.ModuleType("made_here")
    exec("def same(sample):\\n    return sample", module.__dict__)
    sys.modules["made_here"] = module
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("made_here", None)
    list(ps.open("dataset").loader(batch_size=3, transform=[module.same], python_workers=1))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'made_here'" in done.stderr and "PYTHONPATH" in done.stderr


def test_workers_end_with_the_program(ds, tmp_path):
    """A worker that is inside a function for a long time does not outlive the program."""
    program = """
    import os, time
    import penstock as ps

    def waits(sample):
        open(f"pid-{os.getpid()}", "w").close()
        time.sleep(3600)  # Only a kill ends this worker in time.

    loader = ps.open("dataset").loader(batch_size=3, transform=[waits], python_workers=2)
    loader._start(loader._position, 4)
    while sum(name.startswith("pid-") for name in os.listdir()) < 2:
        time.sleep(0.01)  # Waits for the workers to begin.
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, check=True)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
