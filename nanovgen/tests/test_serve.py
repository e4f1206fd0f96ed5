"""A server of four ranks, as its clients meet it: OpenAI's own client among them, and those who send rubbish."""

import base64
import http.client
import io
import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import numpy as np
import openai
import pytest
import serving
import soak
from conftest import PROMPT
from PIL import Image
from safetensors.torch import load_file
from serving import SOON, Server, wait_for

BOOM = """
import os
from nanovgen import generate
velocity = generate.velocity

def broken(job, model, x, t, contexts):
    if job.request.prompt == "boom" and os.environ["RANK"] == "2" and t == job.times[1]:
        raise RuntimeError("boom on purpose")
    return velocity(job, model, x, t, contexts)

generate.velocity = broken
"""
FOREVER = {"num_inference_steps": 90000}
LONG_DECODE = {"num_frames": 1601, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def server(pristine, tmp_path_factory):
    """Four ranks, the VAE on two. The third fails in step 2 of whatever is called "boom"."""
    folder = tmp_path_factory.mktemp("server")
    recipe = folder / "recipe.yaml"
    recipe.write_text("parallel_config: {cfg_size: 2, ring_size: 2, parallel_vae_size: 2}")
    flags = ("--model", pristine, "--ranks", 4, "--recipe", recipe, "--waiting", 3, "--max-steps", 10**5, "--sheet")
    running = Server(folder, *flags, code=BOOM)
    yield running.ready()
    running.kill()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ours:
        yield ours


def counted(server: Server, name: str) -> float:
    found = [line for line in server.ask("/metrics").body.decode().splitlines() if line.startswith(name + " ")]
    return float(found[0].split()[1])


def test_openai_s_client_makes_the_video_of_run_py(server, client, cli, pristine, tmp_path):
    """Its own types, unmodified; the latents of the command line to 1e-5, on four ranks against one."""
    more = {"num_frames": 9, "fps": 8, "num_inference_steps": 3, "seed": 7, "guidance_scale": 2.5, "guidance_scale_2": 1.5}
    with pytest.warns(DeprecationWarning):
        video = client.videos.create(prompt=PROMPT, size="80x48", model=str(pristine), extra_body=more)
        assert video.object == "video" and video.status in ("queued", "in_progress") and video.progress < 100
        assert (video.size, video.seconds, video.prompt) == ("80x48", "1.125", PROMPT)
        wait_for(lambda: client.videos.retrieve(video.id).status == "completed")
        done = client.videos.retrieve(video.id)
        assert done.progress == 100 and done.error is None and done.completed_at >= done.created_at
        movie = client.videos.download_content(video.id).read()
        sheet = client.videos.download_content(video.id, variant="spritesheet").read()
        assert video.id in [one.id for one in client.videos.list(limit=1)]  # pages of one, all of them
        saved = load_file(server.folder / f"videos/{video.id}.latents.safetensors")["latents"]
        with pytest.raises(openai.UnprocessableEntityError, match="not 'sora-2'; leave model out"):
            client.videos.create(prompt=PROMPT, model="sora-2")
        gone = client.videos.delete(video.id)
        assert gone.deleted and gone.object == "video.deleted"
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)
    flags = ("--frames=9", "--fps=8", "--steps=3", "--seed=7", "--guidance=2.5", "--guidance-low=1.5", "--shift=5", "--sheet")
    out = tmp_path / "v.mp4"
    assert cli(PROMPT, "--model", pristine, "--size=80x48", "--out", out, *flags).code == 0
    wanted = load_file(out.with_suffix(".latents.safetensors"))["latents"]
    assert (saved - wanted).norm() / wanted.norm() <= 1e-5
    assert len(movie) == pytest.approx(out.stat().st_size, rel=0.02) and movie[4:8] == b"ftyp"
    ours, theirs = (np.asarray(Image.open(f).convert("RGB"), int) for f in (io.BytesIO(sheet), out.with_suffix(".png")))
    assert ours.shape == theirs.shape and abs(ours - theirs).max() <= 1
    assert not any(video.id in name for name in server.files())


