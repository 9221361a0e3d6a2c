"""Greedy answers with pages reused are those without, over chats, equal beginnings and near-duplicates.

In formats that round, a chunk reads what is before it rounded and its own ids as they are, so that answers depend on
where prompts are cut. Chunks here are as short as they can be: every prompt is cut at the same places, reused or not.
"""

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry

from appliance.config import ApplianceConfig, CacheConfig, PathsConfig
from appliance.config_cache import cache_problem
from appliance.engine_metrics import EngineObserver
from appliance.engine_ports import Found
from appliance.telemetry import Metrics
from appliance.wiring import host_tier, lower_tiers, schedule_settings
from planner.architecture import ModelArchitecture
from planner.formats import KvFormat
from planner.plan import Plan
from planner.prefixes import PrefixSettings
from planner.searching import Search
from tests.support.front import wait_for
from tests.support.spread_engine import MODEL, Answer, RandomModel, plan_of

TIE = 1e-3
"""Two ids less far apart in log-probability may change places, and then all that follows may differ."""

WINDOWED = replace(MODEL, windows=(24, 0))


def mixed_prompts(page: int, count: int) -> list[list[int]]:
    """Prompts of three kinds that begin like earlier ones, by any number of ids, full pages and single ids among it."""
    source = random.Random(5)
    ids = range(MODEL.vocab)
    system = source.choices(ids, k=2 * page)
    prompts = [[*system, *source.choices(ids, k=page // 2)]]
    while len(prompts) < count:
        base = source.choice(prompts)
        kept = source.choice([0, 1, page, 2 * page, source.randrange(len(base) + 1), len(base)])
        prompt = [*base[:kept], *source.choices(ids, k=source.randrange(1, page))]
        prompts.append(prompt[: MODEL.context - 20])
    return prompts


def assert_same(found: Answer, wanted: Answer) -> None:
    """Equal ids up to the first place where two of them are as good as equally likely."""
    for number, (here, there) in enumerate(zip(found.ids, wanted.ids, strict=True)):
        for place, (a, b) in enumerate(zip(here, there, strict=True)):
            if a != b:
                likely = wanted.top[number][place]
                assert abs(likely[a] - likely[b]) < TIE, f"answer {number} differs at {place}"
                break


def a_plan(kv_format: KvFormat, architecture: ModelArchitecture = MODEL) -> Plan:
    page = 128 if kv_format in (KvFormat.BMQ4, KvFormat.BMQ2) else 16
    plan = plan_of(architecture, kv_format=kv_format, page_size=page, slots=4)
    return replace(plan, lattice=replace(plan.lattice, prefill_chunks=(16,)))


@pytest.mark.parametrize(("kv_format", "count"), [(KvFormat.FLOAT32, 36), (KvFormat.INT8, 36), (KvFormat.BMQ4, 18)])
def test_answers_are_those_of_an_engine_that_reuses_nothing(kv_format: KvFormat, count: int) -> None:
    plan = a_plan(kv_format)
    model, prompts = RandomModel(plan), mixed_prompts(plan.page_size, count)
    wanted = model.answers(prompts, 6, reuse=False)
    assert wanted.cached == [0] * len(prompts)
    for every in (0, 5):  # all at once, and while others are computed or just have been
        found = model.answers(prompts, 6, every=every)
        assert sum(cached > 0 for cached in found.cached) >= 3
        assert_same(found, wanted)


@pytest.mark.parametrize("kv_format", [KvFormat.FLOAT32, KvFormat.INT8])
def test_answers_with_a_host_tier_behind_a_small_pool_are_the_same(kv_format: KvFormat) -> None:
    plan = small_pool(a_plan(kv_format), 9)
    model, source, ids = RandomModel(plan), random.Random(11), range(MODEL.vocab)
    openings = [source.choices(ids, k=50) for _ in range(5)]
    prompts = [[*openings[n % 5][: source.choice([32, 50])], *source.choices(ids, k=5)] for n in range(20)]
    wanted = model.answers(prompts, 6, reuse=False)
    assert_same(model.answers(prompts, 6, every=2, host_pages=40), wanted)
    before = model.moved.bytes["out"]
    found = model.answers(prompts, 6, every=15, host_pages=40)
    assert_same(found, wanted)
    assert min(found.cached[5:]) >= 32
    assert found.tier.hits > 8
    assert (found.tier.damaged, found.tier.held) == (0, found.tier.saved)
    assert model.moved.bytes["out"] - before == found.tier.hits * plan.page_bytes


def test_answers_in_a_format_of_blocks_come_back_with_their_first_positions() -> None:
    plan = small_pool(a_plan(KvFormat.BMQ4), 3)
    model = RandomModel(plan)
    source = random.Random(8)
    texts = [source.choices(range(MODEL.vocab), k=270 + n) for n in range(2)]
    prompts = texts * 2
    found = model.answers(prompts, 6, every=60, host_pages=8)
    assert_same(found, model.answers(prompts, 6, reuse=False, every=60))
    assert found.cached == [0, 0, 240, 240]
    assert found.tier.hits == 4


def small_pool(plan: Plan, pages: int) -> Plan:
    return replace(plan, num_pages=pages)


def test_windows_only_mask_so_that_old_pages_serve() -> None:
    model = RandomModel(a_plan(KvFormat.INT8, WINDOWED))
    prompts = mixed_prompts(16, 12)
    assert_same(model.answers(prompts, 6, every=9), model.answers(prompts, 6, reuse=False))


def test_what_is_shared_follows_the_configuration_the_plan_and_the_model() -> None:
    plan, config = a_plan(KvFormat.FLOAT32), ApplianceConfig()

    def found(cache: CacheConfig, *model: str, plan: Plan = plan) -> PrefixSettings:
        return schedule_settings(plan, msgspec.structs.replace(config, cache=cache), model).prefixes

    default = found(CacheConfig(), "a")
    assert (default.reuse, default.all_tenants, default.lead, default.warm_up) == (True, False, 0, False)
    other = found(CacheConfig(prefix_reuse=False, share_prefixes="all", warmup_enabled=True), "a")
    assert (other.reuse, other.all_tenants, other.warm_up) == (False, True, True)
    assert found(CacheConfig(), "b").identity != default.identity == other.identity
    rounded = found(CacheConfig(), "a", plan=a_plan(KvFormat.BMQ4))
    assert rounded.lead == 16
    assert rounded.identity != default.identity


# ---------------------------------------------------------------------- tiers


def with_cache(**cache: object) -> ApplianceConfig:
    return msgspec.structs.replace(ApplianceConfig(), cache=CacheConfig(**cache))  # type: ignore[arg-type]


def test_a_tier_has_as_many_places_as_its_memory_holds_pages_of_all_devices() -> None:
    plan = a_plan(KvFormat.FLOAT32)
    tier = host_tier(plan, with_cache(host_tier_mb=1.0))
    assert (tier.places, tier.at_once) == ((1 << 20) // plan.page_bytes, plan.moved_pages)
    cut = plan_of(devices=4)
    assert host_tier(cut, with_cache(host_tier_mb=1.0)).places == (1 << 20) // (4 * cut.page_bytes)
    assert host_tier(plan, ApplianceConfig()).places == 0


@pytest.mark.parametrize(
    ("plan", "mib", "line"),
    [
        (plan_of(devices=2, context_devices=2, shard_len=16), 64.0, "pages of contexts that are spread over devices"),
        (plan_of(), 0.01, "cache.host_tier_mb holds no page"),
    ],
)
def test_a_tier_that_cannot_be_is_left_out_with_a_line(plan: Plan, mib: float, line: str) -> None:
    with structlog.testing.capture_logs() as log:
        assert host_tier(plan, with_cache(host_tier_mb=mib)).places == 0
    assert [line in entry["event"] for entry in log] == [True]


def test_who_is_looked_for_below_follows_the_configuration() -> None:
    plan = a_plan(KvFormat.FLOAT32)
    assert schedule_settings(plan, with_cache(host_tier_mb=1.0)).search_s == 0
    assert schedule_settings(plan, with_cache(host_tier_mb=1.0, disk_tier_mb=1.0)).search_s == 0.25


def test_tiers_below_are_those_that_are_configured_and_contents_are_of_the_same_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, observer = a_plan(KvFormat.INT8), EngineObserver(Metrics(CollectorRegistry()))
    cache = {"host_tier_mb": 1.0, "disk_tier_mb": 1.0, "redis_tier": True, "redis_url": "redis://127.0.0.1:1"}
    config = msgspec.structs.replace(with_cache(**cache), paths=PathsConfig(home=str(tmp_path)))
    assert lower_tiers(plan, with_cache(host_tier_mb=1.0), observer) is None

    def found(name: bytes) -> list[object]:
        with contextlib.closing(tiers := lower_tiers(plan, config, observer)):
            assert [tier.store.label for tier in tiers._stores] == ["disk", "redis"]
            tiers.put(name, memoryview(bytes([7]) * plan.page_bytes))
            wait_for(lambda: not tiers._writes)
            tiers.search([Search(1, (b"first",))])
            ends: list[Found] = []
            wait_for(lambda: ends.extend(tiers.found()) or ends)
            return list(ends[0].contents)

    assert found(b"first") == [bytes([7]) * plan.page_bytes]
    assert found(b"other") == [bytes([7]) * plan.page_bytes]
    assert {path.parent.parent for path in tmp_path.rglob("*") if path.is_file()} == {tmp_path / "pages"}
    monkeypatch.setattr("appliance.wiring.identity", lambda _: {"kernel_sources_sha256": "others"})
    assert found(b"other") == []


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        ({"host_tier_mb": 5.0}, None),
        ({"host_tier_mb": 5.0, "disk_tier_mb": 9.0}, None),
        ({"host_tier_mb": 5.0, "redis_tier": True, "redis_url": "redis://localhost"}, None),
        ({"host_tier_mb": 5.0, "prefix_reuse": False}, "cache.prefix_reuse is false, so that no page would be found"),
        ({"disk_tier_mb": 5.0}, "cache.disk_tier_mb is set and cache.host_tier_mb is 0"),
        ({"redis_tier": True, "redis_url": "redis://localhost"}, "cache.redis_tier is set and cache.host_tier_mb is 0"),
        ({"host_tier_mb": 5.0, "redis_tier": True}, "cache.redis_tier is true and cache.redis_url is empty"),
    ],
)
def test_tiers_that_cannot_work_are_refused(cache: dict[str, object], problem: str | None) -> None:
    found = cache_problem(CacheConfig(**cache))  # type: ignore[arg-type]
    assert found is None if problem is None else problem in (found or "")
