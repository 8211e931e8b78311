"""Write bench/README.md from README.in.md, the results and the reasons, with the losses first.

.venv/bin/python bench/report.py                  # writes bench/README.md

.venv/bin/python bench/report.py --results FOLDER # writes FOLDER/README.md

.venv/bin/python bench/report.py --agree FOLDER   # compares the winners of two runs; exit code 1 if they differ beyond their spread
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import pathlib
import re
import statistics
import sys
import textwrap
import tomllib
from typing import Any

from harness import rivals
from run import ALL

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
WORSE, TIED, BETTER = "worse", "tied", "better"
# Units of exact counts, which have no spread.
COUNTS = ("requests", "bytes")


def results(folder: pathlib.Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the results of the benchmarks that exist, in their order."""
    found = {}
    for path in (folder / f"{name}.json" for name in ALL):
        if path.exists():
            try:
                found[path.stem] = dict(json.loads(path.read_text()))
            except (ValueError, TypeError) as error:
                sys.exit(f"{path} is not a result: {error}. Remove it, or run the benchmark again")
            if found[path.stem].get("machine", {}).get("quick"):
                sys.exit(f"{path} is of a quick run, which measures nothing. Run the benchmark without --quick")
    return found


def spread(values: list[float]) -> tuple[float, float]:
    """Return the range of values: the least and the greatest, or, of six or more, their quartiles."""
    if len(values) < 6:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def outcome(comparison: dict[str, Any]) -> tuple[str, str, float] | None:
    """Return whether Penstock is better, tied or worse, a rival, and our ratio to it: above 1 is better. None without rivals.

    It is worse if it is worse than any rival, and better if it is better than all. It is tied with a rival if the ranges of both overlap,
    or if the medians differ by less than 3 %: two runs of the same programs differ by as much. Counts have no noise.
    """
    ours, others = comparison["systems"].get("penstock"), rivals(comparison)
    if not others:
        return None
    if not ours:
        return WORSE, next(iter(others)), 0.0
    highest = comparison["best"] == "highest"

    def against(theirs: list[float]) -> tuple[str, float]:
        mine, other = statistics.median(ours), statistics.median(theirs)
        above, below = (mine, other) if highest else (other, mine)
        ratio = above / below if below else 1.0 if not above else float("inf")
        (low, high), (least, most) = spread(ours), spread(theirs)
        near = abs(ratio - 1) < 0.03 or (low <= most and least <= high)
        if ratio == 1 or (near and comparison["unit"] not in COUNTS):
            return TIED, ratio
        return BETTER if ratio > 1 else WORSE, ratio

    found = {name: against(theirs) for name, theirs in others.items()}
    told = next(one for one in (WORSE, TIED, BETTER) if any(kind == one for kind, _ in found.values()))
    name = min((one for one in found if found[one][0] == told), key=lambda one: found[one][1])
    return told, name, found[name][1]


def short(value: float) -> str:
    """Return a number with three digits."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _met(bar: dict[str, Any]) -> bool:
    return bool(bar["value"] >= bar["at_least"] if "at_least" in bar else bar["value"] <= bar["at_most"])


def _wanted(bar: dict[str, Any]) -> str:
    return f"≥ {bar['at_least']:,}" if "at_least" in bar else f"≤ {bar['at_most']:,}"


def losses(found: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return each row that is lost: its name, and what was measured. First failures, then comparisons with rivals, then bars."""
    rows = [(f"{name}: the benchmark", f"failed: {result['failed']}") for name, result in found.items() if result.get("failed")]
    for name, result in found.items():
        for comparison in result.get("comparisons", []):
            told = outcome(comparison)
            if told and told[0] == WORSE:
                _, best, ratio = told
                if not comparison["systems"].get("penstock"):
                    rows.append((f"{name}: {comparison['what']}", "Penstock failed"))
                    continue
                ours, theirs = (statistics.median(comparison["systems"][system]) for system in ("penstock", best))
                rows.append(
                    (f"{name}: {comparison['what']}", f"{short(ours)} {comparison['unit']}, {best} {short(theirs)}: {short(ratio)} ×")
                )
    for name, result in found.items():
        rows += [
            (f"{name}: bar {bar['what']}", f"{short(bar['value'])}, wanted {_wanted(bar)}")
            for bar in result.get("bars", [])
            if not _met(bar)
        ]
    return rows


