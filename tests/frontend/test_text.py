"""Incremental text is the text of all tokens; stop strings are never shown, not even in part."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.frontend.tiny_model import SPECIALS, byte_tokenizer, write_model
from tests.processes import completed
from tlt_server.errors import InvalidRequest, ModelError
from tlt_server.frontend.generation.choice import GrowingChoice
from tlt_server.frontend.generation.text import REPLACEMENT, Incremental, Pieces, StopStrings, Text
from tlt_server.samples.identity import identity_of
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput

# Merges that cut characters in awkward places: the tail of one with the head of the next, a head
# alone.
MERGES = [
    (b"\xa9", b"\xe2"),
    (b"\xf0", b"\x9f"),
    (b"\xac", b"\xf0"),
    (b"a", b"\xe2"),
    (b"\x82", b"\xac"),
]
TEXT = Text(byte_tokenizer(MERGES))
LAST = 256 + len(SPECIALS) + len(MERGES) - 1
ANY_TOKENS = st.lists(st.integers(0, LAST), max_size=80)
REAL_TEXT = st.text(alphabet="ab é€🚀한\n\u200d�", max_size=40)


def incremental_text(token_ids: list[int]) -> tuple[str, list[str]]:
    incremental = Incremental(TEXT)
    deltas = [incremental.push(token) for token in token_ids]
    return "".join(deltas) + incremental.flush(), deltas


@given(ANY_TOKENS)
def test_deltas_add_up_to_the_decoded_text_for_any_tokens(token_ids: list[int]) -> None:
    assert incremental_text(token_ids)[0] == TEXT.decode(token_ids)


@given(REAL_TEXT)
def test_real_text_survives_and_no_delta_shows_half_a_character(text: str) -> None:
    token_ids = list(text.encode())  # one token per byte, the worst case
    whole, deltas = incremental_text(token_ids)
    assert whole == text
    assert sum(delta.count(REPLACEMENT) for delta in deltas) <= text.count(REPLACEMENT)


@given(REAL_TEXT)
def test_encoding_and_decoding_are_inverse(text: str) -> None:
    assert TEXT.decode(TEXT.encode([text])[0]) == text


@given(st.text(alphabet="ab é€🚀", max_size=30))
def test_byte_fallback_tokenizers_show_no_half_characters(text: str) -> None:
    tokenizer = Tokenizer(
        models.Unigram(
            [(f"<0x{byte:02X}>", 0.0) for byte in range(256)], byte_fallback=True, unk_id=0
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    incremental = Incremental(Text(tokenizer))
    deltas = [incremental.push(byte) for byte in text.encode()]
    assert "".join(deltas) + incremental.flush() == text
    assert REPLACEMENT not in "".join(deltas)


def test_undecodable_text_is_held_back_within_a_bound() -> None:
    incremental = Incremental(TEXT)
    shown = "".join(incremental.push(0x80) for _ in range(2000)) + incremental.flush()
    assert shown == REPLACEMENT * 2000
    assert len(incremental._window) < 520


PIECES = Pieces(TEXT)


@given(st.text(alphabet="ab \u00e9\u20ac\U0001f680\n", max_size=30))
def test_bytes_join_to_the_text_and_characters_add_up(text: str) -> None:
    pieces = [PIECES[token] for token in TEXT.encode([text])[0]]
    assert b"".join(piece.bytes for piece in pieces) == text.encode()
    assert sum(piece.characters for piece in pieces) == len(text)


def test_special_tokens_have_text_but_count_no_characters() -> None:
    assert PIECES[256] == ("<|end|>", b"<|end|>", 0)
    assert PIECES[10_000] == ("", b"", 0)


def test_byte_fallback_tokenizers_give_bytes_and_spaces() -> None:
    tokenizer = Tokenizer(
        models.Unigram(
            [("<0xE2>", 0.0), ("\u2581hi", 0.0), ("x", 0.0)], byte_fallback=True, unk_id=2
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken("own", special=False)])
    pieces = Pieces(Text(tokenizer))
    assert [pieces[i] for i in (0, 1, 3)] == [
        ("\ufffd", b"\xe2", 1),
        (" hi", b" hi", 3),
        ("own", b"own", 3),
    ]


SMALL = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The slow twin, one character at a time: at the first end of a stop string, the earliest start
    among those that end there.
    """
    for end in range(1, len(text) + 1):
        hits = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return min(hits)
    return None


@given(SMALL, STOPS)
def test_stop_strings_match_the_slow_twin_character_by_character(
    text: str, stops: list[str]
) -> None:
    matcher, shown = StopStrings(stops), ""
    expected = first_stop(text, stops)
    for character in text:
        shown += matcher.push(character)
        assert expected is None or text[: expected[0]].startswith(
            shown
        )  # nothing of the stop string is ever shown
        if matcher.matched is not None:
            break
    if expected is None:
        assert matcher.matched is None and shown + matcher.flush() == text
    else:
        assert (shown, matcher.matched) == (text[: expected[0]], expected[1])


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=6), STOPS)
def test_no_split_of_the_text_shows_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
    if matcher.matched is None:
        shown += matcher.flush()
        assert shown == "".join(pieces)
    else:
        assert "".join(pieces).startswith(shown + matcher.matched)
    assert not any(stop in shown for stop in stops)


