"""The kernel bench on a device, without one: small cases interpreted, a clock that is made up, and how it refuses."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from appliance.bench import kernels_device, kernels_launches, runner
from appliance.bench.kernels_device import Effort, Timed, Yardsticks, figures
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_prefill import cases as prefill_cases

EFFORT = Effort(
    copy_bytes=2**16, side=32, pool_bytes=2**16, chain_seconds=4.0, program_seconds=0.0, repeats=3, most_steps=2
)
YARDSTICKS = Yardsticks((4e6, 1e6, 2e6), (4e8, 1e8, 2e8))


def ticking():
    """A clock on which whatever lies between two looks takes a second."""
    return itertools.count().__next__


@pytest.fixture
def decode() -> kernels_launches.Launch:
    return kernels_launches.of_decode(decode_cases.CASES[0], EFFORT.pool_bytes, interpret=True)


@pytest.mark.interpret
def test_a_decode_case_is_checked_and_timed(decode) -> None:
    timed = kernels_device.time_launch(decode, YARDSTICKS, EFFORT, ticking())
    # keys and values of all histories, then queries, results, keys and values of ten slots, in bf16
    assert decode.least_bytes == 2 * sum(decode_cases.RAGGED) * 3 * 64 * 2 + 10 * (2 * 9 + 2 * 3) * 64 * 2
    assert timed.seconds == 0.5
    assert timed.percent == pytest.approx(100 * decode.least_bytes / 0.5 / 2e6)
    assert timed.right
    assert not timed.counts
    assert timed.against == "reference"


@pytest.mark.interpret
def test_a_prefill_case_is_checked_and_timed() -> None:
    launch = kernels_launches.of_prefill(prefill_cases.CASES[0], EFFORT.pool_bytes, interpret=True)
    timed = kernels_device.time_launch(launch, YARDSTICKS, EFFORT, ticking())
    assert launch.pages.shape[0] == 2, "a layer is 48 KiB, a pool at least 64"
    assert launch.rows == 26
    assert launch.flops == 4 * 9 * 64 * (5 * 6 // 2 + 20 * 37 + 20 * 21 // 2 + 17)
    assert timed.percent == pytest.approx(100 * launch.flops / 0.5 / 2e8)
    assert timed.right


def test_an_answer_that_is_wrong_says_so(decode) -> None:
    wrong = dataclasses.replace(decode, run=lambda q, *_: jnp.zeros_like(q))
    timed = kernels_device.time_launch(wrong, YARDSTICKS, EFFORT, ticking())
    assert timed.error == 1.0
    assert timed.line().startswith("paged_decode smollm2-135m-9:3-d64-ragged: WRONG, error 1.0000 against reference")
    lost = dataclasses.replace(decode, run=lambda q, *_: jnp.full_like(q, jnp.nan))
    assert kernels_device.worst_error(lost) == float("inf")


def test_a_case_that_does_not_run_ends_nothing() -> None:
    def make() -> kernels_launches.Launch:
        raise ValueError("too large\nfor this card")

    timed = kernels_device.attempt("paged_prefill big", make, YARDSTICKS, EFFORT)
    assert timed.line() == "paged_prefill big: FAILED: too large"
    assert not timed.right


def test_yardsticks_count_what_is_read_and_written_and_multiplied() -> None:
    found = kernels_device.measure_yardsticks(EFFORT, ticking())
    assert found.bytes_per_second == (2 * 2 * 2**16,) * 3  # two steps a second
    assert found.flops_per_second == (2 * 2 * 32**3,) * 3


@pytest.mark.parametrize(("is_a100", "met"), [(True, (False, True)), (False, (None, None))])
def test_figures_are_the_least_of_the_long_cases(is_a100, met) -> None:
    timed = [
        Timed("paged_decode", "short", counts=False, error=0.001, seconds=1.0, percent=3.0),
        Timed("paged_decode", "long", counts=True, error=0.002, seconds=1.0, percent=85.0),
        Timed("paged_decode", "longer", counts=True, error=0.003, seconds=1.0, percent=79.0),
        Timed("paged_prefill", "long", counts=True, error=0.5, seconds=1.0, percent=56.0),
        Timed("paged_prefill", "broken", counts=False, failure="why"),
    ]
    results = {result.name: result for result in figures(timed, YARDSTICKS, is_a100=is_a100)}
    assert {name: result.value for name, result in results.items()} == {
        "cases_wrong": 2, "decode_bandwidth_pct": 79.0, "prefill_peak_pct": 56.0, "error_max": 0.5,
        "copy_bandwidth": 0.002, "mma_peak": 0.0002,
    }  # fmt: skip
    assert results["decode_bandwidth_pct"].spread == (79.0, 85.0)
    assert (results["decode_bandwidth_pct"].met, results["prefill_peak_pct"].met) == met
    assert results["cases_wrong"].met is False


def test_every_case_fits_its_kernel_and_its_reference(monkeypatch) -> None:
    def only_shape(one_layer: jax.ShapeDtypeStruct, pool_bytes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, *one_layer.shape[1:]), one_layer.dtype)

    monkeypatch.setattr(kernels_launches, "_pool", only_shape)
    names = list[str]()
    for name, make in kernels_launches.launches(0):
        launch = make()
        new = jax.eval_shape(launch.new, jax.random.key(0))
        arguments = (*new, launch.pages, jnp.int32(0), *launch.rest)
        assert jax.eval_shape(launch.exact, *arguments).shape == new[0].shape, name
        assert launch.rows <= new[0].shape[0]
        assert int(launch.rest[0].max()) < launch.pages.shape[1]
        names.append(name)
    assert len(set(names)) == len(decode_cases.CASES) + len(prefill_cases.CASES)


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
