"""Calls and reasoning on an engine whose model has marks as tokens of their own: an answer keeps to
its structure, is read back, and has the same bits under every strategy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.engine.families import EOS, write_pair
from tests.engine.pushing import Pushable, cpu_settings
from tests.tokenizers import FAMILIES
from tlt_server.frontend.dialects.openai.answers import structure
from tlt_server.frontend.dialects.openai.requests import CHAT, ChatRequest
from tlt_server.frontend.generation.requests import StructuredOutputs
from tlt_server.frontend.generation.samplings import written
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.parsers.answer import parsers_of
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText
from tlt_server.grammars.forms import grammar_of
from tlt_server.grammars.vocabulary import MARKS
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy

STRATEGIES = [Strategy("eagle", 4, 3, 12), Strategy("history", 4, 2, 6)]
PARSERS = parsers_of("hermes", "think", None)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["<think>", 7]}}, "required": ["a"]}
TOOLS = [{"function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
MESSAGES = [{"role": "user", "content": "ask"}]
GBNF = 'root ::= "yes" | "<tool_call>"'


class Asked(NamedTuple):
    fields: dict[str, Any]
    opens: bool | None = None  # whether the prompt opens reasoning; None: it is not told apart
    content: str = ""  # a pattern of the answer's content; empty: it is calls


ASKED = (
    Asked({"tools": TOOLS, "tool_choice": "required"}),
    Asked({"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, opens=False),
    Asked({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, opens=True),
    Asked({"guided_regex": "[0-9]{2}"}, opens=True, content="[0-9]{2}"),
    Asked({"guided_choice": ["</think>a", "b"]}, content="</think>a|b"),
    Asked({"guided_json": SCHEMA}, opens=True, content=r'\{\s*"a"\s*:\s*("<think>"|7)\s*\}'),
    Asked({"guided_grammar": GBNF}, opens=True, content="yes|<tool_call>"),
    Asked({"guided_grammar": GBNF}, opens=False, content="yes|<tool_call>"),
)


class Marked(NamedTuple):
    engine: Pushable
    text: Text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=FAMILIES)
def marked(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Marked:
    target, drafter = FAMILIES[request.param].write(pair[0]), pair[1]
    settings = cpu_settings(target, drafter)
    engine = Pushable(settings)
    engine.engine._structures.prepare()
    return Marked(engine, Text.load(target))


def request(text: Text, i: int, asked: Asked) -> GenerateRequest:
    """Return a request whose random model soon ends what it may end."""
    chat = msgspec.convert({"messages": MESSAGES, **asked.fields}, ChatRequest)
    form = PARSERS.forced.form if "tools" in asked.fields else None
    _, held = structure(chat, form, asked.opens, CHAT)
    assert isinstance(held, StructuredOutputs)
    grammar = grammar_of(*written("structured_outputs", held), text.specials)
    [mark] = text.encode(["</think>"], special=False)
    bias = {EOS: 20.0} | ({mark[0]: 5.0} if len(mark) == 1 else {})
    sampling = Sampling(max_tokens=500, logit_bias=bias, structured_outputs=grammar)
    return GenerateRequest(id=f"r{i}", token_ids=[*b"ask ", i], seed=i, sampling=sampling)


def read(asked: Asked, text: str) -> list[Piece]:
    prompt = "<think>\n" if asked.opens else ""
    answer = PARSERS.answer(
        prompt,
        {"f", "g"} if "tools" in asked.fields else None,
        forced="tools" in asked.fields,
        parallel=True,
        reasons=asked.opens is not None,
    )
    return [SpokenText(text)] if answer is None else [*answer.push(text), *answer.end()]


def test_structured_outputs_may_contain_special_mark_tokens(marked: Marked) -> None:
    batch = [request(marked.text, i, asked) for i, asked in enumerate(ASKED)]
    plain = marked.engine.run(*batch)
    has_mark = MARKS < marked.text.tokenizer.get_vocab().keys() if marked.text.tokenizer else None
    for r, asked in zip(batch, ASKED, strict=True):
        last, tokens = marked.engine.said[r.id][-1], marked.engine.tokens(r.id)
        text = marked.text.decode(tokens)
        assert last.error is None, (asked, last.error)
        if last.finish_reason == "length":  # it spells marks, and never comes to their end
            assert not has_mark, (asked, text)
            continue
        pieces = read(asked, text)
        spoken = "".join(piece.text for piece in pieces if isinstance(piece, SpokenText))
        called = [piece for piece in pieces if isinstance(piece, SpokenCall)]
        assert re.fullmatch(asked.content, spoken.strip()), (asked, text)
        assert bool(called) == ("tools" in asked.fields), text
    first = marked.text.encode(["<tool_call>"], special=False)[0]
    first = first if len(first) == 1 else first[:-1]  # the last one may go on
    assert marked.engine.tokens("r0")[: len(first)] == first, "the call begins with its mark"
    for strategy in STRATEGIES:
        marked.engine.engine.send(SetPolicy("fixed", strategy))
        assert marked.engine.run(*batch) == plain
    marked.engine.engine.send(SetPolicy("off"))
