"""The kernel bench on a device, without one: small cases interpreted, a clock that is made up, and how it refuses."""

import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from appliance.bench import kernels_checks, kernels_data, kernels_device, kernels_launches, runner
from appliance.bench.kernels_checks import Checked
from appliance.bench.kernels_device import Effort, Timed, Yardsticks, figures
from pallas_kernels import model_shapes as models
from pallas_kernels.page_write import cases as write_cases
from pallas_kernels.page_write import examine as write_examine
from pallas_kernels.page_write.cases import WriteCase
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_prefill import cases as prefill_cases
from pallas_kernels.paged_prefill.cases import PrefillCase
from pallas_kernels.pages import BitmaskPages, fetch
from pallas_kernels.sample import cases as sample_cases
from pallas_kernels.sample.op import Sampled

EFFORT = Effort(
    copy_bytes=2**16, side=32, pool_bytes=2**16, chain_seconds=4.0, program_seconds=0.0, repeats=3, most_steps=2
)
YARDSTICKS = Yardsticks((4e6, 1e6, 2e6), (4e8, 1e8, 2e8))


@pytest.fixture(autouse=True)
def quickly(monkeypatch) -> None:
    """Programs run once or twice here, so that compiling is what takes time."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=quick))


def ticking():
    """A clock on which whatever lies between two looks takes a second."""
    return itertools.count().__next__


def timed(launch: kernels_launches.Launch) -> Timed:
    return kernels_device.time_launch(launch, YARDSTICKS, EFFORT, ticking())


@pytest.mark.interpret
def test_a_decode_case_is_checked_and_timed() -> None:
    launch = kernels_launches.of_decode(decode_cases.CASES[0], EFFORT.pool_bytes, interpret=True)
    found = timed(launch)
    # keys and values of all histories, then queries, results, keys and values of ten slots, in bf16
    assert launch.amount == 2 * sum(decode_cases.RAGGED) * 3 * 64 * 2 + 10 * (2 * 9 + 2 * 3) * 64 * 2
    assert found.seconds == (0.5, 0.5, 0.5)
    assert found.rate == launch.amount / 0.5
    assert found.percent == pytest.approx(100 * launch.amount / 0.5 / 2e6)
    assert found.right
    assert not found.counts
    assert found.line().startswith(f"paged_decode {launch.name}: error 0.00")
    assert " against reference, 500000.0 us, " in found.line()


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("kv_format", "history_bytes"),
    # int8: codes and two bf16 scales a position. bmq: two full blocks of 300 positions and one of 130, and what two
    # slots keep in bf16 beside
    [
        ("int8", 5 * (300 + 130) * (2 * 8 + 4)),
        ("bmq4", 5 * 3 * (4 * 32 + 2 * 8 + 32 * 4 + 8 + 64 + 8) * 4 + 2 * 5 * 2 * 144 * 8 * 2),
        ("bmq2", 5 * 3 * (2 * 32 + 4 * 8 + 32 * 4 + 8 + 64 + 8) * 4 + 2 * 5 * 2 * 144 * 8 * 2),
    ],
)
def test_decoding_from_a_quantised_pool_is_right_and_counts_the_bytes_of_its_format(kv_format, history_bytes) -> None:
    case = decode_cases.DecodeCase("short", models.TINY, (300, 130), 128, kv_format=kv_format)
    launch = kernels_launches.of_decode(case, 1, interpret=True)
    assert launch.amount == history_bytes + 2 * (2 * 5 + 2 * 5) * 8 * 2
    checked = launch.check()
    assert checked.right, checked
    assert checked.error is not None
    assert checked.error > 0


@pytest.mark.interpret
def test_a_prefill_case_is_checked_and_timed() -> None:
    launch = kernels_launches.of_prefill(prefill_cases.CASES[0], EFFORT.pool_bytes, interpret=True)
    found = timed(launch)
    assert launch.inputs(jax.random.key(0))[3].shape[0] == 2, "a layer is 48 KiB, a pool at least 64"
    assert launch.amount == 4 * 9 * 64 * (5 * 6 // 2 + 20 * 37 + 20 * 21 // 2 + 17)
    assert found.percent == pytest.approx(100 * launch.amount / 0.5 / 2e8)
    assert found.right


@pytest.mark.interpret
@pytest.mark.parametrize("kv_format", prefill_cases.FORMATS)
def test_a_prefill_from_a_quantised_pool_is_right(kv_format) -> None:
    case = PrefillCase("short", models.TINY, ((300, 20), (0, 5), (16, 3)), 32, 128, kv_format=kv_format)
    checked = kernels_launches.of_prefill(case, 1, interpret=True).check()
    assert checked.right, checked


WRITTEN = {
    "bf16": 4 * 8,
    "int8": 2 * 8 + 4,
    "bmq4": (4 * 32 + 2 * 8 + 32 * 4 + 8 + 64 + 8) * 4 / 128 + 127 / 128 * 4 * 8,
    "bmq2": (2 * 32 + 4 * 8 + 32 * 4 + 8 + 64 + 8) * 4 / 128 + 127 / 128 * 4 * 8,
}
"""Bytes of a position of one head; in bitmask formats a token fills a block or is kept in bf16."""


def write_case(kv_format: str) -> WriteCase:
    return WriteCase("decode", models.TINY, 2, 4, 128, 2, kv_format=kv_format)


@pytest.mark.interpret
@pytest.mark.parametrize("kv_format", WRITTEN)
def test_a_write_is_right_and_counts_the_bytes_of_its_format(kv_format) -> None:
    launch = kernels_launches.of_write(write_case(kv_format), interpret=True)
    assert launch.amount == round(2 * 5 * 2 * WRITTEN[kv_format])
    checked = launch.check()
    assert checked.right, checked


@pytest.mark.interpret
def test_a_write_is_timed_in_the_place_of_its_pool() -> None:
    launch = kernels_launches.of_write(write_case("int8"), interpret=True)
    found = timed(launch)
    assert found.percent == pytest.approx(100 * launch.amount / 0.5 / 1e6), "a copy writes half of what it moves"
    pool, *rest = launch.inputs(jax.random.key(0))
    jax.jit(launch.step, donate_argnums=1)(jnp.int32(0), pool, *rest)
    assert pool.words.is_deleted()


@pytest.mark.interpret
@pytest.mark.parametrize("way", kernels_launches.WAYS)
def test_a_sample_case_is_right(way) -> None:
    launch = kernels_launches.of_sample(sample_cases.CASES[0], way, interpret=True)
    assert (launch.name, launch.amount) == (f"smaller-than-the-candidates {way}", 4 * 37 * 4)
    checked = launch.check()
    assert checked.right, checked
    assert checked.text.startswith("0 of 32 rows drew another id, log-probabilities within ")


@pytest.mark.interpret
def test_a_sample_case_is_timed() -> None:
    found = timed(kernels_launches.of_sample(sample_cases.CASES[0], "top-k-top-p", interpret=True))
    assert found.percent == pytest.approx(100 * 4 * 37 * 4 / 0.5 / 2e6)


def test_attention_that_is_wrong_says_so() -> None:
    ones = jnp.ones((2, 3, 4), jnp.bfloat16)
    assert kernels_checks.check_attention(ones, ones.astype(jnp.float32), "reference").right
    lost = kernels_checks.check_attention(jnp.zeros_like(ones), ones, "reference")
    assert lost == Checked(right=False, text="error 1.0000 against reference", error=1.0)
    assert kernels_checks.check_attention(ones.at[1, 2, 3].set(jnp.nan), ones, "xla").error == float("inf")


@pytest.fixture(params=["bf16", "int8", "bmq4", "bmq2"])
def pool(request):
    case = WriteCase("pool", models.TINY, 2, 3, 128, 1, kv_format=request.param)
    return kernels_data.random_pool(write_examine.shapes(case)[0], 8, 2, jax.random.key(1))


def test_a_pool_is_held_against_another_code_by_code(pool) -> None:
    def checked(changed) -> Checked:
        return kernels_checks.check_pools(changed, pool, 8)

    same = "0 codes differ, by 0.00 steps at most, and 0 bf16 numbers, against xla"
    assert checked(pool) == Checked(right=True, text=same)
    if isinstance(pool, jax.Array):
        other = checked(pool.at[1, 2, 0, 1, 5, 6].add(1.0))
        assert other == Checked(right=False, text=same.replace("0 bf16", "1 bf16"))
        return
    if isinstance(pool, BitmaskPages):
        assert not checked(pool._replace(recent=pool.recent.at[1, 0, 2, 1, 143, 7].add(1.0))).right
    word = (1, 2, 0, *[0] * (pool.words.ndim - 3))
    next_code = pool._replace(words=pool.words.at[word].set(pool.words[word] ^ 1))
    assert checked(next_code) == Checked(right=True, text=same.replace("0 codes", "1 codes").replace("0.00", "1.00"))
    distant = pool._replace(words=pool.words.at[word].set(pool.words[word] ^ 2))
    assert checked(distant) == Checked(right=False, text=same.replace("0 codes", "1 codes").replace("0.00", "2.00"))
    assert not checked(pool._replace(words=pool.words.at[1].set(pool.words[1] ^ 1))).right, "too many differ"


def test_ids_may_differ_in_a_few_rows() -> None:
    zeros = jnp.zeros((200, 3))
    wanted = Sampled(jnp.arange(200), zeros[:, 0], zeros, zeros)

    def checked(**parts) -> Checked:
        return kernels_checks.check_samples([(wanted._replace(**parts), wanted)] * 2)

    assert checked().text == "0 of 400 rows drew another id, log-probabilities within 0.0e+00, of reference"
    assert checked(ids=wanted.ids.at[:2].add(1)).right
    assert not checked(ids=wanted.ids.at[:3].add(1)).right
    assert not checked(top_logprobs=zeros.at[7, 1].set(0.01)).right
    assert not checked(logprob=wanted.logprob.at[3].set(jnp.nan)).right


def test_a_pool_has_real_codes_in_as_many_layers_as_it_needs() -> None:
    one_layer = write_examine.shapes(WriteCase("pool", models.TINY, 1, 40, 128, 1, kv_format="bmq4"))[0]
    assert kernels_data.layers_of(one_layer, 3 * one_layer.words.size * 4 + 1) == 4
    assert kernels_data.layers_of(one_layer, 2**60) == kernels_data.MOST_LAYERS
    pool = kernels_data.random_pool(one_layer, 8, 2, jax.random.key(0))
    assert (pool.words.shape, pool.recent.dtype) == ((2, *one_layer.words.shape[1:]), jnp.bfloat16)
    assert float(fetch(pool, 8, jnp.int32(1), jnp.arange(40)).std()) == pytest.approx(1.0, abs=0.05)


def test_a_case_that_does_not_run_ends_nothing() -> None:
    def make() -> kernels_launches.Launch:
        raise TypeError("too large\nfor this card")

    found = kernels_device.attempt("paged_prefill big", make, YARDSTICKS, EFFORT)
    assert found.line() == "paged_prefill big: FAILED: too large"
    assert not found.right


def test_an_answer_that_is_wrong_is_timed_and_says_so() -> None:
    launch = kernels_launches.Launch(
        "sample", "odd", lambda _, x: x + 1, lambda _: (jnp.int32(0),), lambda: Checked(right=False, text="all differ"),
        1000, "of copy bandwidth",
    )  # fmt: skip
    assert timed(launch).line() == "sample odd: WRONG, all differ, 500000.0 us, 0.0 GB/s, 0.1 % of copy bandwidth"


def test_yardsticks_count_what_is_read_and_written_and_multiplied() -> None:
    found = kernels_device.measure_yardsticks(EFFORT, ticking())
    assert found.bytes_per_second == (2 * 2 * 2**16,) * 3  # two steps a second
    assert found.flops_per_second == (2 * 2 * 32**3,) * 3


def of_case(kernel: str, name: str, error: float, seconds: float, percent: float) -> Timed:
    right, chains = error < 0.01, (seconds, 2 * seconds, seconds / 2)
    return Timed(kernel, name, counts=True, right=right, error=error, seconds=chains, percent=percent)


@pytest.mark.parametrize(("is_a100", "met"), [(True, (False, True, False)), (False, (None, None, None))])
def test_figures_are_the_least_of_the_long_cases(is_a100, met) -> None:
    plain, coded = (case.name for case in decode_cases.PAIR_64K)
    found = [
        dataclasses.replace(of_case("paged_decode", "short", 0.001, 1.0, 3.0), counts=False),
        of_case("paged_decode", plain, 0.002, 3.0, 85.0),
        of_case("paged_decode", coded, 0.003, 2.0, 79.0),
        of_case("paged_prefill", "long", 0.004, 1.0, 56.0),
        of_case("paged_prefill", "wrong", 0.5, 1.0, 5.0),
        Timed("paged_prefill", "broken", counts=False, failure="why"),
        Timed("sample", "right", counts=False, right=True),
    ]
    results = {result.name: result for result in figures(found, YARDSTICKS, is_a100=is_a100)}
    assert {name: result.value for name, result in results.items()} == {
        "cases_wrong": 2, "decode_bandwidth_pct": 79.0, "prefill_peak_pct": 56.0, "bmq4_speedup_64k": 1.5,
        "error_max": 0.5, "copy_bandwidth": 0.002, "mma_peak": 0.0002,
    }  # fmt: skip
    assert results["decode_bandwidth_pct"].spread == (79.0, 85.0)
    assert results["bmq4_speedup_64k"].spread == (1.5 / 4.0, 6.0 / 1.0)
    assert tuple(results[name].met for name in ("decode_bandwidth_pct", "prefill_peak_pct", "bmq4_speedup_64k")) == met
    assert results["cases_wrong"].met is False
    wrong = [dataclasses.replace(case, right=False) if case.name == coded else case for case in found]
    assert "bmq4_speedup_64k" not in {result.name for result in figures(wrong, YARDSTICKS, is_a100=is_a100)}


def test_every_case_has_its_data(monkeypatch) -> None:
    """By shapes and tables: the numbers are never made."""
    tables = list[jax.Array]()

    def random_table(*arguments) -> jax.Array:
        tables.append(kernels_data.random_table(*arguments))
        return tables[-1]

    def random_pool(one_layer, head_dim, layers, key):
        return one_layer

    monkeypatch.setattr(kernels_launches, "random_table", random_table)
    names = list[str]()
    for name, make in kernels_launches.launches(0):
        attends = name.startswith("paged")
        with monkeypatch.context() as patch:
            if attends:
                patch.setattr(kernels_launches, "random_pool", random_pool)
                patch.setattr(kernels_launches, "normal", lambda shapes, _: shapes)
            launch = make()
            inputs = launch.inputs if attends else functools.partial(jax.eval_shape, launch.inputs)
            first, *others = inputs(jax.random.key(0))
        assert launch.amount > 0
        if not name.startswith("sample"):
            pages = jax.tree.leaves(others[2] if attends else first)[0]
            assert int(tables[-1].max()) < pages.shape[1], name
        names.append(name)
    counted = (decode_cases.CASES, decode_cases.QUANTISED_CASES, decode_cases.PAIR_64K, prefill_cases.CASES)
    counted = (*counted, prefill_cases.QUANTISED_CASES, write_cases.GPU_CASES, sample_cases.CASES * 3)
    assert len(set(names)) == sum(map(len, counted))


@pytest.mark.parametrize(("program_seconds", "steps"), [(0.0, 10), (1.0, 10), (1.5, 10), (2.5, 9), (99.0, 20)])
def test_a_chain_is_programs_of_some_steps_each_on_the_result_of_the_last(program_seconds, steps) -> None:
    effort = Effort(chain_seconds=10.0, program_seconds=program_seconds, repeats=2, most_steps=20)
    results = list[int]()

    def step(index, x):
        jax.debug.callback(lambda value: results.append(int(value)), x + 1)
        return x + 1

    seconds = kernels_device.chain_seconds(step, lambda _: (jnp.int32(0),), 4.0, 4, effort, ticking())
    jax.effects_barrier()
    assert sorted(results) == sorted([*range(1, steps + 1)] * 3), "once to compile, then two repeats"
    assert seconds == [1 / steps] * 2


def test_no_launch_is_thought_to_be_over_before_a_card_can_have_begun_it() -> None:
    effort = Effort(chain_seconds=10.0, program_seconds=0.0, launch_seconds=2.0, repeats=1, most_steps=20)
    seconds = kernels_device.chain_seconds(lambda _, x: x, lambda _: (jnp.int32(0),), 4.0, 4, effort, ticking())
    assert seconds == [1 / 5]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ZCCP_HOME", str(tmp_path))


def test_without_a_gpu_it_ends_with_2_and_says_so(capsys) -> None:
    assert runner.main("kernels", ["--device"]) == 2
    assert capsys.readouterr().err.startswith("zccp: --device needs an NVIDIA GPU that jax can use, and finds none;")


@pytest.mark.parametrize("capability", ["7.5", "unknown"])
def test_a_gpu_that_is_too_old_is_refused(monkeypatch, capsys, capability) -> None:
    old = SimpleNamespace(device_kind="Tesla T4", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda _: [old])
    assert runner.main("kernels", ["--device"]) == 2
    wanted = f"zccp: Tesla T4 has compute capability {capability}; the kernels need 8.0 or more\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.interpret
def test_one_run_over_the_cases_of_a_name(monkeypatch, capsys) -> None:
    """The whole bench, on a CPU that passes for an A100."""
    monkeypatch.setattr(kernels_device, "find_gpu", lambda: kernels_device.Gpu("NVIDIA A100-SXM4-80GB", "8.0"))
    monkeypatch.setattr(kernels_device, "Effort", lambda: EFFORT)
    monkeypatch.setattr(jax, "devices", lambda _, of=jax.devices: of("cpu"))
    of = kernels_launches.launches
    monkeypatch.setattr(kernels_device, "launches", lambda pool_bytes: of(pool_bytes, interpret=True))
    assert runner.main("kernels", ["--device", "--only", "prefill tiny", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = {result["name"]: result for result in report["results"]}
    assert results["cases_wrong"]["value"] == 0
    assert results["cases_wrong"]["repeats"] == 1
    assert set(results) == {"cases_wrong", "error_max", "copy_bandwidth", "mma_peak"}, "no long case, no percentage"
    assert report["notes"][0] == "card: NVIDIA A100-SXM4-80GB, compute capability 8.0"
    assert report["notes"][1].startswith("paged_prefill tiny-5:5-d8-mixed: error 0.00")
