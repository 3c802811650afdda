"""Host buffers that copies use in turns."""

from __future__ import annotations

from tlt_server.engine.gpu.steps.ring import PinnedBuffer, PinnedRing


class Copy:
    """Stand-in for an event that notes when it was waited for."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1


def ring(count: int) -> tuple[PinnedRing, list[Copy]]:
    ring, copies = PinnedRing(count, 4, pinned=False), [Copy() for _ in range(count)]
    ring._events = copies  # type: ignore[assignment]
    return ring, copies


def test_ring_buffers_alternate_and_keep_their_content() -> None:
    ring_, _ = ring(3)
    buffers = [ring_.take() for _ in range(3)]
    for i, buffer in enumerate(buffers):
        buffer.array[:] = i
    assert [buffer.tensor.tolist() for buffer in buffers] == [[0] * 4, [1] * 4, [2] * 4]
    assert ring_.take().tensor.data_ptr() == buffers[0].tensor.data_ptr()


def test_ring_buffer_is_reused_only_after_its_copy() -> None:
    ring_, copies = ring(2)
    ring_.take().mark()
    ring_.take().mark()
    before = [copy.waited for copy in copies]
    ring_.take()
    assert [copy.waited for copy in copies] == [before[0] + 1, before[1]]


def test_ring_buffer_marks_and_waits_only_for_its_own_copy() -> None:
    ring_, copies = ring(2)
    buffer = ring_.take()
    buffer.mark()
    buffer.wait()
    assert [copy.recorded for copy in copies] == [1, 0] and copies[1].waited == 0


def test_ring_without_a_device_never_waits() -> None:
    buffer = PinnedRing(1, 2, pinned=False).take()
    buffer.mark()
    buffer.wait()
    assert isinstance(buffer, PinnedBuffer) and buffer.array.tolist() == [0, 0]
