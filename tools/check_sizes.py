"""Check how much a reader must keep in mind at once: lines per file and function, parameters, and files per folder. Tests are exempt.

Code that exceeds a limit must explain why in a line: `Over 450 lines: <reason>` anywhere in the file; `Over 80 lines: <reason>` or
`Over 6 parameters: <reason>` directly above the function. `--table` prints the figures for each crate and for the package.
"""

import ast
import pathlib
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES, PARAMETERS, FOLDER_FILES = 450, 80, 6, 14
PLACES = ["crates/*/src", "python/penstock", "bench", "tools", "examples"]


def sources() -> list[pathlib.Path]:
    return sorted(
        path for place in PLACES for folder in ROOT.glob(place) for path in folder.rglob("*") if path.suffix in (".rs", ".py", ".c")
    )


def without_tests(text: str) -> str:
    return re.split(r"#\[cfg\(test\)\]\s*(?:#\[path[^\n]*\]\s*)?mod ", text)[0]


def rust_functions(text: str) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield (name, first line, lines, parameters, lines above) for each function. This relies on rustfmt's layout."""
    lines = without_tests(text).splitlines()
    for first, line in enumerate(lines):
        found = re.match(r"(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?(?:async )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)", line)
        if not found or line.rstrip().endswith(";"):
            continue
        last = next((at for at in range(first, len(lines)) if lines[at].rstrip() == found[1] + "}"), first)
        if "}" in line and last != first and line.count("{") == line.count("}"):
            last = first
        yield found[2], first + 1, last - first + 1, parameters("\n".join(lines[first : last + 1])), above(lines, first)


def parameters(function: str) -> int:
    """Count the parameters of a Rust function, without self."""
    begin, depth, angle = function.index("fn "), 0, 0
    while function[begin] != "(" or angle:
        angle += (function[begin] == "<") - (function[begin] == ">" and function[begin - 1] != "-")
        begin += 1
    parts, part = [], ""
    for place in range(begin, len(function)):
        letter = function[place]
        opens, closes = letter in "([{<", letter in ")]}" or (letter == ">" and function[place - 1] not in "-=")
        depth += opens - closes
        if depth == 0:
            break
        if letter == "," and depth == 1:
            parts, part = [*parts, part], ""
        else:
            part += letter
    parts = [part.strip("( \n") for part in [*parts, part] if part.strip("( \n")]
    return len([part for part in parts if not re.fullmatch(r"&?('\w+ )?(mut )?self", part)])


def above(lines: list[str], first: int) -> str:
    begin = first
    while begin > 0 and lines[begin - 1].lstrip().startswith(("//", "#", "@")):
        begin -= 1
    return "\n".join(lines[begin:first])


def python_functions(text: str) -> Iterator[tuple[str, int, int, int, str]]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([name for name in given if name.arg not in ("self", "cls")])
            docs = ast.get_docstring(node, clean=False)
            code = (node.end_lineno or 0) - node.lineno + 1 - (docs.count("\n") + 1 if docs else 0)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, node.lineno, code, count, above(lines, first - 1)


def main() -> int:
    problems, lines_of, longest = [], {}, Counter()
    for path in sources():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        lines_of[path] = len(without_tests(text).splitlines())
        if lines_of[path] > FILE_LINES and f"Over {FILE_LINES} lines: " not in text:
            problems.append(f"{name}: {lines_of[path]} lines, at most {FILE_LINES} unless a line explains why")
        functions = python_functions(text) if path.suffix == ".py" else rust_functions(text) if path.suffix == ".rs" else ()
        for function, line, length, count, comment in functions:
            longest[f"{name}:{line} {function}"] = length
            if length > FUNCTION_LINES and f"Over {FUNCTION_LINES} lines: " not in comment:
                problems.append(f"{name}:{line}: `{function}` has {length} lines, at most {FUNCTION_LINES}")
            if count > PARAMETERS and f"Over {PARAMETERS} parameters: " not in comment:
                problems.append(f"{name}:{line}: `{function}` has {count} parameters, at most {PARAMETERS}")
    folders = Counter(path.parent for path in lines_of)
    for folder, count in folders.items():
        if count > FOLDER_FILES:
            problems.append(f"{folder.relative_to(ROOT).as_posix()}: {count} files, at most {FOLDER_FILES}")
    if "--table" in sys.argv:
        table(lines_of, longest, folders)
    print("\n".join(problems) or f"{len(lines_of)} files are within the size limits")
    return bool(problems)


def table(lines_of: dict[pathlib.Path, int], longest: Counter, folders: Counter) -> None:
    print("| part | files | lines | median | longest file | largest folder |\n|---|---|---|---|---|---|")
    parts: dict[str, list[pathlib.Path]] = {}
    for path in lines_of:
        parts.setdefault("/".join(path.relative_to(ROOT).parts[:2]), []).append(path)
    for part, paths in [*sorted((part, paths) for part, paths in parts.items() if len(paths) > 2), ("all", list(lines_of))]:
        sizes = [lines_of[path] for path in paths]
        largest = max(folders[path.parent] for path in paths)
        print(f"| {part} | {len(paths)} | {sum(sizes)} | {statistics.median(sizes):.0f} | {max(sizes)} | {largest} |")
    print("longest functions:", ", ".join(f"{name} {length}" for name, length in longest.most_common(8)))


if __name__ == "__main__":
    sys.exit(main())
