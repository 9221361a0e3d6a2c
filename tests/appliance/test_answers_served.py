"""Kept answers through real processes: one computation a worker, and what is forgotten is forgotten by all workers."""

from pathlib import Path

import httpx

from tests.support.node import Node, ask, expected, node

LENGTH = 20


def computed(running: Node) -> float:
    return running.metrics()["zccp_generated_tokens_total"]


def test_each_worker_computes_an_answer_once_until_it_is_forgotten(tmp_path: Path) -> None:
    with node(tmp_path, server={"workers": 2}, cache={"answers_mb": 1}) as running:
        running.wait_ready()
        before = 0.0
        for forgotten in (False, True):
            if forgotten:
                reply = httpx.post(f"{running.url}/v1/answers/forget")
                assert reply.json() == {"kept": True, "object": "answers.forgotten"}
            answers = [ask(running.url, "abc", LENGTH).json() for _ in range(12)]
            assert {answer["choices"][0]["text"] for answer in answers} == {expected("abc", LENGTH)}
            assert {answer["usage"]["completion_tokens"] for answer in answers} == {LENGTH}
            made = computed(running) - before
            assert made in (LENGTH, 2 * LENGTH)
            before += made
        counts = running.metrics()
        hits = counts['zccp_answers_total{result="hit"}']
        assert hits + counts['zccp_answers_total{result="miss"}'] == 24
        assert hits == 24 - before / LENGTH
        assert running.end() == 0


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        running.wait_ready()
        assert [ask(running.url, "abc", LENGTH).status_code for _ in range(3)] == [200] * 3
        assert computed(running) == 3 * LENGTH
        assert httpx.post(f"{running.url}/v1/answers/forget").json()["kept"] is False
        assert running.end() == 0