@settings(max_examples=60)
@given(
    st.text(alphabet="ab€", min_size=1, max_size=20),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(1, 6), min_size=1),
    st.integers(0, 6),
    st.booleans(),
)
def test_text_does_not_depend_on_how_tokens_are_grouped(
    text: str, stops: list[str], groups: list[int], min_tokens: int, streamed: bool
) -> None:
    token_ids = list(text.encode())
    one_by_one = grown(token_ids, stops, [1], min_tokens, True)
    grouped = grown(token_ids, stops, groups, min_tokens, streamed)
    assert grouped == one_by_one
    assert not any(stop in (one_by_one[0] or "") for stop in stops) or min_tokens


def grown(
    token_ids: list[int], stops: list[str], groups: list[int], min_tokens: int, streamed: bool
) -> tuple[object, ...]:
    sampling = Sampling(stop=tuple(stops), min_tokens=min_tokens)
    stopped: list[str] = []
    request = GenerateRequest(id="r", token_ids=[1], sampling=sampling, seed=1)
    sequence = GrowingChoice(request, 0, TEXT, incremental=streamed, stop=stopped.append)
    at, group, shown = 0, 0, ""
    while at < len(token_ids):
        end = min(len(token_ids), at + groups[group % len(groups)])
        last = end == len(token_ids)
        output = StepOutput(
            id="r",
            token_ids=token_ids[at:end],
            logprobs=[-float(i) for i in range(at, end)],
            finish_reason="length" if last else None,
            weight_version="0",
        )
        delta = sequence.push([output])
        shown += delta.text or ""
        at, group = end, group + 1
    choice = sequence.choice()
    assert len(stopped) <= 1
    if streamed:
        assert shown == choice.text
    return (
        choice.text,
        choice.token_ids,
        choice.logprobs,
        choice.finish_reason,
        choice.stop_reason,
        choice.weight_versions,
    )


def test_the_template_sees_special_tokens_and_opens_the_turn(tmp_path: Path) -> None:
    text = Text.load(write_model(tmp_path))
    assert text.render([{"role": "user", "content": "hi"}]) == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].missing.more }}",
        "{{ messages.append(1) }}",
        "{{ 9 ** (9 ** 7) % 10 }}",
        "{% set a = 3000000 %}{{ (7**a) % 10 }}",
        "{{ 'a' * 10**9 }}",
        "{% set a = 10**1000 %}{{ a * a }}",
    ],
)
def test_a_failing_or_prying_template_is_a_client_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        Text(TEXT.tokenizer, template).render([{"role": "user", "content": "x"}])


def test_template_features_of_published_models_render() -> None:
    template = (
        "{%- for m in messages %}{%- if loop.first %}{%- continue %}{%- endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{%- endfor %}"
    )
    assert Text(TEXT.tokenizer, template).render([{"content": "a"}, {"content": "é<"}]) == '"é<"'


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(b"{{ messages }}\xff"), lambda path: path.mkdir()]
)
def test_an_unreadable_template_file_is_a_model_error(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(write_model(tmp_path) / "chat_template.jinja")
    with pytest.raises(ModelError, match="cannot read .*chat_template.jinja"):
        Text.load(tmp_path)


def test_template_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    write_model(tmp_path).joinpath("chat_template.jinja").write_bytes("é".encode())
    script = (
        "import sys, pathlib; from tlt_server.frontend.generation.text import Text; "
        "print(ascii(Text.load(pathlib.Path(sys.argv[1])).render([])))"
    )
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = completed([sys.executable, "-c", script, str(tmp_path)], env=environment)
    assert done.stdout == "'\\xe9'\n", done.stderr


def test_template_files_and_named_templates_are_found(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "default", "template": "D"},
                    {"name": "tool_use", "template": "T{{ tools | length }}"},
                    {"name": "rag", "template": "R"},
                ]
            }
        )
    )
    text, before = Text.load(tmp_path), identity_of(tmp_path).template
    assert text.render([]) == text.render([], []) == "D"
    assert text.render([], [{}]) == "T1"
    assert text.render([], [{}], name="rag") == "R"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    (tmp_path / "chat_template.jinja").write_text("J")
    text = Text.load(tmp_path)
    assert (text.render([]), text.render([], [{}])) == ("J", "F")
    assert sorted(text.templates) == ["default", "tool_use"], "files take the place of the list"
    assert len({before, identity_of(tmp_path).template}) == 2
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="named default, only tool_use"):
        Text.load(tmp_path).render([])


@pytest.mark.parametrize("spoilt", [7, ["default"], [{"name": "default"}], {"default": 1}])
def test_a_non_text_template_is_a_model_error(tmp_path: Path, spoilt: object) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": spoilt}))
    with pytest.raises(ModelError, match="it must be a text, or a list"):
        Text.load(tmp_path)


def test_a_directory_without_tokenizer_serves_ids_only(tmp_path: Path) -> None:
    text = Text.load(tmp_path)
    with pytest.raises(InvalidRequest, match="token_ids"):
        text.encode(["a"])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer.json"):
        Text.load(tmp_path)
