"""kv-quality: its figures from made-up measurements, its texts and prompts, and its trials on a tiny model."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from appliance.bench import kv_quality, runner
from appliance.bench.held_out import held_out
from appliance.bench.kv_baselines import BASELINES
from appliance.bench.kv_quality import CONTEXTS, Losses, Measured
from appliance.bench.kv_trials import attention_errors, losses, trials_of
from appliance.bench.passkey import NEW_TOKENS, passkeys
from appliance.bench.runner import BenchUseError
from appliance.model.safetensors import open_safetensors_checkpoint
from planner.decoder import QUERY_ENERGY
from planner.formats import KvFormat, WeightForm
from planner.kv import page_bytes, slot_bytes
from planner.plan import Plan, make_plan
from tests.bench.scoring import prefill_scorer
from tests.support.tiny_models import VOCAB, save_hf


class Letters:
    """A codec whose ids are code points."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        assert not parse_special
        return [ord(letter) for letter in text]


def measured(model: str, *, more: dict[str, float], error: float, flips: dict[str, int]) -> Measured:
    """Two windows of two blocks a context; ``more`` is added to every block's loss of a trial."""
    found = {
        (name, length): Losses(np.full((2, 2), 100.0 + added), 400)
        for length in CONTEXTS
        for name, added in {"float32": 0.0, **more}.items()
    }
    keys = {
        "float32": [True] * 4,
        **{name: [index >= count for index in range(4)] for name, count in flips.items()},
    }
    errors = {"bmq4": np.array([error, 3 * error]), "rotation4": np.array([0.01, 0.01])}
    return Measured(model, found, errors, keys, {"bmq4": (4.5156, 6502, 3_317_760)})


def test_a_figure_is_the_worst_of_the_models():
    one = measured("one", more={"int8": 0.0, "bmq4": 0.1, "bmq2": 1.0}, error=0.001, flips={"int8": 1, "bmq4": 1})
    two = measured("two", more={"int8": 0.2, "bmq4": 0.3, "bmq2": -1.0}, error=0.002, flips={"int8": 0, "bmq4": 2})
    found = {result.name: (round(result.value, 4), result.met) for result in kv_quality.figures([one, two])}
    assert found == {
        "ppl_delta_int8_pct": (0.2002, False),  # 4 blocks of 0.2 more over 400 ids: exp(0.002)
        "ppl_delta_bmq4_pct": (0.3005, True),
        "ppl_delta_bmq2_pct": (1.005, True),
        "bits_bmq4": (4.5156, True),
        "err_bmq4_vs_rotation4": (0.4, False),
        "passkey_flips_bmq4_minus_int8": (2.0, False),
    }


def test_an_interval_holds_the_delta_and_grows_with_the_spread():
    rng = np.random.default_rng(0)
    base = Losses(rng.normal(100, 5, (4, 8)), 4 * 8 * 128)
    found = {("float32", 1024): base}
    for name, spread in (("near", 0.1), ("far", 1.0)):
        found[name, 1024] = Losses(base.by_block + 0.5 + spread * rng.normal(size=(4, 8)), base.predicted)
    widths = {}
    for name in ("near", "far"):
        low, high = kv_quality.interval_pct(found, name, 1024)
        assert low < kv_quality.delta_pct(found, name, (1024,)) < high
        widths[name] = high - low
    assert widths["far"] > 5 * widths["near"]


def test_lines_name_every_format_and_every_size():
    one = measured("one", more={"int8": 0.0, "bmq4": 0.1, "bmq2": 1.0}, error=0.001, flips={"int8": 1, "bmq4": 0})
    text = "\n".join(kv_quality.describe(one))
    assert "one, context 8192: perplexity 2.7183 in float32; int8 +0.000 % [+0.000, +0.000]" in text
    assert "float32 finds 4 of 4; flips: int8 1, bmq4 0" in text
    assert "bmq4 4.516 bits, 6502 B a token, 3317760 B a sequence beside" in text


def test_held_out_texts_are_long_enough_and_none_is_too_short_quietly():
    prose, code = held_out(Letters(), 100_000)  # type: ignore[arg-type]
    assert (len(prose.ids), len(code.ids)) == (100_000, 100_000)
    assert prose.kind == "prose"
    assert "".join(map(chr, code.ids[:200])).startswith("#!/usr/bin/env python3")
    with pytest.raises(
        BenchUseError, match=r"the prose has \d+ ids, 10000000 were asked for; ask for fewer with --ids"
    ):
        held_out(Letters(), 10_000_000)  # type: ignore[arg-type]


