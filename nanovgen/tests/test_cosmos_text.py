"""Cosmos3's text and schedule against the reference: its pipeline's own tokens, its scheduler built from the hub's file."""

import json
import random

import clip_world
import diffusers
import pytest
import tiny_bpe
import tiny_layout
import torch
import transformers
from test_golden import TOLERANCE, error, walk

from nanovgen.dress import ChatTokenizer, chat, dress, json_prompt, read_negative
from nanovgen.recipe import PRESETS, Request, resolve
from nanovgen.scheduler import flow_sigmas, karras_sigmas, stored_schedule, timesteps

SHIPPED = json.loads("""{
  "_class_name": "UniPCMultistepScheduler", "_diffusers_version": "0.37.1", "beta_end": 0.02, "beta_schedule": "linear",
  "beta_start": 0.0001, "disable_corrector": [], "dynamic_thresholding_ratio": 0.995, "final_sigmas_type": "zero",
  "flow_shift": 1.0, "lower_order_final": true, "num_train_timesteps": 1000, "predict_x0": true,
  "prediction_type": "flow_prediction", "rescale_betas_zero_snr": false, "sample_max_value": 1.0, "shift_terminal": null,
  "sigma_max": 200.0, "sigma_min": 0.147, "solver_order": 2, "solver_p": null, "solver_type": "bh2", "steps_offset": 0,
  "thresholding": false, "time_shift_type": "exponential", "timestep_spacing": "linspace", "trained_betas": null,
  "use_beta_sigmas": false, "use_dynamic_shifting": false, "use_exponential_sigmas": false, "use_flow_sigmas": true,
  "use_karras_sigmas": true}""")  # the hub's, of Super and Nano

PROMPTS = ["A cat walks", "A cat walks.", "Wait for it...", "...", ".", "", " ", "\n", "tail space . ", "两只猫。", "é, e\u0301",
           '"quoted" \'single\' \\back', "line\nbreak\r\n\ttab", "👩‍🚀 on 🌑, ½ ﬁ", "it's 12345.67 FPS!!",
           "<|im_end|>\n<|im_start|>user\nhi", "<think>hm</think> <|vision_start|><|endoftext|>", '{"a": 1', "[1, 2]",
           "{{ messages }} {% if x %}", "a\u3000b\xa0c"]  # fmt: skip
SHOTS = [(189, 24.0, (1280, 720)), (1, 24.0, (960, 960)), (49, 16, (832, 480)), (5, 29.97, (320, 192)), (25, 2.5, (192, 96))]


def their_schedule(steps, **changes):
    theirs = diffusers.UniPCMultistepScheduler.from_config(SHIPPED | changes)
    theirs.set_timesteps(steps)
    theirs.set_begin_index(0)
    return theirs


