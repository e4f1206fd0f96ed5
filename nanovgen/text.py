"""Prompt to text states: clean, tokenize, and UMT5 (arXiv:2304.09151; T5, arXiv:1910.10683).

    "a red circle …"  ->  ids (n,), n <= limit  ->  states (1, limit, C), rows beyond n zero

The encoder runs on the n real tokens only. Its position bias is relative, so that equals running padded with a mask.
The transformer then attends to all `limit` rows, zero ones included: Wan was trained so.
"""

import html
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

import ftfy
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from nanovgen.recipe import read_json

EOS = 1
LONGEST = 512  # what Wan was trained with; real tokenizer configs name no limit of their own


def clean(prompt: str) -> str:
    """Mend broken Unicode, undo HTML entities (twice: some are doubly escaped), make each run of spaces one."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt)))).strip()


class PromptTokenizer:
    """A checkpoint's tokenizer folder. `limit` is the number of text rows that the transformer sees."""

    def __init__(self, folder: Path):
        self.limit = min(LONGEST, int(read_json(folder / "tokenizer_config.json").get("model_max_length") or LONGEST))
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has no narrower one
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def __call__(self, prompt: str) -> tuple[list[int], int]:
        """Ids of the cleaned prompt, end mark included, and how many ids were cut off to fit the limit."""
        ids = self.tokenizer.encode(clean(prompt)).ids
        cut = max(0, len(ids) - self.limit)
        return ([*ids[: self.limit - 1], EOS] if cut else ids), cut


@dataclass(frozen=True)
class UMT5Config:
    """Sizes, by the names of text_encoder/config.json. The defaults are UMT5-XXL's."""

    vocab_size: int = 256384
    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    @classmethod
    def read(cls, config: dict) -> "UMT5Config":
        if config.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
            raise ValueError(f"text encoder has feed_forward_proj={config['feed_forward_proj']}; UMT5's is gated-gelu")
        return cls(**{f.name: config[f.name] for f in fields(cls) if f.name in config})


def buckets(n: int, count: int, farthest: int) -> Tensor:
    """Relative position key - query of n tokens -> bucket (n, n): half for each sign, exact when near, log-spaced far."""
    half, exact = count // 2, count // 4
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    near = distance.abs().clamp(min=1)
    far = exact + (torch.log(near.float() / exact) / math.log(farthest / exact) * (half - exact)).long()
    return half * (distance > 0) + torch.where(distance.abs() < exact, distance.abs(), far.clamp(max=half - 1))


class UMT5Block(nn.Module):
    def __init__(self, c: UMT5Config):
        super().__init__()
        inner = c.num_heads * c.d_kv
        self.heads = c.num_heads
        self.norm1, self.norm2 = (nn.RMSNorm(c.d_model, eps=c.layer_norm_epsilon) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(c.d_model, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, c.d_model, bias=False)
        self.bias = nn.Embedding(c.relative_attention_num_buckets, c.num_heads)  # every layer has its own, unlike T5
        self.wi_0, self.wi_1 = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.wo = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, bucket: Tensor, mask: Tensor | None) -> Tensor:
        """x (b, n, C); bucket (n, n); mask (b, n), True where a token is real."""
        h = self.norm1(x)
        q, k, v = (proj(h).unflatten(-1, (self.heads, -1)) for proj in (self.q, self.k, self.v))  # b n h d
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + self.bias(bucket).permute(2, 0, 1)  # no 1/sqrt(d) in T5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = scores.float().softmax(-1).to(v.dtype)
        x = x + self.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))
        h = self.norm2(x)
        return x + self.wo(F.gelu(self.wi_0(h), approximate="tanh") * self.wi_1(h))


class UMT5(nn.Module):
    HUB_NAMES = (("blocks.", "encoder.block."), (".bias.", ".layer.0.SelfAttention.relative_attention_bias."),
                 (".norm1.", ".layer.0.layer_norm."), (".norm2.", ".layer.1.layer_norm."),
                 *((f".{x}.", f".layer.0.SelfAttention.{x}.") for x in "qkvo"),
                 *((f".{x}.", f".layer.1.DenseReluDense.{x}.") for x in ("wi_0", "wi_1", "wo")),
                 ("norm.weight", "encoder.final_layer_norm.weight"))  # fmt: skip
    FP32 = ()

    def __init__(self, config: UMT5Config):
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(UMT5Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.layer_norm_epsilon)

    def hub_name(self, name: str) -> str:
        for ours, theirs in self.HUB_NAMES[:-1]:
            name = name.replace(ours, theirs)
        return name.replace(*self.HUB_NAMES[-1]) if name == "norm.weight" else name

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids (b, n) -> states (b, n, C). A mask (b, n) is for batches of unequal prompts, as in training."""
        c = self.config
        bucket = buckets(ids.shape[1], c.relative_attention_num_buckets, c.relative_attention_max_distance).to(ids.device)
        x = self.shared(ids)
        for block in self.blocks:
            x = block(x, bucket, mask)
        return self.norm(x)


def encode_prompt(encoder: UMT5, ids: list[int], limit: int) -> Tensor:
    """One prompt's states (1, limit, C): the real tokens' rows, then zeros."""
    device = encoder.shared.weight.device
    states = encoder(torch.tensor([ids], device=device))
    return F.pad(states, (0, 0, 0, limit - len(ids)))
