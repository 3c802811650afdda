"""Chat templates: those of a model directory by name, and the text that one makes from messages.

A model has a template named `default`, and may have others, such as `tool_use` for requests with
tools. They are found as transformers finds them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2.meta

from tlt_server.errors import InvalidRequest, ModelError, TooLarge
from tlt_server.frontend.generation.sandbox import environment
from tlt_server.wire.packed import PackedText

DEFAULT, WITH_TOOLS = "default", "tool_use"
# Limit on one text. To tokenise it takes 310 bytes per character.
MAX_TEXT_CHARS = 10 * 2**20


class ChatTemplate:
    """A compiled template, with the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str], *, strict: bool = False) -> None:
        """`strict`: the template comes from a request."""
        within = environment(strict=strict)
        self.source, self._tokens = source, tokens
        self._template = within.from_string(source)
        self._variables = jinja2.meta.find_undeclared_variables(within.parse(source))

    @classmethod
    def brought(cls, source: str, tokens: Mapping[str, str]) -> ChatTemplate:
        """Return the template of a request. `InvalidRequest` if it does not compile."""
        try:
            return cls(source, tokens, strict=True)
        except MemoryError:
            raise
        except Exception as error:  # a client's code; the library has many errors
            raise InvalidRequest(
                f"chat_template does not compile: {_reason(error)}; send it in Jinja's form"
            ) from None

    def reads(self, name: str) -> bool:
        """Return True if the template reads a variable of this name."""
        return name in self._variables

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        open_end: bool = False,
    ) -> str:
        """Apply the template to messages, with the assistant's turn opened, or with `open_end` cut
        after the text of the final message. It sees the `options` that it reads by name.
        """
        if open_end:
            return self._open_end(messages, tools, options)
        if "developer" not in self.source:
            messages = [_of_system(message) for message in messages]
        try:
            known = {
                name: value for name, value in (options or {}).items() if name in self._variables
            }
            return self._template.render(
                **{
                    "add_generation_prompt": True,
                    **known,
                    **self._tokens,
                    "messages": messages,
                    "tools": tools,
                }
            )
        except MemoryError:
            raise
        except Exception as error:  # the template is the model's code, the data the client's
            raise InvalidRequest(
                f"the chat template refuses these messages: {_reason(error)}"
            ) from None

    def _open_end(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
    ) -> str:
        """Render with a mark after the final text, and cut there, since the same text may occur
        again later.
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


def _reason(error: Exception) -> str:
    """Return an error's message without paths of this machine."""
    return type(error).__name__ if isinstance(error, ImportError | OSError) else str(error)[:200]


def _of_system(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message under the older name of its role, which every template knows."""
    return message | {"role": "system"} if message.get("role") == "developer" else message


def for_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in the form of templates: objects stay, structs convert themselves."""
    return [
        message if isinstance(message, dict) else message.for_template() for message in messages
    ]


def template_sources(model: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a model's templates by name: from its files, else from its
    tokenizer_config.json.
    """
    files = {path.stem: path for path in sorted(model.glob("additional_chat_templates/*.jinja"))}
    own = model / "chat_template.jinja"
    if own.exists():
        files[DEFAULT] = own
    if files:
        return {name: _source(path) for name, path in files.items()}
    found = config.get("chat_template")
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (KeyError, TypeError):
            found = {DEFAULT: found}
    named = found if isinstance(found, dict) else {DEFAULT: found} if found is not None else {}
    if not all(isinstance(source, str) for source in named.values()):
        raise ModelError(
            f"chat_template of {model / 'tokenizer_config.json'} is {json.dumps(found)[:100]}; "
            "it must be a text, or a list of objects with name and template"
        )
    return named


def _source(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}; it must be UTF-8 encoded text") from None


def check_length(where: str, text: str | PackedText) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise TooLarge(
            f"{where} has a text of {len(text)} characters; the server tokenises at most "
            f"{MAX_TEXT_CHARS} at once: send it as token ids"
        )
