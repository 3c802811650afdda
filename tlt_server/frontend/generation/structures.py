"""The structure that a request asks for: what it may not be with, and its grammar, which the
reading process compiles once before the request is let in.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.generation.requests import FORMS, NativeRequest, StructuredOutputs, Words
from tlt_server.frontend.reading.asking import ask
from tlt_server.frontend.reading.frames import sliced
from tlt_server.frontend.reading.jobs import Patience, Slice
from tlt_server.frontend.reading.reader import LANES
from tlt_server.grammars import KEPT
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import Grammar, Sampling

MAX_BYTES = 2**17  # limit on a schema or grammar
# Of a core: a slow one takes 2 s for the largest grammar that compiles, and the process as much for
# each other lane.
COMPILE_S = 10.0
MOST = 64  # structures of one request, so that a batch takes a compiler from no one else for long


class Written(NamedTuple):
    """A structure as it was asked for. Equal ones have one grammar."""

    form: str  # a field of `StructuredOutputs`
    text: str  # choices and objects as JSON


def written(where: str, structure: StructuredOutputs) -> Written:
    """Return what a structure asks for. `where` is its field."""
    given = [name for name in FORMS if getattr(structure, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{where} has {' and '.join(given) or 'nothing in it'}; give exactly one of "
            f"{', '.join(FORMS)}"
        )
    [form] = given
    value = getattr(structure, form)
    if not is_small(value):
        raise _too_large(where)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text.encode()) > MAX_BYTES:
        raise _too_large(where)
    return Written(form, text)


def is_small(value: Any) -> bool:
    """Return True if JSON of a value may be within the limit, without writing what is far beyond.
    Only texts, names and members are counted.
    """
    least, waiting = 0, [value]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, str | list | dict):
            continue
        least += len(found)
        if least > MAX_BYTES:
            return False
        if isinstance(found, dict):
            waiting += found.values()
        if not isinstance(found, str):
            waiting += found
    return True


def _too_large(where: str) -> TooLarge:
    return TooLarge(f"{where} has more than {MAX_BYTES} bytes: simplify it")


def check_with(words: Words, sampling: Sampling, eos: bool) -> None:
    """Refuse what no structure can be with. `eos`: whether the model has an end token."""
    if sampling.structured_outputs is None:
        return
    structure = words.called("structured_outputs")
    for name, why in (
        ("ignore_eos", "the end token ends a structure"),
        ("min_tokens", "a structure ends where it is complete"),
        ("allowed_token_ids", "the structure says what is allowed"),
        ("bad_words", "the structure may need them"),
    ):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{words.called(name)} is given with {structure}, and {why}: leave one of them out"
            )
    if not eos:
        raise InvalidRequest(f"{structure} needs an end token, and this model has none")


class Grammars:
    """The grammars of structures that were asked for lately, or why these have none."""

    def __init__(self) -> None:
        self._known: OrderedDict[Written, Grammar | str] = OrderedDict()  # text: why it is none

    async def of(
        self, words: Words, request: NativeRequest, info: EngineInfo
    ) -> dict[int, Grammar]:
        """Return the grammar of each structure of a request, by the structure's identity.
        `InvalidRequest`: it has none.
        """
        where, given = words.called("structured_outputs"), dict[Written, list[int]]()
        for fields in (request.sampling, *(item.sampling for item in request.requests)):
            if fields is not None and fields.structured_outputs is not UNSET:
                structure = fields.structured_outputs
                given.setdefault(written(where, structure), []).append(id(structure))
                if len(given) > MOST:
                    raise TooLarge(
                        f"{where} differs between more than {MOST} items of one request; "
                        "spread them over several requests"
                    )
        found = {asked: await self._grammar(where, asked, info) for asked in given}
        return {id: found[asked] for asked, ids in given.items() for id in ids}

    async def _grammar(self, where: str, asked: Written, info: EngineInfo) -> Grammar:
        known = self._known.get(asked)
        if known is None:
            known = await _compiled(asked, info)
            while len(self._known) >= KEPT:
                self._known.popitem(last=False)
            self._known[asked] = known
        self._known.move_to_end(asked)
        if isinstance(known, str):
            raise InvalidRequest(f"{where}: {known}")
        return known


def _too_slow() -> Exception:
    return InvalidRequest(
        f"the grammar takes more than {COMPILE_S:g} s of a core to compile; simplify it, above all "
        "its repetitions and numbers"
    )


async def _compiled(asked: Written, info: EngineInfo) -> Grammar | str:
    """Return the grammar of a structure, or why it has none."""
    data = asked.text.encode()
    header = ("grammar", asked.form, info.vocab_size, [*info.eos_token_ids])
    work = [Slice(header, lambda: sliced([data]))]
    try:
        # As a large job, since a small text may take a while too.
        [found] = await ask(
            work, total=LANES[0] + 1, largest=len(data), patience=Patience(COMPILE_S, _too_slow)
        )
    except InvalidRequest as error:
        return error.message
    assert isinstance(found, Grammar)
    return found
