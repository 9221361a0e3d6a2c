"""Prompts of many lengths on the real model, around every size at which something changes, up to the context."""

import itertools

import pytest

from tests.support.running_appliance import RunningAppliance

pytestmark = pytest.mark.system

MODEL = "smollm2-135m"
CONTEXT = 8192
TIE = 0.1
"""Log-probabilities nearer than this may change places when the same ids are computed in other chunks."""

_TEXT_IDS = (504, 3575, 282, 4649, 314, 7042, 30, 1385, 314, 260, 3575, 282, 7477, 47, 198)


def ids(length: int) -> list[int]:
    """A prompt of plain words, repeated."""
    return list(itertools.islice(itertools.cycle(_TEXT_IDS), length))


def complete(appliance: RunningAppliance, prompt: list[int] | str, max_tokens: int) -> dict:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "logprobs": 2}
    reply = appliance.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "length", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025]
)
def test_every_length_is_answered_in_full(appliance: RunningAppliance, length: int) -> None:
    answer = complete(appliance, ids(length), 2)
    assert answer["usage"]["prompt_tokens"] == length
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("sentences", [1, 4, 9, 40])
def test_decoding_agrees_with_computing_the_same_text_as_a_prompt(appliance: RunningAppliance, sentences: int) -> None:
    prompt = "The quick brown fox jumps over the lazy dog while it rains in Spain. " * sentences + "The capital of"
    made = complete(appliance, prompt, 6)
    tokens, tops = made["choices"][0]["logprobs"]["tokens"], made["choices"][0]["logprobs"]["top_logprobs"]
    compared = 0
    for place in range(1, 6):
        again = complete(appliance, prompt + "".join(tokens[:place]), 1)
        first, second = sorted(tops[place].values(), reverse=True)[:2]
        same_ids = again["usage"]["prompt_tokens"] == made["usage"]["prompt_tokens"] + place
        if same_ids and first - second > TIE:
            assert again["choices"][0]["text"] == tokens[place]
            compared += 1
    assert compared >= 2


def test_the_longest_prompt_leaves_one_id_and_one_more_is_refused(appliance: RunningAppliance) -> None:
    answer = complete(appliance, ids(CONTEXT - 1), 5)
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 1
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    body = {"model": MODEL, "prompt": ids(CONTEXT), "max_tokens": 1}
    reply = appliance.client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"the prompt has {CONTEXT} tokens; the context holds {CONTEXT}" in error["message"]
