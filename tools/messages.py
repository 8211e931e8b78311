"""Find the messages of the sources: texts and hints of errors, what commands print, and their help. `check_words.py` checks them, and
`docs/build.py` lists them on one page.

A message is a string literal of at least three words outside of comments, docstrings and tests.
"""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A comment, a raw string, a string, or a character. Only strings have groups.
RUST_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|\bb?r(?P<fence>#*)"(?P<raw>.*?)"(?P=fence)|"(?P<text>(?:[^"\\]|\\.)*)"|\'(?:\\.|[^\'\\])\'', re.S
)
CODE = re.compile(r'^    \("([a-z-]+)", Kind::', re.M)
# A function that makes errors of one code.
MAKES = re.compile(r'fn (\w+)\([^)]*\) -> (?:\w+::)?Error \{[^{}]*Error::new\("([a-z-]+)", \w+\)')
# A class of errors in Python, and the code of those that name none.
CLASS = re.compile(r'^class (\w+)\(.*?\n    code = "([a-z-]+)"', re.M | re.S)


class Message(NamedTuple):
    path: pathlib.Path
    line: int
    # The code of the error, if it is written beside the text.
    code: str | None
    is_hint: bool
    text: str


def codes() -> list[str]:
    """Return the codes of all errors, in their order in the table of `crates/error`."""
    return CODE.findall((ROOT / "crates/error/src/lib.rs").read_text())


def is_prose(text: str) -> bool:
    return len(re.findall(r"[^\W\d_]{2,}(?=[\s,.:;?!)]|$)", re.sub(r"\{[^{}]*\}|`[^`]*`", "x", text))) >= 3 and " " in text


def rust_messages(path: pathlib.Path, known: set[str], makers: dict[str, str]) -> Iterator[Message]:
    source = re.split(r"^(?:    )?#\[cfg\(test\)\]\n(?:    )?mod \w+ \{", path.read_text(), maxsplit=1, flags=re.M)[0]
    code, end_of_code = None, 0
    for token in RUST_TOKEN.finditer(source):
        text = token["raw"] if token["raw"] is not None else token["text"]
        if text is None:
            continue
        if text in known:
            code, end_of_code = text, token.end()
        text = re.sub(r"\\\n\s*", "", text).replace('\\"', '"').replace("\\n", "\n")
        if is_prose(text):
            called = re.search(r"(\w+)\((?:format!\()?\s*$", source[: token.start()])
            name = called[1] if called else ""
            is_beside = ";" not in source[end_of_code : token.start()]
            later = re.match(r'[^;]*;[^;]*Error::new\("([a-z-]+)", \w+\)', source[token.end() : token.end() + 300])
            line = source.count("\n", 0, token.start()) + 1
            yield Message(path, line, makers.get(name) or (code if is_beside else later and later[1]), name == "hint", text)


def python_text(node: ast.expr) -> str | None:
    """Return the text of a literal, with placeholders for its expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            shown = (part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}" for part in parts)
            return "".join(map(str, shown))
    return None


def python_messages(path: pathlib.Path, classes: dict[str, str]) -> Iterator[Message]:
    """Yield the messages of a file. The code is that of the call that has the text as an argument."""
    waiting: list[tuple[ast.AST, str | None, bool]] = [(ast.parse(path.read_text()), None, False)]
    while waiting:
        node, code, is_hint = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # A docstring.
        if isinstance(node, ast.expr) and (text := python_text(node)) is not None:
            if is_prose(text):
                yield Message(path, node.lineno, code, is_hint, text)
            continue
        if isinstance(node, ast.Call):
            given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            code = str(given.get("code") or classes.get(ast.unparse(node.func)) or code or "") or None
        is_hint = (isinstance(node, ast.keyword) and node.arg == "hint") or (is_hint and not isinstance(node, ast.keyword))
        waiting += [(child, code, is_hint) for child in ast.iter_child_nodes(node)]


def messages() -> list[Message]:
    """Return all messages, by path and line."""
    known, found = set(codes()), list[Message]()
    paths = [path for path in ROOT.glob("crates/*/src/**/*.rs") if "testkit" not in path.parts and path.name != "tests.rs"]
    makers = dict(maker for path in paths for maker in MAKES.findall(path.read_text()))
    for path in paths:
        found += rust_messages(path, known, makers)
    classes = dict(CLASS.findall((ROOT / "python/penstock/errors.py").read_text()))
    for path in ROOT.glob("python/penstock/**/*.py"):
        found += python_messages(path, classes)
    return sorted(found, key=lambda message: message[:2])
