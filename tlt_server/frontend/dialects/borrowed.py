"""Parts of requests that several borrowed dialects share: the model or LoRA adapter that a request
names, whose body is read only if the server can answer; priorities; and structured outputs,
translated to the native field; only one of those may be set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from tlt_client.fields import Choices, Json, Salt
from tlt_server.errors import InvalidRequest, NotFound
from tlt_server.frontend.generation.requests import BorrowedSampling, StructuredOutputs
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import read_given
from tlt_server.frontend.http.fields import RefusedField, Tolerant, shown
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.service import Service

# Fields that requests of several dialects have
AskedModel = Annotated[str, "served_model_name, a LoRA adapter that is loaded, or absent"]
CacheSalt = Annotated[Salt, "requests share cached prefixes only with those of the same salt"]
Schema = Annotated[Json | None, "a JSON schema"]
Regex = Annotated[str | None, "matches the whole output"]
Texts = Annotated[Choices | None, "texts, of which the output is one"]
GrammarText = Annotated[str | None, "a grammar in GBNF or in Lark's form"]
ANY_OBJECT = StructuredOutputs(json_schema={"type": "object"})
_SPACES = RefusedField(
    "white space in JSON is a space, or a line break with an indent: leave it out"
)
_OTHER_FIELD = RefusedField("structured_outputs has it: use that")
_PROPERTIES = RefusedField("the schema says so by additionalProperties: use that")


class JsonSchemaFormat(Tolerant, frozen=True, kw_only=True):
    schema: Annotated[Json, "the JSON schema"]
    name: Annotated[str, "has no effect", Meta(max_length=256)] = ""


class ResponseFormat(Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = {
        "schema": RefusedField("give it as json_schema.schema, with the type json_schema", ()),
        **dict.fromkeys(("regex", "pattern", "grammar", "ebnf", "choice"), _OTHER_FIELD),
    }

    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"], "text: no structure"
    ]
    json_schema: Annotated[JsonSchemaFormat | None, "the schema, with the type json_schema"] = None
    structures: Annotated[
        list[dict[str, Any]] | None,  # the parts of a tag are counted when they are written
        "with the type structural_tag: begin, schema and end of each tag",
    ] = None
    triggers: Annotated[
        Annotated[list[str], Meta(max_length=1024)] | None,
        "with the type structural_tag: texts that begin a tag",
    ] = None
    format: Annotated[dict[str, Any] | None, "with the type structural_tag: its newer form"] = None

    def native(self, where: str) -> StructuredOutputs | None:
        match self.type:
            case "json_object":
                return ANY_OBJECT
            case "json_schema":
                if self.json_schema is None:
                    raise InvalidRequest(
                        f"{where} has the type json_schema and no json_schema; give it one"
                    )
                return StructuredOutputs(json_schema=self.json_schema.schema)
            case "structural_tag":
                parts = (
                    {"format": self.format}
                    if self.format
                    else {"structures": self.structures, "triggers": self.triggers}
                )
                return StructuredOutputs(structural_tag={"type": "structural_tag", **parts})
        return None


class VllmStructure(Tolerant, frozen=True, kw_only=True):
    """One structure; exactly one field must be set."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        "disable_any_whitespace": _SPACES,
        "whitespace_pattern": _SPACES,
        "disable_additional_properties": _PROPERTIES,
        "json_schema": RefusedField("its name is json here: use that", ()),
        "ebnf": RefusedField("its name is grammar here: use that"),
    }

    json: Schema = None
    json_object: Annotated[bool, "any JSON object"] = False
    regex: Regex = None
    choice: Texts = None
    grammar: GrammarText = None
    structural_tag: Annotated[Json | None, "see response_format"] = None

    def native(self, where: str) -> StructuredOutputs | None:
        given: dict[str, Any] = {
            "json": self.json,
            "json_object": self.json_object or None,
            "regex": self.regex or None,
            "choice": self.choice or None,
            "grammar": self.grammar or None,
            "structural_tag": self.structural_tag or None,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        if len(asked) > 1:
            raise InvalidRequest(f"{where} has {' and '.join(asked)}; give one of them")
        if not asked:
            return None
        [(name, value)] = asked.items()
        if name == "json_object":
            return ANY_OBJECT
        return StructuredOutputs(**{"json_schema" if name == "json" else name: value})


class Structured(BorrowedSampling, frozen=True, kw_only=True):
    """Sampling fields, with the fields that may request a structure."""

    def structures(self) -> Iterator[tuple[str, StructuredOutputs | None]]:
        """Yield each field and its structure."""
        raise NotImplementedError

    @property
    def structure(self) -> tuple[str, StructuredOutputs | UnsetType]:
        """Return the field that requests a structure, and the structure."""
        given = [(name, asked) for name, asked in self.structures() if asked is not None]
        if len(given) > 1:
            names = " and ".join(name for name, _ in given)
            raise InvalidRequest(f"{names} both ask for a structure; give one of them")
        return given[0] if given else ("structured_outputs", UNSET)


class VllmStructured(Structured, frozen=True, kw_only=True):
    """vLLM's fields, the older ones too."""

    response_format: Annotated[ResponseFormat | None, "what the output looks like"] = None
    structured_outputs: Annotated[VllmStructure | None, "the texts that the output may be"] = None
    guided_decoding: Annotated[VllmStructure | None, "the older name of structured_outputs"] = None
    guided_json: Schema = None
    guided_json_object: Annotated[bool, "any JSON object"] = False
    guided_regex: Regex = None
    guided_choice: Texts = None
    guided_grammar: GrammarText = None

    def structures(self) -> Iterator[tuple[str, StructuredOutputs | None]]:
        for name in ("response_format", "structured_outputs", "guided_decoding"):
            field = getattr(self, name)
            yield name, field and field.native(name)
        yield "guided_json", _native("json_schema", self.guided_json)
        yield "guided_json_object", ANY_OBJECT if self.guided_json_object else None
        yield "guided_regex", _native("regex", self.guided_regex or None)
        yield "guided_choice", _native("choice", self.guided_choice or None)
        yield "guided_grammar", _native("grammar", self.guided_grammar or None)


class SglangStructured(Structured, frozen=True, kw_only=True):
    """SGLang's fields."""

    json_schema: Schema = None
    regex: Regex = None
    ebnf: GrammarText = None
    structural_tag: Annotated[Json | None, "triggers, and structures of begin, schema and end"] = (
        None
    )

    def structures(self) -> Iterator[tuple[str, StructuredOutputs | None]]:
        yield "json_schema", _native("json_schema", self.json_schema)
        yield "regex", _native("regex", self.regex or None)
        yield "ebnf", _native("grammar", self.ebnf or None)
        yield "structural_tag", _native("structural_tag", self.structural_tag or None)


class BothStructured(VllmStructured, frozen=True, kw_only=True):
    """The fields of OpenAI's API as vLLM and SGLang extend it."""

    regex: Regex = None
    ebnf: GrammarText = None

    def structures(self) -> Iterator[tuple[str, StructuredOutputs | None]]:
        yield from super().structures()
        yield "regex", _native("regex", self.regex or None)
        yield "ebnf", _native("grammar", self.ebnf or None)


def _native(form: str, value: Any) -> StructuredOutputs | None:
    return None if value is None else msgspec.convert({form: value}, StructuredOutputs)


async def generating(service: Service, kind: Any, request: Request) -> Any:
    """Read the body of a generating request. `Unavailable` if the server could not answer it
    now.
    """
    service.engine.check_available()
    await request.body()
    service.engine.check_available()  # again, since reading the body may take long
    # Checked before a large body is parsed.
    service.engine.check_room(Demand(sequences=1, owner=caller_of(request).name))
    return await _read(service, kind, request)


async def running(service: Service, kind: Any, request: Request) -> Any:
    """Read the body of a request that only needs the tokenizer; a pause or sleep does not
    matter.
    """
    service.engine.check_running()
    await request.body()
    service.engine.check_running()
    return await _read(service, kind, request)


async def _read(service: Service, kind: Any, request: Request) -> Any:
    asked = await read_given(service, kind, request)
    adapter_of(service, asked.model)
    return asked


def unknown(service: Service, name: str) -> NotFound:
    info, served = service.engine.info, service.config.served_model_name
    adapters = ", ".join(info.adapters) if info is not None else ""
    return NotFound(
        f"model is {name[:100]!r}; this server serves {served!r}: name that one, or none"
        + (f", or one of its LoRA adapters ({shown(adapters)})" if adapters else "")
    )


def adapter_of(service: Service, model: str) -> str:
    """Return the LoRA adapter that a request names as its model; empty for the model itself.
    `NotFound` for another name.
    """
    info = service.engine.info
    if info is not None and model in info.adapters:
        return model
    if model not in ("", service.config.served_model_name, str(service.config.model)):
        raise unknown(service, model)
    return ""


def named(service: Service, model: str) -> str:
    """Return the adapter or model that computes a request with this model name."""
    return adapter_of(service, model) or service.config.served_model_name
