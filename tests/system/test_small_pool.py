"""The float32 form through XLA alone, with a page pool that holds one full sequence and host memory behind it.

Neither preemption nor the way of pages to host memory and back changes an answer.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.running_appliance import RunningAppliance, write_config, zccp

pytestmark = pytest.mark.system

MODEL = "smollm2-135m"
CONTEXT = 256
SMALL = {
    "weight_form": "float32",
    "implementation": "xla",
    "context": CONTEXT,
    "slots": 4,
    "prefill_chunk": 64,
    "kv_memory_mb": 12,
}
OPENINGS = ("Once upon a time", "The sea is", "In the year 2050,")
LENGTH = 140
"""Ids of an answer: three of the pool's four pages with its prompt. Two are admitted together, as each then needs one
page and one in reserve; both cannot have a third."""


@pytest.fixture(scope="module")
def small(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """An appliance with models of the shared home and programs of its own."""
    own = tmp_path_factory.mktemp("small")
    (own / "models").symlink_to(home / "models")
    config = write_config(own, own, {"engine": SMALL, "cache": {"host_tier_mb": 64.0}})
    built = zccp("build", "--config", str(config))
    assert built.returncode == 0, built.stderr
    with RunningAppliance(config) as appliance:
        yield appliance


def story(appliance: RunningAppliance, opening: str) -> str:
    body = {"model": MODEL, "prompt": opening, "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
    reply = appliance.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == LENGTH
    return reply.json()["choices"][0]["text"]


def test_preempted_answers_equal_undisturbed_ones(small: RunningAppliance) -> None:
    alone = [story(small, opening) for opening in OPENINGS]
    before = small.settled()
    with ThreadPoolExecutor(len(OPENINGS)) as pool:
        together = list(pool.map(lambda opening: story(small, opening), OPENINGS))
    after = small.settled()
    assert after["zccp_preemptions_total"] > before["zccp_preemptions_total"]
    assert together == alone
    assert after["zccp_compilations_total"] == 0


def test_a_prompt_that_was_pushed_out_comes_back_from_host_memory(small: RunningAppliance) -> None:
    def answer(first_id: int) -> tuple[str, int]:
        body = {"model": MODEL, "prompt": [first_id, *range(600, 730)], "temperature": 0, "max_tokens": 8}
        reply = small.client.post("/v1/completions", json=body).json()
        return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, _ = answer(510)
    before = small.settled()
    for first_id in range(511, 515):
        assert answer(first_id)[1] == 0
    assert answer(510) == (first, 128)
    after = small.settled()
    hits = 'zccp_tier_pages_total{event="hit",tier="host"}'
    assert after[hits] - before[hits] == 2
    assert after["zccp_prompt_tokens_reused_total"] - before["zccp_prompt_tokens_reused_total"] == 128
    assert after["zccp_compilations_total"] == 0


def test_what_can_never_fit_is_refused_and_blocks_nobody(small: RunningAppliance) -> None:
    body = {"model": MODEL, "prompt": [504] * CONTEXT, "max_tokens": 1}
    refused = small.client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert f"the context holds {CONTEXT}" in refused.json()["error"]["message"]
    fits = small.client.post("/v1/completions", json=body | {"prompt": [504] * (CONTEXT - 1)})
    assert fits.json()["usage"] == {
        "prompt_tokens": CONTEXT - 1,
        "completion_tokens": 1,
        "total_tokens": CONTEXT,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    small.settled()


def test_the_reference_form_is_sensible(small: RunningAppliance) -> None:
    body = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    assert small.client.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith(" Paris")
