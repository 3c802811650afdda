"""The words allowed at each position of a command line, for errors and shell completion.

`tlt completion SHELL` prints a script that asks the command itself, so it knows the verbs and flags
of the installed version. If nothing matches, the shell completes file names.
"""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Mapping, Sequence
from typing import NoReturn

SCRIPTS = {
    "bash": """\
_tlt() {
  local IFS=$'\\n'
  COMPREPLY=($(tlt completion bash "${COMP_WORDS[@]:1:COMP_CWORD}"))
}
complete -o default -F _tlt tlt
""",
    "zsh": """\
_tlt() {
  local -a found=("${(@f)$(tlt completion zsh "${(@)words[2,CURRENT]}")}")
  [[ -n $found ]] && compadd -- $found || _files
}
compdef _tlt tlt
""",
    "fish": """\
complete -c tlt -a '(tlt completion fish (commandline -opc)[2..] (commandline -ct))'
""",
}


class LineParser(ArgumentParser):
    """A parser whose errors are one line, without the usage of a hundred flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what it takes)\n")


def verbs(parser: ArgumentParser) -> Mapping[str, ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, _SubParsersAction))
    return next((action.choices for action in actions), {})


def flags(parser: ArgumentParser) -> list[str]:
    names = (name for action in parser._actions for name in action.option_strings)
    return [name for name in names if name.startswith("--")]


def reached(parser: ArgumentParser, words: Sequence[str]) -> tuple[ArgumentParser, str]:
    """Return the parser of the last verb, and the word in the position of a further verb, or
    nothing.
    """
    for word in words:
        if not verbs(parser) or word.startswith("-"):
            break
        if word not in verbs(parser):
            return parser, word
        parser = verbs(parser)[word]
    return parser, ""


def completions(parser: ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the completions of the last word; an empty word matches everything."""
    *before, last = words
    parser, strange = reached(parser, before)
    if strange:
        return []
    values = [
        str(choice)
        for action in parser._actions
        if not action.option_strings
        for choice in action.choices or ()
    ]
    return [name for name in (*values, *flags(parser)) if name.startswith(last)]
