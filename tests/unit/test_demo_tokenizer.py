"""The shipped tokenizer means the same to `tokenizers` and to `AutoTokenizer`, and its chat
template is the demo's.
"""

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

import tlt_server
from tlt_server.demo import chat, task

TARGET = Path(tlt_server.__file__).parent / "demo" / "pair" / "target"
ALPHABETS = (
    "0123456789",
    "abcXYZ'",
    " \t\n\r",
    "+-*/=().,:!?",
    "éßñ\u00e9e\u0301",
    "漢字かな",
    "\U0001f600\u200d\u00a0",
    "٣४Ⅷ½",
)


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def auto():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


def generated_strings(count: int) -> list[str]:
    rng = Random(0)
    mixed = [
        "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randint(0, 40)))
        for _ in range(count // 2)
    ]
    solved = [task.solution(task.problem(seed), Random(seed)) for seed in range(count - len(mixed))]
    return mixed + solved


@pytest.mark.slow
def test_auto_tokenizer_gives_the_ids_of_the_file(raw, auto):
    for text in generated_strings(1_000):
        assert auto(text, add_special_tokens=False)["input_ids"] == raw.encode(text).ids, repr(text)


def test_digits_are_single_tokens(raw):
    assert raw.encode("1234567890").tokens == list("1234567890")


def test_decoding_gives_the_normalised_text_back(raw, auto):
    for text in generated_strings(200)[100:]:
        assert auto.decode(raw.encode(text).ids) == text


def test_the_template_is_the_training_format(raw, auto):
    message = [{"role": "user", "content": "What is 2+3?"}]
    assert auto.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    ) == chat.render_prompt("What is 2+3?")
    assert auto.eos_token == chat.END and auto.pad_token == chat.PAD


def test_specials_are_the_last_ids(raw):
    assert [raw.token_to_id(token) for token in chat.SPECIALS] == [509, 510, 511]
    assert raw.get_vocab_size() == 512