@pytest.mark.parametrize("ends", [(0.147, 200.0), (0.002, 80.0)])
def test_karras(ends):
    worst = 0.0
    for steps in (*range(1, 13), 20, 35, 50, 100):
        theirs = their_schedule(steps, sigma_min=ends[0], sigma_max=ends[1], flow_shift=10.0)  # which does nothing
        sigmas = karras_sigmas(steps, *ends)
        assert sigmas.dtype == torch.float64 and sigmas.shape == (steps + 1,) and sigmas[-1] == 0
        assert timesteps(sigmas) == theirs.timesteps.tolist(), f"{steps} steps"
        assert error(sigmas, theirs.sigmas) < 1e-6
        worst = max(worst, error(walk(sigmas), walk(sigmas, theirs)))
    print(f"UniPC on Karras sigmas {ends}, the worst of 1 to 100 steps: {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("shift", [3.0, 5.0, 10.0])
def test_shift_without_karras(shift):
    worst = 0.0
    for steps in (1, 2, 3, 10, 35, 50, 100):
        theirs, sigmas = their_schedule(steps, flow_shift=shift, use_karras_sigmas=False), flow_sigmas(steps, shift, "diffusers")
        assert timesteps(sigmas) == theirs.timesteps.tolist()
        assert error(sigmas, theirs.sigmas) < 1e-6
        native = flow_sigmas(steps, shift, "native")
        given = diffusers.UniPCMultistepScheduler.from_config(SHIPPED | dict(flow_shift=1.0, use_karras_sigmas=False))
        given.set_timesteps(sigmas=native[:-1].numpy())
        given.set_begin_index(0)
        assert timesteps(native) == given.timesteps.tolist()
        for ours, reference in ((sigmas, theirs), (native, given)):
            worst = max(worst, error(walk(ours), walk(ours, reference)))
    print(f"UniPC, shift {shift}, both grids, the worst of 1 to 100 steps: {worst:.1e}")
    assert worst < TOLERANCE


def test_what_a_scheduler_file_asks_for():
    stored = stored_schedule(SHIPPED)
    assert stored.shift is None and stored.karras == (0.147, 200.0) and "arras" in str(stored) and "200 to 0.147" in str(stored)
    assert stored_schedule(SHIPPED | {"flow_shift": 10.0}) == stored  # NVIDIA's own snippet sets that, in vain
    both = stored_schedule(SHIPPED | {"flow_shift": 10, "use_karras_sigmas": False})
    assert both == (10.0, None) and str(both) == "shift 10"
    short = {key: SHIPPED[key] for key in ("prediction_type", "use_flow_sigmas")}
    assert stored_schedule(short | {"a_new_key": 1}) == (1.0, None)
    for steps in (1, 4, 35):
        assert error(stored.sigmas(steps), their_schedule(steps).sigmas) < 1e-6
        theirs = their_schedule(steps, flow_shift=10.0, use_karras_sigmas=False)
        assert error(both.sigmas(steps), theirs.sigmas) < 1e-6


@pytest.mark.parametrize("key, value", [("solver_order", 3), ("prediction_type", "epsilon"), ("use_flow_sigmas", False),
                                        ("use_beta_sigmas", True), ("final_sigmas_type", "sigma_min"), ("shift_terminal", 0.1),
                                        ("disable_corrector", [0]), ("sigma_min", None), ("sigma_max", "high")])  # fmt: skip
def test_another_sampler_is_refused(key, value):
    with pytest.raises(ValueError, match=rf"{key}={value}".replace("[", r"\[")) as refused:
        stored_schedule(SHIPPED | {key: value})
    assert "\n" not in str(refused.value)


def test_no_shift_and_no_sigmas():
    with pytest.raises(ValueError, match="flow_shift=None; numbers"):
        stored_schedule(SHIPPED | {"use_karras_sigmas": False, "flow_shift": None})
    wrong = ((0, 1, 2, "steps is 0"), (4, 0, 2, "from 2 to 0"), (4, 3, 2, "must fall"), (4, 1, float("inf"), "inf"))
    for steps, low, high, said in wrong:
        with pytest.raises(ValueError, match=said):
            karras_sigmas(steps, low, high)


@pytest.fixture(scope="module")
def pipeline(chat_folder):
    """The reference pipeline with its tokenizer; it has no transformer, and a VAE of no size."""
    vae = diffusers.AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    tokenizer, scheduler = transformers.AutoTokenizer.from_pretrained(chat_folder), their_schedule(1)
    return diffusers.Cosmos3OmniPipeline(None, tokenizer, vae, scheduler, enable_safety_checker=False)


@pytest.fixture(scope="module")
def tokens(chat_folder):
    return ChatTokenizer(chat_folder)


@pytest.mark.parametrize("sentences", [True, False])
@pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: f"{shot[0]} frames, {shot[1]:g} fps")
def test_tokens_are_the_pipelines(shot, sentences, pipeline, tokens):
    frames, fps, size = shot
    seen = set()
    for prompt, system in [(prompt, system) for prompt in PROMPTS for system in (True, False)]:
        wanted = pipeline.tokenize_prompt(prompt, prompt, frames, size[1], size[0], fps, system, sentences, sentences)
        for negative in (False, True):
            ids = tokens(chat(dress(prompt, *shot, sentences, negative), frames, system))
            assert ids == wanted[negative], (prompt, negative)
            seen.add(tuple(ids))
    assert len(seen) >= (1 + sentences) * 2 * (len(PROMPTS) - 4)  # full stops alone are the empty prompt to the sentences
    assert wanted == pipeline.tokenize_prompt(prompt, prompt, frames, size[1], size[0], fps, False, sentences, sentences)


def test_no_negative_is_the_empty_one_to_the_pipeline(pipeline, tokens):
    ids = {text: tokens(chat(dress(text, *SHOTS[0], negative=True), 189)) for text in ("", "blurry")}
    assert pipeline.tokenize_prompt("a cat", None)[1] == ids[""] != ids["blurry"]


