"""Text completions: prompts of every kind, echo, log-probabilities, batches."""

from typing import Any

import pytest

from tests.support.api_rig import CONTEXT, TEXT, Rig, prompt
from tests.support.scripted_engine import ASSISTANT, BOS, EOS, USER, ScriptedEngine, emit, say


def both(script: Any, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """One request whole and streamed; the streamed texts equal the whole ones."""
    reply = Rig(ScriptedEngine(script)).post(TEXT, body)
    assert reply.status == 200, reply.body
    answer = reply.json()
    stream = Rig(ScriptedEngine(script)).post(TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = stream.data()
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], answer["usage"])
    for choice in answer["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [value for part in own if part["logprobs"] for value in part["logprobs"][name]]
            assert parts == (choice["logprobs"][name] if choice["logprobs"] else [])
    return answer, chunks


def texts(answer: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def test_the_whole_answer() -> None:
    answer, chunks = both(say("ok"), prompt())
    assert (answer["object"], chunks[0]["object"]) == ("text_completion", "text_completion")
    assert answer["choices"] == [{"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", [[BOS, *b"hi"]]),
        (["hi"], [[BOS, *b"hi"]]),
        (["hi", "yo"], [[BOS, *b"hi"], [BOS, *b"yo"]]),
        ([104, 105], [[104, 105]]),
        ([[104], [105, 106]], [[104], [105, 106]]),
        ("", [[BOS]]),
        ("<|user|>hi<|end|><|assistant|>", [[BOS, USER, *b"hi", EOS, ASSISTANT]]),
    ],
)
def test_bc046_prompts_special_tokens_are_parsed(given: Any, ids: list[list[int]]) -> None:
    rig = Rig()
    assert rig.post(TEXT, prompt(given)).status == 200
    assert [list(request.prompt_ids) for request in rig.engine.requests] == ids


def test_batches_have_their_own_choices_in_order() -> None:
    answer, _ = both(say("xyz"), prompt(["a", "bb"], n=2, max_tokens=2, echo=True))
    assert texts(answer) == [
        (0, "axy", "length"),
        (1, "axy", "length"),
        (2, "bbxy", "length"),
        (3, "bbxy", "length"),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_one_prompt_of_a_batch_that_does_not_fit_refuses_all() -> None:
    rig = Rig()
    reply = rig.post(TEXT, prompt(["a", "x" * CONTEXT]))
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert not rig.engine.requests


def test_bc019_sixteen_tokens_unless_asked() -> None:
    answer, _ = both(say("x" * 40), prompt())
    assert texts(answer) == [(0, "x" * 16, "length")]


def test_bc017_no_token_at_all() -> None:
    rig = Rig()
    answer = rig.post(TEXT, prompt("Verdict: true", max_tokens=0, echo=True)).json()
    assert texts(answer) == [(0, "Verdict: true", "length")]
    assert answer["usage"]["completion_tokens"] == 0
    assert not rig.engine.requests
    assert texts(both(say("x"), prompt("Once", max_tokens=0))[0]) == [(0, "", "length")]
    assert rig.post(TEXT, prompt("Verdict", max_tokens=0, echo=True, logprobs=1)).status == 400
    assert rig.post(TEXT, prompt("x")).status == 200


def test_echo_of_ids_is_their_text() -> None:
    assert texts(both(say("!"), prompt([BOS, *b"hi"], echo=True))[0]) == [(0, "hi!", "stop")]


def test_bc066_completion_logprobs() -> None:
    answer, _ = both(emit(*b"a", 263, 264, *b"b"), prompt(logprobs=2, max_tokens=8))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd\ufffd", "b"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert answer["choices"][0]["text"] == "a\U0001fae0b"


def test_bc069_zero_alternatives_still_give_the_chosen_token() -> None:
    answer, _ = both(say("ok"), prompt(logprobs=0))
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"o": -0.5}, {"k": -0.5}]
    assert both(say("ok"), prompt())[0]["choices"][0]["logprobs"] is None


def test_bc013_bc014_stop_strings_and_the_kept_one() -> None:
    assert texts(both(say("hello END"), prompt(stop=["END"]))[0]) == [(0, "hello ", "stop")]
    assert texts(both(say("ENDhello"), prompt(stop=["END"]))[0]) == [(0, "", "stop")]
    assert texts(both(say("p;q;r;s"), prompt(stop="q;r"))[0]) == [(0, "p;", "stop")]
    kept = prompt(stop=["q;r"], include_stop_str_in_output=True)
    assert texts(both(say("p;q;r;s", per_event=4), kept)[0]) == [(0, "p;q;r", "stop")]
    assert texts(both(say("END"), prompt(stop="END", max_tokens=3))[0]) == [(0, "", "stop")]


def test_a_stop_string_in_one_choice_of_a_batch_cancels_that_generation_only() -> None:
    engine = ScriptedEngine(lambda request: say("aENDb" if request.prompt_ids[-1] == ord("1") else "fine")(request))
    answer = Rig(engine).post(TEXT, prompt(["1", "2"], stop="END")).json()
    assert texts(answer) == [(0, "a", "stop"), (1, "fine", "stop")]
    assert engine.cancels == [[0], []]


def test_best_of_equal_to_n_is_nothing_special() -> None:
    assert len(Rig().post(TEXT, prompt(n=2, best_of=2)).json()["choices"]) == 2
