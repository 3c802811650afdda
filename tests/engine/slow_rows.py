"""Steps whose rows take long, so the scheduler is told: it leaves rows out where owners share the
engine.
"""

from __future__ import annotations

from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.scheduler import Scheduler


def slow_rows(scheduler: Scheduler) -> list[set[str]]:
    """Return a list that gets, for each step, the decoding sequences that run and are not in it."""
    left_out: list[set[str]] = []
    observe, next_batch = scheduler.observe, scheduler.next_batch

    def slow(batch: Batch, ms: float) -> None:
        observe(batch, 1 + 5 * sum(chunk.end - chunk.start for chunk in batch.chunks))

    def recorded() -> Batch | None:
        due = {each.id for each in scheduler.running if each.unlaunched <= 1 and each.due}
        batch = next_batch()
        if batch:
            left_out.append(due - {chunk.sequence.id for chunk in batch.chunks})
        return batch

    scheduler.observe, scheduler.next_batch = slow, recorded  # type: ignore[method-assign]
    return left_out
