"""A server of one rank: who may use it, images, its start and its end, and the client that measures it."""

import base64
import io
import json
import signal
import threading
from urllib.parse import urlencode

import numpy as np
import openai
import pytest
import serving
import torch
from conftest import PROMPT
from PIL import Image
from safetensors.torch import load_file
from serving import Server, wait_for

from nanovgen import compiled, generate, preview, serve, summary
from nanovgen import job as jobs
from nanovgen.orders import Orders
from nanovgen.preview import Previewer
from nanovgen.recipe import Recipe, Request, TorchCompileConfig, from_flags

TOKEN = "a-word-of-32-letters-for-the-tests"


def png(width: int, height: int, colour: tuple[int, int, int] = (200, 40, 40), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(pristine_i2v, tmp_path_factory):
    """Image-to-video, with a token, weights read anew for every request."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "token").write_text(TOKEN + "\n")
    running = Server(folder, "--model", pristine_i2v, "--token-file", folder / "token", "--keep", "no", "--max-body", 2)
    yield running.ready()
    running.kill()


def test_the_token(server):
    body = {"prompt": PROMPT}
    assert server.ask("/health").status == server.ask("/").status == 200
    for path in ("/v1/videos", "/metrics", "/v1/videos/x/content"):
        assert server.ask(path).status == 401, path
    for wrong in ("", TOKEN, f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"):
        assert server.ask("/v1/videos", body, Authorization=wrong).status == 401, wrong
    assert server.ask("/v1/videos", Authorization=f"Bearer {TOKEN}").status == 200
    assert TOKEN not in server.log and TOKEN not in (server.folder / "server.py").read_text()


def test_images(server, tmp_path):
    """Through OpenAI's client as a file, and in JSON: the first frame decides the video, and other bytes are refused."""
    (tmp_path / "any name; x=..png").write_bytes(png(100, 60))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client, pytest.warns(DeprecationWarning):
        upload = client.videos.create(prompt=PROMPT, input_reference=tmp_path / "any name; x=..png", extra_body={"seed": 1})
        blue = ("x.jpg", png(64, 32, (0, 0, 250), "JPEG"))
        other = client.videos.create(prompt=PROMPT, input_reference=blue, extra_body={"seed": 1})
        plain = base64.b64encode(png(100, 60)).decode()
        url, key = f"data:image/png;base64,{plain}", {"Authorization": f"Bearer {TOKEN}"}
        asked = [{"input_reference": {"image_url": url}}, {"input_reference": plain}, {"input_reference[image_url]": url}]
        asked = [{"prompt": PROMPT, "seed": 1} | one for one in asked]
        inside = [server.ask("/v1/videos", body, **key).json["id"] for body in asked[:2]]
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        inside.append(server.ask("/v1/videos", urlencode(asked[2]).encode(), **key, **form).json["id"])
        names = [upload.id, other.id, *inside]
        for name in names:
            wait_for(lambda name=name: client.videos.retrieve(name).status == "completed")
        movies = [client.videos.download_content(name).read() for name in names]
        assert movies[0] == movies[2] == movies[3] == movies[4] != movies[1]
        bomb = Image.new("1", (7000, 7000))
        for data, said in ((b"GIF89a", "no PNG"), (png(8, 8)[:40], "no PNG"), (png(8, 8, kind="BMP"), "no PNG"), (b"", "no PNG"),
                           (bomb, "49000000|7000x7000")):  # fmt: skip
            if data is bomb:
                buffer = io.BytesIO()
                bomb.save(buffer, "PNG")
                data = buffer.getvalue()
            with pytest.raises(openai.UnprocessableEntityError, match=said):
                client.videos.create(prompt=PROMPT, input_reference=("../../x.png", data))
        with pytest.raises(openai.UnprocessableEntityError, match="from an image and text"):
            client.videos.create(prompt=PROMPT)
        with pytest.raises(openai.APIStatusError, match="at most 2000000 bytes"):
            client.videos.create(prompt=PROMPT, input_reference=("x.png", b"x" * 3 * 10**6))
        assert all("load" in server.ask(f"/v1/videos/{name}", **key).json["stage_seconds"] for name in names)  # --keep no
        ends = (".mp4", ".json", ".latents.safetensors", ".image.png")
        for name in names:
            assert {f for f in server.files() if name in f} == {name + end for end in ends}
            client.videos.delete(name)
    assert server.files() == set()


def test_starts_that_are_refused(server, tmp_path, capsys, monkeypatch, pristine):
    """One line, status 2, before a weight is read: two servers on one port, or in one folder, among them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "load", lambda *_: pytest.fail("a weight would have been read"))
    (tmp_path / "empty").write_text(" \n")
    small = ["--model", str(pristine), *serving.SMALL, "--port", str(serving.free_port())]
    for flags, said in {
        ("--port", server.port): "cannot listen on 127.0.0.1",
        ("--folder", server.folder / "videos"): "another server works in",
        ("--port", 70000): "cannot listen on",
        ("--host", "no.such.host.invalid"): "cannot listen on",
        ("--token-file", "none"): "token file none cannot be read",
        ("--token-file", "empty"): "must hold one word",
        ("--size", "853x480"): "the nearest is 848x480",
        ("--folder", "/proc/videos"): "cannot write in /proc/videos",
        ("--recipe", "8gpu"): "the recipe is for 8 ranks",
    }.items():
        assert serve.main([*small, *map(str, flags)]) == 2
        found = capsys.readouterr()
        assert found.out == "" and found.err.startswith("nanovgen.serve: ") and said in found.err, found
        assert found.err.count("\n") == 1
    assert server.health() == 200


def test_bench(server, capsys, tmp_path):
    """Of a server that is not ready, that wants a token, and of a good one; 2 at a time."""
    assert serve.main(["bench", "--url", f"http://127.0.0.1:{serving.free_port()}", "--wait", "0.3"]) == 1
    assert "is not ready after 0.3 s" in capsys.readouterr().err
    assert serve.main(["bench", "--url", server.url, "--requests", "0"]) == 2
    assert serve.main(["bench", "--url", server.url, "--requests", "1"]) == 1 and "401" in capsys.readouterr().err
    assert serve.main(["bench", "--url", server.url, "--requests", "1", "--token-file", str(server.folder / "token")]) == 1
    assert "from an image and text" in capsys.readouterr().err


@pytest.fixture
def own(pristine, tmp_path):
    """A server of one rank that the test may start more than once, in one folder."""
    started = []

    def start(*flags: object, **more: object) -> Server:
        started.append(Server(tmp_path / "own", "--model", pristine, *flags, **more))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def test_health_from_its_start_to_its_end_and_a_restart(own, capsys, tmp_path):
    """503 while it warms up and while it ends; the finished and the waiting are there again, the lost one says how to go on."""
    server = own("--max-steps", 10**6)
    wait_for(lambda: server.health() == 503)
    assert server.ask("/v1/videos", {"prompt": PROMPT}).status == 503
    server.ready()
    bench = ["bench", "--url", server.url, "--requests", "3", "--concurrency", "2", "--out", str(tmp_path / "b.json")]
    assert serve.main(bench) == 0
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "b.json").read_text())
    assert "3 requests, 2 at a time" in printed
    assert all(f"\n{name} " in printed for name in ("total", "queued", "denoise", "decode"))
    spread = report["percentiles"]["total"]
    assert spread["50"] <= spread["90"] <= spread["99"] and report["percentiles"]["generation"]["50"] < spread["50"]
    first = server.make(seed=9)
    server.ended(first)
    movie = server.ask(f"/v1/videos/{first}/content").body
    lost = server.make(num_inference_steps=90000)
    server.reaches(lost, "denoise")
    waits, gone = server.make(seed=9), server.make()
    assert server.ask(f"/v1/videos/{gone}", method="DELETE").status == 200
    said = []
    server.process.send_signal(signal.SIGTERM)
    follow = threading.Thread(target=lambda: wait_for(lambda: said.append(server.health()) or said[-1] == 0))
    follow.start()
    server.gone()
    follow.join()
    assert 503 in said and said[-1] == 0 and server.process.returncode == 130
    again = own().ready()
    assert again.video(first)["status"] == "completed" and again.ask(f"/v1/videos/{first}/content").body == movie
    assert "denoise;dur=" in again.ask(f"/v1/videos/{first}").headers["server-timing"]
    message = again.video(lost)["error"]["message"]
    assert message.startswith("the server ended (told to end); no latents were saved; make it again with: python run.py ")
    assert "--steps=90000" in message and again.video(lost)["status"] == "failed"
    assert again.ended(waits)["status"] == "completed" and again.ask(f"/v1/videos/{waits}/content").body == movie
    assert again.ask(f"/v1/videos/{gone}").status == 404
    listed = [v["id"] for v in again.ask("/v1/videos?order=asc").json["data"]]
    assert listed[-3:] == [first, lost, waits] and len(listed) == 6
    again.process.send_signal(signal.SIGKILL)
    again.gone()


def test_latents_survive_and_their_command_works(own, cli, tmp_path):
    """Killed outright while it decodes: the restarted server names the command, and the command makes the video."""
    server = own().ready()
    name = server.make(num_frames=1601, num_inference_steps=1)
    wait_for(lambda: any(f.endswith(".part.mp4") for f in server.files()))
    server.process.send_signal(signal.SIGKILL)
    server.gone()
    again = own().ready()
    message = again.video(name)["error"]["message"]
    assert message.startswith("the server ended while it was made; its latents are safe; go on from them with: python run.py ")
    assert again.files() == {f"{name}.latents.safetensors"}
    command = message.split("python run.py ")[1].split()
    assert cli(*command).code == 0 and (tmp_path / "own/videos" / f"{name}.mp4").exists()
    assert again.stop(signal.SIGINT) == 130


def test_a_disk_that_is_full_does_not_stop_the_orders(tmp_path):
    """What cannot be written down is known all the same, and written when there is room; a new order is refused."""
    request = Request("x", out="x.mp4", steps=2)
    orders = Orders(tmp_path, 4)
    first, second, third = (orders.add(name, request, {}) for name in ("video_1", "video_2", "video_3"))
    pages = orders.file.execute("pragma page_count").fetchone()[0]
    orders.file.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(OSError, match="the order cannot be written down"):
        for i in range(100):
            orders.most = 1000
            orders.add(f"video_x{i}", request, {"plan": "x" * 500})
    long = "it failed " * 2000  # more than fits
    assert orders.take(1) is first
    orders.end(first, error=long)
    assert orders.find("video_1").error == long and orders.find("video_1").status == "failed"
    assert orders.take(1) is second and orders.delete("video_2")
    orders.end(second, error="cancelled")
    assert orders.find("video_2") is None and orders.delete("video_3") and third.ended
    assert {"video_2", "video_3"}.isdisjoint(order.id for order in orders.page(None, 100, False)[0])
    orders.file.execute("pragma max_page_count = 100000")
    orders.take(0.01)
    orders.close()
    again = Orders(tmp_path, 4)
    assert again.find("video_1").error == long and again.find("video_2") is again.find("video_3") is None


def test_weights_are_kept_where_they_fit(pristine, tmp_path, monkeypatch):
    """All parts and the larger of the two working sets together, against nine tenths of the memory."""

    def kept(way: str) -> bool:
        args = serve.parse(["--model", str(pristine), *serving.SMALL, "--folder", str(tmp_path), "--keep", way])
        return serve.prepare(args, *from_flags(args, 1), 1).kept.everything

    job = jobs.prepare(Request(PROMPT, str(pristine), size="64x32", frames=5, steps=2, out=str(tmp_path / "v.mp4")))
    parts = sum(summary.weight_bytes(job, part) for part in job.models)
    need = summary.predicted_peak(jobs.replace(job, kept=jobs.Kept(everything=True)))
    assert parts < need < parts + summary.predicted_peak(job)
    assert [kept(way) for way in ("auto", "yes", "no")] == [True, True, False]
    monkeypatch.setattr(summary, "room", lambda *_: need)
    assert [kept(way) for way in ("auto", "yes", "no")] == [False, True, False]
    monkeypatch.setattr(summary, "room", lambda *_: need * 1.2)
    assert kept("auto")


def test_what_is_kept_is_compiled_once(pristine, tmp_path, one_thread):
    """Of two requests alike the second compiles and loads nothing; one of another shape would be warmed up for it alone."""
    torch._dynamo.reset()  # this process may have compiled the same code for another test
    recipe = Recipe(torch_compile_config=TorchCompileConfig(True))
    request = Request(PROMPT, str(pristine), size="64x32", frames=5, steps=2, out=str(tmp_path / "v.mp4"))
    base, made = jobs.replace(jobs.prepare(request, recipe), kept=jobs.Kept(everything=True)), []
    for _ in range(2):
        before = compiled.graphs()
        report = generate.generate(jobs.prepare(request, recipe, like=base))
        latents = load_file(tmp_path / "v.latents.safetensors")["latents"]
        made.append((compiled.graphs() - before, "load" in report["stages"], report["graphs_in_steps"], latents))
    assert made[0][0] > 0 and made[0][1] and made[1][:3] == (0, False, 0) and torch.equal(made[0][3], made[1][3])
    assert base.kept.warmed == {("64x32", 5)} and {*base.kept.parts} == {*base.models}
    other = jobs.prepare(jobs.replace(request, size="32x32"), recipe, like=base)
    assert [job.request.size for job in jobs.warm_jobs(other)] == ["32x32"]


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_the_last_preview_is_the_first_frame(pristine, tmp_path, monkeypatch, one_thread, solver):
    """After the last step x0 is the sample; an earlier step's is another picture. And they keep to their share of the time."""
    monkeypatch.setattr(preview, "PAUSE", 0.0)
    monkeypatch.setattr(preview, "SHARE", 1e9)
    request = Request(PROMPT, str(pristine), size="64x32", frames=9, steps=3, solver=solver, sheet=True,
                      out=str(tmp_path / "v.mp4"))  # fmt: skip
    job, seen = jobs.prepare(request), []
    previewer = Previewer(generate.load(job, "vae", generate.Stages(job.device)))

    class Stages(generate.Stages):
        def step(self, *given):
            seen.append(np.asarray(Image.open(io.BytesIO(previewer.look(*given))), int))

    generate.generate(job, Stages(job.device))
    first = np.asarray(Image.open(job.out.with_suffix(".png")))[1:33, 1:65]  # the contact sheet's first cell
    wanted = np.asarray(Image.open(io.BytesIO(preview.jpeg(first))), int)
    errors = [abs(picture - wanted).mean() for picture in seen]
    print(f"mean differences from the first frame: {errors}")
    assert len(seen) == 3 and errors[2] < 0.1 and errors[0] > 3
    monkeypatch.setattr(preview, "PAUSE", 100.0)
    x = torch.zeros(1, 16, 3, 4, 8)
    assert previewer.look(job, 0, x, x) and previewer.look(job, 0, x, x) is None