def test_pass_keys_lie_at_their_depth_and_leave_room_for_the_answer():
    text = [ord("x")] * 600
    found = passkeys(Letters(), text, (400, 500), 3)  # type: ignore[arg-type]
    assert [(one.context, one.depth) for one in found] == [(c, d) for c in (400, 500) for d in (0.0, 0.5, 1.0)]
    assert len({one.key for one in found}) == 6
    for one in found:
        assert len(one.ids) == one.context - NEW_TOKENS
        words = "".join(map(chr, one.ids))
        assert words.count(one.key) == 2
        assert words.endswith("The pass key is")
        filler = words.split("\n\n")
        assert len(filler[0]) == round(one.depth * words.count("x"))


def test_baselines_round_within_half_a_step():
    rng = np.random.default_rng(1)
    k, v = jnp.asarray(rng.standard_normal((2, 3, 128, 64), dtype=np.float32))
    step = {"token4": 6.0 / 15, "rotation4": 6.0 / 15, "channel4": 7.0 / 15}  # the extent of 64 or 128 normal numbers
    for name, rounding in BASELINES.items():
        for old, new in zip((k, v), rounding(k, v), strict=True):
            error = np.asarray(jnp.abs(old - new))
            assert 0 < error.mean() < step[name] / 4, name
            assert np.unique(np.asarray(new)).size > 100, name
    levels = np.unique(np.asarray(BASELINES["token4"](k, v)[0][0, 0]))
    assert levels.size <= 16, "one group of 64 channels has 16 levels"


LENGTH = 512


def plan_of(architecture, kv_format: KvFormat) -> Plan:
    return make_plan(
        architecture, target="cpu_native", weight_form=WeightForm.FLOAT32, kv_format=kv_format, context=LENGTH, slots=2,
        prefill_chunk=128, prefill_slots=2, page_size=128, kv_bytes=0, implementation="xla",
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_hf(folder, "qwen3", max_position_embeddings=1024)
    checkpoint = open_safetensors_checkpoint(folder)
    weights = {name: jnp.asarray(array) for name, array in dict(checkpoint.weights()).items()}
    arch = checkpoint.architecture
    weights[QUERY_ENERGY] = jnp.ones((arch.layers, arch.kv_heads, arch.head_dim))
    windows = np.random.default_rng(3).integers(0, VOCAB, (2, LENGTH)).tolist()
    return arch, weights, windows


def test_losses_of_the_float32_pool_are_those_of_the_whole_window(tiny):
    arch, weights, windows = tiny
    trial = trials_of({"float32": plan_of(arch, KvFormat.FLOAT32)})[0]
    reached: list[int] = []
    found = losses(trial, LENGTH, weights, windows, reached.append)
    assert found.shape == (2, LENGTH // 128)
    assert reached == [256, 512, 768, 1024]
    plain = {name: array for name, array in weights.items() if name != QUERY_ENERGY}
    wanted = [prefill_scorer(trial.plan)(plain, window).loss for window in windows]
    np.testing.assert_allclose(found.sum(axis=1), wanted, rtol=1e-5)


def test_errors_rank_the_formats(tiny):
    arch, weights, windows = tiny
    plans = {str(name): plan_of(arch, name) for name in (KvFormat.FLOAT32, KvFormat.INT8, KvFormat.BMQ4, KvFormat.BMQ2)}
    errors = attention_errors(trials_of(plans), weights, windows, lambda _: None)
    assert set(errors) == {"int8", "bmq4", "bmq2", *BASELINES}
    assert all(error.shape == (arch.layers,) for error in errors.values())
    mean = {name: error.mean() for name, error in errors.items()}
    assert 0 < mean["int8"] < mean["bmq4"] / 10 < mean["bmq2"]
    assert mean["bmq4"] < mean["bmq2"] / 2


def test_sizes_of_a_model(tiny):
    arch = tiny[0]
    per_block = page_bytes(KvFormat.BMQ4, arch, 128)
    assert per_block == arch.layers * arch.kv_heads * 4 * (35 * arch.head_dim + 72)
    assert slot_bytes(KvFormat.BMQ4, arch) == arch.layers * arch.kv_heads * 2 * 144 * arch.head_dim * 2


def test_what_cannot_be_measured_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ZCCP_HOME", str(tmp_path))
    assert runner.main("kv-quality", ["--ids", "9000"]) == 2
    assert capsys.readouterr().err == "zccp: --ids 9000 is no multiple of 8192, the longest context\n"