def test_the_same_seed_gives_the_same_bytes(server):
    movies = [server.ask("/v1/videos/sync", {"prompt": PROMPT, "seed": seed}) for seed in (3, 4, 3)]
    assert [m.status for m in movies] == [200] * 3 and movies[0].body == movies[2].body != movies[1].body
    stages = dict(part.split(";dur=") for part in movies[0].headers["server-timing"].split(", "))
    assert {"queued", "text", "denoise", "decode", "write", "total"} <= set(stages)
    assert float(stages["total"]) >= float(stages["denoise"]) > 0


def test_every_step_is_told(server):
    name = server.make(num_inference_steps=12)
    said = server.ask(f"/v1/videos/{name}/events").body.decode().split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in said if event]
    assert [e["step"] for e in events if e["stage"] == "denoise" and e["step"]] == list(range(1, 13))
    assert events[0]["status"] == "queued" and events[-1]["status"] == "completed"
    assert [e["progress"] for e in events] == sorted(e["progress"] for e in events)
    one = server.video(name)
    assert one["progress"] == 100 and set(one["bytes_sent"]) >= {"cfg", "ring", "seq", "vae"}
    assert "load" not in one["stage_seconds"], "the weights were kept"
    assert one["plan"]["ranks"] == "4: cfg 2, ring 2; VAE 2 by width" and one["stage_seconds"]["denoise"] > 0


def test_a_failure_on_one_rank_fails_on_all_and_the_next_is_served(server):
    before = server.ask("/v1/videos/sync", {"prompt": PROMPT}).body
    ranks = server.ranks(4)
    for _ in range(3):
        start = time.monotonic()
        video = server.ended(server.make(prompt="boom"), SOON)
        assert video["status"] == "failed" and time.monotonic() - start < SOON
        assert "rank 2: boom on purpose; no latents were saved; make it again with: python run.py" in video["error"]["message"]
    answer = server.ask("/v1/videos/sync", {"prompt": "boom"})
    assert answer.status == 500 and "rank 2: boom on purpose" in answer.error
    assert server.ask("/v1/videos/sync", {"prompt": PROMPT}).body == before and server.ranks(4) == ranks


def test_an_encoder_that_is_killed_costs_one_video_and_not_its_latents(server, cli, tmp_path):
    name = server.make(**LONG_DECODE)
    server.reaches(name, "decode")
    encoders = serving.children(server.ranks(4)[0])
    assert len(encoders) == 1
    os.kill(encoders[0], signal.SIGKILL)
    message = server.ended(name)["error"]["message"]
    assert message.startswith("rank 0: no video, but the latents are safe") and f"--latents {server.folder}" in message
    assert {f for f in server.files() if name in f} == {f"{name}.latents.safetensors"}
    assert server.ask("/v1/videos/sync", {"prompt": PROMPT}).status == 200
    assert server.ask(f"/v1/videos/{name}/content").status == 409


def test_the_one_in_progress_is_stopped(server):
    other = server.make()
    server.ended(other)
    name = server.make(**FOREVER)
    server.reaches(name, "denoise")
    wait_for(lambda: server.ask(f"/v1/videos/{name}/preview").status == 200)
    picture = Image.open(io.BytesIO(server.ask(f"/v1/videos/{name}/preview").body))
    assert picture.size == (64, 32) and server.ask(f"/v1/videos/{other}/preview").status == 404
    ended, start = counted(server, 'nanovgen_videos_total{end="cancelled"}'), time.monotonic()
    assert server.ask(f"/v1/videos/{name}", method="DELETE").json["deleted"]
    assert server.ask(f"/v1/videos/{name}").status == 404
    wait_for(lambda: counted(server, 'nanovgen_videos_total{end="cancelled"}') == ended + 1, 5)
    assert server.ask("/v1/videos/sync", {"prompt": PROMPT}).status == 200 and time.monotonic() - start < 10
    assert not any(name in f for f in server.files())
    assert name not in [v["id"] for v in server.ask("/v1/videos").json["data"]]


def test_a_client_that_does_not_wait_takes_its_order_along(server):
    with socket.create_connection(("127.0.0.1", server.port)) as plug:
        body = json.dumps({"prompt": PROMPT} | FOREVER).encode()
        head = "POST /v1/videos/sync HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        plug.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: counted(server, "nanovgen_in_progress") == 1)
    wait_for(lambda: counted(server, "nanovgen_in_progress") == 0, 10)


