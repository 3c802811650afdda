"""Parsers, which read tool calls and reasoning from an answer's text as it arrives. Each is a file
and one line of a table.

A parser is a pure function of the text: its pieces do not depend on how the text is cut, and text
that it cannot parse is returned as content. `answer.AnswerReader` combines the two that a request
needs.
"""

from __future__ import annotations

from tlt_server.registry import Registry

TOOL_PARSERS = Registry(
    "tool-call parser",
    {
        "hermes": "tlt_server.frontend.parsers.hermes:Hermes",
        "llama3_json": "tlt_server.frontend.parsers.llama3_json:Llama3Json",
        "pythonic": "tlt_server.frontend.parsers.pythonic:Pythonic",
    },
)
REASONING_PARSERS = Registry(
    "reasoning parser",
    {
        "think": "tlt_server.frontend.parsers.thinking:Thinking",
        "deepseek_r1": "tlt_server.frontend.parsers.thinking:OpenThinking",
    },
)
