"""The `tlt` command: serve | fleet | demo | bench | doctor | weights | quantise | drafter |
completion. Parses arguments with the standard library only; heavy imports wait.

User errors (`StartupError`, `TltError`) end in one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tlt_server import __version__
from tlt_server.errors import StartupError, TltError
from tlt_server.process.threads import prepare_grpc
from tlt_server.settings.command_line import SCRIPTS, LineParser, completions, flags, reached, verbs


def main(argv: Sequence[str] | None = None) -> int:
    prepare_grpc()
    arguments = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return int(arguments.run(arguments) or 0)
    except (StartupError, TltError) as error:
        for fault in error.message.splitlines():
            print(f"tlt: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(argv: list[str], before: Sequence[str] = ()) -> argparse.Namespace:
    """`before`: flags that stand before `--`, after which the line is from."""
    parser = _parser()
    verb, strange = reached(parser, argv)
    after: list[str] = []
    if verb.get_default("after") is not None and "--" in argv:
        argv, after = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    if strange or (verbs(verb) and not {"-h", "--help", "--version"} & {*argv}):
        _demand_verb(verb, strange)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        word, near = unknown[0], _nearest(unknown[0], flags(verb))
        if not word.startswith("-") and "--model" in flags(verb):
            near = f"; did you mean --model {word}?"
        if word.partition("=")[0] in before:
            near = "; write it before --"
        verb.error(f"unknown argument {word}{near}")
    if verb.get_default("after") is not None:
        known.after, known.served = after, vars(_parse(["serve", *after], flags(verb)))
    return known


def _demand_verb(parser: argparse.ArgumentParser, strange: str) -> NoReturn:
    """Exit with the list of verbs, if a line has none or an unknown one."""
    said = f"{strange} is not a verb{_nearest(strange, verbs(parser))}"
    parser.exit(2, f"{parser.format_help()}\n{parser.prog}: {said if strange else 'name a verb'}\n")


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(
        prog="tlt",
        description="Exact, adaptive speculative rollouts for reasoning-RL trainers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tlt {__version__}")
    add = parser.add_subparsers(title="verbs", metavar="VERB", required=True).add_parser
    serve = add(
        "serve",
        help="serve a model",
        allow_abbrev=False,
        description=(
            "Serve a model. Every flag is also a variable (TLT_MAX_QUEUE) and a YAML key "
            "(max_queue); flags win over variables, variables over the file."
        ),
    )
    _add_settings(serve)
    serve.set_defaults(run=_serve)
    fleet = add("fleet", help="serve with many servers as with one", allow_abbrev=False)
    import_module("tlt_server.fleet.arguments").add_arguments(
        fleet.add_subparsers(metavar="VERB", required=True), _add_settings
    )
    for parser_of_verb in verbs(fleet).values():
        parser_of_verb.set_defaults(run=_later("tlt_server.fleet.command"))
    demo = add(
        "demo", help="serve the shipped pair and show exactness and speed-up", allow_abbrev=False
    )
    import_module("tlt_server.demo.arguments").add_arguments(demo)
    demo.set_defaults(run=_interruptible(_later("tlt_server.demo.command")))
    doctor = add(
        "doctor",
        help="check whether serve with these flags would work here",
        allow_abbrev=False,
        description=(
            "Check Python, packages, torch, port, disk, memory and model files, each with a "
            "remedy. Takes the flags of serve; without --model it checks for the shipped pair."
        ),
    )
    _add_settings(doctor)
    import_module("tlt_server.doctor.arguments").add_arguments(doctor)
    doctor.set_defaults(run=_later("tlt_server.doctor.command"))
    weights = add(
        "weights",
        help="push weights to a running server, look at them, roll back",
        allow_abbrev=False,
    )
    import_module("tlt_server.push.arguments").add_arguments(weights)
    weights.set_defaults(run=_later("tlt_server.push.command"))
    quantise = add(
        "quantise",
        help="write a checkpoint in FP8",
        allow_abbrev=False,
        description=(
            "Write a target's checkpoint with its linear maps in FP8 (e4m3, one scale per block "
            "of 128 x 128): half the bytes on disk, in memory and per step. Embedding, head, norms "
            "and biases stay as they are. OUT is an ordinary model directory, which other engines "
            "read, too. `tlt serve --model OUT` gives the tokens of `tlt serve --model DIR "
            "--quantization fp8`, which quantises at every start. Needs memory for a file of 2 GB."
        ),
    )
    quantise.add_argument(
        "model", type=Path, metavar="DIR", help="model directory in bfloat16, float16 or float32"
    )
    quantise.add_argument(
        "out", type=Path, metavar="OUT", help="directory to write; must not exist, or be empty"
    )
    quantise.set_defaults(run=_interruptible(_later("tlt_server.quantise")))
    drafter = add(
        "drafter", help="make, train and judge drafters", allow_abbrev=False
    ).add_subparsers(metavar="VERB", required=True)
    import_module("tlt_server.drafter.arguments").add_arguments(drafter, _later, _with_engine)
    _add_benches(add)
    completion = add(
        "completion",
        help="print what completes verbs and flags in a shell",
        allow_abbrev=False,
        description='For example, in ~/.bashrc: eval "$(tlt completion bash)"',
    )
    completion.add_argument("shell", choices=SCRIPTS)
    completion.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    completion.set_defaults(run=lambda arguments: _complete(parser, arguments))
    return parser


def _add_benches(add: Callable[..., argparse.ArgumentParser]) -> None:
    benches = add("bench", help="benchmarks", allow_abbrev=False).add_subparsers(
        metavar="NAME", required=True
    )
    for name, kind in import_module("tlt_server.bench.arguments").BENCHES.items():
        bench = benches.add_parser(name, help=kind.sentence, allow_abbrev=False)
        kind.add(name, bench)
        ended = _in_folder if kind.loads_engine else _interruptible
        bench.set_defaults(run=ended(partial(_bench, name, kind)))


def _bench(name: str, kind: Any, arguments: argparse.Namespace) -> int:
    verb = _with_engine if kind.loads_engine else _later
    return int(verb(kind.place(name, arguments))(arguments) or 0)


def _complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.words:
        print("\n".join(completions(parser, arguments.words)))
    else:
        print(SCRIPTS[arguments.shell], end="")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    from tlt_server.settings.server import settings

    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings.")
    for setting in settings():
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.is_switch else {}
        parser.add_argument(
            setting.flag,
            dest=setting.name,
            default=argparse.SUPPRESS,
            metavar=setting.doc.unit.split()[0].upper(),
            help=setting.help.replace("%", "%%"),
            **alone,
        )


def _serve(arguments: argparse.Namespace) -> int:
    from tlt_server.process.garbage import loading

    with loading():
        from tlt_server.build import serve
        from tlt_server.config import load

    flags = {
        name: value for name, value in vars(arguments).items() if name not in ("run", "config")
    }
    return serve(load(flags, file=arguments.config).resolved())


def _later(module: str):  # type: ignore[no-untyped-def]
    return lambda arguments: import_module(module).run(arguments)


def _with_engine(module: str):  # type: ignore[no-untyped-def]
    """Return a verb with an engine in this process, whose libraries read the environment when they
    are loaded.
    """

    def run(arguments: argparse.Namespace) -> int:
        from tlt_server.models.environment import library_environment
        from tlt_server.process.garbage import loading

        os.environ.update(library_environment(arguments.numerics))
        with loading():
            verb = import_module(module)
        return int(verb.run(arguments))

    return run


def _interruptible(run):  # type: ignore[no-untyped-def]
    """Return a verb that stops its servers and removes its folders on SIGTERM and SIGHUP, too."""

    def interruptible(arguments: argparse.Namespace) -> int:
        _on_end(signal.default_int_handler)
        return int(run(arguments) or 0)

    return interruptible


def _in_folder(run):  # type: ignore[no-untyped-def]
    """Return a verb whose temporary files are in one folder, which SIGTERM and SIGHUP remove. They
    end the process at once: an exception inside a compiler may be lost, or abort.
    """

    def in_folder(arguments: argparse.Namespace) -> int:
        import shutil
        import tempfile

        def end(number: int, frame: FrameType | None) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
            _on_end(end)
            before, tempfile.tempdir = tempfile.tempdir, folder
            try:
                return int(run(arguments))
            finally:
                tempfile.tempdir = before

    return in_folder


def _on_end(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Handle SIGTERM and SIGHUP, unless they are ignored, as after nohup."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _nearest(name: str, known: Iterable[str]) -> str:
    from tlt_server.settings.wording import nearest

    return nearest(name.partition("=")[0], known)


if __name__ == "__main__":
    sys.exit(main())
