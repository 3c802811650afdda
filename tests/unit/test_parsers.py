"""Parsers of calls and reasoning: what they read, that no character is lost, and that the pieces do
not depend on how the text is cut.
"""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.errors import StartupError
from tlt_server.frontend.parsers import REASONING_PARSERS, TOOL_PARSERS
from tlt_server.frontend.parsers.answer import AnswerReader, parsers_of
from tlt_server.frontend.parsers.json_call import JsonText
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, ThoughtText
from tlt_server.frontend.parsers.pieces import SpokenText as Text

OFFERED = frozenset({"f", "g"})


def answer(
    tools: str, thinking: str = "none", prompt: str = "", *, parallel: bool = True
) -> AnswerReader:
    made = parsers_of(tools, thinking, None).answer(
        prompt, OFFERED, forced=False, parallel=parallel, reasons=True
    )
    assert made is not None
    return made


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces, those of one kind in a row as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Text | ThoughtText) and isinstance(last, type(piece)):
            found[-1] = type(piece)(last.text + piece.text)
        else:
            found.append(piece)
    return found


def read(reader: AnswerReader, text: str, size: int = 10**9) -> list[Piece]:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return joined([piece for part in parts for piece in reader.push(part)] + reader.end())


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MADE: list[Piece] = [SpokenCall("f", '{"a": 1}')]
HARD = '{"a": [1, -2.5e3, {"b": "x</tool_call>\\u00e9\\"\\\\é🙂"}], "c": null}'
CASES: list[tuple[str, str, list[Piece]]] = [
    ("hermes", "just text", [Text("just text")]),
    ("hermes", " \n text \n", [Text(" \n text \n")]),
    ("hermes", CALL, MADE),
    ("hermes", f"I look.\n{CALL}\n{CALL}", [Text("I look."), *MADE, *MADE]),
    ("hermes", f"{CALL} so", [*MADE, Text("so")]),
    ("hermes", CALL.removesuffix("\n</tool_call>"), MADE),
    ("hermes", CALL.replace('{"a": 1}', HARD), [SpokenCall("f", HARD)]),
    ("hermes", CALL.replace('"f"', '"unheard of"'), [SpokenCall("unheard of", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"f"}</tool_call>', [SpokenCall("f", "{}")]),
    ("hermes", '<tool_call>{"arguments":{"a": 1},"name":"f","id":7}</tool_call>', MADE),
    ("hermes", "<tool_call>" + CALL, [Text("<tool_call>"), *MADE]),
    ("hermes", "<tool_call> none </tool_call>", [Text("<tool_call> none </tool_call>")]),
    ("hermes", '<tool_call>{"name": "f"', [Text('<tool_call>{"name": "f"')]),
    ("hermes", "a <tool_c", [Text("a <tool_c")]),
    ("hermes", "<tool_call>{}</tool_call>", [Text("<tool_call>{}</tool_call>")]),
    ("hermes", CALL.replace("f", "\\n"), [Text(CALL.replace("f", "\\n"))]),
    ("hermes", CALL.replace("f", "\\ud800"), [Text(CALL.replace("f", "\\ud800"))]),
    ("hermes", CALL.replace("{", "[{", 1), [Text(CALL.replace("{", "[{", 1))]),
    (
        "hermes",
        CALL.replace('{"a": 1}', '{"a\tb": "x = 1\n\tprint(\\d)\\\n\x00"}'),
        [SpokenCall("f", '{"a\\tb": "x = 1\\n\\tprint(\\\\d)\\\\\\n\\u0000"}')],
    ),
    ("llama3_json", '{"parameters":{"a": "\n"},"name":"f"}', [SpokenCall("f", '{"a": "\\n"}')]),
    ("hermes", CALL.replace('"f"', '"f\n"'), [Text(CALL.replace('"f"', '"f\n"'))]),
    ("pythonic", '[f(a="x\n\ty")]', [SpokenCall("f", '{"a": "x\\n\\ty"}')]),
    ("hermes", CALL.replace("}}", "}"), MADE),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', MADE),
    ("llama3_json", '\n<|python_tag|>{"name": "f", "arguments": {"a": 1}}', MADE),
    (
        "llama3_json",
        '{"name":"f","parameters":{"a": 1}}; {"name":"g"} .',
        [*MADE, SpokenCall("g", "{}"), Text(".")],
    ),
    (
        "llama3_json",
        '{"name": "Bob", "parameters": {}}',
        [Text('{"name": "Bob", "parameters": {}}')],
    ),
    ("llama3_json", 'So {"name": "f"}', [Text('So {"name": "f"}')]),
    ("llama3_json", "<|python_", [Text("<|python_")]),
    ("pythonic", "[f(a=1)]", MADE),
    ("pythonic", "[f(a=1), g(), ]", [*MADE, SpokenCall("g", "{}"), Text(", ]")]),
    ("pythonic", "[f(a=1,), g( )] so", [*MADE, SpokenCall("g", "{}"), Text("so")]),
    (
        "pythonic",
        "[f(b='x\\'(y\\n', c=[True, None, -1.5, {\"k\": (1, 2)}])]",
        [SpokenCall("f", '{"b": "x\'(y\\n", "c": [true, null, -1.5, {"k": [1, 2]}]}')],
    ),
    ("pythonic", "[f(a='\\ud800')]", [SpokenCall("f", '{"a": "\\ud800"}')]),
    ("pythonic", "[f(1)]", [Text("[f(1)]")]),
    ("pythonic", "[f(a=open('x'))]", [Text("[f(a=open('x'))]")]),
    ("pythonic", "[f(a=1, a=2)]", [Text("[f(a=1, a=2)]")]),
    ("pythonic", "[f(a=1e999)]", [Text("[f(a=1e999)]")]),
    ("pythonic", "[h()]", [Text("[h()]")]),
    ("pythonic", "[note] f(a=1)", [Text("[note] f(a=1)")]),
    ("pythonic", "[f(a=1", [Text("[f(a=1")]),
]


@pytest.mark.parametrize("size", [1, 2, 7, 10**9])
def test_tool_calls_are_parsed_and_other_text_is_content(size: int) -> None:
    for tools, text, expected in CASES:
        assert read(answer(tools), text, size) == expected, (tools, text)


def test_tool_call_is_emitted_once_its_arguments_are_complete() -> None:
    reader = answer("hermes")
    assert reader.push('<tool_call>{"name": "f", "arguments": {"a": tru') == []
    assert reader.push("e}") == [SpokenCall("f", '{"a": true}')]
    assert reader.push("}</tool") == []
    assert reader.push("_call> x") == [Text("x")] and reader.end() == []


BROKEN = ("{", '{"a', '{"a": "x', '{"a": "x\\', '{"a": 1, ', '{"a": [1, {"b": tr', '{"a": -')
MALFORMED = ('{"a": 01}', '{"a": True}', "{'a': 1}", '{"a": 1,}', "{a: 1}", '{"a": 1]', '{"a" 1}')
PYTHON_BROKEN = ("a", "a=", "a='x", "a=[1, {'b': ", "a=1, b")
PYTHON_MALFORMED = ("1", "a=x", "a=01x", "a:1", '{"a": 1}')
FORMS = {  # before the arguments, after them, and between calls
    "hermes": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": ('{"name": "f", "parameters": ', "}", "; "),
    "pythonic": ("[f(", ")]", ", "),
}


@pytest.mark.parametrize("tools", [*TOOL_PARSERS])
def test_incomplete_tool_call_is_content(tools: str) -> None:
    head, tail, separator = FORMS[tools]
    python = tools == "pythonic"
    cut, wrong = (PYTHON_BROKEN, PYTHON_MALFORMED) if python else (BROKEN, MALFORMED)
    texts = [head + part for part in cut] + [head + part + tail for part in wrong]
    before = head + ("a=1" if python else '{"a": 1}') + tail.removesuffix("]")
    for text in texts:
        after = separator + text.removeprefix("[")
        content = after.lstrip() if tools == "hermes" else after
        for size in (1, 3, 10**9):
            assert read(answer(tools), text, size) == [Text(text)]
            assert read(answer(tools), before + after, size) == [*MADE, Text(content)]


def test_only_one_tool_call_is_parsed_unless_parallel() -> None:
    assert read(answer("hermes", parallel=False), CALL + CALL) == [*MADE, Text(CALL)]
    one = [Text("<tool_call>"), *MADE, Text(CALL)]
    assert read(answer("hermes", parallel=False), "<tool_call> " + CALL + CALL) == one
    many = read(answer("hermes"), CALL * 130)
    assert len([piece for piece in many if isinstance(piece, SpokenCall)]) == 128
    assert many[-1] == Text(CALL * 2)


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "expected"),
    [
        ("think", "", "<think>\nhm\n</think>\n\nso", [ThoughtText("hm"), Text("so")]),
        ("think", "<think>\n", "hm</think>so", [ThoughtText("hm"), Text("so")]),
        ("think", "<think>\n\n</think>\n\n", "so", [Text("so")]),
        ("think", "", "<think>\n\n</think>\n\nso", [Text("so")]),
        ("think", "<think>\n", "</think>\n\nso\n", [Text("so\n")]),
        ("think", "<think>", " \n", []),
        ("think", "", " so </think> <think>", [Text(" so </think> <think>")]),
        ("think", "", "<think>hm <think> it", [ThoughtText("hm <think> it")]),
        ("think", "", "<think>hm </thi", [ThoughtText("hm </thi")]),
        ("think", "", "<thi", [Text("<thi")]),
        ("think", "", f"<think>{CALL}</think>{CALL}", [ThoughtText(CALL), *MADE]),
        ("deepseek_r1", "", "hm</think>so", [ThoughtText("hm"), Text("so")]),
        ("deepseek_r1", "", "<think>hm", [ThoughtText("hm")]),
    ],
)
def test_reasoning_is_separated_from_content(
    parser: str, prompt: str, text: str, expected: list[Piece]
) -> None:
    for size in (1, 3, 10**9):
        assert read(answer("hermes", parser, prompt), text, size) == expected


WORDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", '{"name": "f", ', "\n"]
    + ['"arguments": ', '"parameters": ', '{"a": ', "[", "]", "{", "}", '"', "\\", "\\u00e", "é🙂"]
    + ["f(", ")", "a=", "'", ",", ";", "1", "-", "tru", "true", " " * 70, "x", " ", "<", ":", CALL]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(WORDS, max_size=30).map("".join),
    st.sampled_from([*TOOL_PARSERS]),
    st.sampled_from(["none", *REASONING_PARSERS]),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_parsed_pieces_do_not_depend_on_cuts_and_lose_no_text(
    text: str, tools: str, thinking: str, sizes: list[int]
) -> None:
    whole = read(answer(tools, thinking), text)
    reader, pieces, at = answer(tools, thinking), list[Piece](), 0
    while at < len(text):
        size = sizes[at % len(sizes)]
        pieces += reader.push(text[at : at + size])
        at += size
    assert joined(pieces + reader.end()) == whole
    for piece in whole:
        if isinstance(piece, SpokenCall):
            assert isinstance(json.loads(piece.arguments), dict)
    if thinking == "none" and {type(piece) for piece in whole} <= {Text}:
        assert "".join(piece[0] for piece in whole) == text


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.integers()
        | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    ),
    st.integers(0, 100),
    st.sampled_from('{}[]",:0-.e\\ut \x00x'),
)
def test_valid_json_is_distinguished_from_invalid(value: object, at: int, letter: str) -> None:
    right = json.dumps({"v": value}, indent=1)
    for text in (right, right[: at % len(right)] + letter + right[at % len(right) :]):
        reader = JsonText()
        end = reader.feed(text, 0, len(text))
        try:
            json.loads(text)
        except ValueError:
            if reader.ended and not text[end:].strip():
                json.loads(reader.strict(text, 0, end))
        else:
            assert reader.ended and not text[end:].strip(), text
            assert reader.strict(text, 0, end) == text[:end]


