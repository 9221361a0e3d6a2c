"""Logits of tiny random checkpoints of every architecture against those of ``transformers``, in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from appliance.model.safetensors import open_safetensors_checkpoint
from tests.support.decoder_rig import whole_logits
from tests.support.tiny_models import VOCAB, save_hf

LENGTH = 70  # longer than the windows of 24
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10_000.0,
}  # fmt: skip
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_key_value_heads": 6}),
    "mistral": ("mistral", {}),
    "mistral-everything": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", {}),
    "gemma3-untied": ("gemma3", {"tie_word_embeddings": False}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 5.0, "sliding_window": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    model = save_hf(tmp_path, family, **overrides)
    checkpoint = open_safetensors_checkpoint(tmp_path)
    ids = np.random.default_rng(0).integers(0, VOCAB, LENGTH)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    assert np.abs(wanted).max() > 0.5, "the checkpoint says something"
    got = whole_logits(checkpoint.architecture, dict(checkpoint.weights()), ids)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
