"""Every block of the site runs, page by page, and prints what the page says. The plot of the README shows the committed results."""

import contextlib
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
import uuid

import pytest
import sample_inputs
import servers

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "site"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
# What a block says that it prints: behind a `print` that fits one line, or in the line after it.
SAID = re.compile(r"^ *print\(.*\) +# (.*)$|^ *# → (.*)$", re.M)
# These pages run in `make soak`: their library needs older versions of ours, and so an environment of its own.
ALONE = {"from-mds"}


def blocks(page: pathlib.Path):
    """Yield the language, the text and the line of each block of a page."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield found.group(1), found.group(2), text[: found.start()].count("\n") + 2


def run_page(page: pathlib.Path, change=lambda text: text) -> int:
    """Run the blocks of a page in the current folder, in one namespace, and compare what they print. Returns how many ran."""
    names, count = {"__name__": "__main__"}, 0
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    for language, block, line in blocks(page):
        place = f"{page.relative_to(ROOT)}:{line}"
        if language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", change(block)], capture_output=True, text=True, env={**os.environ, "PATH": path}
            )
            assert done.returncode == 0, (place, done.stdout, done.stderr)
        elif language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + change(block), str(page), "exec"), names)
            said = [(behind or after).strip() for behind, after in SAID.findall(block)]
            assert not re.search(r"^ *\) +# ", block, re.M), (place, "a comment behind a bracket is easily missed")
            lines = printed.getvalue().splitlines()
            assert [text for text in lines if text in said] == said, (place, said, lines)
        else:
            assert language in ("text", "pycon"), (place, language)
            continue
        count += 1
    return count


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    sample_inputs.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLAIN = sorted(
    page.relative_to(PAGES).with_suffix("").as_posix()
    for page in PAGES.rglob("*.md")
    if page.stem not in ALONE | {"s3"} and re.search(r"^```(python|bash)$", page.read_text(), re.M)
)


@pytest.mark.parametrize("name", PLAIN)
def test_the_blocks_of_a_page_run_and_print_what_they_say(name, inputs):
    page = PAGES / f"{name}.md"
    if name == "tour":
        sample_inputs.shutil.rmtree("photos")  # The page makes its own.
    if name == "how-to/from-lance":
        sample_inputs.lance(
            inputs / "pets.lance", sorted(f"photos/{path.parent.name}/{path.name}" for path in inputs.glob("photos/*/*")), inputs
        )
    assert run_page(page) >= 1


def test_the_page_about_buckets_runs_on_minio(inputs, minio):
    prefix = f"s3://{servers.BUCKET}/{uuid.uuid4().hex}"
    assert run_page(PAGES / "how-to/s3.md", lambda text: re.sub(r"^export .*$", "", text.replace("s3://bucket", prefix), flags=re.M)) >= 5


@pytest.mark.soak
def test_the_page_about_mds_runs_in_an_environment_of_its_own(inputs):
    uv, python = ROOT / ".venv/bin/uv", inputs / "venv/bin/python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, inputs / "venv"], check=True)
    needed = ["mosaicml-streaming>=0.12", "pillow", "pyarrow", "pyyaml", "ml_dtypes", "typer", "rich"]
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *needed], check=True)
    write = """
import pathlib
from streaming import MDSWriter
with MDSWriter(out="mds", columns={"image": "bytes", "label": "int"}) as out:
    for path in sorted(pathlib.Path("photos").rglob("*.jpg")):
        out.write({"image": path.read_bytes(), "label": int(path.parent.name == "dog")})
"""
    page = PAGES / "how-to/from-mds.md"
    [(_, block, _)] = [found for found in blocks(page) if found[0] == "python"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    for script in (write, block):
        done = subprocess.run([python, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "20"


def test_every_page_is_in_the_navigation_and_the_reference_names_what_exists():
    import tomllib

    import penstock

    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(config["project"]["nav"])))
    assert listed == {page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md")}
    named = {name for page in (PAGES / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    for name in named:
        thing = penstock
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)
        assert thing.__doc__, name
    public = {name for name in penstock.__all__ if not name.startswith("__") and not name.endswith("Error")}
    missing = {name for name in public if f"penstock.{name}" not in named}
    assert missing <= {"Files", "Mix"}, missing  # Their functions are listed.


# `docs/build.py` writes these pages. Their text in the repository is not on the site.
GENERATED = {"benchmarks.md", "format.md", "reference/commands.md", "reference/messages.md"}
LINK = re.compile(r"\]\(([^()\s]+)\)")
DOCUMENTS = sorted(
    {
        *PAGES.rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "docs" / "design").glob("*.md"),
        ROOT / "bench/README.md",
        ROOT / "spec/format-v1.md",
    }
)


def headings(page: pathlib.Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and Zensical make them."""
    text = BLOCK.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_in_the_repository_and_on_the_site(page):
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} does not exist in the repository"
        assert not anchor or target.suffix != ".md" or anchor in headings(target), f"{link} names no heading"
        own = page.is_relative_to(PAGES) and page.relative_to(PAGES).as_posix() not in GENERATED
        assert not own or target.is_relative_to(PAGES), f"{link} is not on the site"


def test_generated_pages_are_written_over_those_of_the_repository():
    build = (ROOT / "docs" / "build.py").read_text()
    for name in GENERATED:
        assert (PAGES / name).exists() and f'"{name.rpartition("/")[2]}").write_text' in build


def test_the_code_of_the_readme_runs_and_fits_80_columns(inputs):
    readme = ROOT / "README.md"
    [code] = [block for language, block, _ in blocks(readme) if language == "python"]
    assert len([line for line in code.splitlines() if line]) <= 13 and max(map(len, code.splitlines())) <= 80
    assert run_page(readme, lambda block: "" if "make demo" in block else block) == 2


def test_the_plot_of_the_readme_shows_the_committed_results():
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))
    svg = (PAGES / "img" / "photos.svg").read_text()
    rates = build["rates"]("photos")
    assert len(rates) >= 5 and all(f" {rate:,.0f}" in svg for rate in rates.values()), "run docs/build.py --readme"
    assert "img/photos.svg" in (ROOT / "README.md").read_text()
