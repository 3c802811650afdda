"""States of pages on the host against a dictionary, over steps around the ring."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_kernels.gpu.hidden_states import StateRing
from tlt_kernels.gpu.tensors import PAGE_SIZE
from tlt_server.engine.gpu.memory.hidden_states.pages import PageStates
from tlt_server.engine.record.hidden_states import StateBytes

SLOTS, FEATURES, HIDDEN, PLACES = 50, 3, 2, 3
PAGE_BYTES = PAGE_SIZE * 4 * (FEATURES + HIDDEN)


class Device:
    """Leaves in the ring what the kernels of a step do."""

    def __init__(self, bound: int = 2**20) -> None:
        ring = StateRing.allocate(
            SLOTS, FEATURES + HIDDEN, PLACES + 1, dtype=torch.float32, device="cpu"
        )
        self.states = PageStates(
            ring, feature_width=FEATURES, hidden_width=HIDDEN, bound=bound, stream=None
        )
        self.head = 0

    def step(self, rows: list[tuple[int, int]], pages: dict[int, list[int]]) -> torch.Tensor:
        """Compute these rows (batch slot, position); return their states."""
        assert len(rows) <= self.states.room
        state_NX = torch.randn(len(rows), FEATURES + HIDDEN)
        for tag, state_X in zip(rows, state_NX, strict=True):
            self.states.ring.tag_C2[self.head] = torch.tensor(tag, dtype=torch.int32)
            self.states.ring.state_CX[self.head] = state_X
            self.head = (self.head + 1) % SLOTS
        self.states.drain(self.head, pages)
        self.states.settle()
        return state_NX

    def take(self, pages: list[int], length: int) -> StateBytes | None:
        found: list[StateBytes | None] = []
        self.states.take(pages, length, found.append)
        self.states.settle()
        return found[0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25))
def test_pages_hold_the_states_computed_last(seed: int, steps: int) -> None:
    draw, device = random.Random(seed), Device()
    twin: dict[tuple[int, int], torch.Tensor] = {}  # by page and place in it
    for _ in range(steps):
        numbers = draw.sample(range(6), 6)
        pages = {place: numbers[2 * place : 2 * place + 2] for place in range(PLACES)}
        rows = []
        for place in range(PLACES):
            start = draw.randrange(2 * PAGE_SIZE)
            stop = min(2 * PAGE_SIZE, start + draw.randrange(12))
            rows += [(place, position) for position in range(start, stop)]
        left = draw.randrange(PLACES)  # its sequence has gone
        counted = {place: own for place, own in pages.items() if place != left}
        for (place, position), state_X in zip(rows, device.step(rows, counted), strict=True):
            if place in counted:
                page = pages[place][position // PAGE_SIZE]
                twin[page, position % PAGE_SIZE] = state_X
        if draw.random() < 0.3:
            device.states.reuse([numbers[0]])
            twin = {key: state_X for key, state_X in twin.items() if key[0] != numbers[0]}
        for own in pages.values():
            length = draw.randrange(1, 2 * PAGE_SIZE + 1)
            wanted = [(own[p // PAGE_SIZE], p % PAGE_SIZE) for p in range(length)]
            found = device.take(own, length)
            assert (found is not None) == all(key in twin for key in wanted)
            if found is not None:
                state_TX = torch.stack([twin[key] for key in wanted])
                features_TF = np.asarray(found.features).view(np.float32).reshape(length, -1)
                hidden_TH = np.asarray(found.hidden).view(np.float32).reshape(length, -1)
                assert np.array_equal(features_TF, state_TX[:, :FEATURES])
                assert np.array_equal(hidden_TH, state_TX[:, FEATURES:])


def test_oldest_state_pages_are_dropped_above_the_bound() -> None:
    device = Device(2 * PAGE_BYTES)
    for page in (4, 1, 2):
        device.step([(0, position) for position in range(PAGE_SIZE)], {0: [page]})
    assert [device.take([page], PAGE_SIZE) is not None for page in (4, 1, 2)] == [False, True, True]


def test_failed_callback_does_not_stop_the_worker(capsys: pytest.CaptureFixture[str]) -> None:
    device, room = Device(), SLOTS - 1

    def fail(states: StateBytes | None) -> None:
        raise MemoryError("no room for it")

    device.states.take([0], 1, fail)
    device.step([(0, 0)], {0: None})  # type: ignore[dict-item]
    device.step([(0, 0)], {0: [3]})
    assert device.take([3], 1) is not None and device.states.room == room
    assert "no room for it" in capsys.readouterr().err
