"""Calls a running server from a command: trusts a CA, sends a key, and prints each failure as one
line with its remedy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from tlt_client import Client, ConnectionFailed, ServerError, Tls
from tlt_client.channels.errors import ContentRefused
from tlt_client.errors import InvalidArgument, NotLive
from tlt_server.errors import StartupError


def call(
    arguments: argparse.Namespace, act: Callable[[Client, Console], None], broken: str = ""
) -> int:
    """Call the server that the flags of `push.arguments.add_server` name, and return the exit
    status. `broken` is the advice to print if the connection breaks. `StartupError` if a file
    cannot be used.
    """
    console, say = (
        Console(stderr=stderr, soft_wrap=True, highlight=False) for stderr in (False, True)
    )
    try:
        with Client(
            arguments.url, api_key=key_in(arguments.api_key_file), tls=tls_of(arguments)
        ) as client:
            act(client, console)
            return 0
    except ServerError as error:
        say.print(f"tlt: {error.code}: {error.message}", markup=False)
        return 1
    except ConnectionFailed as error:
        say.print(
            f"tlt: {arguments.url} cannot be reached ({error}); start the server, or give another "
            f"--url, or the files that its TLS needs (--tls-ca, --tls-cert, --tls-key). {broken}",
            markup=False,
        )
        return 1
    except NotLive as error:
        say.print(f"tlt: {error}", markup=False)
        return 1
    except (ContentRefused, InvalidArgument, OSError) as error:
        raise StartupError(str(error)) from None


def tls_of(
    arguments: argparse.Namespace,
    names: Sequence[str] = ("tls_ca", "tls_cert", "tls_key"),
    *,
    by_default: bool = False,
) -> Tls | None:
    """Return the TLS files that these flags name. `StartupError` if one of them cannot be used.
    `by_default`: TLS is used without any file, too.
    """
    files = [getattr(arguments, name) for name in names]
    if not (any(files) or by_default):
        return None
    tls = Tls(*files)
    try:
        tls.context()
    except ValueError as error:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise StartupError(f"{flags}: {error}") from None
    return tls


def key_in(file: Path | None) -> str | None:
    """Return the first key of a file. `StartupError` if it is a sha256 or there is none."""
    if file is None:
        return None
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        said = f"cannot read the key file {file}: {type(error).__name__}"
        raise StartupError(f"{said}; name a text file whose first line is a key") from None
    first = next((words[0] for words in lines if words and not words[0].startswith("#")), "")
    if not first or first.startswith("sha256:"):
        raise StartupError(
            f"{file} does not begin with a plain key (a sha256 cannot be sent); write the key into "
            "its first line"
        )
    return first
