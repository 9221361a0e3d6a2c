"""Steps over pages give what one whole forward pass gives, however the ids are cut, packed, padded and placed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sample.op import Sampled
from planner.architecture import Activation, ModelArchitecture, RopeKind, RopeScaling
from planner.batch import PROMPT_COUNT, Float, Int
from planner.decoder import DeviceState, set_slot
from planner.formats import WeightForm
from planner.weights import by_layer, random_weights, weight_specs
from tests.support.decoder_rig import DecoderRig, Row, whole_logits

COMMON = {"layers": 3, "embed": 32, "ffw": 48, "vocab": 96, "context": 96, "norm_eps": 1e-6, "rope_theta": 10_000.0}
ARCHITECTURES = {
    "llama": ModelArchitecture(
        family="llama", q_heads=6, kv_heads=2, head_dim=16, query_scale=0.25, qkv_bias=True,
        rope_scaling=RopeScaling(RopeKind.YARN, factor=4.0, original_context=32, attention_factor=1.1), **COMMON,
    ),
    "gemma3": ModelArchitecture(
        family="gemma3", q_heads=4, kv_heads=1, head_dim=16, query_scale=0.3, activation=Activation.GELU_TANH,
        windows=(20, 5, 0), local_rope=(True, True, False), rope_local_theta=500.0, tied_embeddings=True, qk_norm=True,
        post_norms=True, embed_scale=5.6, attn_softcap=3.0, logit_softcap=8.0, **COMMON,
    ),
}  # fmt: skip
PROMPTS = [np.random.default_rng(seed).integers(0, 96, length).tolist() for seed, length in enumerate((75, 33, 9, 1))]
PAGES = [[7, 0, 19, 3, 12], [5, 22, 1], [9], [14]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def rig(request):
    architecture = ARCHITECTURES[request.param]
    return DecoderRig(architecture, random_weights(architecture, 1))


@pytest.fixture(scope="module")
def logprobs(rig):
    """Log-probabilities of every position of every prompt, from one whole pass each."""
    passes = (whole_logits(rig.architecture, rig.weights, prompt) for prompt in PROMPTS)
    return [np.asarray(jax.nn.log_softmax(logits)) for logits in passes]


@pytest.fixture(autouse=True)
def _fresh(rig):
    rig.reset()


def assert_row(out: Sampled, index: int, wanted: np.ndarray) -> None:
    """The row's best ids and their log-probabilities are those of a position of the whole pass."""
    order = np.argsort(-wanted)[:20]
    np.testing.assert_allclose(out.top_logprobs[index], wanted[order], rtol=0, atol=5e-5)
    np.testing.assert_allclose(wanted[out.top_ids[index]], wanted[order], rtol=0, atol=5e-5)
    assert out.ids[index] == order[0]


def test_layers_with_arrays_of_their_own_are_one_forward(rig, logprobs):
    specs = weight_specs(rig.architecture, WeightForm.FLOAT32)
    rows = {name: tuple(rig.weights[name]) for name, spec in specs.items() if spec.axes[0] == "layers"}
    apart = {f"{name}.{layer}": row for name, stack in rows.items() for layer, row in enumerate(stack)}
    apart |= {name: rig.weights[name] for name in specs if name not in rows}
    assert {name: array.shape for name, array in apart.items()} == {n: s.shape for n, s in by_layer(specs).items()}
    other = DecoderRig(rig.architecture, apart)
    prompt, pages = PROMPTS[1], PAGES[1]
    other.prefill([Row(1, pages, 0, prompt[:16], sample=False)], chunk=32)
    assert_row(other.prefill([Row(1, pages, 16, prompt[16:32])], chunk=32), 0, logprobs[1][31])
    assert_row(other.decode([Row(1, pages, 32, prompt[32:33])]), 1, logprobs[1][32])


