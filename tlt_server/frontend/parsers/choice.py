"""The parsers of a server: those that its settings name, or that suit the model's chat template."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from tlt_server.frontend.parsers import REASONING_PARSERS, TOOL_PARSERS
from tlt_server.frontend.parsers.answer import AnswerReader
from tlt_server.frontend.parsers.llama3_json import Llama3Json
from tlt_server.frontend.parsers.pieces import ToolParser
from tlt_server.frontend.parsers.thinking import Thinking

MAX_CALLS = 128  # read out of one answer
PROMPT_END = 64  # characters of the prompt that say whether it opens the reasoning
# What a template holds that asks for calls in some form, and what it holds if it means another one.
_SIGNS = (
    ("hermes", "<tool_call>", ("<function=", "<arg_key>")),
    ("pythonic", "[func_name1(", ()),
    ("llama3_json", '"parameters": dictionary', ()),
    ("llama3_json", "<|python_tag|>", ()),
)


class Parsers(NamedTuple):
    name: str  # the form of calls; empty: they stay text, unless they are forced
    tools: type[ToolParser] | None
    forced: type[ToolParser]  # for answers that must call, whose form is known
    thinking: type[Thinking] | None

    def answer(
        self,
        prompt_end: str,
        offered: Container[str] | None,
        *,
        forced: bool,
        parallel: bool,
        reasons: bool,
    ) -> AnswerReader | None:
        """Return what reads an answer, or None where its text is the content.

        `offered` are the names of the functions, None if no call is read. `forced`: the answer is
        held to calls. `parallel`: there may be several. `reasons`: reasoning is told apart.
        """
        thinking = self.thinking(prompt_end) if self.thinking and reasons else None
        kind = self.forced if forced else self.tools
        tools = None
        if kind is not None and offered is not None:
            tools = kind(offered, MAX_CALLS if parallel else 1)
        return AnswerReader(thinking, tools) if thinking or tools else None


def parsers_of(tool_parser: str | None, reasoning_parser: str, template: str | None) -> Parsers:
    """Return the parsers of these names. `StartupError`: there is none of a name. Calls: None takes
    the form that the template asks for, and `none` leaves them text.
    """
    name = _suited(template or "") if tool_parser is None else tool_parser
    name = "" if name == "none" else name
    tools = TOOL_PARSERS.resolve(name) if name else None
    return Parsers(
        name,
        tools,
        tools if tools is not None and tools.form is not None else Llama3Json,
        REASONING_PARSERS.resolve(reasoning_parser) if reasoning_parser != "none" else None,
    )


def _suited(template: str) -> str:
    return next(
        (
            name
            for name, sign, others in _SIGNS
            if sign in template and not any(other in template for other in others)
        ),
        "",
    )
