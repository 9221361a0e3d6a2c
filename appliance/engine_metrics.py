"""The engine's side of the metrics: counts launches, steps and the state of the moment.

Implements ``appliance.engine_ports.EngineMetrics``, ``appliance.prediction.PredictionMetrics`` and
``appliance.reuse.tiers.TierObserver`` on ``appliance.telemetry.Metrics``. Runs within a step, so it touches only
counters that were made before.
"""

from typing import Literal

from appliance.engine_ports import EngineReport
from appliance.telemetry import Metrics
from planner.buckets import Bucket, Phase
from planner.host_tier import TierCounts
from planner.prefixes import ReuseCounts

_TIER_EVENTS = {
    "hits": "hit",
    "misses": "miss",
    "saved": "saved",
    "evictions": "evicted",
    "left_out": "left_out",
    "damaged": "damaged",
}
"""What is counted of a tier, and the label that it has."""


class EngineObserver:
    """Counts what the engine does."""

    def __init__(self, metrics: Metrics) -> None:
        """Count in ``metrics``."""
        self._metrics = metrics
        self._steps = {phase: metrics.steps.labels(str(phase)) for phase in Phase}
        self._rows = {phase: metrics.step_rows.labels(str(phase)) for phase in Phase}
        self._predictions = {source: metrics.predictions.labels(source) for source in ("lstm", "baseline")}
        self._counted = ReuseCounts()
        tiers = metrics.of_tiers
        self._tier = {name: tiers.pages.labels("host", event) for name, event in _TIER_EVENTS.items()}
        self._tier_held = tiers.held.labels("host")
        self._tier_bytes = {direction: tiers.bytes.labels("host", direction) for direction in ("in", "out")}
        self._trainings = {outcome: metrics.prediction_trainings.labels(outcome) for outcome in ("done", "failed")}

    def launched(self, bucket: Bucket, rows: int, tokens: int) -> None:  # noqa: ARG002 - tokens are counted by step
        """A program was dispatched."""
        self._steps[bucket.phase].inc()
        self._rows[bucket.phase].inc(rows)

    def stepped(self, host_s: float, prompt_tokens: int, generated_tokens: int, preemptions: int) -> None:
        """A step is over."""
        metrics = self._metrics
        metrics.step_host.observe(host_s)
        if prompt_tokens:
            metrics.prompt_tokens.inc(prompt_tokens)
        if generated_tokens:
            metrics.generated_tokens.inc(generated_tokens)
        if preemptions:
            metrics.preemptions.inc(preemptions)

    def reported(self, report: EngineReport) -> None:
        """The state after a step."""
        metrics = self._metrics
        used, total = report.total_pages - report.free_pages, report.total_pages
        metrics.ready.set(1 if report.state == "ready" else 0)
        metrics.running.set(report.running)
        metrics.waiting.set(report.waiting)
        metrics.waiting_tokens.set(report.waiting_tokens)
        metrics.pages_used.set(used)
        metrics.pages_total.set(total)
        metrics.pages_ratio.set(used / total if total else 0.0)
        metrics.pages_cached.set(report.cached_pages)
        now, before, self._counted = report.reuse, self._counted, report.reuse
        if now.reused_tokens > before.reused_tokens:
            metrics.reused_tokens.inc(now.reused_tokens - before.reused_tokens)
        if now.joins > before.joins:
            metrics.joins.inc(now.joins - before.joins)
        if now.evictions > before.evictions:
            metrics.evictions.inc(now.evictions - before.evictions)
        if now.tier != before.tier:
            self._tier_changed(now.tier, before.tier)

    def _tier_changed(self, now: TierCounts, before: TierCounts) -> None:
        for name, counter in self._tier.items():
            more: int = getattr(now, name) - getattr(before, name)
            if more:
                counter.inc(more)
        self._tier_held.set(now.held)

    def tier_moved(self, direction: Literal["in", "out"], num_bytes: int) -> None:
        """A content has been copied into the host tier, or out of it; called on the thread that copies."""
        self._tier_bytes[direction].inc(num_bytes)

    def tier_event(self, tier: str, event: str, num_bytes: int = 0) -> None:
        """Something became of a page in a tier below host memory; called on the thread that asks these."""
        self._metrics.of_tiers.pages.labels(tier, event).inc()
        if num_bytes:
            self._metrics.of_tiers.bytes.labels(tier, "out" if event == "hit" else "in").inc(num_bytes)

    def compiled(self) -> None:
        """A program was compiled after ready, which should never happen."""
        self._metrics.compilations.inc()

    def predicted(self, source: Literal["lstm", "baseline"]) -> None:
        """The length of a request was predicted."""
        self._predictions[source].inc()

    def scored(self, lstm_loss: float, baseline_loss: float, *, use_lstm: bool) -> None:
        """Both scores, in ids a request, and which of the two predicts from now on."""
        self._metrics.prediction_lstm_loss.set(lstm_loss)
        self._metrics.prediction_baseline_loss.set(baseline_loss)
        self._metrics.prediction_lstm.set(1 if use_lstm else 0)

    def trained(self, outcome: Literal["done", "failed"]) -> None:
        """A training is over."""
        self._trainings[outcome].inc()
