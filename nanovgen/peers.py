"""Another implementation on our very weights, in the same process: what nanovgen.bench's --peer diffusers times."""

import importlib
from dataclasses import asdict

import torch
from torch import Tensor, nn

from nanovgen import attention, plan
from nanovgen.floor import Bench, alone
from nanovgen.mesh import Mesh
from nanovgen.recipe import ParallelConfig
from nanovgen.vae import VAE
from nanovgen.wan import Wan


def denoiser(bench: Bench, model: nn.Module) -> dict | str:
    """diffusers' transformer on our very weights, with torch's fastest kernel on this shape; eager, then by compiled block."""
    try:
        theirs_of = importlib.import_module("diffusers")
    except ImportError:
        return "diffusers is not installed"
    if not isinstance(model, Wan):
        return "diffusers' Cosmos3 holds both towers and runs the text in every step; it is not timed"
    c, work = bench.config, bench.work
    with torch.device("meta"):
        peer = theirs_of.WanTransformer3DModel(**asdict(c))
    peer.load_state_dict({model.hub_name(name): value for name, value in model.state_dict().items()}, assign=True)
    peer.rope = type(peer.rope)(c.attention_head_dim, (1, 2, 2), 1024).to(bench.device)  # its tables are not in the state dict
    peer = peer.eval()
    q = torch.randn(1, work.tokens, work.heads, work.head_dim, device=bench.device, dtype=bench.dtype)
    torchs = {"_native_cudnn": "cudnn", "_native_flash": "flash"} if bench.dtype == torch.bfloat16 else {}
    kernels = {name: alone(lambda k=k: attention.attention(q, q, q, attention.KERNELS[k]), bench.device)
               for name, k in torchs.items()} if bench.device.type == "cuda" else {}  # fmt: skip
    best = min(kernels, key=kernels.get, default="native")
    peer.set_attention_backend(best)
    x = torch.randn(1, c.in_channels, *bench.latent, device=bench.device, dtype=bench.dtype)
    text = torch.randn(1, bench.text, c.text_dim, device=bench.device, dtype=bench.dtype)
    t = torch.tensor([500], device=bench.device)
    run = lambda: peer(x, t, text, return_dict=False)[0]  # noqa: E731
    ours = model(x, t, model.context(text, *bench.latent), plan.bind(ParallelConfig(), Mesh(), work.tokens,
                                                                     attention.KERNELS[bench.kernel]))  # fmt: skip
    found = {"version": theirs_of.__version__, "kernel": best, "difference": ((run() - ours).norm() / ours.norm()).item()}
    ways = {"eager": False, "compiled": True} if bench.compile else {"eager": False}
    for name, blocks in ways.items():
        if blocks:
            peer.compile_repeated_blocks(dynamic=False)
        found[name] = alone(run, bench.device, bench.steps)
    if bench.kernel not in ("cudnn", "flash", "cpu"):  # and on our kernel, which it does not bring
        kernel, wan = attention.KERNELS[bench.kernel], importlib.import_module(type(peer).__module__)
        wan.dispatch_attention_fn = lambda q, k, v, **_: attention.attention(q, k, v, kernel)[0]
        found |= {f"{name} with {bench.kernel}": alone(run, bench.device, bench.steps) for name in list(ways)[-1:]}
    return found


def decoder(bench: Bench, vae: VAE, z: Tensor) -> dict | str:
    """diffusers' decode of the same latents by the same weights, a latent frame at a time, as it does always."""
    try:
        theirs_of = importlib.import_module("diffusers")
    except ImportError:
        return "diffusers is not installed"
    if vae.config.is_residual:
        return "diffusers' VAE is timed at Wan 2.1's sizes only"
    with torch.device("meta"):
        peer = theirs_of.AutoencoderKLWan()
    state = {vae.hub_name(name): value.contiguous() for name, value in vae.state_dict().items()}  # laid out as files give them
    peer.load_state_dict(state, assign=True)
    mean, std = (torch.tensor(x, device=z.device).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    raw, gpu = (z * std + mean).to(bench.vae_dtype), bench.device.type == "cuda"
    run = lambda: peer.decode(raw, return_dict=False)[0]  # noqa: E731
    ours = torch.cat(list(vae.decode(z, 1)), dim=2)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    difference = ((run() - ours).norm() / ours.norm()).item()
    return {"version": theirs_of.__version__, "difference": difference, "seconds": alone(run, bench.device, bench.steps),
            "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None}  # fmt: skip