@pytest.mark.parametrize("tools", [*TOOL_PARSERS])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"' * 20_000,
        '{"a":' * 40_000,
        " " * 200_000,
        "[f(" * 70_000,
    ]
    + ['<tool_call>{"name":"f","arguments":{"a":[' + "1," * 100_000, "[f(a='" + "\\'" * 100_000]
    + ['<tool_call>{"name":"' + "x" * 200_000, "\n" * 100_000 + '{"name": "f"}', "[" * 200_000],
    ids=lambda text: text[:20],
)
def test_hostile_text_is_parsed_in_linear_time(tools: str, text: str) -> None:
    begun = time.process_time()
    pieces = read(answer(tools, "think"), text, 20)
    assert time.process_time() - begun < 3
    assert sum(len(piece[0]) for piece in pieces) > len(text) * 0.9


def test_parsers_are_chosen_from_the_template_or_by_name() -> None:
    for template, name in (
        ("{{ tools }} return <tool_call>{}</tool_call>", "hermes"),
        ("<tool_call>\n<function=name>", ""),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("{{ tools }}[func_name1(params_name1=v)]", "pythonic"),
        ("{{ messages }}", ""),
        (None, ""),
    ):
        assert parsers_of(None, "none", template).name == name
        assert parsers_of("pythonic", "none", template).name == "pythonic"
        assert parsers_of("none", "none", template).tools is None
    with pytest.raises(StartupError, match="unknown tool-call parser 'herms'.*did you mean"):
        parsers_of("herms", "none", None)
    with pytest.raises(StartupError, match="unknown reasoning parser 'thnk'"):
        parsers_of(None, "thnk", None)
