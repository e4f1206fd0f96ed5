"""The tiny models' sizes, and how their folders are written: the diffusers layouts of Wan 2.2 and Cosmos3, in bf16.

Loaders of the real checkpoint open it unchanged; only the numbers in the config files are small.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import clip_world
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from nanovgen import checkpoint
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.text import UMT5, UMT5Config
from nanovgen.vae import VAE, Stream, VAEConfig
from nanovgen.wan import Wan, WanConfig

TEXT_ROWS, BOUNDARY, SHIFT = 32, 0.875, 5.0
WAN_CONFIG = WanConfig(num_attention_heads=8, attention_head_dim=32, num_layers=5, ffn_dim=768, text_dim=128)
TEXT_CONFIG = UMT5Config(vocab_size=3 + len(clip_world.word_list()), d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4)
VAE_CONFIG = VAEConfig(base_dim=8, decoder_base_dim=16, latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16)
COSMOS_CONFIG = CosmosConfig(hidden_size=384, intermediate_size=384, num_hidden_layers=6, num_attention_heads=8,
                             num_key_value_heads=2, head_dim=32, vocab_size=512, mrope_section=(6, 5, 5))  # fmt: skip
COSMOS_VAE_CONFIG = VAEConfig(base_dim=16, decoder_base_dim=24, z_dim=48, is_residual=True, patch_size=2,
                              latents_mean=(0.0,) * 48, latents_std=(1.0,) * 48)  # fmt: skip


def with_statistics(config: VAEConfig, mean: list[float], std: list[float]) -> VAEConfig:
    return replace(config, latents_mean=tuple(round(x, 5) for x in mean), latents_std=tuple(round(x, 5) for x in std))


def decode_raw(vae: VAE, z: Tensor) -> Tensor:
    """Latents that are not normalised (b, z, f, y, x) -> video, not clamped, so that training sees every error."""
    stream = Stream()
    return vae.unpatch(vae.decoder(vae.post_quant_conv(z.to(vae.post_quant_conv.weight.dtype), stream), stream))


def save_weights(path: Path, *modules: nn.Module) -> None:
    """All tensors of all modules in one file, in bf16, under the hub's names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {module.hub_name(k): v.detach().to("cpu", torch.bfloat16).contiguous()
               for module in modules for k, v in module.state_dict().items()}  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for the owner alone


def load_vae(out: Path, device: str) -> VAE:
    component = checkpoint.open_component(out / "vae")
    vae = checkpoint.build(VAE, VAEConfig.read(component.config))
    return checkpoint.load(vae, component, torch.device(device), torch.bfloat16).requires_grad_(True)


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_vae(vae: VAE, out: Path) -> None:
    save_weights(out / "vae" / "diffusion_pytorch_model.safetensors", vae)
    write_vae_config(vae.config, out)


def write_vae_config(config: VAEConfig, out: Path) -> None:
    write_json(out / "vae" / "config.json", {
        "_class_name": "AutoencoderKLWan", **asdict(config), "attn_scales": [], "dropout": 0.0,
        "in_channels": 3 * config.patch**2, "out_channels": 3 * config.patch**2, "scale_factor_spatial": config.scale,
        "scale_factor_temporal": 4,
    })  # fmt: skip


def write_scheduler(out: Path) -> None:
    """UniPC without Karras' sigmas, which would make of the shift nothing; with the shift that was trained for."""
    write_json(out / "scheduler" / "scheduler_config.json", {
        "_class_name": "UniPCMultistepScheduler", "num_train_timesteps": 1000, "prediction_type": "flow_prediction",
        "use_flow_sigmas": True, "use_karras_sigmas": False, "flow_shift": SHIFT, "solver_order": 2, "solver_type": "bh2",
        "predict_x0": True, "lower_order_final": True, "final_sigmas_type": "zero",
    })  # fmt: skip


def save_experts(text: UMT5, high: Wan, low: Wan, vae_config: VAEConfig, out: Path) -> None:
    """All of the folder but the VAE's weights; its config holds the statistics of the latents that these learned on."""
    write_vae_config(vae_config, out)
    for part, expert in (("transformer", high), ("transformer_2", low)):
        save_weights(out / part / "diffusion_pytorch_model.safetensors", expert)
        write_json(out / part / "config.json", {
            "_class_name": "WanTransformer3DModel", **asdict(expert.config), "patch_size": [1, 2, 2],
            "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "added_kv_proj_dim": None, "image_dim": None,
            "pos_embed_seq_len": None, "rope_max_seq_len": 1024,
        })  # fmt: skip
    save_weights(out / "text_encoder" / "model.safetensors", text)
    write_json(out / "text_encoder" / "config.json", {
        "architectures": ["UMT5EncoderModel"], "model_type": "umt5", **asdict(text.config),
        "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True, "dropout_rate": 0.0,
        "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    })  # fmt: skip
    (out / "tokenizer").mkdir(exist_ok=True)
    clip_world.build_tokenizer().save(str(out / "tokenizer" / "tokenizer.json"))
    write_json(out / "tokenizer" / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": TEXT_ROWS, "pad_token": "<pad>",
        "eos_token": "</s>", "unk_token": "<unk>", "model_input_names": ["input_ids", "attention_mask"],
    })  # fmt: skip
    write_scheduler(out)
    write_json(out / "model_index.json", {
        "_class_name": "WanPipeline", "boundary_ratio": BOUNDARY, "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"], "vae": ["diffusers", "AutoencoderKLWan"],
        "transformer": ["diffusers", "WanTransformer3DModel"], "transformer_2": ["diffusers", "WanTransformer3DModel"],
    })  # fmt: skip


def save_towers(text: TextTower, video: Cosmos, tokenizer: Tokenizer, vae_config: VAEConfig, out: Path) -> None:
    """All of tiny-cosmos but the VAE's weights. Of the last text layer only what is read is stored, and no lm_head."""
    write_vae_config(vae_config, out)
    save_weights(out / "transformer" / "diffusion_pytorch_model.safetensors", text, video)
    sizes = asdict(video.config)
    section = list(sizes.pop("mrope_section"))
    write_json(out / "transformer" / "config.json", {
        "_class_name": "Cosmos3OmniTransformer", **sizes, "action_gen": False, "sound_gen": False, "attention_bias": False,
        "attention_dropout": 0.0, "dtype": "bfloat16", "enable_fps_modulation": True, "hidden_act": "silu",
        "joint_attn_implementation": "two_way", "latent_patch_size": 2, "patch_latent_dim": 4 * video.config.latent_channel,
        "model_type": "qwen3_vl_text", "position_embedding_type": "unified_3d_mrope", "qk_norm_for_diffusion": True,
        "qk_norm_for_text": True, "rope_scaling": {"mrope_interleaved": True, "mrope_section": section, "rope_type": "default"},
        "unified_3d_mrope_reset_spatial_ids": True, "use_moe": True, "video_temporal_causal": False,
    })  # fmt: skip
    (out / "text_tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(out / "text_tokenizer" / "tokenizer.json"))
    write_json(out / "text_tokenizer" / "tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "model_max_length": 262144,
    })  # fmt: skip
    write_scheduler(out)
    write_json(out / "model_index.json", {
        "_class_name": "Cosmos3OmniDiffusersPipeline", "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_tokenizer": ["transformers", "Qwen2TokenizerFast"], "transformer": ["diffusers", "Cosmos3OmniTransformer"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    })  # fmt: skip
