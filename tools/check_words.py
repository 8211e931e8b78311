"""Check that sentences in comments, docstrings, messages and documents have at most 25 words and contain none of the phrases below.

A sentence ends at a full stop, colon or semicolon. Text in code font counts as one word. Text in brackets does not count, and code
blocks are not checked.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

from messages import messages

ROOT = pathlib.Path(__file__).parent.parent
WORDS = 25
# Phrases that a native speaker would not write here, and their replacements.
PHRASES = {
    r"(?<!there )\b(is|are) no (?!longer|more|slower|faster)\w+": "is not a …, or None if … is not …",
    r"\b(tells?|told)\b": "reports, returns",
    r"\bgo(es)? on\b": "continues, resumes",
    r"\bstands? (for|there|in)\b": "means, exists, replaces",
    r"\bby itself\b": "automatically",
    r"\bside by side\b": "concurrently",
    r"\bat hand\b": "available",
    r"\bwhoever\b": "the caller, the thread that …",
    r"\b(all but|but for)\b": "except",
    r"\bonce more\b": "again",
    r"\bgiven up\b": "aborted, abandoned",
    r"\blets? go of\b": "releases",
    r"\bnone at all\b": "empty, None",
    r"\bwhat (comes|is there)\b": "the noun",
    r"\b(that|which) cannot be\b(?! \w)": "invalid, impossible",
}

Text = tuple[pathlib.Path, int, str]


def rust_texts(path: pathlib.Path) -> Iterator[Text]:
    """Yield the paragraphs of comments, each with its first line number."""
    held: list[str] = []
    code = False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        found = re.match(r"\s*//[/!]?(?: (.*)|$)", line)
        text = found.group(1) or "" if found else ""
        code ^= text.startswith("```")
        if text and not code and not text.startswith("```"):
            held.append(text)
        elif held:
            yield path, number - len(held), " ".join(held)
            held = []
        if not found and (trailing := re.search(r"[;{},)\]] // (.+)$", line)):
            yield path, number, trailing.group(1)


def python_texts(path: pathlib.Path) -> Iterator[Text]:
    """Yield the paragraphs of docstrings, without examples, and of comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                if not paragraph.startswith((">>>", "    ")):
                    yield path, getattr(node, "lineno", 1), paragraph.split(">>>")[0]
    held: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#!|# (noqa|fmt|type):", token.string):
            continue
        number = token.start[0]
        if held and (number != last + 1 or not token.line.lstrip().startswith("#")):
            yield path, last - len(held) + 1, " ".join(held)
            held = []
        held.append(token.string.lstrip("# "))
        last = number
    if held:
        yield path, last - len(held) + 1, " ".join(held)


def document_texts(path: pathlib.Path) -> Iterator[Text]:
    """Yield paragraphs, list items and table cells."""
    held: list[str] = []
    code = False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        code ^= line.startswith("```")
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        plain = not code and line.strip() and not line.startswith(("    ", "|", "#", "```"))
        if held and (item or not plain):
            yield path, number - len(held), " ".join(held)
            held = []
        if plain:
            held.append(line[item.end() if item else 0 :].strip())
        elif line.startswith("|") and not code:
            for cell in line.strip("|").split("|"):
                yield path, number, cell


def texts() -> Iterator[Text]:
    for path in sorted(ROOT.glob("crates/**/*.rs")):
        yield from rust_texts(path)
    for folder in ("python/penstock", "tests", "bench", "tools", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from python_texts(path)
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("spec/*.md")), ROOT / "bench/README.md"):
        yield from document_texts(path)
    for message in messages():
        yield message.path, message.line, re.sub(r"\{[^{}]*\}", "X", message.text)


def sentences(text: str) -> Iterator[str]:
    """Split a paragraph into sentences.

    >>> [len(sentence.split()) for sentence in sentences("One `a b` two (three four). Five; six")]
    [3, 1, 1]
    """
    text = re.sub(r"\([^()]*\)", "", re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "X", " ".join(text.split())))
    yield from re.split(r"[.!?]\s+(?=[A-Z0-9*\[])|[:;]\s+| · ", text)


def main() -> None:
    problems = []
    for path, number, text in texts():
        where = f"{path.relative_to(ROOT)}:{number}"
        for sentence in sentences(text):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > WORDS:
                problems.append(f"{where}: {len(words)} words: {sentence[:100]}…")
        plain = re.sub(r"`[^`]*`|\"[^\"]*\"", "x", text)
        for phrase, instead in PHRASES.items():
            if path.name != "check_words.py" and (found := re.search(phrase, plain, re.IGNORECASE)):
                problems.append(f"{where}: `{found.group()}`, write: {instead}")
    if problems:
        sys.exit("\n".join([*problems, f"{len(problems)} passages are not in plain English"]))
    print("comments and documents are in plain English")


if __name__ == "__main__":
    main()
