"""Tokenizers with the added tokens of models that people serve: which texts are one token, and
which of these are special, as their `tokenizer.json` says. The rest is a small byte-level BPE.

`each_family` runs a test once per family of models; a fixture has `params=FAMILIES`. Ids 0 to 255
are the bytes, 256 is the end token, the other added tokens and the merges follow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = (
    *((b"n", b"a"), (b"m", b"e"), (b"na", b"me"), (b"{", b'"'), (b'"', b":"), (b"}", b"}")),
    *((b"<", b"/"), (b">", b"\n"), (b"\n", b"\n"), (b"t", b"h"), (b"th", b"in"), (b"i", b"n")),
)
CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|fim_pad|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
THINK_MARKS = ("<think>", "</think>")
RESULT_MARKS = ("<tool_response>", "</tool_response>")
LLAMA = (
    *("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
)
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>")
DEEPSEEK_TURNS = ("<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_CALLS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)


@dataclass(frozen=True)
class Family:
    special: tuple[str, ...]  # the first one ends a text
    plain: tuple[str, ...] = ()  # the other added tokens
    bos: str | None = None  # comes before a bare text
    digits: str = ""  # limit on those in one token
    nfc: bool = True
    merges: tuple[tuple[bytes, bytes], ...] = MERGES

    @property
    def eos(self) -> str:
        return self.special[0]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(_written(self))

    def write(self, directory: Path, template: str | None = None) -> Path:
        """Write the tokenizer's files of a model directory."""
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer()
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {
            "eos_token": self.eos,
            "bos_token": self.bos,
            "added_tokens_decoder": {
                str(id): {"content": token.content, "special": token.special, "normalized": False}
                for id, token in tokenizer.get_added_tokens_decoder().items()
            },
            **({"chat_template": template} if template is not None else {}),
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory


FAMILIES = {
    "no marks": Family(("<|end|>", "<|user|>", "<|assistant|>"), merges=()),
    "qwen2.5": Family(CHATML[:4], (*CALL_MARKS, CHATML[4])),
    "qwen3": Family(CHATML[:4], (*CALL_MARKS, CHATML[4], *RESULT_MARKS, *THINK_MARKS)),
    "deepseek-r1": Family(
        (*DEEPSEEK, "<|EOT|>"),
        (*DEEPSEEK_TURNS, *THINK_MARKS, *DEEPSEEK_CALLS),
        bos=DEEPSEEK[1],
        digits="{1,3}",
        nfc=False,
    ),
    "r1-distill-qwen": Family(
        (*DEEPSEEK[:2], CHATML[3]),
        (*DEEPSEEK_TURNS, "<|EOT|>", *THINK_MARKS, *CALL_MARKS, CHATML[4]),
        bos=DEEPSEEK[1],
    ),
    "r1-distill-llama": Family(
        (*DEEPSEEK, *LLAMA),
        (*DEEPSEEK_TURNS, *THINK_MARKS),
        bos=DEEPSEEK[1],
        digits="{1,3}",
        nfc=False,
    ),
    "llama3": Family(LLAMA, bos=LLAMA[1], digits="{1,3}", nfc=False),
    "hermes": Family(
        ("<|im_end|>", *LLAMA, "<|im_start|>"),
        (*CALL_MARKS, *RESULT_MARKS, "<tools>", "</tools>", "<schema>", "</schema>"),
        bos=LLAMA[1],
        digits="{1,3}",
        nfc=False,
    ),
    "special marks": Family((*CHATML[:4], *CALL_MARKS, *RESULT_MARKS, *THINK_MARKS)),
}


each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@cache
def _written(family: Family) -> str:
    letters = byte_letters()
    added = (*family.special, *family.plain)
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    vocab |= {text: 256 + i for i, text in enumerate(added)}
    pairs = []
    for left, right in family.merges:
        pair = tuple("".join(letters[b] for b in part) for part in (left, right))
        if all(part in vocab for part in pair):
            pairs.append(pair)
            vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=not family.nfc))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = Regex(_SPLIT.replace("DIGITS", family.digits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=text in family.special, normalized=False) for text in added]
    )
    if family.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, vocab[family.bos])]
        )
    written: str = tokenizer.to_str()
    return written


def byte_letters() -> list[str]:
    """Return the printable stand-in of each byte in byte-level BPE (GPT-2's table)."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
