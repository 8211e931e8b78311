"""Run the benchmarks: `python bench/run.py [NAME…] [--photos FOLDER]`. Each benchmark prints ratios and writes bench/results/NAME.json."""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
import tempfile

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
    arguments = parser.parse_args()
    missed = []
    for name in arguments.names or cases.ALL:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"penstock-bench-{name}-", dir=arguments.scratch))
        try:
            print(f"== {name}", flush=True)
            result = cases.ALL[name](folder, arguments.photos)
            for line in result["lines"]:
                print("  " + line)
            for bar in result.get("bars", []):
                met = bar["value"] >= bar["at_least"] if "at_least" in bar else bar["value"] <= bar["at_most"]
                bar["met"] = met
                limit = f"≥ {bar['at_least']}" if "at_least" in bar else f"≤ {bar['at_most']}"
                print(f"  {'met   ' if met else 'MISSED'} {bar['what']}: {bar['value']:.3g} (bar {limit})")
                missed += [] if met else [f"{name}: {bar['what']}"]
            save(name, result)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(missed)} bars missed" + "".join(f"\n  {line}" for line in missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
