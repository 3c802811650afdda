"""Find sentences that slow a reader down: `python -m tests.unit.english PATH ...` lists them.

A program can see three of the rules in CONTRIBUTING.md: a docstring begins with a noun or a verb,
no trailing comment continues the code's sentence, no filler words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(
    r"(of|that|which|whose|who|whoever|whatever|what|whether|where|how|why|when|while|it|they|he|"
    r"she|its|their|there|and|or|but|as|so|in|on|at|by|for|from|to|with|without|only|also|not|"
    r"neither|between|behind|beside|before|after|until|once|those|these|tell whether)\b",
    re.IGNORECASE,
)
# A docstring on the line of its quotes, or on the next one: of a module, a class or a function
BEGINNING = re.compile(
    rf'(^[ \t]*|:[ \t]+)[a-z]?"""[ \t]*{FRAGMENT.pattern}|'
    rf'(\A|:[^\n]*\n)\s*[a-z]?"""\s*{FRAGMENT.pattern}',
    re.IGNORECASE | re.MULTILINE,
)
TRAILING = re.compile(r"#\s*(that|of|which|whose|whom)\b", re.IGNORECASE)
FILLER = re.compile(
    r"\b(behind|beside|besides|anew|nobody|whatever|whoever|somebody|so many|as far as)\b",
    re.IGNORECASE,
)
INSIDE_QUOTES = re.compile(r"`[^`]*`")


def offenders(path: Path) -> Iterator[str]:
    """Yield `line: reason` for each sentence of a Python file that breaks a rule."""
    source = path.read_text()
    suspicious = BEGINNING.search(source)  # which saves most files the parser
    for node in statements(ast.parse(source)) if suspicious else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and FRAGMENT.match(text):
                line = node.body[0].lineno
                yield f"{line}: a docstring that begins with {text.split()[0]!r}"
    if not (FILLER.search(source) or TRAILING.search(source)):
        return  # which saves most files the tokenizer
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if TRAILING.match(token.string) and token.line.strip() != token.string:
                yield f"{line}: a trailing comment that continues the code's sentence"
        elif token.type not in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            continue
        for number, text in enumerate(token.string.split("\n")):
            for word in FILLER.findall(INSIDE_QUOTES.sub("", text)):
                yield f"{line + number}: the filler {word!r}"


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and the statements in it, at any depth. Expressions are left out: they hold no
    docstring, and most nodes are expressions.
    """
    yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, block, ())
        for child in children if isinstance(children, list) else ():
            yield from statements(child)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        place = Path(name)
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            for offence in offenders(file):
                print(f"{file}:{offence}")