def test_a_full_queue(server):
    running = server.make(**FOREVER)
    server.reaches(running, "denoise")
    waiting = [server.make(seed=i) for i in range(3)]
    full = server.ask("/v1/videos", {"prompt": PROMPT})
    assert full.status == 429 and full.headers["retry-after"] == "2" and "3 videos wait already" in full.error
    assert server.ask(f"/v1/videos/{waiting[1]}", method="DELETE").json["deleted"]  # of one that waits
    page = server.ask("/v1/videos?limit=2").json
    assert [v["id"] for v in page["data"]] == [waiting[2], waiting[0]] and page["has_more"]
    page = server.ask(f"/v1/videos?limit=2&order=asc&after={running}").json
    assert [v["id"] for v in page["data"]] == [waiting[0], waiting[2]] and not page["has_more"]
    server.ask(f"/v1/videos/{running}", method="DELETE")
    assert [server.ended(w)["status"] for w in (waiting[0], waiting[2])] == ["completed"] * 2


def test_a_client_that_leaves_in_the_middle_of_a_download(server):
    name = server.make(seed=5)
    server.ended(name)
    os.truncate(server.folder / f"videos/{name}.mp4", 2 * 10**7)  # more than sockets buffer
    whole = server.ask(f"/v1/videos/{name}/content").body
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as plug:
            plug.sendall(f"GET /v1/videos/{name}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert plug.recv(512).startswith(b"HTTP/1.1 200")
    assert server.ask(f"/v1/videos/{name}/content").body == whole
    part = server.ask(f"/v1/videos/{name}/content", Range="bytes=10-19")
    assert part.status == 206 and part.body == whole[10:20]
    rank = server.ranks(4)[0]
    wait_for(lambda: not [fd for fd in Path(f"/proc/{rank}/fd").iterdir() if name in os.path.realpath(fd)], 10, "files are open")


REFUSED = {
    "unknown field": ({"prompt": "x", "nonsense": 1}, "nonsense"),
    "no prompt": ({}, "prompt: Field required"),
    "empty prompt": ({"prompt": "  "}, "the prompt is empty"),
    "size": ({"prompt": "x", "size": "853x480"}, "the nearest is 848x480"),
    "size words": ({"prompt": "x", "size": "big"}, "size"),
    "size zero": ({"prompt": "x", "size": "0x0"}, "multiple of 16"),
    "frames": ({"prompt": "x", "num_frames": 80}, "ask for 77 or 81"),
    "both": ({"prompt": "x", "num_frames": 5, "seconds": 1}, "give one of them"),
    "seconds": ({"prompt": "x", "seconds": "-4"}, "seconds"),
    "steps": ({"prompt": "x", "num_inference_steps": 10**6}, "this server makes up to 100000"),
    "pixels": ({"prompt": "x", "size": "16000x16000"}, "this server makes up to 185.0"),
    "bool": ({"prompt": "x", "seed": True}, "true and false are no numbers"),
    "seed": ({"prompt": "x", "seed": -1}, "seed"),
    "nan": (b'{"prompt": "x", "guidance_scale": NaN}', "guidance_scale"),
    "a file": ({"prompt": "x", "negative_prompt": "@/etc/passwd"}, "begins with @"),
    "a path": ({"prompt": "x", "image": "/etc/passwd"}, "image"),
    "out": ({"prompt": "x", "out": "/tmp/x.mp4"}, "out"),
    "a URL": ({"prompt": "x", "input_reference": {"image_url": "http://localhost/x.png"}}, "nothing is fetched"),
    "a file id": ({"prompt": "x", "input_reference": {"file_id": "x"}}, "input_reference"),
    "text only": ({"prompt": "x", "input_reference": base64.b64encode(b"no image").decode()}, "no PNG, JPEG or WebP"),
    "VAE": ({"prompt": "x", "size": "16x32"}, "use parallel_vae_size"),
    "surrogates": (b'{"prompt": "\\ud800"}', ""),
    "no object": (b"[1]", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "VAE"])
def test_refusals(server, name):
    body, said = REFUSED[name]
    answer = server.ask("/v1/videos", body, Content_Type="application/json")
    assert answer.status in ((422, 400) if isinstance(body, bytes) else (422,)) and said in answer.error, answer
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}


