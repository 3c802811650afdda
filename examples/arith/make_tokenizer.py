"""Step 1: train the byte-level BPE on the task's text and save it as a Qwen2 tokenizer directory.

Normalizer (NFC), split pattern and byte alphabet are Qwen2's own, so `AutoTokenizer`, which
rebuilds a Qwen2 tokenizer from vocabulary and merges, gives the same ids as the file itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tlt_server.demo import chat, task

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(documents: int, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` ids: 256 bytes, merges, and the ChatML specials last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def corpus():
        for seed in task.TRAIN_SEEDS[:documents]:
            problem = task.problem(seed)
            for text in (
                chat.render_prompt(problem.prompt_text),
                task.solution(problem, Random(seed)),
            ):
                for special in chat.SPECIALS:
                    text = text.replace(special, "")
                yield text

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(chat.SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    missing = vocab_size - len(chat.SPECIALS) - tokenizer.get_vocab_size()
    if missing:
        raise ValueError(
            f"the corpus gives {missing} merges too few for a vocabulary of {vocab_size}: use more "
            "documents or a smaller one"
        )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in chat.SPECIALS]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) as `transformers`
    expects of a Qwen2 model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": chat.END,
        "pad_token": chat.PAD,
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 4096,
        "additional_special_tokens": list(chat.SPECIALS[1:]),
        "chat_template": chat.TEMPLATE,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in chat.SPECIALS
        },
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("tlt_server/demo/pair/target"))
    parser.add_argument(
        "--documents", type=int, default=40_000, help="training texts, from the first train seeds"
    )
    parser.add_argument("--vocab-size", type=int, default=512)
    options = parser.parse_args()
    tokenizer = train_tokenizer(options.documents, options.vocab_size)
    save_tokenizer(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {options.out}")


if __name__ == "__main__":
    main()
