"""Check the dependencies between crates, and the imports between files and folders.

A crate depends only on crates at lower levels of the layer table in ARCHITECTURE.md. Folders in a crate or in `python/penstock` must not
form a cycle, and neither must files in different folders. Files in the same folder may form a cycle if one of them explains why:
`Cycle with <file>: <reason>`.
"""

import ast
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "penstock"
Edges = dict[pathlib.Path, set[pathlib.Path]]


def check_levels() -> list[str]:
    """Compare the layer table with `cargo metadata`."""
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
    return problems + [f"the layer table names `{name}`, which is not a crate" for name in sorted(missing)]


def rust_edges(source: pathlib.Path) -> Edges:
    """Return the other files that each file of a crate uses. `pub use` only re-exports names, so it is not counted."""
    files = {
        module_of(path, source): path
        for path in source.rglob("*.rs")
        if "bin" not in path.relative_to(source).parts and not path.stem.endswith("tests")
    }
    texts = {module: code_of(path.read_text()) for module, path in files.items()}
    passed_on = {}  # (module, name) -> the module that a `pub use` takes the name from
    for module, text in texts.items():
        for statement in re.findall(r"pub(?:\([^)]*\))? use ([^;]+);", text):
            for path in spread(statement):
                if (target := resolve(path[:-1], module, files, {})) is not None:
                    passed_on[(*module, path[-1])] = target
    edges: Edges = {path: set() for path in files.values()}
    for module, text in texts.items():
        text = re.sub(r"pub(?:\([^)]*\))? use [^;]+;", "", text)
        children = {name[len(module)] for name in files if len(name) == len(module) + 1 and name[: len(module)] == module}
        heads = "|".join(["crate", "super", "self", *sorted(children)])
        for statement in re.findall(rf"(?<![\w:])((?:{heads})::(?:[\w:]+|\{{)(?:[^;(){{}}]|\{{[^;]*?\}}(?=;))*)", text):
            for path in spread(statement if re.match(r"[\w:]+\{", statement) else re.match(r"[\w:]+", statement).group()):
                target = resolve(path, module, files, passed_on)
                if target is not None and target != module:
                    edges[files[module]].add(files[target])
    return edges


def module_of(path: pathlib.Path, source: pathlib.Path) -> tuple[str, ...]:
    parts = path.relative_to(source).with_suffix("").parts
    return parts[:-1] if parts[-1] in ("lib", "mod", "main") else parts


def code_of(text: str) -> str:
    """Return the source code without tests, comments and literals."""
    text = re.split(r"#\[cfg\(test\)\]\s*(?:#\[path[^\n]*\]\s*)?mod ", text)[0]
    text = re.sub(r'r#".*?"#|"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def spread(statement: str) -> Iterable[list[str]]:
    """Yield the paths of a use tree: `a::{b, c::d}` yields a::b and a::c::d."""
    statement = re.sub(r"\s+", " ", statement).strip()
    head, brace, rest = statement.partition("{")
    if not brace:
        yield [part.partition(" as ")[0].strip() for part in head.split("::") if part.strip()]
        return
    prefix = [part.strip() for part in head.split("::") if part.strip()]
    depth, begin, inner = 0, 0, rest.rpartition("}")[0] if "}" in rest else rest
    for place, letter in enumerate(inner + ","):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if inner[begin:place].strip():
                yield from ([*prefix, *path] for path in spread(inner[begin:place]))
            begin = place + 1


def resolve(path: list[str], module: tuple[str, ...], files: dict, passed_on: dict) -> tuple[str, ...] | None:
    """Find the module that a path refers to, following re-exported names."""
    at: tuple[str, ...] = module
    rest = list(path)
    if rest and rest[0] == "crate":
        at, rest = (), rest[1:]
    while rest and rest[0] in ("super", "self"):
        at, rest = at[:-1] if rest[0] == "super" else at, rest[1:]
    if at == module and path[:1] not in (["self"], ["crate"]) and (not rest or (*at, rest[0]) not in files):
        return None
    while rest and (*at, rest[0]) in files:
        at, rest = (*at, rest[0]), rest[1:]
    while rest and (*at, rest[0]) in passed_on and passed_on[(*at, rest[0])] != at:
        at = passed_on[(*at, rest[0])]
    return at if at in files else None


def python_edges() -> Edges:
    """Return the modules that each module of the package imports when it is loaded. Imports inside functions are not counted."""
    edges: Edges = {path: set() for path in PACKAGE.rglob("*.py")}
    for path in edges:
        for node in statements(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "penstock":
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] == "penstock"]
            found = [place for name in names if (place := python_file(name)) is not None and place.name != "__init__.py"]
            edges[path] |= {place for place in found if place != path}
    return {path: targets for path, targets in edges.items() if path != PACKAGE / "__init__.py"}


def statements(tree: ast.Module) -> Iterable[ast.stmt]:
    """Yield the statements that run on import, except those that are only for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from getattr(node, "body", []) if isinstance(node, ast.If | ast.Try) else []


def python_file(name: str) -> pathlib.Path | None:
    place = ROOT / "python" / name.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


def check_circles(what: pathlib.Path, edges: Edges) -> list[str]:
    problems = []
    top = {path for path in edges if path.parent == what}
    # Treat each file in the top folder as a separate node, and each other folder as a single node.
    room = {path: path if path in top else path.parent for path in edges}
    folders: Edges = {place: set() for place in room.values()}
    for path, targets in edges.items():
        folders[room[path]] |= {room[target] for target in targets if target in room} - {room[path]}
    for cycle in cycles(folders):
        named = [place.relative_to(ROOT).as_posix() for place in cycle]
        if not (all(place in top for place in cycle) and is_explained(cycle)):
            problems.append(f"folder cycle: {' <-> '.join(named)}")
    for cycle in cycles(edges):
        if len({path.parent for path in cycle}) > 1 or not is_explained(cycle):
            problems.append(f"file cycle: {' <-> '.join(path.relative_to(ROOT).as_posix() for path in cycle)}")
    return problems


def is_explained(cycle: list[pathlib.Path]) -> bool:
    names = {path.name for path in cycle}
    found = [name for path in cycle for name in re.findall(r"Cycle with `?([\w.]+?)`?: \w", path.read_text())]
    return bool(names & set(found))


def cycles(edges: Edges) -> list[list[pathlib.Path]]:
    """Return the strongly connected components with more than one node (Tarjan 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(place: pathlib.Path) -> None:
        index[place] = low[place] = len(index)
        stack.append(place)
        for target in edges.get(place, ()):
            if target not in index:
                visit(target)
                low[place] = min(low[place], low[target])
            elif target in stack:
                low[place] = min(low[place], index[target])
        if low[place] == index[place]:
            cycle = stack[stack.index(place) :]
            del stack[stack.index(place) :]
            if len(cycle) > 1:
                found.append(sorted(cycle))

    for place in edges:
        if place not in index:
            visit(place)
    return found


def main() -> int:
    problems = check_levels()
    sources = sorted(ROOT.glob("crates/*/src"))
    for source in sources:
        problems += check_circles(source, rust_edges(source))
    problems += check_circles(PACKAGE, python_edges())
    print("\n".join(problems) or f"{len(sources)} crates and the package respect their layers")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
