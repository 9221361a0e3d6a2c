"""Scores of a tiny random model: both of our paths, and the reference's logits, say the same in float32."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from appliance.model.safetensors import open_safetensors_checkpoint
from planner.formats import KvFormat, WeightForm
from planner.plan import make_plan
from tests.bench.scoring import decode_scores, prefill_scorer, score
from tests.support.tiny_models import VOCAB, save_hf


def test_prefill_decode_and_reference_agree(tmp_path: Path) -> None:
    model = save_hf(tmp_path, "qwen3")
    checkpoint = open_safetensors_checkpoint(tmp_path)
    weights = {name: jnp.asarray(array) for name, array in dict(checkpoint.weights()).items()}
    plan = make_plan(
        checkpoint.architecture,
        target="cpu_native",
        weight_form=WeightForm.FLOAT32,
        kv_format=KvFormat.FLOAT32,
        context=128,
        slots=4,
        prefill_chunk=64,
        prefill_slots=2,
        page_size=16,
        kv_bytes=0,
        implementation="xla",
    )
    windows = np.random.default_rng(3).integers(0, VOCAB, (3, 37)).tolist()
    reached: list[int] = []
    scorer = prefill_scorer(plan)
    at_once = [scorer(weights, window) for window in windows]
    one_by_one = decode_scores(plan, weights, windows, reached.append)
    with torch.no_grad():
        logits = model(torch.tensor(windows), use_cache=False).logits.numpy()
    wanted = [score(rows, window) for rows, window in zip(logits, windows, strict=True)]
    assert reached == list(range(1, 38))
    for ours in (at_once, one_by_one):
        for got, want in zip(ours, wanted, strict=True):
            assert got.predicted == want.predicted == 36
            assert got.loss == pytest.approx(want.loss, abs=1e-3)
            assert got.top.tolist() == want.top.tolist()
