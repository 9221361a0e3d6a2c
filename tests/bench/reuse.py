"""reuse: how often near-duplicates find a prefix, what that saves, what it costs, and that answers stay the same.

Owns the part about exact prefixes: ``hit_rate`` through the scheduler alone, the rest through the engine as it is
served. Each is a function from what all of them share to results and notes. The others are ``reuse_tiers`` and
``reuse_fingerprint``.
"""

import gc
import math
import random
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec
from prometheus_client import CollectorRegistry

from api.ports import ChatMessage
from appliance.bench.inline_engine import KeepingGateway
from appliance.bench.report import Findings, Result
from appliance.bench.runner import BenchContext
from appliance.bench.served import build_store
from appliance.config import ApplianceConfig
from appliance.engine import Engine
from appliance.engine_metrics import EngineObserver
from appliance.model.codec import Codec
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record
from appliance.planning import plan_for
from appliance.telemetry import Metrics
from appliance.wiring import build_engine, schedule_settings
from planner.pages import PagePool
from planner.schedule import Scheduler
from planner.sequence import Sampling
from planner.sequence import Sequence as Stream
from tests.bench import reuse_fingerprint, reuse_tiers
from tests.bench.inline_engine import InlineEngine
from tests.bench.near_duplicates import documents, edited
from tests.bench.reuse_engine import Asked, BurstEngine, watched_prefixes
from tests.support.redis_server import redis_server

PARTS = ("prefixes", "tiers", "fingerprints")

OPTIONS: Sequence[click.Parameter] = [
    click.Option(["--part", "parts"], multiple=True, type=click.Choice(PARTS), help="Default: all."),
    click.Option(["--requests"], type=click.IntRange(8, 2000), default=500, show_default=True, help="Mixed requests."),
    click.Option(["--bursts"], type=click.IntRange(1, 50), default=9, show_default=True, help="Bursts of four."),
    click.Option(["--pairs"], type=click.IntRange(50), default=2000, show_default=True, help="Similar pairs a bound."),
]

NUM_DOCUMENTS, VARIANTS = 10, 20
WORDS = 1500
"""Words of a document: about as many as the Apache License 2.0 has."""
REPEATED = 0.25
"""Share of later requests that are an earlier one word for word."""
MOST_EDITS = 3
BURST, APART_S = 4, 0.012
NEW_TOKENS = 16
AT_ONCE = 40
"""Mixed requests that come together."""
EQUAL_POSITIONS, HOST_POSITIONS, DISK_POSITIONS = 16_384, 4096, 8192
"""Positions of pool, host memory and disk for mixed requests, so few that prefixes go to the next and come back."""
TIE = 1e-3
"""Two ids less far apart in log-probability may change places, and what follows may differ."""

