"""The two sides of `--` of `tlt fleet serve`: what replicas get, and what the gateway is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trustme

from tlt_client import Tls
from tlt_server.__main__ import _parse
from tlt_server.errors import StartupError
from tlt_server.fleet.launchers.plan import KEY, FleetPlan
from tlt_server.fleet.settings import planned
from tlt_server.frontend.http.keys import read_keys


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TLT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def plan(line: str) -> FleetPlan:
    return planned(_parse(["fleet", "serve", *line.split()]))


def test_flags_after_the_dashes_count_for_the_gateway_too(model: Path) -> None:
    line = f"--replicas 3 --port 9000 --max-n 4 -- --model {model} --max-n 8 --tensor-parallel 2"
    asked = plan(line)
    assert asked.replicas == 3 and asked.flags == line.split()[line.split().index("--") + 1 :]
    config = asked.config
    assert (config.model, config.port, config.max_n) == (model, 9000, 4)
    assert config.tensor_parallel == asked.gpus_each == 2
    assert asked.tls is None and len(asked.key) == 43


def test_fleets_key_is_known_to_a_gateway_that_asks_for_keys(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas need it to take what was uploaded to the gateway."""
    monkeypatch.setenv(KEY, "")
    monkeypatch.setenv("OWN_KEYS", "of-the-variable scopes=data")
    (file := tmp_path / "keys").write_text("of-the-file name=trainer")
    variable = "--api-key-variable OWN_KEYS"
    for flags, secret in ((f"--api-key-file {file}", "of-the-file"), (variable, "of-the-variable")):
        asked = plan(f"--replicas 1 {flags} -- --model {model}")
        keys = read_keys(asked.config)
        assert keys.find(secret) is not None and len(keys) == 2
        assert (caller := keys.find(asked.key)) and caller.scopes == {"link"}
        assert secret not in " ".join({**os.environ, **asked.variables()}.values())
    assert not plan(f"--replicas 1 -- --model {model}").config.api_key_variable
    asked = plan(f"--replicas 1 -- --model {model} --api-key-file {file}")
    assert "--api-key-file" in asked.flags and asked.config.api_key_file == file


def test_options_reach_the_gateway(model: Path) -> None:
    line = "--replicas 1 --consolidate 0.02 --sleep-idle 30 --rebalance --take-over"
    asked = plan(f"{line} -- --model {model}")
    assert asked[-4:] == (True, 0.02, 30.0, True)


def test_configuration_file_is_that_of_either_side(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: {model}\nmax_n: 5\n")
    own = f"--config {file} -- --model {model}"
    for line in (f"--replicas 1 -- --config {file}", f"--replicas 1 {own}"):
        assert plan(line).config.max_n == 5
    with pytest.raises(StartupError, match="--model stands before --, but it is the replicas'"):
        plan(f"--replicas 1 --config {file} --")
    with pytest.raises(StartupError, match="give one file: after -- it is the replicas'"):
        plan(f"--replicas 1 --config {file} -- --config {file}")
    file.write_text(f"model: {model}\nport: 5\n")
    with pytest.raises(StartupError, match="--port stands after --, but it is different for each"):
        plan(f"--replicas 1 -- --config {file}")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"--replicas 1 -- --{name} 1", f"--{name} stands after --, but it is different for each")
        for name in ("port", "host", "grpc-port", "probe-port", "state-dir", "api-key-variable")
    ]
    + [
        (
            "--replicas 2 --tensor-parallel 2 --threads 1 --",
            "--tensor-parallel stands before --, but it is the replicas'; write it after --\n"
            "--threads stands before --",
        ),
        ("--", "--launcher is local, which needs --replicas; give it"),
        ("--launcher static --", "--launcher is static, which needs --addresses; give it"),
        ("--launcher static --addresses a:1 --replicas 2 --", "leave it out, or use --launcher lo"),
        ("--replicas 2 --addresses a:1 --", "--addresses is given, but --launcher is local; leave"),
        ("--replicas 2 --link-key-file /no --", "--link-key-file is given, but --launcher is loc"),
        ("--replicas 2 --ray-labels a=b --", "--ray-labels is given, but --launcher is local"),
        ("--replicas 2 --replica-cpus 3 --", "leave it out, or use --launcher ray"),
        ("--replicas 2 --weight-channels http --", "weight_channels names http, but there is no"),
        ("--replicas 2 -- --weight-root .", "weights can be pushed by disk, but there is no --sta"),
        (
            "--replicas 2 --weight-root . --",
            "--weight-root stands before --, but it is the replica",
        ),
        ("--replicas 2 --link-cert x.pem --", "--link-ca, --link-cert, --link-cert-key: "),
        (
            "--launcher static --addresses a:1 --link-key-file /no --",
            "cannot read the key file /no: FileNo",
        ),
    ],
)
def test_unusable_settings_are_refused_before_a_start(line: str, says: str, model: Path) -> None:
    with pytest.raises(StartupError) as refused:
        plan(f"{line} --model {model}")
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--replicas 0 --", "'0' is not a whole number from 1 to 1024"),
        ("--replicas 1025 --", "'1025' is not a whole number"),
        ("--sleep-idle -1 --", "'-1' is not a number from 0 to a million"),
        ("--ray-labels a=b,c --", "'a=b,c' must be NAME=VALUE, with commas between"),
        ("-- --replicas=2", "unknown argument --replicas=2; write it before --"),
        ("-- --replica 2", "unknown argument --replica"),
    ],
)
def test_unusable_words_are_errors_of_the_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan(line)
    assert says in capsys.readouterr().err


def test_key_of_a_fleet_is_kept_for_its_user_alone(model: Path, tmp_path: Path) -> None:
    line = f"--replicas 1 --state-dir {tmp_path / 'state'} -- --model {model}"
    asked = plan(line)
    file = tmp_path / "state" / "fleet.key"
    assert file.read_text() == asked.key and file.stat().st_mode & 0o777 == 0o600
    assert plan(line).key == asked.key
    assert plan(f"--replicas 1 -- --model {model}").key != asked.key


def test_model_before_the_dashes_is_for_static_only(model: Path) -> None:
    """The launcher local would start replicas without a model."""
    flags = f"--model {model} --weight-root {model}"
    assert plan(f"--launcher static --addresses a:1 {flags}").config.model == model
    with pytest.raises(StartupError) as refused:
        plan(f"--replicas 2 {flags} --weight-channels disk")
    assert refused.value.message == "\n".join(
        f"--{name} stands before --, but it is the replicas'; write it after --"
        for name in ("model", "weight-root")
    )


def test_static_links_take_their_key_and_certificates(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret scopes=link\n")
    line = f"--launcher static --addresses a:1 --link-key-file {tmp_path / 'keys'} --"
    asked = plan(f"{line} --model {model}")
    assert asked.key == "secret" and asked.addresses == "a:1"
    assert asked.tls is None


def test_replicas_with_a_certificate_are_reached_by_tls(model: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    served = f"--model {model} --tls-cert {tmp_path}/cert.pem --tls-key {tmp_path}/key.pem"
    asked = plan(f"--replicas 1 --link-ca {tmp_path}/ca.pem -- {served}")
    assert asked.tls == Tls(f"{tmp_path}/ca.pem")
    assert plan(f"--replicas 1 -- {served}").tls == Tls()