def test_chunked_prefill_and_decode_are_one_forward(rig, logprobs):
    prompt, pages = PROMPTS[0], PAGES[0]
    for start, end in ((0, 32), (32, 48), (48, 60)):
        out = rig.prefill([Row(2, pages, start, prompt[start:end], sample=end == 60)], chunk=32)
        assert_row(out, 0, logprobs[0][end - 1])
    for position in range(60, len(prompt)):
        out = rig.decode([Row(2, pages, position, prompt[position : position + 1])])
        assert_row(out, 2, logprobs[0][position])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32])
def test_a_padded_bucket_is_the_unpadded_one(rig, logprobs, length):
    out = rig.prefill([Row(0, PAGES[0], 0, PROMPTS[0][:length])], chunk=32)
    assert_row(out, 0, logprobs[0][length - 1])
    written = np.isfinite(np.asarray(rig.state.pages)).all(axis=(0, 2, 3, 5))  # page, place
    wanted = np.zeros(written.shape, bool)
    for position in range(length):
        wanted[PAGES[0][position // 16], position % 16] = True
    np.testing.assert_array_equal(written, wanted, "padding is written nowhere")


def test_a_ragged_launch_is_each_row_alone(rig, logprobs):
    rig.prefill([Row(0, PAGES[0], 0, PROMPTS[0][:32], sample=False)], chunk=32)
    rig.prefill([Row(1, PAGES[1], 0, PROMPTS[1][:16], sample=False)], chunk=32)
    rows = [
        Row(1, PAGES[1], 16, PROMPTS[1][16:29]),
        Row(3, PAGES[3], 0, PROMPTS[3]),
        Row(0, PAGES[0], 32, PROMPTS[0][32:41], sample=False),
        Row(2, PAGES[2], 0, PROMPTS[2]),
    ]
    out = rig.prefill(rows, chunk=32)
    for index, (sequence, last) in enumerate(((1, 28), (3, 0), (0, 40), (2, 8))):
        assert_row(out, index, logprobs[sequence][last])
    assert rig.state.last_ids.tolist() == [0, out.ids[0], out.ids[3], out.ids[1]], "row 0's slot samples nothing yet"
    out = rig.decode([Row(1, PAGES[1], 29, PROMPTS[1][29:30]), Row(0, PAGES[0], 41, PROMPTS[0][41:42])])
    assert_row(out, 1, logprobs[1][29])
    assert_row(out, 0, logprobs[0][41])


def test_slots_may_be_permuted(rig, logprobs):
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        rig.reset()
        for sequence, slot in enumerate(order):
            rig.prefill([Row(slot, PAGES[sequence], 0, PROMPTS[sequence][:-1][:32])], chunk=32)
        positions = [min(32, len(prompt) - 1) for prompt in PROMPTS]
        rows = [
            Row(slot, PAGES[sequence], positions[sequence], [PROMPTS[sequence][positions[sequence]]])
            for sequence, slot in enumerate(order)
        ]
        out = rig.decode(rows)
        for sequence, slot in enumerate(order):
            assert_row(out, slot, logprobs[sequence][positions[sequence]])


def test_a_row_past_its_pages_or_past_the_table_writes_nothing(rig):
    full = list(range(6))
    rig.prefill([Row(0, full, 0, PROMPTS[0][:32])], chunk=32)
    before = np.asarray(rig.state.pages)
    for pages, position in ((PAGES[2], 16), (full, 96), (full, 97)):
        rig.decode([Row(1, pages, position)])
        np.testing.assert_array_equal(np.asarray(rig.state.pages), before)


def test_rows_that_sample_nothing_leave_ids_and_counts(rig):
    rig.prefill([Row(0, PAGES[0], 0, PROMPTS[0][:20]), Row(1, PAGES[1], 0, PROMPTS[1][:12], sample=False)], chunk=32)
    ids, counts = np.asarray(rig.state.last_ids), np.asarray(rig.state.counts)
    assert ids[1:].tolist() == [0, 0, 0]
    assert counts[0].sum() == counts[0, ids[0]] == 1
    assert counts[1:].sum() == 0
    rig.decode([])
    np.testing.assert_array_equal(rig.state.last_ids, ids)
    np.testing.assert_array_equal(rig.state.counts, counts)


def test_a_step_feeds_on_the_id_that_it_sampled_last(rig):
    prompt = PROMPTS[1][:10]
    first = int(rig.prefill([Row(3, PAGES[1], 0, prompt)], chunk=32).ids[0])
    ids = [first]
    for step in range(3):
        ids.append(int(rig.decode([Row(3, PAGES[1], 10 + step, ids[-1:])]).ids[3]))
        assert rig.state.last_ids[3] == ids[-1]
    greedy = whole_logits(rig.architecture, rig.weights, [*prompt, *ids]).argmax(-1)
    assert ids == greedy[9:13].tolist()


def test_penalties_follow_the_slot_and_count_what_it_samples(rig):
    prompt = PROMPTS[1][:10]
    best = int(rig.prefill([Row(2, PAGES[1], 0, prompt)], chunk=32).ids[0])
    counts = jnp.zeros(96, jnp.int32).at[best].set(PROMPT_COUNT)
    penalised = {Int.PENALISED: 1, Float.FREQUENCY: 50.0}
    rig.reset()
    rig.state = set_slot(rig.state, jnp.int32(2), counts, jnp.zeros(96))
    out = rig.prefill([Row(2, PAGES[1], 0, prompt, fields=penalised)], chunk=32)
    assert out.ids[0] == best, "a prompt's id is free of the frequency penalty"
    assert rig.state.counts[2, best] == PROMPT_COUNT + 1
    out = rig.prefill([Row(2, PAGES[1], 0, prompt, fields=penalised)], chunk=32)
    assert out.ids[0] != best, "but not once the completion holds it"


def test_bias_belongs_to_a_slot(rig):
    bias = jnp.zeros(96).at[41].set(100.0)
    rig.state = set_slot(rig.state, jnp.int32(3), jnp.zeros(96, jnp.int32), bias)
    fields = {Int.BIASED: 1}
    rows = [Row(3, PAGES[1], 0, PROMPTS[1][:8], fields=fields), Row(0, PAGES[0], 0, PROMPTS[0][:8], fields=fields)]
    ids = rig.prefill(rows, chunk=32).ids
    assert ids[0] == 41
    assert ids[1] != 41


def test_suppressed_ids_and_seeds_reach_the_sampler(rig):
    prompt = PROMPTS[1][:10]
    best = rig.prefill([Row(0, PAGES[1], 0, prompt)], chunk=32).top_ids[0].tolist()
    fields = {Int(Int.SUPPRESSED): best[0]}
    assert rig.prefill([Row(0, PAGES[1], 0, prompt, fields=fields)], chunk=32).ids[0] == best[1]
    drawn = [
        int(rig.prefill([Row(0, PAGES[1], 0, prompt, fields={Float.TEMPERATURE: 2.0, column: seed})], chunk=32).ids[0])
        for column in (Int.SEED_LOW, Int.SEED_HIGH)
        for seed in range(8)
    ]
    assert len(set(drawn)) > 4
    top_k = {Float.TEMPERATURE: 2.0, Int.TOP_K: 1}
    assert rig.prefill([Row(0, PAGES[1], 0, prompt, fields=top_k)], chunk=32).ids[0] == best[0]


def test_set_slot_touches_its_slot_alone():
    state = DeviceState(jnp.zeros((1, 1, 1, 2, 16, 16)), jnp.arange(3), jnp.ones((3, 4), jnp.int32), jnp.ones((3, 4)))
    after = set_slot(state, jnp.int32(1), jnp.arange(4, dtype=jnp.int32), jnp.full(4, 2.0))
    assert after.counts.tolist() == [[1, 1, 1, 1], [0, 1, 2, 3], [1, 1, 1, 1]]
    assert after.bias.tolist() == [[1.0] * 4, [2.0] * 4, [1.0] * 4]
    assert after.last_ids.tolist() == [0, 1, 2]
