"""Build the site: `make docs`. Writes generated pages and plots beside the pages of docs/site, and runs Zensical. In the repository, a short
page stands for each generated one, so that links lead somewhere.

.venv/bin/python docs/build.py            # target/site
.venv/bin/python docs/build.py --readme   # only docs/site/img/photos.svg, the plot of the README
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from messages import messages  # noqa: E402

PAGES, SOURCE, SITE = ROOT / "docs" / "site", ROOT / "target" / "site-source", ROOT / "target" / "site"
RESULTS = ROOT / "bench" / "results"
OURS, THEIRS = "#3567c9", "#b3bccb"

# Plots of comparisons: the result, the beginning of the comparison's name, and the title.
PLOTS = {
    "photos": ("loader_photos", "small", "JPEG photographs: decode at full scale, crop, resize, flip (images/s)"),
    "augment": ("loader_augment", "2 cores", "32 × 32 images: flip, crop, normalise, two cores (images/s)"),
    "text": ("text", "random rows", "Text: batches of 1,024 random rows, one core (rows/s)"),
    "cifar": ("cifar", "samples", "32 × 32 images: shuffled takes of 512, one core (samples/s)"),
    "epochs": ("minio_epochs", "epoch, 20 ms", "JPEG bytes from MinIO, 20 ms on each reply: shuffled epoch (MB/s)"),
}
NAMES = {
    "penstock": "Penstock", "penstock, full scale": "Penstock, full scale", "penstock, loader": "Penstock's loader", "dali": "DALI", "ffcv": "FFCV",
    "ffcv, own recipe": "FFCV, half raw pixels", "litdata": "LitData", "torchvision": "torchvision + DataLoader", "numpy": "NumPy", "lance": "Lance", "lmdb": "LMDB",
    "webdataset": "WebDataset", "mosaicml": "MosaicML Streaming", "huggingface": "Hugging Face datasets", "grain": "Grain", "spdl": "SPDL",
}  # fmt: skip


def rates(plot: str) -> dict[str, float]:
    """Return the rates that a plot shows, fastest first."""
    file, begins, _ = PLOTS[plot]
    result = json.loads((RESULTS / f"{file}.json").read_text())
    compared = next(one for one in result["comparisons"] if one["what"].startswith(begins))
    found = {name: statistics.median(values) for name, values in compared["systems"].items() if not name.startswith(("limit", "("))}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measured() -> list[str]:
    """Return the plots whose results there are."""
    return [plot for plot, (file, *_) in PLOTS.items() if (RESULTS / f"{file}.json").exists()]


def draw(plot: str, path: pathlib.Path) -> None:
    """Draw the rates of some systems as bars, with their numbers. The file is the same each time."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    matplotlib.rcParams["svg.fonttype"] = "none"  # Text stays text, in the fonts of the reader.
    found = rates(plot)
    figure, axes = pyplot.subplots(figsize=(7.2, 0.7 + 0.42 * len(found)))
    names = [NAMES.get(name, name) for name in found]
    axes.barh(names, list(found.values()), color=[OURS if name.startswith("penstock") else THEIRS for name in found])
    for row, rate in enumerate(found.values()):
        axes.text(rate, row, f" {rate:,.0f}", va="center")
    axes.set_title(PLOTS[plot][2], loc="left", fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max(found.values()) * 1.15)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def benchmarks() -> str:
    """Return the page of benchmarks: plots of the comparisons that have results, and then bench/README.md, in which losses come first."""
    plots = "\n\n".join(
        f"![{PLOTS[plot][2]}: {', '.join(f'{NAMES.get(n, n)} {r:,.0f}' for n, r in rates(plot).items())}](img/{plot}.svg)"
        for plot in measured()
    )
    head, rest = (ROOT / "bench" / "README.md").read_text().split("\n## ", 1)
    return f"{head}\n{plots}\n\n## {rest}"


def commands() -> str:
    """Return the page of the command line, from the help of each verb."""
    import typer.main
    from penstock.cli import app

    group = typer.main.get_command(app)
    text = "# Command line\n\n`--json` prints machine-readable output. Exit codes: 0 success, 1 error, 2 usage error.\n"
    for name, command in group.commands.items():
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join(
            [
                "penstock",
                name,
                *(parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]" for parameter in arguments),
            ]
        )
        rows = [(", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts)) if parameter not in arguments else f"`{parameter.name.upper()}`",
                 " ".join((parameter.help or "").split()).replace("|", "\\|")) for parameter in command.params]  # fmt: skip
        table = "\n".join(f"| {option} | {meaning} |" for option, meaning in rows)
        text += f"\n## {name}\n\n{' '.join((command.help or '').split())}\n\n```text\n{usage}\n```\n\n| | |\n|---|---|\n{table}\n"
    return text


def codes() -> str:
    """Return a table of all error codes, by class."""
    from penstock import _core, errors

    kinds: dict[str, list[str]] = {}
    for code, kind in _core.CODES:
        kinds.setdefault(kind, []).append(f"`{code}`")
    rows = [
        f"| `{kind}Error` | {(getattr(errors, f'{kind}Error').__doc__ or '').split('.')[0]} | {', '.join(found)} |"
        for kind, found in kinds.items()
    ]
    return "\n".join(["| class | meaning | codes |", "|---|---|---|", *rows])


def message_page() -> str:
    """Return the page of all texts and hints of errors by code, and of other texts by part."""
    from penstock import _core

    texts: dict[str, list[str]] = {f"`{code}`": [] for code, _ in _core.CODES}
    for message in messages():
        part = message.path.relative_to(ROOT).parts
        title = f"`{message.code}`" if message.code else f"Other texts of {part[1] if part[0] == 'crates' else part[2].removesuffix('.py')}"
        texts.setdefault(title, []).append(("hint: " if message.is_hint else "") + message.text.strip().replace("\n", " "))
    blocks = [f"## {title}\n\n```text\n{chr(10).join(dict.fromkeys(found))}\n```" for title, found in texts.items() if found]
    head = "# Messages\n\nThe texts and hints of all errors, by code, and what else Penstock prints. Braces stand for values."
    return "\n\n".join([head, *blocks]) + "\n"


def build() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(PAGES, SOURCE)
    for plot in measured():
        draw(plot, SOURCE / "img" / f"{plot}.svg")
    (SOURCE / "benchmarks.md").write_text(benchmarks())
    (SOURCE / "reference" / "commands.md").write_text(commands())
    (SOURCE / "reference" / "messages.md").write_text(message_page())
    errors = SOURCE / "reference" / "errors.md"
    errors.write_text(errors.read_text().replace("<!-- codes -->", codes()))
    (SOURCE / "format.md").write_text((ROOT / "spec" / "format-v1.md").read_text())
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(ROOT / "zensical.toml")], cwd=ROOT, check=True
    )
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="draw only the plot of the README")
    if parser.parse_args().readme:
        draw("photos", PAGES / "img" / "photos.svg")
    else:
        build()
