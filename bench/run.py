"""Run the benchmarks: `python bench/run.py [NAME…] [--photos FOLDER] [--strict]`. Prints ratios and writes bench/results/NAME.json."""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import cases
from harness import save


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(cases.ALL)}")
    parser.add_argument("--photos", type=pathlib.Path, help="a folder of JPEGs; by default, JPEGs are made from scikit-learn's photographs")
    parser.add_argument(
        "--scratch", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()), help="the folder in which datasets are made"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed or a benchmark fails")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in cases.ALL]:
        parser.error(f"there is no benchmark `{unknown[0]}`; expected {', '.join(cases.ALL)}")
    missed: list[str] = []
    try:
        for name in arguments.names or cases.ALL:
            missed += _one(name, arguments)
    except KeyboardInterrupt:
        print("interrupted: the results of the benchmarks above are kept")
        return 130
    print(f"{len(missed)} bars missed" + "".join(f"\n  {line}" for line in missed))
    return int(bool(missed) and arguments.strict)


def _one(name: str, arguments: argparse.Namespace) -> list[str]:
    """Run one benchmark, and return the bars that it misses. One that fails is reported, and the others run."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"penstock-bench-{name}-", dir=arguments.scratch))
    try:
        print(f"== {name}", flush=True)
        result = cases.ALL[name](folder, arguments.photos)
        for line in result["lines"]:
            print("  " + line)
        missed = [f"{name}: {bar['what']}" for bar in result.get("bars", []) if not _is_met(bar)]
        save(name, result)
        return missed
    except Exception as error:  # A rival that is not installed, or a full disk.
        print(f"  FAILED {type(error).__name__}: {error}")
        return [f"{name}: failed with {type(error).__name__}: {error}"]
    finally:
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
