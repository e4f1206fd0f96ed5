"""The planner's page: all in one file, every rank in its place, measured rows beside predicted ones, and readable on a phone."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from PIL import Image

from nanovgen import choose, report
from nanovgen.article import RACK
from nanovgen.recipe import ParallelConfig

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TAGS_ALONE = {"meta", "link", "img"}


class Page(HTMLParser):
    """Refuses tags that do not close in order; keeps the text, and what would be fetched."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.text, self.fetched = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href")]
        if tag not in TAGS_ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The report of 8 H200s, with one measured file of two rows, and the picture."""
    home = tmp_path_factory.mktemp("report")
    rows = [{"recipe": {"ulysses_size": 2, "attn2d_size": [1, 1]}, "seconds": {"turn": 5.5}},
            {"recipe": {"cfg_size": 2, "attn2d_size": [1, 1]}, "seconds": {"turn": 10.0}}]  # fmt: skip
    argv = ["--model", "wan2.2-t2v-a14b", "--compile", "--attention", "cudnn", "--sweep"]
    (home / "two.json").write_text(json.dumps({"argv": argv, "device": "NVIDIA <H200>", "world": 2, "rows": rows}))
    code = choose.main(["--gpus", "8", "--machine", "h200-nvlink", "--frames", "77", "--report", str(home / "plan.html"),
                        "--picture", str(home / "plan.png"), "--measured", str(home / "two.json")])  # fmt: skip
    assert code == 0
    return home


def test_the_page_is_whole(made):
    html = (made / "plan.html").read_text()
    page = Page(html)
    text = " ".join(page.text)
    assert all(what.startswith("data:") for what in page.fetched) and "<script" not in html
    for heading in ("The mesh", "Why this one", "The ranking", "Left out", "Measured", "Published, and the model"):
        assert heading in page.text
    assert "NVIDIA <H200>: wan2.2-t2v-a14b, 72000 tokens, cudnn" in text and "12.88" in text and "PR 13821" in text


def test_measured_rows_beside_predicted_ones(made):
    """A turn of cfg 2 is a whole forward; of Ulysses 2, half of one and its exchanges."""
    (_, name, seconds, half), (_, _, _, whole) = report.read_measured(made / "two.json")
    assert (name, seconds) == ("ul2", 5.5)
    assert whole == pytest.approx(40 * 263.6e-3, rel=0.03) and 0.5 < half / whole < 0.55


def test_the_picture(made):
    with Image.open(made / "plan.png") as image:
        assert image.size == (900, 1275) and len(image.convert("RGB").getcolors(10**6)) > 50


MESHES = {"rack": RACK, "ring": ParallelConfig(2, ulysses_size=4, ring_size=9), "one": ParallelConfig(),
          "tall": ParallelConfig(tp_size=2, attn2d_size=(12, 3))}  # fmt: skip


@pytest.mark.parametrize("name", MESHES)
def test_every_rank_has_a_place(name):
    parallel = MESHES[name]
    drawn = report.mesh(parallel)
    Page(drawn)
    cells = [[int(n) for n in re.findall(r"<b[^>]*>(\d+)</b>", cell)] for cell in drawn.split('class="cell"')[1:]]
    assert sorted(rank for cell in cells for rank in cell) == list(range(parallel.world))
    assert all(cell == list(range(cell[0], cell[0] + parallel.ulysses_size)) for cell in cells)  # ulysses: consecutive ranks
    assert f"repeat({max(parallel.attn2d_size[1], parallel.ring_size)}, " in drawn
    assert drawn.count('class="grid"') == parallel.cfg_size * parallel.tp_size


@pytest.mark.parametrize("content", ["{", "[]", '{"argv": ["--model", "no"], "device": "x", "world": 1, "rows": []}'])
def test_a_file_of_something_else(tmp_path, capsys, content):
    measured, out = tmp_path / "x.json", tmp_path / "p.html"
    measured.write_text(content)
    code = choose.main(["--gpus", "1", "--model", "tiny-wan", "--report", str(out), "--measured", str(measured)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and "x.json is no JSON of nanovgen.bench --out" in error and not out.exists()


def test_in_a_browser(made):
    """Chromium, as wide as a phone and as a desk: no word on its console, nothing fetched, nothing wider than the screen."""
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    said, uri = [], (made / "plan.html").as_uri()
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            page.goto(uri)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            sizes = page.evaluate(
                "[...document.querySelectorAll('p, li, td, b')].map(e => parseFloat(getComputedStyle(e).fontSize))"
            )
            assert min(sizes) >= 12 and page.evaluate("document.images[0].naturalWidth") == 900
        browser.close()
    assert [what for what in said if what != uri and not what.startswith("data:")] == []
