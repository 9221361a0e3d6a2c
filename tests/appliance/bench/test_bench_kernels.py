"""The kernel bench: its figures from made-up cases, and how it refuses."""

from importlib import import_module

import pytest

from appliance.bench import kernels, runner
from appliance.bench.kernels_static import DECODE, PREFILL, WRITE, Examined, figures

GOOD = Examined(DECODE, "good", 80, 0, 37_896, 4, 16, 29, 1.01)


def figure(*cases: Examined) -> dict[str, tuple[float, bool | None]]:
    return {result.name: (result.value, result.met) for result in figures(cases)}


def test_a_figure_is_the_worst_of_all_cases() -> None:
    bad = Examined(DECODE, "bad", 255, 40, 83_457, 1, 0, 0, 1.11)
    short = Examined(DECODE, "short", 64, 0, 20_000, 7, 8, 4, None)
    assert figure(GOOD, bad, short) == {
        "spill_bytes_max": (40, False),
        "cases_without_mma": (1, False),
        "cases_without_cp_async": (1, None),
        "registers_max": (255, None),
        "smem_decode_max": (83_457, False),
        "decode_ctas_per_sm_min": (1, False),
        "bytes_over_minimum_max": (1.11, False),
    }
    assert all(met is not False for _, met in figure(GOOD, short).values())


def test_prefill_has_figures_of_its_own() -> None:
    prefill = Examined(PREFILL, "long", 239, 0, 166_913, 1, 512, 96, None)
    assert figure(prefill) == {
        "spill_bytes_max": (0, True),
        "cases_without_mma": (0, True),
        "cases_without_cp_async": (0, None),
        "registers_max": (239, None),
        "smem_prefill_max": (166_913, False),
        "prefill_ctas_per_sm_min": (1, None),
    }
    assert figure(GOOD, prefill)["smem_decode_max"] == (37_896, True)


def test_writes_need_no_products_of_matrices() -> None:
    write = Examined(WRITE, "plain", 32, 0, 83_457, 16, 0, 0, None)
    assert figure(write) == {
        "spill_bytes_max": (0, True),
        "registers_max": (32, None),
        "smem_write_max": (83_457, False),
        "write_ctas_per_sm_min": (16, None),
    }
    assert figure(GOOD, write)["cases_without_mma"] == (0, True)


def test_a_case_is_a_line() -> None:
    assert GOOD.line() == (
        "paged_decode good: 80 registers, 0 B spilt, 37896 B shared, 4 CTAs, 16 mma.sync, 29 cp.async, "
        "bytes 1.0100 of the minimum"
    )


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ZCCP_HOME", str(tmp_path))


@pytest.mark.parametrize("options", [[], ["--static", "--device"]])
def test_it_does_one_of_two_things_and_wants_to_be_told(capsys, options) -> None:
    assert runner.main("kernels", options) == 2
    wanted = "say what to do: --static examines code without a GPU, --device runs on this machine's GPU"
    assert capsys.readouterr().err == f"zccp: {wanted}\n"


def test_without_the_extra_it_names_it(monkeypatch, capsys) -> None:
    compiled = import_module("pallas_kernels.compiled")
    monkeypatch.setattr(compiled, "missing", lambda: "the extra is missing")
    assert runner.main("kernels", ["--static"]) == 2
    assert capsys.readouterr().err == "zccp: the extra is missing\n"


def test_a_card_that_is_not_known_is_refused(capsys) -> None:
    assert runner.main("kernels", ["--static", "--target", "b900"]) == 2
    assert "'b900' is not one of 'a100_pcie_80', 'a100_sxm_40', 'a100_sxm_80', " in capsys.readouterr().err
    assert kernels.OPTIONS


def test_a_case_that_is_not_there_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(import_module("pallas_kernels.compiled"), "missing", lambda: "")
    assert runner.main("kernels", ["--static", "--only", "llama-9"]) == 2
    kinds = "paged_decode or paged_prefill or paged_prefill_unpack or page_write or sample"
    assert capsys.readouterr().err == f"zccp: no case has 'llama-9' in its name; a name begins with {kinds}\n"
