"""start: how long ``zccp serve`` takes to be ready with a built store, and that serving compiles nothing.

Starts the real process several times and asks ``/health/ready``; then sends mixed traffic to the last one and reads
the count of compilations from ``/metrics``. The store is built before and not timed; files are in the page cache. Where
the time of a start goes is what the processes themselves log, part by part; the rest is a part of its own.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
import httpx

from appliance.bench.report import Findings, Result, measured
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.served import Served, build_store, serving
from appliance.bench.statistics import median

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--repeats"], type=click.IntRange(1, 100), default=5, show_default=True, help="Starts to time."),
]

READY_TARGET_S = 8.0
_TIMEOUT_S = 300.0
_TOLD = {"log": {"level": "info"}}
_WORDS = "pages keep keys and values while many sequences share one device "


def run(context: BenchContext, *, repeats: int, clients: int = 8) -> Findings:
    """Measure starts; send traffic to the last.

    Raises:
        BenchError: the appliance does not start, or refuses a request that is right.
    """
    context.progress("building what is missing", 0, repeats)
    build_store(context.config, {})
    times_s: list[float] = []
    budgets: list[dict[str, float]] = []
    for repeat in range(repeats - 1):
        context.progress("starting", repeat, repeats)
        with serving(context.config, _TOLD) as served:
            times_s.append(served.ready_s)
            budgets.append(budget(served.log_lines(), served.ready_s))
    context.progress("starting, then mixed traffic", repeats - 1, repeats)
    with serving(context.config, _TOLD) as served:
        times_s.append(served.ready_s)
        budgets.append(budget(served.log_lines(), served.ready_s))
        send_mixed(served, clients)
        counts = served.metrics()
    compilations, steps = counts["zccp_compilations_total"], counts["zccp_steps_total"]
    if not steps:
        raise BenchError("the mixed traffic ran no program, so its compilations say nothing")
    return Findings(
        (
            measured("ready_s", times_s, "s", READY_TARGET_S, "<="),
            Result("compilations_after_ready", compilations, "programs", 1, (compilations, compilations), 0, "=="),
            *phase_results(budgets),
        ),
        (
            largest_phase(budgets),
            f"mixed traffic: {len(mixed_bodies(served.model))} kinds of request, {clients} clients, {steps:g} launches",
        ),
    )


def budget(lines: Iterable[Mapping[str, Any]], ready_s: float) -> dict[str, float]:
    """Seconds of each part of a start, in order, from the log of its processes.

    The main process counts from its own start until it has started the others; the engine from its own start, part by
    part; what is left of ``ready_s`` is the way from a ready engine to a worker's first answer.

    Raises:
        BenchError: the log does not tell them.
    """
    told = {line["event"]: line for line in lines if line.get("event") in ("processes started", "engine ready")}
    try:
        main_s, engine = float(told["processes started"]["after_s"]), told["engine ready"]["phases"]
        parts = {"main process": main_s, **{f"engine: {what}": float(seconds) for what, seconds in engine.items()}}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BenchError(f"the log does not tell the parts of a start: {error!r}") from error
    return {**parts, "workers ready": ready_s - sum(parts.values())}


def phase_results(budgets: Sequence[Mapping[str, float]]) -> list[Result]:
    """One result a part of a start, in order."""
    return [measured(f"{re.sub('[^a-z]+', '_', what)}_s", [each[what] for each in budgets], "s") for what in budgets[0]]


def largest_phase(budgets: Sequence[Mapping[str, float]]) -> str:
    """The part of a start that takes most of its time, in words."""
    medians = {what: median([each[what] for each in budgets]) for what in budgets[0]}
    largest = max(medians, key=lambda what: medians[what])
    share = medians[largest] / sum(medians.values())
    return f"the largest part of a start is {largest}: {medians[largest]:.2f} s, {share:.0%} of all"


def mixed_bodies(model: str) -> list[tuple[str, dict[str, object]]]:
    """Path and body of one request of every kind that may take another program or another way through it."""
    chat = [{"role": "user", "content": "Name three colours."}]
    text: dict[str, object] = {"model": model, "max_tokens": 12, "prompt": "Once upon a time"}
    return [
        ("/v1/completions", text),
        ("/v1/completions", {**text, "prompt": _WORDS * 120, "max_tokens": 40}),
        ("/v1/completions", {**text, "prompt": _WORDS * 20, "temperature": 0}),
        ("/v1/completions", {**text, "n": 3, "seed": 7, "logprobs": 3}),
        ("/v1/completions", {**text, "max_tokens": 0, "echo": True}),
        ("/v1/completions", {**text, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
        (
            "/v1/completions",
            {**text, "logit_bias": {"11": 4}, "min_tokens": 6, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
        ),
        ("/v1/chat/completions", {"model": model, "max_tokens": 60, "messages": chat, "stream": True}),
        (
            "/v1/chat/completions",
            {"model": model, "max_tokens": 9, "messages": chat, "logprobs": True, "top_logprobs": 5},
        ),
        ("/v1/messages", {"model": model, "max_tokens": 30, "messages": chat, "stream": True}),
        ("/v1/messages", {"model": model, "max_tokens": 8, "messages": chat, "stop_sequences": ["."]}),
    ]


def send_mixed(served: Served, clients: int) -> None:
    """Send every kind of request from several clients at once, each beginning at another kind.

    Raises:
        BenchError: a request was refused.
    """
    bodies = mixed_bodies(served.model)
    failures: list[str] = []

    def client(first: int) -> None:
        with httpx.Client(base_url=served.url, timeout=_TIMEOUT_S) as session:
            for path, body in (*bodies[first:], *bodies[:first]):
                problem = _attempt(session.post, path, body)
                if problem:
                    failures.append(problem)

    threads = [threading.Thread(target=client, args=(index % len(bodies),)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(f"{len(failures)} requests of the mixed traffic failed, the first: {failures[0]}")


def _attempt(post: Callable[..., httpx.Response], path: str, body: Mapping[str, object]) -> str:
    """What went wrong with a request; empty if nothing did."""
    try:
        answer = post(path, json=dict(body))
    except httpx.HTTPError as error:
        return f"{path}: {type(error).__name__}: {error}"
    return "" if answer.status_code == 200 else f"{path}: {answer.status_code} {answer.text[:300]}"