def test_other_refusals(server):
    assert server.ask("/v1/videos", b"{", Content_Type="application/json").status == 400
    assert server.ask("/v1/videos", b"x", Content_Type="text/plain").status == 415
    assert server.ask("/v1/videos", b"x" * (16 * 10**6 + 1), Content_Type="application/json").status == 413
    assert server.ask("/v1/videos", {"prompt": "x"}, Origin="http://evil.example").status == 403
    assert server.ask("/v1/videos", Host="evil.example").status == 421
    for path in ("v1/videos/no", "v1/videos/..%2f..%2fetc%2fpasswd/content", "v1/videos/no/preview", "v1/videos/no/events", "no"):
        answer = server.ask("/" + path)
        assert answer.status == 404 and answer.error, path
    assert server.ask("/v1/videos?limit=0").status == server.ask("/v1/videos?order=up").status == 422


def chunked(server: Server, pieces: int) -> int:
    """The status of a body of so many MB whose length is not announced."""
    plug = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        kind, body = {"Content-Type": "application/json"}, iter([b" " * 10**6] * pieces)
        plug.request("POST", "/v1/videos", body, kind, encode_chunked=True)
        return plug.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        return 413  # it hung up on us while we still sent
    finally:
        plug.close()


def test_a_body_without_a_length_is_counted(server):
    assert chunked(server, 2) == 400 and chunked(server, 40) == 413


def fuzzed(rng: random.Random) -> tuple[str, bytes]:
    """A content type and a body: JSON and forms with wrong values, cut, spliced and random ones."""
    values = [None, True, -1, 0, 1e308, "", "x" * 9000, "5", [], {}, "../../x", "0x32", "64x32", "\ud83d\ude00", 2**70, "@x", 0.5]
    names = ["prompt", "size", "seconds", "num_frames", "fps", "num_inference_steps", "guidance_scale", "negative_prompt", "seed",
             "input_reference", "model", "out", "latents", "__class__"]  # fmt: skip
    given = {"prompt": "x", "size": rng.choice(["64x32", "48x48"])}
    given |= {name: rng.choice(values) for name in rng.sample(names, rng.randint(1, 5))}
    data, json_kind = json.dumps(given).encode(), "application/json"
    kind = rng.choice([json_kind, json_kind, "multipart/form-data; boundary=b", "application/x-www-form-urlencoded", "no"])
    if kind.startswith("multipart"):
        file = rng.choice(["", '; filename="../../x"'])
        parts = [f'--b\r\nContent-Disposition: form-data; name="{n}"{file}\r\n\r\n{v}\r\n' for n, v in given.items()]
        data = ("".join(parts) + rng.choice(["--b--\r\n", "", "--c"])).encode(errors="replace")
    for _ in range(rng.choice([0, 0, 1, 4])):
        where = rng.randrange(len(data) + 1)
        head, tail = data[:where], data[where:]
        data = rng.choice([head, tail, head + rng.randbytes(5) + tail, data + data, b"[" * 5000])[: 10**5]
    return kind, data


def test_fuzzed_bodies_reach_no_rank(server, request):
    """Each (of 1000 with --full) is answered by a status of its own; no more is begun than was accepted; the next is served."""
    rng, counts, accepted, bodies = random.Random(0), {}, [], 1000 if request.config.getoption("full") else 250
    begun = counted(server, "nanovgen_started_total")
    for _ in range(bodies):
        kind, data = fuzzed(rng)
        answer = server.ask("/v1/videos", data, Content_Type=kind)
        counts[answer.status] = counts.get(answer.status, 0) + 1
        if answer.status == 202:  # some are good
            accepted.append(answer.json["id"])
            assert server.ended(accepted[-1])["status"] == "completed"
    print(counts)
    assert set(counts) <= {202, 400, 413, 415, 422} and counts[422] > 0.3 * bodies and len(accepted) < 0.1 * bodies
    assert counted(server, "nanovgen_started_total") - begun == len(accepted)
    assert server.ask("/v1/videos/sync", {"prompt": PROMPT}).status == 200
    assert "Traceback" not in server.log, server.log


def test_a_short_soak(pristine, tmp_path):
    """Of every kind of request; `python -m nanovgen.tests.soak` runs the long one, and there memory may not grow either."""
    server = soak.start(tmp_path, pristine)
    try:
        found = soak.soak(server, 12)
    finally:
        server.kill()
    print(found)
    assert set(found["counts"]) == set(soak.KINDS)
