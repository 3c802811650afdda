"""Text to token ids and back: the tokenizer and chat template of a model directory, incremental
text, stop strings. No torch.

`Incremental` and `StopStrings` see one token's text at a time, so what they say does not depend on
how the engine groups tokens into outputs: that changes with the speculation strategy, the reply
must not.
"""

from __future__ import annotations

import copy
import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tlt_server.errors import InvalidRequest, ModelError

REPLACEMENT = "\ufffd"
# tokens of context kept before new ones, since some decoders treat the first token of a text in a
# special way
KEPT = 4
# Limits on a product in a template: bits of a number, and characters or members of a repetition.
MAX_BITS, MAX_REPEATED = 4096, 2**20
MAX_PENDING = 512  # tokens; only a model that emits invalid bytes without end gets there


class Text:
    """The tokenizer of one model directory. A directory without `tokenizer.json` serves token ids
    only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        tokens: dict[str, str] | None = None,
        directory: Path = Path(),
    ) -> None:
        self.tokenizer, self.directory = tokenizer, directory
        self.longest_token = (
            max(map(len, tokenizer.get_vocab()), default=0) if tokenizer is not None else 0
        )  # characters
        self.tokens = tokens or {}
        self.template = template
        self._template = _compile(template) if template else None
        self._variables = _variables(template) if template else set()

    @classmethod
    def load(cls, model: Path) -> Text:
        path = model / "tokenizer.json"
        if not path.exists():
            return cls(None, directory=model)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"cannot read {path}: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(model / "tokenizer_config.json")
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        try:
            return cls(tokenizer, _template_source(model, config), tokens, model)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {model} does not compile: {error}") from None

    @property
    def specials(self) -> dict[str, int]:
        """Return the special tokens, with their ids."""
        added = self.tokenizer.get_added_tokens_decoder() if self.tokenizer else {}
        return {token.content: id for id, token in added.items() if token.special}

    def with_template(self, template: str) -> Text:
        """Return the same tokenizer with another template. `InvalidRequest`: it is none."""
        other = copy.copy(self)
        try:
            other._template, other._variables = _compile(template), _variables(template)
        except MemoryError:
            raise
        except Exception as error:  # a client's code; the library has many errors
            raise InvalidRequest(
                f"chat_template does not compile: {str(error)[:200]}; send it in Jinja's form"
            ) from None
        other.template = template
        return other

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def reads(self, name: str) -> bool:
        """Tell whether the chat template takes something of this name in."""
        return name in self._variables

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Token ids of each text; `special` adds what the tokenizer puts around a bare text (not
        wanted after a chat template).
        """
        if self.tokenizer is None:
            raise InvalidRequest(
                "this model directory has no tokenizer.json, so texts cannot be read; send "
                "token_ids"
            )
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text, special tokens left out unless `special`; empty without a tokenizer."""
        return (
            self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)
            if self.tokenizer is not None
            else ""
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        open_end: bool = False,
    ) -> str:
        """The chat template applied, with the assistant's turn opened, or with `open_end` cut after
        the text of the final message. Of `options` the template sees those that it reads by name.
        """
        if open_end:
            return self._open_end(messages, tools, options)
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; send prompt or token_ids instead of messages"
            )
        if "developer" not in (self.template or ""):
            messages = [_of_system(message) for message in messages]
        try:
            known = {
                name: value for name, value in (options or {}).items() if name in self._variables
            }
            return self._template.render(
                **{
                    "add_generation_prompt": True,
                    **known,
                    **self.tokens,
                    "messages": messages,
                    "tools": tools,
                }
            )
        except MemoryError:
            raise
        except Exception as error:  # the template is the model's code, the data the client's
            raise InvalidRequest(
                f"the chat template refuses these messages: {str(error)[:200]}"
            ) from None

    def _open_end(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
    ) -> str:
        """Render with a mark after the final text, and cut there, since the same text may come
        again after it.
        """
        mark = f"[{secrets.token_hex(16)}]"
        final = messages[-1] | {"content": f"{messages[-1]['content']}{mark}"}
        parts = self.render([*messages[:-1], final], tools, options).split(mark)
        if len(parts) != 2:
            raise InvalidRequest(
                "continue_final_message is true, and the chat template shows the text of the final "
                f"message {len(parts) - 1} times; it must be once: leave continue_final_message out"
            )
        return parts[0]


def _of_system(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message under the older name of its role, which every template knows."""
    return message | {"role": "system"} if message.get("role") == "developer" else message


def for_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as a template sees them: objects stay, structs say what theirs is."""
    return [
        message if isinstance(message, dict) else message.for_template() for message in messages
    ]


class Incremental:
    """The text that each further token adds; with `flush()`, the sum is `Text.decode` of all
    tokens.

    U+FFFD at the end may be the head of a character whose bytes are still to come, so it is held
    back; what stands before is settled.
    """

    def __init__(self, text: Text, *, special: bool = False) -> None:
        """`special`: special tokens show as text."""
        self._text, self._special = text, special
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text already given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = len(text.rstrip(REPLACEMENT))
        delta = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        if settled == len(text) and len(self._window) >= 4 * KEPT:
            self._shorten()
        if len(self._window) >= MAX_PENDING:
            delta += text[self._shown :]
            self._window, self._shown = [], 0
        return delta

    def _shorten(self) -> None:
        """Keep a few last tokens, cut between characters: some decoders spoil a whole run of bytes
        for one that is incomplete.
        """
        for kept in range(KEPT, 2 * KEPT):
            text = self._decode(self._window[-kept:])
            if REPLACEMENT not in text:
                self._window, self._shown = self._window[-kept:], len(text)
                return

    def flush(self) -> str:
        delta = self._decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._text.decode(token_ids, special=self._special)


class StopStrings:
    """Finds the first stop string and holds back text that may be the start of one.

    `push` returns the text that can be shown; after `matched` is set that is everything before the
    stop string and no more follows.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        """`keeps`: the stop string that ends the text is shown."""
        self._stops, self._keeps = stops, keeps
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, armed: bool = True) -> str:
        """Take new text. `armed` false (before `min_tokens`): stop strings are ordinary text."""
        text = self._held + delta
        self._held = ""
        if armed:
            hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if hits:
                at, _, self.matched = min(hits)
                return text[: at + len(self.matched) * self._keeps]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of some stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) and len(stop) > length for stop in self._stops):
                return length
        return 0


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for trainers; when rendering a prompt it is
    transparent.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which no number or text grows to a size that takes long to compute."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        bits = [side.bit_length() for side in (left, right) if isinstance(side, int)]
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "**":
            large = len(bits) == 2 and bits[0] * abs(right) > MAX_BITS
        elif sizes and bits:
            large = sizes[0] * (right if isinstance(right, int) else left) > MAX_REPEATED
        else:
            large = sum(bits) > MAX_BITS
        if large:
            raise SecurityError(f"a value that {operator} makes is too large")
        return super().call_binop(context, operator, left, right)


def _variables(source: str) -> set[str]:
    """The names that the template takes from outside."""
    return jinja2.meta.find_undeclared_variables(_environment().parse(source))


def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _template_source(model: Path, config: dict[str, Any]) -> str | None:
    path = model / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"cannot read {path}: {error}; it must be UTF-8 encoded text"
            ) from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next(
            (entry.get("template") for entry in source if entry.get("name") == "default"), None
        )
    return source if isinstance(source, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return content if isinstance(content, dict) else {}
