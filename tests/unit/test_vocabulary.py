"""Structures whose text holds tokens of their own, over the tokenizers of served models."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tests.tokenizers import DEEPSEEK_CALLS, Family, each_family
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import grammar_of
from tlt_server.grammars.vocabulary import MARKS, read_tokenizer

VOCAB, EOS = 300, 256
TEXTS = (
    *(
        "<think>hm</think>\n\n42",
        "<tool_call>\n{}\n</tool_call>",
        "a <|python_tag|>b",
        "<|im_end|>",
    ),
    *(
        f"{DEEPSEEK_CALLS[0]}f{DEEPSEEK_CALLS[1]}",
        "<tools><schema>x",
        "<｜User｜>hi",
        "e\u0301<think>",
    ),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@cache
def _model(directory: Path, family: Family) -> tuple[Compiler, Tokenizer]:
    model = family.write(directory / str(hash(family)))
    return Compiler(model, VOCAB, [EOS]), Tokenizer.from_str(
        read_tokenizer(model / "tokenizer.json")
    )


def allowed(matcher: LLMatcher) -> set[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return {*np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()}


def forms(text: str) -> dict[str, tuple[str, str]]:
    """Return structures that hold the output to a text or to others, and the output."""
    pattern = re.sub(r"([|{}^$.*+?()\[\]\\])", r"\\\1", text).replace("\n", r"\n")
    lark, escaped = json.dumps(text, ensure_ascii=False), json.dumps(text, ensure_ascii=False)
    tag = {"type": "tag", "begin": text, "content": {"type": "regex", "pattern": "x"}, "end": text}
    return {
        "choice": (json.dumps([text, "~"]), text),
        "regex": (f"({pattern}|~)", text),
        "json_schema": (json.dumps({"enum": [text, 5]}), escaped),
        "grammar": (f"start: a a\na: {lark}", text * 2),
        "structural_tag": (json.dumps({"format": tag}), f"{text}x{text}"),
    }


@each_family
@pytest.mark.parametrize("form", forms(""))
def test_structure_accepts_a_text_as_tokens_or_as_bytes(
    directory: Path, family: Family, form: str
) -> None:
    compiler, tokenizer = _model(directory, family)
    specials = {
        t.content: id for id, t in tokenizer.get_added_tokens_decoder().items() if t.special
    }
    for text in TEXTS:
        content, output = forms(text)[form]
        start = compiler.compile(grammar_of(form, content, specials))
        tokenizer.encode_special_tokens = form != "structural_tag"
        ids = tokenizer.encode(output, add_special_tokens=False).ids
        as_tokens = start.deep_copy()
        if tokenizer.normalizer is None or output.isascii():
            for id in ids:
                assert id in allowed(as_tokens), (text, id)
                assert as_tokens.consume_token(id)
            assert as_tokens.is_accepting()
        if specials.keys().isdisjoint(re.findall("<[^<>]+>", text)) or form != "structural_tag":
            spelled = start.deep_copy()
            assert spelled.consume_tokens([*output.encode()]) and spelled.is_accepting(), text


@each_family
def test_every_token_allowed_by_a_mask_is_accepted(directory: Path, family: Family) -> None:
    draw = np.random.default_rng(5)
    for text in TEXTS:
        for form, (content, _) in forms(text).items():
            compiler, tokenizer = _model(directory, family)
            matcher = compiler.compile(grammar_of(form, content)).deep_copy()
            tokens = list[int]()
            while not matcher.is_accepting():
                found = sorted(allowed(matcher) - {EOS})
                assert found, (form, tokenizer.decode(tokens))
                tokens.append(int(draw.choice(found)))
                assert matcher.consume_token(tokens[-1]), (form, text, tokens)


@each_family
def test_special_tokens_are_not_text_but_mark_tokens_are(directory: Path, family: Family) -> None:
    compiler, tokenizer = _model(directory, family)
    found = allowed(compiler.compile(grammar_of("regex", r"(.|\n)+")))
    for id, token in tokenizer.get_added_tokens_decoder().items():
        assert (id in found) == (token.content not in family.special or token.content in MARKS)
        assert token.special == (id not in found)


@each_family
def test_grammar_rule_may_name_a_token(directory: Path, family: Family) -> None:
    compiler, tokenizer = _model(directory, family)
    for text in (*family.special[1:], *family.plain):
        grammar = grammar_of("grammar", f'start: "{text}" {text} /[<]think>/ // {text}')
        matcher = compiler.compile(grammar).deep_copy()
        assert matcher.consume_tokens([*text.encode()])
        assert allowed(matcher) == {tokenizer.token_to_id(text)}