def test_json_prompts(tmp_path, pipeline, tokens):
    content = {"scene": "Ein Café. …", "fps": 24, "parts": [{"a": 1.50}, None, True]}
    spelt = json.dumps(content)
    (tmp_path / "p.json").write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")
    for prompt in (spelt, f"@{tmp_path / 'p.json'}", "  " + json.dumps(content, indent=2, ensure_ascii=False) + "\n"):
        assert json_prompt(prompt) == dress(prompt, *SHOTS[0]) == dress(prompt, *SHOTS[0], negative=True) == spelt
        assert dress(prompt, *SHOTS[0], True).startswith(spelt + ". The video is 7.9 seconds")
        wanted = pipeline.tokenize_prompt(spelt, add_resolution_template=False, add_duration_template=False)[0]
        assert tokens(chat(dress(prompt, *SHOTS[0]), 189)) == wanted
    for plain in ("", "a cat", "[1]", "7", '"text"', "null", '{"a": }', "@p", "[" * 100_000):
        assert json_prompt(plain) is None and dress(plain, *SHOTS[0], False) == plain and "This video" in dress(plain, *SHOTS[0])
    (tmp_path / "list.json").write_text("[1]")
    for name, said in (("none", "is missing"), ("list", "is not a JSON object")):
        with pytest.raises(ValueError, match=said):
            dress(f"@{tmp_path / name}.json", *SHOTS[0])


def test_the_folders_negative_prompt(tmp_path):
    assert read_negative(tmp_path) is None
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "negative_prompt.json").write_text('{\n  "bad": ["mud",\n "é"]\n}')
    assert read_negative(tmp_path) == '{"bad": ["mud", "\\u00e9"]}'


@pytest.mark.parametrize("size, shift", [((1280, 720), 10), ((720, 1280), 10), ((1280, 704), 10), ((960, 960), 10),
                                         ((832, 480), 5), ((480, 832), 5), ((640, 640), 5), ((320, 192), 3),
                                         ((256, 256), 3)])  # fmt: skip
def test_shifts(size, shift):
    found = resolve(Request("x", size="{}x{}".format(*size)), PRESETS["cosmos3-nano"])
    assert (found.shift, found.steps, found.guidance, found.frames) == (shift, 35, 6.0, 189)
    image = resolve(Request("x", size="{}x{}".format(*size), frames=1), PRESETS["cosmos3-super"])
    assert (image.shift, image.steps, image.guidance) == (3.0, 50, 4.0)
    assert resolve(Request("x", frames=1, shift=7.0, steps=9), PRESETS["cosmos3-super"]).shift == 7.0


def captions(count=400):
    rng = random.Random(0)
    texts = [clip_world.caption(clip_world.sample_clip(rng, 1 + i % 2), rng) for i in range(count)]
    return [*texts, *(chat(dress(text, 33, 16, (192, 96)), 33) for text in texts[:40])]


def test_small_bpe(tmp_path, tokens):
    texts = captions()
    bpe = tiny_bpe.build_bpe(texts, 512)
    assert bpe.get_vocab_size() == 512 and bpe.to_str() == tiny_bpe.build_bpe(iter(texts), 512).to_str()
    bpe.save(str(tmp_path / "tokenizer.json"))
    ours = ChatTokenizer(tmp_path)
    assert [*ours.marks.values()] == [506, 507, 508]
    for text in texts + PROMPTS:
        same = ours.tokenizer.normalizer.normalize_str(text)
        assert ours.tokenizer.decode(ours.encode(text), skip_special_tokens=False) == same
    fresh = captions(800)[400:800]
    length = sum(len(ours.encode(text)) for text in fresh) / sum(len(text.split()) for text in fresh)
    print(f"small BPE: {length:.2f} tokens a word")
    assert length < 1.5
    mine, real = (json.loads(t.tokenizer.to_str()) for t in (ours, tokens))
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        assert mine[part] == real[part], part
    assert mine["decoder"]["type"] == real["decoder"]["type"]  # its options do nothing
    form = [{k: v or None for k, v in t["model"].items() if k not in ("vocab", "merges")} for t in (mine, real)]
    assert form[0] == form[1]
    known = {mark["content"]: mark | {"id": 0} for mark in real["added_tokens"]}
    assert all(mark | {"id": 0} == known[mark["content"]] for mark in mine["added_tokens"])
    ids = ours(chat("a cat", 33))
    assert ids[-2:] == [507, 508] and ids.count(506) == 3 and ids.count(507) == 3  # the marks stay whole


def test_small_bpe_refuses(tmp_path):
    with pytest.raises(ValueError, match="bytes and the marks alone are 263"):
        tiny_bpe.build_bpe(["a b"], 262)
    with pytest.raises(ValueError, match="enough for 264 tokens, not for 300"):
        tiny_bpe.build_bpe(["ab"], 300)
    bare = tiny_bpe.build_bpe(captions(50), 300)
    content = json.loads(bare.to_str())
    content["added_tokens"] = [mark for mark in content["added_tokens"] if mark["content"] != "<|vision_start|>"]
    tiny_layout.write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ValueError, match=r"has no token <\|vision_start\|>; Cosmos3 needs"):
        ChatTokenizer(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        ChatTokenizer(tmp_path / "nowhere")
