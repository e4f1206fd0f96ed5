"""The page at /, in a real browser without a window: a video is asked for, followed, stopped; on a desk and on a phone."""

import shutil
from pathlib import Path

import pytest
from serving import Server, wait_for

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZES = {"desk": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'nanovgen[test]'")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on the PATH (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """tiny-wan, with a token."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "token").write_text("secret")
    running = Server(folder, "--token-file", folder / "token", "--max-steps", 10**5)
    yield running.ready()
    running.kill()


@pytest.fixture(params=SIZES)
def page(browser, server, request):
    """Opened, with whatever the browser complains of; nothing but this server is asked for anything."""
    width, height = SIZES[request.param]
    tab = browser.new_page(viewport={"width": width, "height": height})
    tab.complaints, tab.asked = [], []
    tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.on("request", lambda asked: tab.asked.append(asked.url))
    tab.goto(server.url)
    tab.set_default_timeout(60_000)
    yield tab
    assert tab.complaints == [] and all(url.startswith((server.url, "blob:")) for url in tab.asked)
    tab.close()


def says(page, where: str, text: str) -> None:
    """Waits for it. Not by wait_for_function: it evaluates text, which the page's own security policy forbids."""
    wait_for(lambda: text in page.text_content(f"#{where}"), 180, f"#{where} never says {text!r}")


def test_a_person_makes_a_video(page, server, tmp_path):
    says(page, "health", "is ready")
    page.fill("#prompt", "a red circle <b>moves</b> right")
    page.click("#make")
    says(page, "state", "wants its token")
    page.click("summary")
    page.fill("#token", "secret")
    for name, value in {"size": "96x48", "num_frames": "9", "num_inference_steps": "6", "seed": "3"}.items():
        page.fill(f"#{name}", value)
    page.click("#make")
    says(page, "state", "step ")
    page.wait_for_selector("#preview:not([hidden])")
    wait_for(lambda: page.evaluate("document.getElementById('preview').naturalWidth") == 96)
    page.wait_for_selector("#video:not([hidden])")
    wait_for(lambda: page.evaluate("document.getElementById('video').readyState") >= 2)
    size = page.evaluate("(v => [v.videoWidth, v.videoHeight, v.duration])(document.getElementById('video'))")
    assert size[:2] == [96, 48] and abs(size[2] - 9 / 16) < 0.1
    assert page.evaluate("document.getElementById('bar').value") == 100
    plan = page.inner_text("#plan")
    assert "96x48, 9 frames at 16 fps" in plan and "denoise" in plan and "a red circle <b>moves</b> right" in plan
    assert page.inner_text("#list").startswith("completed: a red circle <b>moves</b> right")
    with page.expect_download() as download:
        page.click("#save")
    assert download.value.suggested_filename.startswith("video_") and Path(download.value.path()).read_bytes()[4:8] == b"ftyp"
    width = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width[0] == width[1], "it must not scroll sideways"
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    print(f"screenshot: {tmp_path / 'page.png'}")


def test_a_person_stops_one_and_opens_another(page, server):
    page.click("summary")
    page.fill("#token", "secret")
    page.fill("#num_inference_steps", "90000")
    says(page, "health", "is ready")
    page.click("#make")
    says(page, "state", "step ")
    page.click("#stop")
    says(page, "state", "stopped")
    page.fill("#num_inference_steps", "2")
    page.fill("#size", "853x480")
    page.click("#make")
    says(page, "state", "the nearest is 848x480")
    page.fill("#size", "64x32")
    page.click("#make")
    says(page, "state", "done in ")
    page.click("#list li:nth-child(1) button")
    page.wait_for_selector("#video:not([hidden])")
    assert "wants its token" not in page.inner_text("#state")
