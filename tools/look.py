"""Open every page of the site in headless Chromium, 1280 and 390 pixels wide. Report errors of the console and pages that are too wide.

.venv/bin/python tools/look.py [--pictures FOLDER]   # after `make docs`; needs Chromium (Debian: apt-get install chromium)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

SITE = pathlib.Path(__file__).resolve().parent.parent / "target" / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve the site on this machine, and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def problems_of(page: Page, address: str, width: int) -> list[str]:
    """Open a page, and list what is wrong with it."""
    found: list[str] = []
    page.on("console", lambda said: found.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"{request.url} failed"))
    page.goto(address, wait_until="load")
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        found.append(f"it is {wide} pixels wide")
    broken = page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
    return found + [f"{source} is not a picture" for source in broken]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=pathlib.Path, help="store a picture of each page here")
    pictures = parser.parse_args().pictures
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    pages = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html"))
    if browser_path is None or not pages:
        raise SystemExit("found no Chromium (install it), or no pages (run `make docs`)")
    problems = []
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width in (1280, 390):
            for path in pages:
                page = browser.new_page(viewport={"width": width, "height": 900})
                problems += [f"{path} at {width}: {problem}" for problem in problems_of(page, f"{address}/{path}", width)]
                if pictures:
                    pictures.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=pictures / f"{'-'.join(path.parts)}-{width}.png", full_page=True)
                page.close()
        browser.close()
    print(*problems, f"{len(pages)} pages at two widths, {len(problems)} problems", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