Part = tuple[list[Result], list[str]]


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all parts share."""

    context: BenchContext
    folder: Path
    codec: Codec

    def ids(self, document: str, question: str = "Summarise this.") -> list[int]:
        """A conversation about a document."""
        return list(self.codec.encode_chat([ChatMessage(role="user", content=f"{document}\n\n{question}")]))

    def engine(self, home: Path | None = None, **cache: object) -> BurstEngine:
        """The served engine with other settings of reuse, and another state directory."""
        config = self.context.config
        cached = msgspec.structs.replace(config.cache, **cache)
        paths = msgspec.structs.replace(config.paths, home=str(home or config.home))
        config = msgspec.structs.replace(config, paths=paths, cache=cached)
        registry = CollectorRegistry()
        return BurstEngine(lambda gateway: self._build(config, gateway, registry), registry)

    def _build(self, config: ApplianceConfig, gateway: KeepingGateway, registry: CollectorRegistry) -> Engine:
        assignment = InlineEngine(config, self.folder).assignment()
        observer = EngineObserver(Metrics(registry))
        engine, _ = build_engine(assignment, gateway, observer, lambda _: None)  # type: ignore[arg-type]
        return engine

    @contextmanager
    def tiers(self) -> Generator[dict[str, object]]:
        """Settings with which every tier is in use: each is so small that pages go on to the next, Redis takes all."""
        plan, redis = plan_for(self.context.config, read_record(self.folder)), shutil.which("redis-server")
        page_mb = plan.page_bytes * plan.model_devices / (1 << 20)
        host, disk = (math.ceil(positions / plan.page_size) * page_mb for positions in (HOST_POSITIONS, DISK_POSITIONS))
        with ExitStack() as stack:
            home = Path(stack.enter_context(TemporaryDirectory(prefix="zccp-bench-")))
            for entry in self.context.config.home.iterdir():
                if entry.name != "pages":
                    (home / entry.name).symlink_to(entry.absolute())
            settings: dict[str, object] = {"home": home, "host_tier_mb": host, "disk_tier_mb": disk}
            if redis is not None:
                (home / "redis").mkdir()
                server = stack.enter_context(redis_server(home / "redis"))
                settings |= {"redis_tier": True, "redis_url": server.url, "redis_cluster": False}
            yield settings


def run(context: BenchContext, *, parts: Sequence[str], requests: int, bursts: int, pairs: int) -> Findings:
    """Measure one part after the other.

    Raises:
        BenchError: the store cannot be built, or a request fails.
    """
    results: list[Result] = []
    notes: list[str] = []
    versions: dict[str, str] = {}
    if not parts or {"prefixes", "tiers"}.intersection(parts):
        build_store(context.config, {})
        folder = ModelLibrary(context.config.home).ensure(context.config.model.reference)
        bench = _Bench(context, folder, Codec.load(folder))
        notes.append(f"licence texts of the SPDX list, cut at {WORDS} words, with up to {MOST_EDITS} edits anywhere")
        measured: list[Part] = []
        if not parts or "prefixes" in parts:
            measured += [hits(bench), warm(bench, bursts), equal(bench, requests)]
        if not parts or "tiers" in parts:
            measured.append(reuse_tiers.measure(bench.engine, bench.ids, _texts, WORDS, bursts, context.progress))
        for found, said in measured:
            results += found
            notes += said
    if not parts or "fingerprints" in parts:
        fingerprints = reuse_fingerprint.measure(context, pairs)
        results += fingerprints.results
        notes += fingerprints.notes
        versions = dict(fingerprints.versions)
    return Findings(tuple(results), tuple(notes), versions)


def _texts(count: int, words: int) -> list[str]:
    """So many licence texts, each cut at so many words; the longer a licence, the later in the list."""
    texts = [text.split() for text in documents().values()]
    return [" ".join(text[:words]) for text in sorted((text for text in texts if len(text) >= words), key=len)[:count]]


def _edited(text: str, source: random.Random, edits: int) -> str:
    return edited("", text, source, edits).text


def hits(bench: _Bench) -> Part:
    """Near-duplicates through the scheduler: who finds a page of its document, and who would find its text."""
    config = bench.context.config
    plan, source = plan_for(config, read_record(bench.folder)), random.Random(1)
    pool = PagePool(plan.num_pages, plan.page_size, plan.context_devices, plan.shard_pages)
    scheduler = Scheduler(plan.lattice, pool, schedule_settings(plan, config))
    header = bench.ids("")
    texts = [(number, document) for number, document in enumerate(_texts(NUM_DOCUMENTS, WORDS))]
    later = [(number, _edited(text, source, source.randint(1, MOST_EDITS))) for number, text in texts * (VARIANTS - 1)]
    later = [entry if source.random() >= REPEATED else source.choice(texts) for entry in later]
    source.shuffle(later)
    seen: set[str] = set()
    exact, found, shares = 0, 0, list[float]()
    for key, (_, document) in enumerate([*texts, *later]):
        bench.context.progress("near-duplicates through the scheduler", key, NUM_DOCUMENTS * VARIANTS)
        ids = bench.ids(document)
        cached = _scheduled(scheduler, key, ids)
        same = next((place for place, (a, b) in enumerate(zip(header, ids, strict=False)) if a != b), len(header))
        if key >= NUM_DOCUMENTS:
            exact += document in seen
            found += cached >= same + plan.page_size
            shares.append(cached / len(ids))
        seen.add(document)
    rate, count = found / len(later), len(later)
    note = (
        f"hits: {count} requests after the first of {NUM_DOCUMENTS} documents each, {REPEATED:.0%} of them verbatim; "
        f"the pool has {plan.num_pages * plan.page_size} positions"
    )
    return [
        Result("hit_rate", rate, "share", count, (rate, rate), 0.89, ">="),
        Result("hit_rate_lru", exact / count, "share", count, (exact / count, exact / count), None, None),
        Result("mean_share_reused", sum(shares) / count, "share", count, (min(shares), max(shares)), None, None),
    ], [note]


def _scheduled(scheduler: Scheduler, key: int, ids: list[int]) -> int:
    """Run one request through a scheduler without a device; how many of its ids were reused."""
    stream = Stream(key, f"r{key}", "bench", ids, len(ids), Sampling(max_tokens=1), 0.0)
    assert scheduler.submit([stream]) is None
    unread: list[Stream] = []
    while scheduler.num_live:
        batch = scheduler.next_batch(0.0)
        scheduler.commit(unread, [0] * len(unread), 0.0)
        unread = [*batch.decode, *(chunk.sequence for chunk in batch.prefill if chunk.samples)]
    scheduler.take_finished()
    return stream.cached_tokens


def warm(bench: _Bench, bursts: int) -> Part:
    """A document and edited copies right behind it: their time to the first id, with reuse and without."""
    source = random.Random(2)
    on, off = bench.engine(prefix_reuse=True), bench.engine(prefix_reuse=False)
    firsts: dict[bool, list[float]] = {True: [], False: []}
    twice = total = 0
    for number, document in enumerate(_texts(bursts, WORDS)):
        bench.context.progress("bursts of near-duplicates", number, bursts)
        prompts = [bench.ids(document), *(bench.ids(_edited(document, source, 1)) for _ in range(BURST - 1))]
        for reuse, engine in ((True, on), (False, off)):
            asked = engine.ask(prompts, 1, APART_S)
            firsts[reuse] += asked.first_s[1:]
            if reuse:
                twice += _twice(prompts, asked)
                total += sum(map(len, prompts))
    drop = 1 - median(firsts[True]) / median(firsts[False])
    with watched_prefixes() as spent:
        before_s = on.steps_s
        on.ask([[n, *bench.ids(text)] for n, text in enumerate(_texts(2 * BURST, WORDS // 5))], NEW_TOKENS)
        cost = sum(spent) / (on.steps_s - before_s)
    gc.collect()
    with_ms, without_ms = (1e3 * median(firsts[reuse]) for reuse in (True, False))
    note = f"median time to the first id of those that follow: {with_ms:.0f} ms with reuse, {without_ms:.0f} ms without"
    return [
        Result("warm_latency_drop", drop, "share", bursts, (drop, drop), 0.38, ">="),
        Result("warm_work", twice / total, "share", bursts, (twice / total, twice / total), 0.12, "<="),
        Result("zero_hit_cost", cost, "share", 2 * BURST, (cost, cost), 0.01, "<="),
    ], [note]


def _twice(prompts: Sequence[Sequence[int]], asked: Asked) -> int:
    """Ids that were computed although an earlier prompt of the burst began with them."""
    found = 0
    for number, prompt in enumerate(prompts):
        common = max((_common(prompt, other) for other in prompts[:number]), default=0)
        found += max(common - asked.cached[number], 0)
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def equal(bench: _Bench, requests: int) -> Part:
    """Greedy answers with reuse and every tier, and without, over chats that go on, near-duplicates and repeats."""
    prompts = _mixed(bench, requests)
    with bench.tiers() as every:
        on = _answered(bench, prompts, "on", prefix_reuse=True, **every)
    off = _answered(bench, prompts, "off", prefix_reuse=False)
    same, tied, gaps = 0, 0, list[float]()
    for number, (mine, plain) in enumerate(zip(on.ids, off.ids, strict=True)):
        place = _common(mine, plain)
        if place == len(plain):
            same += 1
            continue
        likely = off.top[number][place]
        gap = abs(likely[plain[place]] - likely.get(mine[place], float("-inf")))
        gaps.append(gap)
        tied += gap < TIE
    share, hit = (same + tied) / len(prompts), sum(count > 0 for count in on.cached)
    loaded = ", ".join(f"{count:.0f} from {tier}" for tier, count in on.hits.items())
    note = (
        f"outputs_equal: {same} of {len(prompts)} answers of {NEW_TOKENS} ids are the same, {tied} part at a tie below "
        f"{TIE:g}; {hit} reused something; pages found outside the pool: {loaded}; "
        f"gaps: {', '.join(f'{gap:.4f}' for gap in sorted(gaps)) or '-'}"
    )
    return [Result("outputs_equal", share, "share", len(prompts), (share, share), 1.0, "==")], [note]


@dataclass(frozen=True, slots=True)
class _Answers:
    """What came of all mixed requests, by request, and the pages that each tier gave."""

    ids: list[list[int]]
    top: list[list[dict[int, float]]]
    cached: list[int]
    hits: dict[str, float]


def _answered(bench: _Bench, prompts: Sequence[list[int]], label: str, **settings: Any) -> _Answers:
    engine = bench.engine(**settings)
    engine.shrink(EQUAL_POSITIONS)
    answers = _Answers([], [], [], {})
    for start in range(0, len(prompts), AT_ONCE):
        bench.context.progress(f"mixed requests with reuse {label}", start, len(prompts))
        asked = engine.ask(prompts[start : start + AT_ONCE], NEW_TOKENS, 0.002)
        answers.ids.extend(asked.ids)
        answers.top.extend(asked.top)
        answers.cached.extend(asked.cached)
    answers.hits.update({tier: engine.tier_hits(tier) for tier in ("host", "disk", "redis")})
    engine.close()
    del engine
    gc.collect()
    return answers


def _mixed(bench: _Bench, count: int) -> list[list[int]]:
    source, prompts = random.Random(3), list[list[int]]()
    texts = _texts(12, WORDS // 5)
    while len(prompts) < count:
        document = source.choice(texts)
        kind = source.randrange(4)
        if kind == 0:
            prompts.append(bench.ids(_edited(document, source, source.randint(1, MOST_EDITS))))
        elif kind == 1:
            prompts.append(bench.ids(document, f"What is said about {source.choice(document.split())}?"))
        elif kind == 2 and prompts:
            prompts.append(list(source.choice(prompts)))
        else:
            cut = source.randrange(1, len(document))
            prompts.append(list(bench.codec.encode(document[:cut], parse_special=False)))
    return prompts
