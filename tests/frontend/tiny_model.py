"""A model directory with a byte-level tokenizer and a chat template, and no weights: token id =
byte value, then specials and merges.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tokenizers import byte_letters

SPECIALS = (
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
)  # ids 256, 257, 258; the rest up to 299 is unused or merges
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(merges: list[tuple[bytes, bytes]] | None = None) -> Tokenizer:
    """Ids 0 to 255 are the bytes; each merge adds an id after the specials, so tokens may hold
    parts of several characters.
    """
    letters = byte_letters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    pairs = []
    for left, right in merges or []:
        pair = tuple("".join(letters[b] for b in part) for part in (left, right))
        pairs.append(pair)
        vocab["".join(pair)] = 256 + len(SPECIALS) + len(pairs) - 1
    vocab |= {special: 256 + i for i, special in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    return tokenizer


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": SPECIALS[0]}, "chat_template": TEMPLATE})
    )
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return directory
