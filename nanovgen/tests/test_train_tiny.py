"""tiny-cosmos' training: the padded batch computes what generation does, steps lower the loss, and its folder is whole."""

import json
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_layout
import torch
import train_cosmos
from clip_world import Clip, Shape, caption
from muon import Budget, Masters
from safetensors import safe_open
from tokenizers import Tokenizer

from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.dress import ChatTokenizer, chat, dress

SMALL = replace(tiny_layout.COSMOS_CONFIG, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_cosmos.build_tokenizer()


@torch.no_grad()
@pytest.mark.parametrize("given", (0, 1))
def test_padded_prompts_train_what_generation_runs(given, one_thread):
    torch.manual_seed(0)
    text, video = TextTower(SMALL), Cosmos(SMALL)
    rows = [[5] * 7 + list(range(20)), list(range(100)), [9, 8, 7]]
    ids, lengths = train_cosmos.padded(rows)
    x, timestep = torch.randn(3, 48, 3, 4, 6), torch.tensor([900.0, 500.0, 20.0])
    prefix = train_cosmos.encode_prompts(text, train_cosmos.turns(SMALL), ids, lengths)
    fixed = train_cosmos.shapes(video, 3, 4, 6, train_cosmos.ROWS, "cpu")
    found = train_cosmos.predict(video, x, timestep, fixed.contexts[given], prefix, lengths)
    for i, row in enumerate(rows):
        context = video.context(text(torch.tensor([row])), 3, 4, 6, 16, given)
        alone = video(x[i : i + 1], timestep[i : i + 1], context)
        error = (found[i : i + 1] - alone).norm() / alone.norm()
        print(f"{len(row)} ids, {given} frames given: {error:.1e}")
        assert error < 1e-5


def test_steps_lower_the_loss(one_thread):
    torch.manual_seed(0)
    model = train_cosmos.start_towers(SMALL, "cpu")
    fixed = train_cosmos.shapes(model[1], 3, 4, 6, train_cosmos.ROWS, "cpu")
    masters = Masters(model, matrices=lambda name, p: p.ndim == 2 and "layers." in name)
    x0, weight = torch.randn(10, 48, 1, 1, 1).expand(-1, -1, 3, 4, 6), torch.ones(10, 1, 3, 4, 6)
    ids, lengths = torch.randint(SMALL.vocab_size, (10, train_cosmos.ROWS)), torch.randint(3, train_cosmos.ROWS, (10,))
    losses = []
    for _ in range(30):
        masters.clear()
        losses.append(train_cosmos.batch_loss(model, fixed, ids, lengths, x0, weight))
        losses[-1].mean().backward()
        masters.step(5e-3, 5e-3)
    first, last = losses[0].tolist(), torch.stack(losses[-5:]).mean(0).tolist()
    print(first, last)
    assert all(b < 0.8 * a for a, b in zip(first, last, strict=True))


def test_the_stage_as_a_whole(monkeypatch, tokenizer, capsys, one_thread):
    """On latents that stand for encoded clips: it learns, leaves their statistics, and calls the graph's stand-in each step."""
    latents, rows = 3 + 2 * torch.randn(6, 48, 1, 1, 1).expand(-1, -1, 3, 4, 6).bfloat16(), [[5, i, 7] for i in range(24)]
    monkeypatch.setattr(train_cosmos, "encode_clips", lambda *_: (latents, torch.ones(6, 1, 3, 4, 6), rows))
    monkeypatch.setattr(tiny_layout, "COSMOS_CONFIG", SMALL)
    vae = SimpleNamespace(config=tiny_layout.COSMOS_VAE_CONFIG)
    args = SimpleNamespace(seed=0, device="cpu", resume=False, compile=False, batch=10, lr_dit=5e-3, spins=3)
    said = []
    monkeypatch.setattr(Budget, "note", lambda self, words, value: said.append(value))
    towers, _ = train_cosmos.fit_towers(vae, args, 0.1)
    assert torch.tensor(vae.config.latents_mean).mean() == pytest.approx(3, abs=1) and len(vae.config.latents_std) == 48
    assert towers[1].layers[0].self_attn.to_out.weight.abs().max() > 0  # it began at zero
    assert len(said) > 5 and len({value.data_ptr() for value in said}) == len(said)  # each its own, not the graph's one
    assert torch.stack(said[-3:]).mean() < torch.stack(said[:3]).mean()


def test_given_frames_reach_the_model_clean_and_carry_no_loss(one_thread):
    class Echo(torch.nn.Module):
        def forward(self, x, timestep, context, attend):
            self.seen = x
            return torch.full_like(x, 1e6 if context.given else 0).index_fill(2, torch.arange(1, x.shape[2]), 0)

    video, x0 = Echo(), torch.randn(2, 48, 3, 4, 6)
    prefix = TextTower(SMALL)(torch.zeros(2, 8, dtype=torch.long))
    context = train_cosmos.shapes(Cosmos(SMALL), 3, 4, 6, 8, "cpu").contexts[1]
    loss = train_cosmos.velocity_loss(video, x0, torch.ones(2, 1, 3, 4, 6), context, prefix, torch.tensor([8, 3]))
    assert torch.equal(video.seen[:, :, 0], x0[:, :, 0]) and not torch.equal(video.seen[:, :, 1], x0[:, :, 1])
    assert loss < 10


def test_every_prompt_fits_and_is_what_generation_reads(tokenizer, tmp_path):
    clips, rows = train_cosmos.draw_captions((0, 300, tokenizer.to_str(), 9))
    motions = [shape.motion for clip in clips for shape in clip.shapes]
    assert 0.4 < motions.count("spin") / len(motions) < 0.55 and len(set(motions)) == 10  # 9 in 18, less circles that do not show
    dropped = train_cosmos.dropped_captions(tokenizer, 200, random.Random(0))
    assert len(rows) == len(clips) * train_cosmos.CAPTIONS and train_cosmos.padded(rows)[0].max() < SMALL.vocab_size
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    served = ChatTokenizer(tmp_path)
    empty = served(chat(dress("", 33, 16, (192, 96), negative=True), 33))
    assert empty in dropped and all(row[-2:] == empty[-2:] for row in rows + dropped)
    one = Clip("black", (Shape("star", "cyan", "big", "spin"),), (0.5,) * 5)
    rng = random.Random(1)
    texts = {caption(one, rng) for _ in range(50)}
    full = [served(chat(dress(text, 33, 16, (192, 96)), 33)) for text in texts]
    assert all(
        tokenizer.encode(train_cosmos.said(text, False, 0.1)).ids == row[:-2] for text, row in zip(texts, full, strict=True)
    )
    with pytest.raises(ValueError, match="1 ids longer than the 110"):
        train_cosmos.padded([[0] * 111])


def test_folder_holds_both_towers(tmp_path, tokenizer):
    text, video = TextTower(SMALL), Cosmos(SMALL)
    tiny_layout.save_towers(text, video, tokenizer, tiny_layout.COSMOS_VAE_CONFIG, tmp_path)
    assert CosmosConfig.read(json.loads((tmp_path / "transformer" / "config.json").read_text())) == SMALL
    with safe_open(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    for tower in (text, video):
        own = {tower.hub_name(name) for name in tower.state_dict()}
        assert own <= names and all(tower.foreign(name) for name in names - own)
    saved = Tokenizer.from_file(str(tmp_path / "text_tokenizer" / "tokenizer.json"))
    assert saved.encode("a red circle, straße").ids == tokenizer.encode("a red circle, straße").ids


def test_resumed_towers_are_the_saved_ones_and_learn(tmp_path, tokenizer):
    saved = train_cosmos.start_towers(SMALL, "cpu")
    tiny_layout.save_towers(*saved, tokenizer, tiny_layout.COSMOS_VAE_CONFIG, tmp_path)
    found = train_cosmos.load_towers(SMALL, tmp_path, "cpu")
    state = saved.state_dict()
    assert found.state_dict().keys() == state.keys() and all(p.requires_grad for p in found.parameters())
    for name, value in found.state_dict().items():
        assert value.dtype == state[name].dtype and torch.equal(value, state[name].bfloat16().to(value.dtype)), name


def test_budget_counts_from_the_second_step(capsys):
    budget, shares = Budget("toy", 0.002), []
    budget.said = -100.0  # long ago: the first step would have something to say
    for share in budget:
        shares.append(share)
        budget.note(lambda loss: f"loss {loss:.1f}", torch.tensor(float(len(shares) + 1)))
        time.sleep(0.02)
    assert shares[0] == 0 and 0 <= shares[1] < 0.2 and shares == sorted(shares) and shares[-1] < 1
    assert budget.step == len(shares)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("toy step 1, ") and said[0].endswith("loss 2.0") and said[1].startswith("toy: first step in 0 s")
