"""Records of a link: one round trip each, deadlines of two clocks, and messages of bounded size."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.wire.commands import Abort, AbortWeights, Pause, Recompute, SetPolicy, Stop, Submit
from tlt_server.wire.events import (
    ControlReport,
    Failed,
    Heartbeat,
    Outputs,
    Phase,
    PhaseProgress,
    WeightReport,
    WeightState,
)
from tlt_server.wire.link import (
    PART_BYTES,
    SPARE_BYTES,
    Attach,
    Attached,
    Ended,
    LinkCommand,
    LinkEvent,
    Ping,
    command_messages,
    decode_link_command,
    decode_link_events,
    event_messages,
    largest_event,
    shifted,
)
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import (
    OFF,
    Cycle,
    GenerateRequest,
    Sampling,
    StepContext,
    StepOutput,
    Switch,
    TokenLogprobs,
    encode,
)

COMMANDS: list[LinkCommand] = [
    Attach(fleet="f1", epoch=3, gateway="http://gateway:8000", take_over=True),
    Ping(),
    Abort(["a"], "abort"),
    SetPolicy("off", id="c1"),
    Recompute([b"\0" * 8]),
    Pause("c2", "drain"),
    AbortWeights("c3", version="v1"),
]
EVENTS: list[LinkEvent] = [
    Attached(3, "http://127.0.0.1:8000"),
    Ping(),
    Ended("engine_failed", "it was silent", "hung", ["a", ""], None, 2.5),
    Phase("load", 0.5),
    PhaseProgress("load", 1, 2),
    WeightReport(id="c3", state=WeightState(target="v0"), result="aborted"),
    ControlReport("c2", ("conflict", "it sleeps")),
]
CYCLE = Cycle(
    context=StepContext(2, 0, 1.0, 2), strategy=OFF, rows=2, emitted=2, accepted=(1, 0), drafted=3
)


def request(id: str, ids: int = 3, **fields: object) -> GenerateRequest:
    packed = PackedIds.of([70000] * ids)
    made = GenerateRequest(id=id, token_ids=packed, sampling=Sampling(stop=("x",)), seed=2**64 - 1)
    return msgspec.structs.replace(made, **fields)


def output(id: str, tokens: int = 2) -> StepOutput:
    return StepOutput(
        id=id,
        token_ids=[70000] * tokens,
        logprobs=[-0.1] * tokens,
        top_logprobs=[TokenLogprobs((1, 2), (-0.5, -1.5))] * tokens,
        weight_version="v0",
        steps=2,
        accepted_each=[1, 0],
    )


def test_commands_and_events_survive_the_way() -> None:
    for command in COMMANDS:
        [message] = command_messages(command, 0.0)
        assert decode_link_command(message) == command
    [message] = event_messages(EVENTS)
    assert decode_link_events(message) == [*EVENTS]


def test_deadlines_cross_as_seconds_left() -> None:
    sent = request("a", deadline_s=1000.0, begin_by_s=990.0)
    left = shifted(sent, -995.0)
    assert (left.deadline_s, left.begin_by_s) == (5.0, 0.0), "a time that is over is 0, not less"
    here = shifted(left, 7.0)
    assert (here.deadline_s, here.begin_by_s) == (12.0, 7.0)
    assert shifted(shifted(sent, -100.0), 100.0) == sent
    endless = request("a")
    assert shifted(endless, 5.0) is endless


def test_batch_crosses_whole_in_order_in_bounded_messages() -> None:
    batch = [request(f"r{at}", ids) for at, ids in enumerate((3, PART_BYTES // 8, 3, PART_BYTES))]
    batch += [request(f"s{at}", PART_BYTES // 40) for at in range(25)]
    messages = [*command_messages(Submit(batch), 0.0)]
    assert len(messages) > 4
    parts = [decode_link_command(message) for message in messages]
    assert [each for part in parts if isinstance(part, Submit) for each in part.requests] == batch
    for message, part in zip(messages, parts, strict=True):
        assert isinstance(part, Submit)
        assert len(part.requests) == 1 or len(message) < PART_BYTES + 100


def test_only_the_last_part_of_large_outputs_has_the_figures() -> None:
    switch = Switch(1.5, "off", "", "start", 1)
    for count, tokens in ((0, 0), (3, 2), (40, 20000)):
        outputs = [output(f"r{at}", tokens) for at in range(count)]
        whole = Outputs(outputs, {"running": 1.0}, CYCLE, [switch], [(0.5, 1, 2)])
        *first, last = [
            event for message in event_messages([whole]) for event in decode_link_events(message)
        ]
        assert isinstance(last, Outputs) and bool(first) == (count == 40)
        assert all(part == Outputs(part.outputs, whole.gauges) for part in first)  # type: ignore[union-attr]
        found = [each for part in (*first, last) for each in part.outputs]  # type: ignore[union-attr]
        assert msgspec.structs.replace(last, outputs=found) == whole


def test_scores_of_a_whole_prompt_fit_the_largest_event() -> None:
    for tokens, alternatives in ((1, 0), (100, 20), (2000, 3)):
        ids, figures = (2**32 - 1,) * (1 + alternatives), (-0.1,) * (1 + alternatives)
        scores = [TokenLogprobs(ids, figures)] * tokens
        whole = msgspec.structs.replace(output("r", tokens), prompt_logprobs=scores)
        whole = msgspec.structs.replace(whole, top_logprobs=None, raw_logprobs=[-0.1] * tokens)
        [message] = event_messages([Outputs([whole], {})])
        assert 0 <= largest_event(tokens, alternatives) - SPARE_BYTES - len(message) + 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(Stop()),
        encode(Heartbeat()),
        encode({"type": "attach", "fleet": "f", "epoch": 0}),
        encode({"type": "attach", "fleet": "../f", "epoch": 1}),
        encode({"type": "attach", "fleet": "f" * 65, "epoch": 1}),
        encode({"type": "attach", "fleet": "f\n", "epoch": 1}),
        encode({"type": "attach", "fleet": "f", "epoch": 1, "gateway": "g" * 257}),
        encode({"type": "submit", "requests": [{"id": "a"}]}),
    ],
)
def test_command_of_no_link_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_link_command(data)


def test_event_of_no_link_is_refused() -> None:
    for event in (Failed("model", "truncated"), Heartbeat()):
        with pytest.raises(msgspec.DecodeError):
            decode_link_events(encode([event]))


@given(st.data())
def test_altered_command_is_a_command_or_malformed(data: st.DataObject) -> None:
    sent = [*COMMANDS, Submit([request("a", generated=[1, 2])])]
    [message] = command_messages(data.draw(st.sampled_from(sent)), 0.0)
    altered = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
    del altered[data.draw(st.integers(1, len(altered))) :]
    try:
        command = decode_link_command(bytes(altered))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    assert isinstance(command, LinkCommand)
