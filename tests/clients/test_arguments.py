"""What cannot be sent is refused where it is given, in words that say what it must be."""

from __future__ import annotations

from typing import Any

import pytest

from tlt_client import AsyncClient, Client, Retries
from tlt_client.errors import ConnectionFailed, InvalidArgument
from tlt_server.__main__ import main

SECRET = "sk-4711-of-nobody"
both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@both
@pytest.mark.parametrize("key, says", [
    (SECRET + "\n", "of which number 18 is white space"), ("\ufeff" + SECRET, "number 1 is no visible ASCII"),
    (SECRET + "ü", "number 18 is no visible ASCII"), ("a b" + SECRET, "number 2 is white space"), (SECRET + "\x00", "a control character")])
def test_a_key_that_no_header_carries_is_refused_at_once_and_not_quoted(kind: Any, key: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as refused:
        kind("http://127.0.0.1:8000", api_key=key, retries=Retries(times=9, first_s=60, longest_s=60))
    assert ".strip()" in str(refused.value) and "sk-" not in repr(refused.value) and refused.value.__cause__ is None


def test_a_key_that_is_no_text_is_not_quoted_either() -> None:
    with pytest.raises(InvalidArgument, match="of type bytes; give it as text") as refused:
        Client(api_key=SECRET.encode())  # type: ignore[arg-type]
    assert "sk-" not in str(refused.value)


@both
@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", "localhost", "", "http://", "https:///v1", "ftp://a", "http://a:b",
                                 None])
def test_an_address_that_is_no_servers_is_refused_at_once(kind: Any, url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"must begin with http:// or https:// and name a host, such as http://127"):
        kind(url)


def test_a_password_in_an_address_is_not_quoted() -> None:
    with pytest.raises(InvalidArgument, match="url is 'server:8000'") as refused:
        Client("me:secret@server:8000")
    assert "secret" not in str(refused.value)


def test_an_address_and_a_key_that_fit_are_taken() -> None:
    with Client("https://me:secret@127.0.0.1:1/below", api_key=SECRET) as client, pytest.raises(ConnectionFailed):
        client.weights()


def test_the_command_ends_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "status", "--url", "127.0.0.1:8000"]) == 2
    assert "url is '127.0.0.1:8000'; it must begin with http://" in capsys.readouterr().err
