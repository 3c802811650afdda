"""`tlt weights` in front of a server without a model: its trust, its key and its output."""

from pathlib import Path

import pytest

from tests.frontend.live_server import live_server
from tests.frontend.test_tls import Issuer, files, first
from tlt_client import Client
from tlt_server.__main__ import main
from tlt_server.wire.commands import AbortWeights

__all__ = ["files", "first"]  # fixtures


def test_push_command_presents_a_client_certificate(
    model: Path, files: dict[str, Path], first: Issuer, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = first.issue("client", "trainer@rl.example")
    own = ["--tls-ca", str(first.ca), "--tls-cert", str(cert), "--tls-key", str(key)]
    with live_server(model, **files, tls_client_ca=first.ca) as mutual:
        url = ["--url", mutual.url]
        for verb, said in (
            (["status"], "live: target 'v0'"),
            (["push", str(model), "--version", "v1"], "committed: version 'v1'"),
            (["rollback"], "rolled_back: "),
            (["abort", "v2"], "aborted: version 'v2'; live is 'v0'"),
        ):
            assert main(["weights", *verb, *url, *own]) == 0 and said in capsys.readouterr().out
        for missing in ([], own[:2]):
            assert main(["weights", "status", *url, *missing]) == 1
            assert "--tls-ca, --tls-cert, --tls-key" in capsys.readouterr().err
        assert main(["weights", "status", *url, *own[:4]]) == 2
        assert "give both, or neither" in capsys.readouterr().err
        assert main(["weights", "status", *url, "--tls-ca", str(key)]) == 2
        assert str(key) in capsys.readouterr().err


def test_push_command_sends_the_first_key_of_a_key_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_server(model, keys="push-key scopes=push-weights name=trainer\n") as server:
        asked = ["weights", "status", "--url", server.url]
        for content in (
            "push-key\n",
            "push-key scopes=push-weights name=trainer\n",
            "\n  # of the trainer\n\t# and\n  push-key  name=x\nother\n",
        ):
            (tmp_path / "own").write_text(content)
            assert main([*asked, "--api-key-file", str(tmp_path / "own")]) == 0, content
            assert "live: target 'v0'" in capsys.readouterr().out
        assert main(asked) == 1 and "unauthenticated" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n # none\n", "sha256:0123 name=x\nplain\n"])
def test_key_file_without_a_plain_key_is_refused_by_name(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").write_text(content)
    assert main(["weights", "status", "--api-key-file", str(tmp_path / "own")]) == 2
    assert f"{tmp_path / 'own'} does not begin with a plain key" in capsys.readouterr().err


def test_abort_command_names_its_version(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(model) as server:
        assert main(["weights", "abort", "step 7", "--url", server.url]) == 0
        assert capsys.readouterr().out == "aborted: version 'step 7'; live is 'v0'\n"
        [command] = server.engine.weight_commands
        assert isinstance(command, AbortWeights) and command.version == "step 7"
        with pytest.raises(SystemExit) as missing:
            main(["weights", "abort", "--url", server.url])
        assert missing.value.code == 2 and "VERSION" in capsys.readouterr().err
        with Client(server.url) as client:
            assert client.weights()["target"] == "v0"
