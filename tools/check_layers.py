"""Hold the layer table of ARCHITECTURE.md against `cargo metadata`: a crate depends only on crates of a lower level."""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def main() -> int:
    table = {name: level for level, name in re.findall(r"^\| (\d|dev) \| `(\w+)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M)}
    metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"], cwd=ROOT))
    problems = []
    for package in metadata["packages"]:
        crate = package["name"].removeprefix("penstock-")
        if crate not in table:
            problems.append(f"crate `{crate}` is not in the layer table")
            continue
        for dependency in package["dependencies"]:
            other = dependency["name"].removeprefix("penstock-")
            if not dependency["name"].startswith("penstock-") or dependency["kind"] == "dev" or table[crate] == "dev" or other == "error":
                continue
            if table[other] == "dev" or int(table[other]) >= int(table[crate]):
                problems.append(f"`{crate}` (level {table[crate]}) depends on `{other}` (level {table[other]})")
    missing = set(table) - {package["name"].removeprefix("penstock-") for package in metadata["packages"]}
    problems += [f"the table names `{name}`, which is no crate" for name in sorted(missing)]
    print("\n".join(problems) or f"{len(table)} crates keep their layers")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
