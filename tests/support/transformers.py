"""Transformers of a few hundred weights, saved as their folders on the hub would look."""

from pathlib import Path
from typing import Any

import pytest
import torch

SIDE, TOKENS = 8, 11


def saved(model: str, config: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A random model of a class of transformers."""
    transformers: Any = pytest.importorskip("transformers", reason="the extra 'peft' is not installed")
    pytest.importorskip("peft", reason="the extra 'peft' is not installed")
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    made.to(dtype).save_pretrained(folder)
    return folder


def tiny_vit(folder: Path, dtype: torch.dtype = torch.float32, model: str = "ViTModel", **settings: Any) -> Path:
    return saved(
        model,
        "ViTConfig",
        folder,
        dtype,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=SIDE,
        patch_size=4,
        initializer_range=0.5,
        **settings,
    )


def tiny_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """With dropout 0.1, which is its default."""
    return saved(
        "GPT2LMHeadModel",
        "GPT2Config",
        folder,
        dtype,
        vocab_size=TOKENS,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.5,
    )


def tiny_encoder(folder: Path) -> Path:
    return saved(
        "BertModel",
        "BertConfig",
        folder,
        vocab_size=TOKENS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
    )
