"""Takes the dashboard's pictures for the README, the tutorials and the gallery, with the runs of ``make demo``.

    make demo
    .venv/bin/python docs/screenshots/make_screenshots.py            # the newest traces/demo-*
    .venv/bin/python docs/screenshots/make_screenshots.py DIR        # other runs
    .venv/bin/python docs/screenshots/make_screenshots.py --gallery  # only one picture of each page

The script needs Chromium and the development requirements. Look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "dashboards", "")]

from support.browser import Watched, open_browser, served  # noqa: E402 - requires the path set above

LARGEST_BYTES = 200_000


class Picture(NamedTuple):
    """A picture: the page, the size of the window, the color scheme, and the card at its top."""

    name: str
    path: str
    width: int
    height: int
    scheme: str
    card: str = ""


PICTURES = (
    Picture("compare-light", "/compare", 1280, 1140, "light"),
    Picture("compare-dark", "/compare", 1280, 1140, "dark"),
    Picture("overview-light", "/overview", 1280, 1140, "light"),
    Picture("overview-dark", "/overview", 1280, 1140, "dark"),
    Picture("compare-phone", "/compare", 420, 1140, "dark"),
    Picture("plan-light", "/plan?compute=900ms", 1280, 1140, "light", "settings"),
    Picture("plan-dark", "/plan?compute=900ms", 1280, 1140, "dark", "settings"),
    Picture("plan-phone", "/plan?compute=900ms", 390, 1500, "light"),
)


def gallery(runs: Path) -> tuple[Picture, ...]:
    """Return a picture of each page. Pages about one run show the first run that is aligned with a log."""
    from commprof_dash.pages import PAGES

    aligned = sorted(runs.rglob("matches.parquet"))
    query = f"?run={quote(aligned[0].parent.relative_to(runs).as_posix())}" if aligned else ""
    pictures = []
    for page in PAGES:
        name = page.path.strip("/") or "runs"
        of_all = name in ("runs", "compare", "plan")
        address = f"{page.path}{'' if of_all else query}"
        pictures.append(Picture(f"gallery-{name}", address, 1440, 900, "light"))
    return tuple(pictures)


def take(browser: Any, base: str, picture: Picture, out: Path) -> Path:
    """Save ``picture`` of the dashboard at ``base`` in ``out``."""
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height}, color_scheme=picture.scheme
    )
    view = Watched(context.new_page())
    view.open(base + picture.path)
    # The page Runs shows this text until the records of all runs are read.
    is_read = "() => !document.body.innerText.includes('Reading the records of')"
    view.page.wait_for_function(is_read, timeout=120_000)
    if picture.card:
        place = "(id) => window.scrollTo(0, document.getElementById(id).getBoundingClientRect().top - 72)"
        view.page.evaluate(place, f"card-{picture.card}")
    path = out / f"{picture.name}.png"
    view.page.screenshot(path=path)
    context.close()
    if view.errors:
        raise SystemExit(f"{picture.path}: {view.errors}")
    if path.stat().st_size > LARGEST_BYTES:
        raise SystemExit(
            f"{path.name} has {path.stat().st_size:,} bytes; at most {LARGEST_BYTES:,} may be committed"
        )
    return path


def newest_demo() -> Path:
    """Return the directory of the runs of the last ``make demo``."""
    found = sorted((ROOT / "traces").glob("demo*"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("no traces/demo*; run `make demo` first, or name a directory of runs")
    return found[-1]


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="?", type=Path, help="directory of runs (default: the newest traces/demo*)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--gallery", action="store_true", help="only one picture of each page")
    arguments = parser.parse_args()
    runs, out = (arguments.runs or newest_demo()).resolve(), arguments.out.resolve()
    pictures = gallery(runs) if arguments.gallery else (*PICTURES, *gallery(runs))
    os.chdir(runs.parent)  # With a relative path of the runs, no page shows a folder of this machine.
    with served(Path(runs.name)) as base, open_browser() as browser:
        for picture in pictures:
            path = take(browser, base, picture, out)
            print(f"{path}  {path.stat().st_size:,} bytes", flush=True)
    # A thread of the dashboard may still run a query, and a normal exit of the interpreter would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
