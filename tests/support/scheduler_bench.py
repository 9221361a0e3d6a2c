"""A scheduler that is stepped without an engine."""

from planner.schedule import Scheduler
from planner.schedule_values import Batch
from planner.sequence import Sampling, Sequence


class SchedulerBench:
    """A scheduler whose steps are committed one step late, as the engine does it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.unread: list[Sequence] = []
        self.made = 0
        self.now_s = 0.0

    def submit(self, prompt: list[int], max_tokens: int = 3, tenant: str = "t", **fields: object) -> Sequence:
        self.made += 1
        sequence = Sequence(
            self.made, f"r{self.made}", tenant, list(prompt), len(prompt), Sampling(max_tokens), self.now_s, **fields
        )  # type: ignore[arg-type]
        assert self.scheduler.submit([sequence]) is None
        return sequence

    def step(self) -> Batch:
        batch = self.scheduler.next_batch(self.now_s)
        self.scheduler.commit(self.unread, [7] * len(self.unread), self.now_s)
        self.scheduler.check()
        self.unread = [*batch.decode, *(chunk.sequence for chunk in batch.prefill if chunk.samples)]
        self.now_s += 1.0
        return batch

    def run(self, prompt: list[int], max_tokens: int = 3, tenant: str = "t", **fields: object) -> Sequence:
        """Submit, and step until nothing is left to do."""
        sequence = self.submit(prompt, max_tokens, tenant, **fields)
        self.settle()
        return sequence

    def settle(self) -> None:
        for _ in range(300):
            if not self.scheduler.num_live and not self.unread:
                assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_live} are left")
