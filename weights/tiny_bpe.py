"""A small tokenizer in the form of Qwen3's, which Cosmos3 reads: byte-level BPE (arXiv:1508.07909), marks at the end.

Any text is encoded, in at most one token a byte; what the training texts hold takes fewer. The same texts give the same
tokenizer.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# Qwen's split: English contractions, a word with the one character before it, single digits, punctuation, line ends, spaces.
WORDS = "|".join((r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                  r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))  # fmt: skip
MARKS = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")]


def build_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """All 256 bytes, merges learnt from the texts, and the marks, which have the last ids: vocab_size tokens in all."""
    least = 256 + len(MARKS)
    if vocab_size < least:
        raise ValueError(f"vocab_size is {vocab_size}; the bytes and the marks alone are {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    as_bytes = dict(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(trim_offsets=False, **as_bytes)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False, **as_bytes)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(MARKS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"the texts are enough for {size} tokens, not for {vocab_size}; give more texts or ask for {size}")
    return tokenizer
