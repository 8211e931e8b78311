"""Run the benchmarks. Prints ratios and writes results/NAME.json, with a card of the machine.

.venv/bin/python bench/run.py [NAME…] [--photos FOLDER] [--strict] [--quick] [--results FOLDER] [--scratch FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "adapters" / "common"), str(HERE.parent / "tools")]

import harness  # noqa: E402

# Each benchmark, and the file of bench/workloads whose function of the same name runs it.
ALL = {
    "cifar": "local", "jpeg": "local", "ingest": "local", "text": "tables", "calls": "local", "opening": "opening", "commits": "opening",
    "memory": "memory", "larger_than_memory": "memory", "codecs": "memory", "minio": "stores.remote", "minio_rows": "stores.remote", "minio_epochs": "stores.remote",
    "direct": "direct", "slices": "slices", "rows": "rows", "import_rows": "rows", "overlays": "changes", "branches": "changes",
    "embeddings": "embeddings", "patterns": "embeddings", "beside": "changes", "loader_photos": "photos", "loader_augment": "photos",
    "loader_functions": "training", "loader_transforms": "transforms", "loader_starting": "training", "loader_whole_direct": "training", "loader_crops": "training", "serve": "stores.tier", "tier": "stores.tier", "local_cache": "stores.tier",
    "foresight": "stores.foresight",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(ALL)}")
    parser.add_argument("--only", nargs="+", default=[], dest="only", metavar="NAME", help="the same as NAME…")
    parser.add_argument("--photos", type=pathlib.Path, help="a folder of JPEGs; by default, JPEGs are made from scikit-learn's photographs")
    parser.add_argument(
        "--scratch", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()), help="the folder in which datasets are made"
    )
    parser.add_argument("--results", type=pathlib.Path, help="where results are written; by default bench/results, with --quick nowhere")
    parser.add_argument(
        "--quick", action="store_true", help="one round with a tenth of the data: shows that everything runs, measures nothing"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed, a system did not run, or a benchmark fails")
    arguments = parser.parse_args()
    names = [*arguments.names, *arguments.only] or list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"there is no benchmark `{unknown[0]}`; expected {', '.join(ALL)}")
    if arguments.photos and not any(path.suffix.lower() in (".jpg", ".jpeg") for path in arguments.photos.rglob("*")):
        parser.error(f"--photos {arguments.photos} is not a folder with JPEGs")
    if not arguments.scratch.is_dir():
        parser.error(f"--scratch {arguments.scratch} is not a folder")
    harness.QUICK = arguments.quick
    arguments.results = arguments.results or (None if arguments.quick else HERE / "results")
    harness.commit()
    missed: list[str] = []
    try:
        for name in names:
            missed += _one(name, arguments)
    except KeyboardInterrupt:
        print("interrupted" + (f": the results of the benchmarks above are in {arguments.results}" if arguments.results else ""))
        return 130
    print(f"{len(missed)} bars missed, or not measured" + "".join(f"\n  {line}" for line in missed))
    return int(bool(missed) and arguments.strict)


def _one(name: str, arguments: argparse.Namespace) -> list[str]:
    """Run one benchmark, and return the bars that it misses, and the systems that did not run. One that fails is reported, and the others run."""
    folder = None
    began = time.monotonic()
    harness.start()
    try:
        print(f"== {name}", flush=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"penstock-bench-{name}-", dir=arguments.scratch))
        result: dict[str, Any] = getattr(importlib.import_module(f"workloads.{ALL[name]}"), name)(folder, arguments.photos)
        for line in result["lines"]:
            print("  " + line)
        missed = [f"{name}: {bar['what']}" for bar in result.get("bars", []) if not _is_met(bar)]
        if arguments.results:
            card = {**harness.machine(arguments.scratch), "seconds": round(time.monotonic() - began)}
            harness.save(arguments.results, name, result, card)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
        return missed + [f"{name}: {system} did not run: {why}" for system, why in result.get("missing", {}).items()]
    except (Exception, SystemExit) as error:  # For example a full disk.
        print(f"  FAILED {type(error).__name__}: {error}", flush=True)
        if arguments.results:  # An older result must not be taken for one of this run.
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            failed = {"what": "failed", "failed": told, "lines": [], "bars": [], "comparisons": []}
            card = {**harness.machine(arguments.scratch), "seconds": round(time.monotonic() - began)}
            try:
                harness.save(arguments.results, name, failed, card)
            except OSError as reason:
                print(f"  not saved: {reason}", flush=True)
                with contextlib.suppress(OSError):
                    (arguments.results / f"{name}.json").unlink(missing_ok=True)
        return [" ".join(f"{name}: failed with {type(error).__name__}: {error}".split())]
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _is_met(bar: dict[str, Any]) -> bool:
    """Compare a bar with its limit, note the outcome in it, and print it."""
    met = bool(bar["value"] >= bar["at_least"] if "at_least" in bar else bar["value"] <= bar["at_most"])
    bar["met"] = met
    limit = f"≥ {bar['at_least']}" if "at_least" in bar else f"≤ {bar['at_most']}"
    print(f"  {'met   ' if met else 'MISSED'} {bar['what']}: {bar['value']:.3g} (bar {limit})")
    return met


if __name__ == "__main__":
    sys.exit(main())
