"""Texts on a GPU: which slot has whose, what is kept, and what is sent once more."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.gpu.steps.texts import NOTHING_KEPT, Shared, Texts, TextSettings
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.wire.records import GenerateRequest, Sampling

SMALL = TextSettings(responses=3, kept_tokens=60, total_tokens=150, prompts=4)


def sequence(name: str, prompt: list[int], batch_slot: int = 0, **fields: object) -> Sequence:
    request = GenerateRequest(
        id=name, token_ids=prompt, sampling=Sampling(max_tokens=20, ignore_eos=True), seed=1
    )
    request = msgspec.structs.replace(request, **fields)
    made = Sequence(request, SamplingState(request, 100, ()), 16)
    made.batch_slot = batch_slot
    return made


def finish(texts: Texts, made: Sequence, output: list[int]) -> None:
    made.append(output)
    made.batch_slot = -1
    texts.end(made)
    texts.check()


def ran(texts: Texts, name: str, prompt: list[int], output: list[int], **fields: object) -> None:
    """Run a sequence, in batch slot 0 by default."""
    made = sequence(name, prompt, **fields)
    texts.begin(made)
    finish(texts, made, output)


def sent(shared: Shared) -> list[tuple[int, list[int]]]:
    assert all(text.group == shared.group for text in shared.sent)
    return [(text.slot, text.tokens.tolist()) for text in shared.sent]


def test_repeated_prompt_resends_responses_lost_by_the_device() -> None:
    texts = Texts(2, range(3, 5), SMALL)
    ran(texts, "a", [1, 2], [7, 8, 9])
    assert sent(texts.begin(sequence("b", [1, 2], 1))) == [], "the device still has it"
    ran(texts, "c", [1, 2], [6])
    shared = texts.begin(sequence("d", [5], 0))
    assert shared.sent[0].slot == 4 and shared.sent[0].tokens.tolist() == [1, 2, 6], (
        "a running prompt's text that is overwritten"
    )
    assert shared.sent[0].group != shared.group
    texts.check()


def test_newest_responses_come_first_and_running_ones_stay() -> None:
    texts = Texts(3, range(4, 6), SMALL)
    together = [sequence(f"a{i}", [1, 2], i) for i in range(3)]
    for made in together:
        texts.begin(made)
    for i, made in enumerate(together):
        finish(texts, made, [i])
    for i in range(3):
        ran(texts, f"b{i}", [5 + i], [6], batch_slot=i)
    assert sent(texts.begin(sequence("c", [1, 2], 1))) == [(4, [1, 2, 2]), (5, [1, 2, 1])]
    assert sent(texts.begin(sequence("d", [6], 0))) == [], "both slots are needed"
    texts.check()


def test_text_is_shared_by_prompt_or_group_within_a_salt() -> None:
    texts = Texts(4, range(5, 8))
    group = texts.begin(sequence("a", [1, 2], 0)).group
    other = texts.begin(sequence("b", [3], 1, group_id="g")).group
    assert texts.begin(sequence("c", [1, 2], 2, group_id="g")).group == other != group
    assert texts.begin(sequence("d", [1, 2], 3, salt="s")).group not in (group, other)
    for name, prompt in (("b", [3]), ("c", [1, 2])):
        texts.end(sequence(name, prompt, group_id="g"))
    assert texts.begin(sequence("e", [1, 2], 1, group_id="g")).group == group
    texts.check()


def test_internal_prompt_numbers_are_unpredictable(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = set()
    for key in (b"1" * 16, b"2" * 16):
        monkeypatch.setattr("tlt_server.engine.gpu.steps.texts.KEY", key)
        numbers.add(Texts(2, range(3, 5)).begin(sequence("a", [1, 2])).group)
    assert len(numbers) == 2


def test_preempted_sequence_keeps_one_text_slot() -> None:
    texts = Texts(2, range(3, 4))
    made = sequence("a", [1, 2], 0)
    texts.begin(made)
    made.batch_slot = 1
    texts.begin(made)
    texts.check()
    assert 0 in texts.forget() and 1 not in texts.forget()


def test_text_of_prompts_without_running_requests_is_forgotten() -> None:
    texts = Texts(2, range(3, 5), SMALL)
    ran(texts, "a", [1], [7])
    ran(texts, "b", [2], [8])
    assert sent(texts.begin(sequence("c", [2], 1))) == []
    assert texts.forget() == [3, 4], "the text of the prompt that runs is in batch slot 0"
    assert texts.gauges()["history_pools"] == 1
    texts.end(sequence("c", [2]))
    assert texts.forget() == [0, 1, 3, 4] and texts.gauges()["history_pool_tokens"] == 0
    texts.check()


def test_no_text_is_kept_without_a_history_drafter() -> None:
    texts = Texts(2, range(3, 5), NOTHING_KEPT)
    ran(texts, "a", [1], [7])
    assert texts.forget() == [0, 1, 3, 4] and texts.gauges()["history_pools"] == 0


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2), st.integers(0, 5)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_text_slots_and_memory_stay_within_bounds(turns: list[tuple[int, int, int]]) -> None:
    """Sequences begin, are preempted and end, three at a time, with two slots for texts."""
    texts, running = Texts(3, range(4, 6), SMALL), dict[int, Sequence]()
    for n, (kind, batch_slot, prompt) in enumerate(turns):
        if (made := running.get(batch_slot)) is not None and kind % 3 == 0:
            del running[batch_slot]
            finish(texts, made, [n] * min(kind + 1, 20))
        elif kind == 11:
            texts.forget()
        else:
            gone = running.pop(batch_slot, None)
            group = "g" if kind == 5 else ""
            made = sequence(f"r{n}", [prompt] * 20, batch_slot, group_id=group)
            running[batch_slot] = made
            shared = texts.begin(made)
            slots = [text.slot for text in shared.sent]
            assert {*slots} <= {4, 5} and len({*slots}) == len(slots)
            if gone is not None:
                texts.end(gone)
        texts.check()


def test_large_text_is_kept_from_the_end_of_its_prompt_on() -> None:
    texts = Texts(1, range(2, 3))
    ran(texts, "a", [*range(50)], [7, 8])
    ran(texts, "other", [99], [6])
    shared = texts.begin(sequence("b", [*range(50)], 0))
    assert shared.first == 34 and sent(shared) == [(2, [*range(34, 50), 7, 8])]
