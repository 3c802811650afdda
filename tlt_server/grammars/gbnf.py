"""Grammars as requests write them, in GBNF or in Lark's form, turned into Lark's form."""

from __future__ import annotations

import re

from tlt_server.errors import InvalidRequest

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def as_lark(text: str) -> str:
    """Return a grammar in Lark's form."""
    return _of_gbnf(text) if _GBNF.search(text) else text


def _of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise InvalidRequest(f"the grammar is not GBNF: {str(error)[:300]}") from None
    except (RecursionError, IndexError, ValueError, KeyError) as error:
        raise InvalidRequest(
            f"the grammar cannot be read as GBNF: {type(error).__name__} {str(error)[:80]}"
        ) from None
    return lark
