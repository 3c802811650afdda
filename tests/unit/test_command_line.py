"""Verbs and flags of `tlt` that its errors list and that shells complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_server.__main__ import _parse, _parser
from tlt_server.config import load
from tlt_server.settings.command_line import SCRIPTS, completions, verbs
from tlt_server.settings.server import settings

SHELLS = {  # what a shell runs to complete `tlt serve --max-q`
    "bash": 'COMP_WORDS=(tlt serve --max-q) COMP_CWORD=2; _tlt; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "words=(tlt serve --max-q) CURRENT=3; _tlt",
    "fish": "complete -C 'tlt serve --max-q'",
}
# zsh's own completion needs a terminal, so these say what they are given.
ZSH = 'compdef() { :; }; compadd() { shift; print -l -- "$@"; }; '


@pytest.mark.parametrize("line", [[], ["sreve"], ["serv", "--help"], ["--modle", "x"]])
def test_missing_verb_error_lists_every_verb(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(line)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and len(verbs(_parser())) == 9
    for verb in verbs(_parser()):
        assert f"\n  {verb}" in said.err.replace("    ", "  "), verb


@pytest.mark.parametrize(
    "verb", [name for name, parser in verbs(_parser()).items() if verbs(parser)]
)
def test_missing_subcommand_error_lists_every_subcommand(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = verbs(verbs(_parser())[verb])
    for line in ([verb], [verb, next(iter(inner))[:-1] + "_"]):
        with pytest.raises(SystemExit) as ended:
            _parse(line)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and all(f"    {name}" in said for name in inner)
    assert f"did you mean {next(iter(inner))}?" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("serve --modle x", "tlt serve: unknown argument --modle; did you mean --model?"),
        ("serve some/dir", "tlt serve: unknown argument some/dir; did you mean --model some/dir?"),
        ("doctor --port", "tlt doctor: argument --port: expected one argument"),
        ("bench rollout some/dir", "tlt bench rollout: unknown argument some/dir"),
        ("weights push", "tlt weights push: the following arguments are required: "),
        ("completion csh", "tlt completion: argument shell: invalid choice: 'csh'"),
    ],
)
def test_command_line_error_is_one_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(line.split())
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.startswith(says), said.err
    assert said.err.count("\n") == 1 and said.err.endswith("--help lists what it takes)\n")


@pytest.mark.parametrize(
    "name", [setting.name for setting in settings() if setting.doc.unit == "true | false"]
)
def test_boolean_flag_may_stand_without_a_value(name: str, tmp_path: Path) -> None:
    flag = f"--{name.replace('_', '-')}"
    (tmp_path / "config.json").write_text("{}")
    for words, on in (([flag], True), ([flag, "true"], True), ([flag, "false"], False)):
        given = vars(_parse(["serve", *words, "--model", str(tmp_path)]))
        flags = {key: given[key] for key in given if key not in ("run", "config")}
        assert getattr(load(flags), name) is on


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ser"], ["serve"]),
        (["--ver"], ["--version"]),
        (["serve", "--max-q"], ["--max-queue", "--max-queue-tokens"]),
        (["serve", "--model", "some/dir"], []),
        (["bench", "roll"], ["rollout"]),
        (["bench", "rollout", "--qui"], ["--quick"]),
        (["completion", ""], [*SCRIPTS, "--help"]),
        (["nope", ""], []),
    ],
    ids=" ".join,
)
def test_completion_offers_the_words_allowed_at_that_position(
    words: list[str], found: list[str]
) -> None:
    assert completions(_parser(), words) == found


def test_shell_completion_offers_every_setting() -> None:
    found = completions(_parser(), ["serve", "--"])
    assert {setting.flag for setting in settings()} <= {*found}


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_works_in_a_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on PATH")
    given = (ZSH if shell == "zsh" else "") + SCRIPTS[shell] + SHELLS[shell]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", given],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["--max-queue", "--max-queue-tokens"], done.stderr


def test_completion_command_prints_the_scripts_and_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shell, script in SCRIPTS.items():
        arguments = _parse(["completion", shell])
        assert arguments.run(arguments) is None
        assert capsys.readouterr().out == script
        arguments = _parse(["completion", shell, "serve", "--max-queue-"])
        arguments.run(arguments)
        assert capsys.readouterr().out == "--max-queue-tokens\n"