def reasons() -> dict[str, str]:
    """Return the reasons of losses, by a pattern of their names."""
    told: dict[str, str] = tomllib.loads((HERE / "reasons.toml").read_text())
    return told


def reason(name: str, told: dict[str, str]) -> str:
    """Return the reason of a loss; the first pattern that fits counts."""
    if name.endswith(": the benchmark"):
        return "not known yet"
    return next((text for pattern, text in told.items() if fnmatch.fnmatch(name, pattern)), "not known yet")


def _table(head: str, rows: list[str]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|" + "---|" * columns, *rows]) if rows else "None."


def _safe(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def render(found: dict[str, dict[str, Any]]) -> str:
    """Return the text of README.md."""
    told = reasons()
    lost = [f"| {_safe(name)} | {_safe(what)} | {_safe(reason(name, told))} |" for name, what in losses(found)]
    compared = []
    for name, result in found.items():
        for comparison in result.get("comparisons", []):
            highest = comparison["best"] == "highest"
            medians = {system: statistics.median(values) for system, values in comparison["systems"].items() if values}
            order = sorted(medians, key=lambda system: -medians[system] if highest else medians[system])
            values = " ".join(
                f"**`{one} {short(medians[one])}`**" if one == "penstock" else f"`{one} {short(medians[one])}`" for one in order
            )
            result_of = outcome(comparison)
            compared.append(
                f"| {name} | {_safe(comparison['what'])} ({comparison['unit']}){_safe(' – ' + comparison['notes'] if comparison.get('notes') else '')} | {_safe(values)} | {result_of[0] + f', {short(result_of[2])} ×' if result_of else '–'} |"
            )
    near = [
        f"| {name} | {_safe(comparison['what'])} | {told_of[1]} | {short(told_of[2])} × |"
        for name, result in found.items() for comparison in result.get("comparisons", [])
        for told_of in [outcome(comparison)] if told_of and told_of[0] == TIED and told_of[2] < 0.97
    ]  # fmt: skip
    bars = [
        f"| {name} | {_safe(bar['what'])} | {short(bar['value']) if _met(bar) else '**' + short(bar['value']) + '**'} | {_wanted(bar)} |"
        for name, result in found.items() for bar in result.get("bars", [])
    ]  # fmt: skip
    missing = [
        f"| {name} | {system} | {_safe(why)} |" for name, result in found.items() for system, why in result.get("missing", {}).items()
    ]
    cards = [result["machine"] for result in found.values()]
    alike = {(card["cpu"], card["cores"], card["memory_gib"], card["kernel"]) for card in cards}
    commits, dates = sorted({card["commit"] for card in cards}), sorted({card["date"] for card in cards})
    disks = sorted(
        {
            f"{card['disk']['device']} ({card['disk']['file_system']}, read-ahead {card['disk']['read_ahead_kib']} KiB)"
            for card in cards
            if card.get("disk", {}).get("file_system")
        }
    )
    versions = sorted({f"{package} {version}" for card in cards for package, version in card["versions"].items() if version})
    versions_told = textwrap.fill(", ".join(versions), 120)
    machine = "; ".join(f"{cpu}, {cores} cores, {memory} GiB, Linux {kernel}" for cpu, cores, memory, kernel in sorted(alike))
    text = (HERE / "README.in.md").read_text()
    absent = [name for name in ALL if name not in found]
    parts = {
        "absent": f"Not measured since their set-up changed: {', '.join(f'`{name}`' for name in absent)}." if absent else "All benchmarks have results.",
        "losses": _table("| what | measured | why |", lost),
        "ties": _table("| benchmark | what | rival | Penstock is |", near),
        "comparisons": _table("| benchmark | what | median of each system, best first | Penstock is |", compared),
        "bars": _table("| benchmark | what | measured | wanted |", bars),
        "notes": "\n".join(f"- `{name}`: {_safe(result['what'])}." for name, result in found.items()),
        "missing": _table("| benchmark | system | why |", missing),
        "machine": f"{machine}. Disk: {'; '.join(disks) or 'not noted'}. Commit {', '.join(commits)}, {' to '.join([dates[0], dates[-1]] if len(dates) > 1 else dates)}; "
        f"{sum(card.get('seconds', 0) for card in cards) / 60:.0f} minutes.\n\n```text\n{versions_told}\n```",
    }  # fmt: skip
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def disagreements(first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return what two runs say differently: contradictions, and changes between a tie and a winner, of bars, and of systems that ran.

    A contradiction is a comparison in which one run says better and the other worse, or that only one run has.
    """
    wrong, near = [], []
    for name in dict.fromkeys([*first, *second]):
        runs = [found.get(name, {}) for found in (first, second)]
        state = ["absent" if not run else "failed" if run.get("failed") else "ran" for run in runs]
        if state[0] != state[1]:
            wrong.append(f"{name}: {state[0]} and {state[1]}")
            continue
        outcomes = [{compared["what"]: outcome(compared) for compared in run.get("comparisons", [])} for run in runs]
        for what in dict.fromkeys([*outcomes[0], *outcomes[1]]):
            before, after = (found.get(what) for found in outcomes)
            told = " and ".join(f"{one[0]} ({short(one[2])} × {one[1]})" if one else "not measured" for one in (before, after))
            if bool(before) != bool(after) or (before and after and {before[0], after[0]} == {BETTER, WORSE}):
                wrong.append(f"{name}: {what}: {told}")
            elif before and after and before[0] != after[0]:
                near.append(f"{name}: {what}: {told}")
        # The name of the best rival may change.
        bars = [{re.sub(r"best rival \(.*\)", "best rival", bar["what"]): bar for bar in run.get("bars", [])} for run in runs]
        for what in dict.fromkeys([*bars[0], *bars[1]]):
            pair = [found.get(what) for found in bars]
            if any(bar is None for bar in pair) or _met(pair[0]) != _met(pair[1]):
                told = " and ".join(f"{short(bar['value'])}, wanted {_wanted(bar)}" if bar else "not measured" for bar in pair)
                near.append(f"{name}: bar {what}: {told}")
        ran = [
            {(one["what"], system) for one in run.get("comparisons", []) for system, values in one["systems"].items() if values}
            for run in runs
        ]
        near += [f"{name}: {what}: {system} ran in one run only" for what, system in sorted(ran[0] ^ ran[1])]
    return wrong, near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agree", type=pathlib.Path, metavar="FOLDER", help="compare the winners with those of the results in this folder")
    parser.add_argument(
        "--results", type=pathlib.Path, metavar="FOLDER", default=RESULTS, help="the results to read; by default bench/results"
    )
    arguments = parser.parse_args()
    runs = [results(folder) for folder in (arguments.results, arguments.agree) if folder]
    for folder, found in zip((arguments.results, arguments.agree), runs, strict=False):
        if not found:
            parser.error(f"{folder} has no results")
    if arguments.agree:
        wrong, near = disagreements(*runs)
        for title, rows in (("Ties in one run, or bars met in one, or systems that ran in one:", near), ("Contradictions:", wrong)):
            print("\n".join([title, *rows]) + "\n" if rows else "", end="")
        print(f"{len(wrong)} contradictions: rows that one run wins and the other loses, or that one run lacks")
        return int(bool(wrong))
    page = HERE / "README.md" if arguments.results == RESULTS else arguments.results / "README.md"
    page.write_text(render(runs[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
