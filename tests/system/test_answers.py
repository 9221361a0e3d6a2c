"""What clients get from the real model: SDKs, curl, terminal; determinism, choices, stop strings, probabilities."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from tests.support.running_appliance import RunningAppliance, zccp

pytestmark = pytest.mark.system

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"
ASKED = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
NEIGHBOURS = (
    "Write a short poem about the sea.",
    "List five fruits.",
    "Explain what a prime number is, in two sentences, to a child that has never heard of one.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes with the amounts of flour, milk and eggs.",
    "What is 12 times 12?",
)


@pytest.fixture
def gpt(appliance: RunningAppliance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{appliance.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(appliance: RunningAppliance) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=appliance.url, api_key="none", max_retries=0) as client:
        yield client


def greedy(gpt: openai.OpenAI, question: str, max_tokens: int = 24) -> str:
    answer = gpt.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=max_tokens
    )
    return answer.choices[0].message.content or ""


def test_curl_gets_sensible_english(appliance: RunningAppliance) -> None:
    body = json.dumps({"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 32})
    command = ["curl", "-sS", "--fail", f"{appliance.url}/v1/chat/completions", "-H", "content-type: application/json"]
    done = subprocess.run([*command, "-d", body], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_text_completion_knows_a_capital(gpt: openai.OpenAI) -> None:
    answer = gpt.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


def test_anthropic_stream_equals_the_whole_answer(claude: anthropic.Anthropic) -> None:
    asked = {"model": MODEL, "messages": ASKED, "max_tokens": 32, "extra_body": GREEDY}
    whole = claude.messages.create(**asked)
    assert whole.content[0].type == "text"
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert len(pieces) > 1
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)


def test_openai_streams_equal_whole_answers(gpt: openai.OpenAI) -> None:
    chat = {"model": MODEL, "messages": ASKED, "max_tokens": 32, "temperature": 0}
    whole = gpt.chat.completions.create(**chat)
    chunks = list(gpt.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    text = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    story = gpt.completions.create(**text)
    parts = list(gpt.completions.create(**text, stream=True))
    assert "".join(part.choices[0].text for part in parts) == story.choices[0].text
    assert parts[-1].choices[0].finish_reason == "length"


def test_counted_tokens_are_those_of_the_message(claude: anthropic.Anthropic) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain? é 日本"}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
    answer = claude.messages.create(model=MODEL, messages=messages, system="Be brief.", max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens


def test_prefill_is_continued(claude: anthropic.Anthropic) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "The capital of France is"}]
    answer = claude.messages.create(model=MODEL, messages=messages, max_tokens=3, extra_body=GREEDY)
    assert answer.content[0].type == "text"
    assert answer.content[0].text.lstrip().startswith("Paris")


def test_choices_are_seeded_and_differ(gpt: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": NEIGHBOURS[0]}], "max_tokens": 24, "seed": 7}
    first, second = (
        [choice.message.content for choice in gpt.chat.completions.create(**asked, n=3).choices] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3
    assert gpt.chat.completions.create(**asked).choices[0].message.content == first[0]


def test_log_probabilities_rank_the_greedy_choice_first(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=6, logprobs=True, top_logprobs=5
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == 6
    for entry in entries:
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert len(ranked) == 5
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, ranked[0])
        assert ranked[0] <= 0
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content


def test_stop_strings_end_an_answer_before_they_appear(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    text = gpt.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=32, stop=[" 7", "never"]
    ).choices[0]
    assert (text.text, text.finish_reason) == (" 5, 6,", "stop")
    answer = claude.messages.create(
        model=MODEL, messages=ASKED, max_tokens=32, stop_sequences=["Paris"], extra_body=GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in "".join(block.text for block in answer.content if block.type == "text")


def test_greedy_answers_do_not_depend_on_company(gpt: openai.OpenAI) -> None:
    questions = (QUESTION, *NEIGHBOURS)
    alone = [greedy(gpt, question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: greedy(gpt, question), questions))
    assert together == alone


def test_seeded_answers_do_not_depend_on_company(gpt: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = gpt.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=24, seed=seed)
        return answer.choices[0].text

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone
    assert len(set(alone)) == 6


def test_an_alias_answers_under_its_own_name(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list().data] == [MODEL, "gpt-4o"]
    answer = gpt.chat.completions.create(model="gpt-4o", messages=ASKED, max_tokens=1)
    assert answer.model == "gpt-4o"


def test_terminal_chat_in_a_pipe(appliance: RunningAppliance) -> None:
    options = ("--url", appliance.url, "--temperature", "0", "--max-tokens", "32")
    done = zccp("chat", *options, stdin=QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    asked_for_json = zccp("chat", "--json", *options, stdin=QUESTION)
    assert "Paris" in json.loads(asked_for_json.stdout)["text"]
