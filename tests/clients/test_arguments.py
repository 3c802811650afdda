"""Arguments that cannot be sent are refused where they are given, with what they must be."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.tiny_model import write_model
from tlt_client import AsyncClient, Client, Retries
from tlt_client.errors import ConnectionFailed, InvalidArgument
from tlt_server.__main__ import main

SECRET = "sk-4711-not-a-key"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(write_model(tmp_path / "model")) as running:
        yield running


both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@both
@pytest.mark.parametrize(
    "key, says",
    [
        (SECRET + "\n", "of which number 18 is white space"),
        ("\ufeff" + SECRET, "number 1 is no visible ASCII"),
        (SECRET + "ü", "number 18 is no visible ASCII"),
        ("a b" + SECRET, "number 2 is white space"),
        (SECRET + "\x00", "a control character"),
    ],
)
def test_key_unfit_for_a_header_is_refused_and_not_quoted(kind: Any, key: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as refused:
        kind("http://127.0.0.1:8000", api_key=key, retries=Retries(times=9, first_s=60, max_s=60))
    assert ".strip()" in str(refused.value) and "sk-" not in repr(refused.value)
    assert refused.value.__cause__ is None


def test_a_non_text_key_is_not_quoted() -> None:
    with pytest.raises(InvalidArgument, match="of type bytes; give it as text") as refused:
        Client(api_key=SECRET.encode())  # type: ignore[arg-type]
    assert "sk-" not in str(refused.value)


@both
@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "localhost:8000",
        "localhost",
        "",
        "http://",
        "https:///v1",
        "ftp://a",
        "http://a:b",
        None,
    ],
)
def test_an_address_without_a_server_is_refused_at_once(kind: Any, url: str) -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"must begin with http:// or https:// and name a host, such as http://127",
    ):
        kind(url)


def test_a_password_in_an_address_is_not_quoted() -> None:
    with pytest.raises(InvalidArgument, match="url is 'server:8000'") as refused:
        Client("me:secret@server:8000")
    assert "secret" not in str(refused.value)


def test_a_fitting_address_and_key_are_accepted() -> None:
    with (
        Client("https://me:secret@127.0.0.1:1/below", api_key=SECRET) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.weights()


# versions

ALLOWED = (
    "have 1 to 256 characters, none of them '/' or a control or format character, no "
    "'@' after a '+', and not dots alone, such as run-7"
)
CALLS: list[Callable[[Any, Any], Any]] = [
    lambda client, version: client.update_weights("p", version),
    lambda client, version: client.push_weights(version, path="p"),
    lambda client, version: client.put_weights(
        version, "part.safetensors", b"abc", start=0, total=3
    ),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("version", ["run/7", "", "a\n", "x" * 257, ".", ".."])
def test_invalid_version_is_refused_before_sending(call: Any, version: str) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidArgument) as refused:
        call(client, version)
    assert str(refused.value).endswith(f"; it must {ALLOWED}")
    assert "version is '" in str(refused.value)


@pytest.mark.parametrize("call", CALLS)
def test_non_text_version_is_refused_before_sending(call: Any) -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InvalidArgument, match="version is 7 of type int; .* such as 'run-7'"),
    ):
        call(client, 7)


# numbers of other libraries


def test_numpy_and_torch_numbers_are_sent_as_python_numbers(server: LiveServer) -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    given = [
        np.array([7, 8]),
        [np.int64(7), torch.tensor(8)],
        torch.tensor([7, 8]),
        (Seven(), np.uint8(8)),
        torch.tensor([7]),
    ]
    with Client(server.url, timeout_s=20) as client:
        for ids in given:
            client.generate(
                [{"token_ids": ids, "seed": np.int64(3)}],
                sampling={
                    "max_tokens": np.int32(2),
                    "temperature": np.float32(0.5),
                    "top_p": np.float64(1),
                },
            )
    asked = [list(request.token_ids) for request in server.engine.submitted]
    assert asked == [[7, 8]] * 4 + [[7]]
    assert {request.sampling.temperature for request in server.engine.submitted} == {0.5}


def test_types_without_a_json_form_are_refused_by_name() -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InvalidArgument, match="a complex, for which JSON has no form"),
    ):
        client.generate([{"token_ids": [1j]}])


@pytest.mark.parametrize(
    ("sampling", "item"),
    [
        ({"temperature": float("nan")}, {}),
        ({"logit_bias": {"3": np.float64("inf")}}, {}),
        ({"temperature": np.float32("nan")}, {}),
        ({"top_p": torch.tensor(float("inf"))}, {}),
        ({}, {"token_ids": np.array([1.0, np.nan])}),
        ({}, {"token_ids": [1], "sampling": {"min_p": torch.tensor([[float("-inf")]])}}),
        ({}, {"token_ids": [1.0, float("nan")]}),
        ({"stop_token_ids": (3, float("inf"))}, {}),
        ({}, {"seed": float("nan")}),
        ({}, {"messages": [{"content": [{"x": float("nan")}]}]}),
    ],
)
def test_non_finite_numbers_are_refused(sampling: dict[str, Any], item: dict[str, Any]) -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InvalidArgument, match="finite number"),
    ):
        client.generate([{"token_ids": [1], **item}], sampling=sampling)


def test_numpy_longdouble_is_refused_by_name() -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InvalidArgument, match="longdouble; give Python's own numbers"),
    ):
        client.generate([{"token_ids": [1]}], sampling={"temperature": np.longdouble(0.5)})


# the command


def test_command_error_ends_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "status", "--url", "127.0.0.1:8000"]) == 2
    assert "url is '127.0.0.1:8000'; it must begin with http://" in capsys.readouterr().err
