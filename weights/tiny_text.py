"""Text as tiny-cosmos sees it: the chat form of Cosmos3's prompts, through a small byte-level BPE in the Qwen form."""

import random

import clip_world
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nanovgen.recipe import NEGATIVE_PROMPT

SYSTEM = "You are a helpful assistant who will generate videos from a give prompt."  # sic: the checkpoints have learned it so
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def dress(text: str, negative: bool = False, sentences: bool = True) -> str:
    """A prompt with what Cosmos3's are told of the clip: how long, how fast, how large."""
    if not sentences:
        return text
    no = " not" if negative else ""
    seconds, size = clip_world.FRAMES / clip_world.FPS, f"{clip_world.HEIGHT}x{clip_world.WIDTH}"
    for said in (f"The video is{no} {seconds:.1f} seconds long and is{no} of {clip_world.FPS:.0f} FPS.",
                 f"This video is{no} of {size} resolution."):  # fmt: skip
        text = f"{text.rstrip('.')}. {said}" if text else said
    return text


def chat(text: str, system: bool = True) -> str:
    said = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n" if system else ""
    return f"{said}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<|im_end|><|vision_start|>"


def train_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Learned on captions in both dressings."""
    rng = random.Random(0)
    texts = [clip_world.caption(clip_world.sample_clip(rng, 1 + i % 2), rng) for i in range(2000)]
    texts += [dress("", negative) for negative in (False, True)] * 200 + [SYSTEM, "system\n", "user\n", "assistant\n"] * 200
    return train_bpe([*texts, *[NEGATIVE_PROMPT] * 50], vocab_size)
