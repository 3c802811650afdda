"""Flags, variables and YAML are one strict set of settings."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tlt_client.channels import CHANNELS
from tlt_server import config
from tlt_server.build import engine_settings
from tlt_server.config import Config, load
from tlt_server.errors import StartupError
from tlt_server.process.machine import HostMemory
from tlt_server.settings.server import settings
from tlt_server.settings.sources import service_links
from tlt_server.wire.records import OFF, Strategy, parse_strategy

RAW = (
    "Input should",
    "Value error",
    "after validation",
    "unable to parse",
    "instance of",
)  # wording of the library


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TLT_")]:
        monkeypatch.delenv(name)


def yaml_file(directory: Path, text: str) -> Path:
    path = directory / "settings.yaml"
    path.write_text(text)
    return path


def test_flags_override_variables_which_override_the_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = yaml_file(tmp_path, f"model: {model}\nmax_queue: 1\nmax_running: 1\nmax_rows: 1\n")
    monkeypatch.setenv("TLT_MAX_QUEUE", "2")
    monkeypatch.setenv("TLT_MAX_RUNNING", "2")
    config = load({"max_queue": "3"}, file=file)
    assert (config.max_queue, config.max_running, config.max_rows) == (3, 2, 1)


def test_yaml_off_is_the_policy_and_not_a_boolean(model: Path, tmp_path: Path) -> None:
    assert load({"model": str(model)}, file=yaml_file(tmp_path, "policy: off\n")).policy == "off"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_qeue": "1"}, "unknown flag max_qeue; did you mean max_queue"),
        (
            {"port": "65536"},
            "port is '65536' (--port); it must be from 0 to 65535 (TCP port). Port",
        ),
        ({"port": "80.5"}, "port is '80.5'"),
        ({"threads": "0"}, "from 1 to 1024"),
        (
            {"header_timeout_s": "nan"},
            "header_timeout_s is 'nan' (--header-timeout-s); it must be a finite number, "
            "from 0.1 to 3600 (s)",
        ),
        ({"policy": "bge"}, "it must be 'auto', 'off', 'fixed', 'beg' or 'goodput'"),
        ({"port": "eighty"}, "it must be a whole number, from 0 to 65535 (TCP port). Port to bind"),
        ({"threads": "many"}, "it must be a whole number or 'auto', from 1 to 1024 (threads)"),
        ({"header_timeout_s": "soon"}, "it must be a number, from 0.1 to 3600 (s)"),
        ({"max_queue": "0"}, "from 1 to 16777216 (sequences)"),
        ({"max_timeout_s": "0"}, "from 0.1 to 1000000 (s)"),
        (
            {"default_timeout_s": "1000000"},
            "default_timeout_s is 1000000 s, above max_timeout_s (86400); lower it",
        ),
        ({"host": "0.0.0.0"}, "api_key_file"),
        ({"host": "example.org"}, "api_key_file"),
        (
            {"tls_cert": "cert.pem"},
            "tls_cert is cert.pem, tls_key none and tls_client_ca none; "
            "give tls_cert and tls_key together",
        ),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca only with them"),
        ({"model": "/does/not/exist"}, "not a directory"),
        (
            {"weight_root": "/does/not/exist"},
            "weight_root is /does/not/exist, which is not a directory; make it",
        ),
        ({"drafter": "/does/not/exist"}, "must be a directory, history or none"),
        ({"policy": "beg"}, "drafter is none"),
        ({"policy": "fixed", "drafter": "history"}, "eagle:7x4x32"),
        ({"sd_strategy": "history:4x1x5", "drafter": "history"}, "sd_strategy is for policy fixed"),
        (
            {"policy": "fixed", "drafter": "history", "sd_strategy": "eagle:4x1x5"},
            "make them agree",
        ),
        (
            {"device": "cpu", "dtype": "bfloat16"},
            "dtype is bfloat16, and a CPU computes in float32; use auto or float32",
        ),
        (
            {"drafter_training": "device", "drafter_training_device": "gpu1"},
            "drafter_training_device is 'gpu1'; it must be auto, cpu or a GPU such as cuda:1",
        ),
        (
            {"drafter_training": "share", "drafter_training_device": "cuda:1"},
            "it is for drafter_training device, as the other modes train where the engine",
        ),
        ({"drafter_training_percent": "0"}, "it must be from 1 to 100 (%)"),
        ({"drafter_training": "sometimes"}, "'off', 'idle', 'device' or 'share'"),
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype is 'fp8' (--kv-cache-dtype); it must be 'auto' or 'fp8_e4m3'",
        ),
        ({"device": "gpu"}, "device is 'gpu' (--device); it must be 'auto', 'cpu' or 'cuda'"),
        ({"graphs": "maybe"}, "graphs is 'maybe' (--graphs); it must be true or false"),
        (
            {"memory_fraction": "1.5"},
            "memory_fraction is '1.5' (--memory-fraction); it must be from 0.05 to 0.99 (share)",
        ),
    ],
)
def test_bad_flags_name_value_limit_and_remedy(
    model: Path, flags: dict[str, str], says: str
) -> None:
    with pytest.raises(StartupError) as caught:
        load({"model": str(model), **flags})
    assert says in caught.value.message
    assert not any(raw in caught.value.message for raw in RAW)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_qeue: 1", "unknown key max_qeue of"),
        ("port: true", "port is 'True' (the configuration file)"),
        ("port: [1]", "port is '[1]'"),
        ("- 1", "must map setting names"),
        ("a: [", "cannot read the configuration file"),
        (
            "max_running: 2.5",
            "max_running is '2.5' (the configuration file); it must be a whole number",
        ),
        ("port: 1\nmax_queue: 2\nport: 3", "the key port is given twice"),
        ("port: 1\nport: 1", "the key port is given twice"),
        ("{port: 1, 'port': 2}", "the key port is given twice"),
        ("[1]: 2", "cannot read the configuration file"),
    ],
)
def test_invalid_config_files_are_refused(
    model: Path, tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(StartupError) as caught:
        load({"model": str(model)}, file=yaml_file(tmp_path, text))
    assert says in caught.value.message
    assert not any(raw in caught.value.message for raw in RAW)


def test_unknown_flag_unlike_every_setting_gets_no_suggestion(model: Path) -> None:
    with pytest.raises(StartupError) as caught:
        load({"model": str(model), "zzz": "1"})
    assert "unknown flag" in caught.value.message and "did you mean" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "has no max_position_embeddings; set max_model_len"),
    ],
)
def test_unusable_config_json_is_refused_naming_its_fault(
    content: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=says):
        load({"model": str(tmp_path)}).resolved()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TLT_MAX_QEUE", "1", "did you mean TLT_MAX_QUEUE"),
        ("TLT_PORT", "x", "port is 'x' (TLT_PORT)"),
        ("TLT_ZZZ", "1", "unknown variable TLT_ZZZ"),
    ],
)
def test_invalid_environment_variables_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as caught:
        load({"model": str(model)})
    assert says in caught.value.message


LINKS = {  # as Kubernetes sets them for the Services tlt, tlt-probe and tlt-gateway
    "TLT_SERVICE_HOST": "10.96.0.12",
    "TLT_SERVICE_PORT": "8000",
    "TLT_SERVICE_PORT_HTTP": "8000",
    "TLT_PORT": "tcp://10.96.0.12:8000",
    "TLT_PORT_8000_TCP": "tcp://10.96.0.12:8000",
    "TLT_PORT_8000_TCP_PROTO": "tcp",
    "TLT_PORT_8000_TCP_PORT": "8000",
    "TLT_PORT_8000_TCP_ADDR": "10.96.0.12",
    "TLT_PROBE_PORT": "udp://[fd00::12]:8001",
    "TLT_GATEWAY_SERVICE_HOST": "fd00::12",
    "TLT_GATEWAY_PORT_53_UDP_ADDR": "fd00::12",
}


def test_service_links_of_kubernetes_are_ignored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TLT_MAX_QUEUE", "7")
    assert service_links(os.environ) == list(LINKS)
    config = load({"model": str(model)}, file=yaml_file(tmp_path, "port: 9\n"))
    assert (config.port, config.probe_port, config.max_queue) == (9, None, 7)
    with pytest.raises(StartupError, match=r"port is 'x' \(the configuration file\)"):
        load({"model": str(model)}, file=yaml_file(tmp_path, "port: x\n"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TLT_SERVICE_HOST", "example.org"),
        ("TLT_SERVICE_PORT", "http"),
        ("TLT_PORTS", "tcp://10.96.0.12:8000"),
        ("TLT_PROBES_PORT", "8001"),
        ("TLT_PORT_8000_TCP_PROTO", "http"),
        ("TLT_PORT_8000", "tcp://10.96.0.12:8000"),
        ("TLT_SERVICE_PORT", "8" * 6),
    ],
)
def test_variables_resembling_service_links_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=f"unknown variable {name}"):
        load({"model": str(model)})


def test_a_missing_model_names_all_three_ways() -> None:
    with pytest.raises(StartupError, match="--model, TLT_MODEL or the key model"):
        load({})


def test_auto_settings_resolve_once_into_a_new_frozen_object(model: Path) -> None:
    config = load({"model": str(model), "drafter": "history"})
    resolved = config.resolved()
    assert config.max_model_len is None and config.policy is None
    assert (resolved.max_model_len, resolved.max_prompt_tokens) == (512, 511)
    assert resolved.policy == "goodput"
    assert resolved.served_model_name == model.name and isinstance(resolved.threads, int)
    with pytest.raises(Exception, match="frozen"):
        resolved.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("auto", "auto"),
        ("cpu", "auto"),
        ("cpu", "float32"),
        ("auto", "bfloat16"),
        ("cuda", "float16"),
        ("cuda", "float32"),
    ],
)
def test_dtypes_of_the_device_are_accepted(model: Path, device: str, dtype: str) -> None:
    config = load({"model": str(model), "device": device, "dtype": dtype}).resolved()
    assert (config.device or "auto", config.dtype or "auto") == (device, dtype)


@pytest.mark.parametrize(("value", "graphs"), [("false", False), ("true", True)])
def test_booleans_are_read_from_flag_file_and_variable(
    model: Path, tmp_path: Path, value: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load({"model": str(model), "graphs": value}).graphs is graphs
    assert (
        load({"model": str(model)}, file=yaml_file(tmp_path, f"graphs: {value}\n")).graphs is graphs
    )
    monkeypatch.setenv("TLT_GRAPHS", value)
    assert load({"model": str(model)}).graphs is graphs


def test_unset_device_settings_are_left_to_the_engine(model: Path) -> None:
    told = engine_settings(load({"model": str(model)}).resolved())
    left = ("device", "dtype", "attention", "max_running", "max_rows", "kv_memory_mb", "pages")
    assert {getattr(told, name) for name in left} == {None}
    assert (told.graphs, told.memory_fraction) == (True, 0.9)


def test_the_configuration_survives_json(model: Path) -> None:
    config = load(
        {
            "model": str(model),
            "policy": "fixed",
            "drafter": "history",
            "sd_strategy": "history:4x2x9",
        }
    ).resolved()
    arrived = Config.model_validate_json(config.model_dump_json())
    assert dict(arrived) == dict(config) and arrived.strategy == Strategy("history", 4, 2, 9)


def test_engine_receives_its_settings(model: Path) -> None:
    given = {
        "device": "cuda",
        "dtype": "float16",
        "attention": "torch",
        "graphs": False,
        "memory_fraction": 0.5,
        "drafter": "history",
        "policy": "fixed",
        "page_size": 32,
        "pages": 9,
        "max_running": 3,
        "max_rows": 77,
        "sd_max_batch": 5,
        "threads": 2,
        "numerics": "fast",
    }
    flags = {name: str(value).lower() for name, value in given.items()}
    loaded = load({"model": str(model), "sd_strategy": "history:4x2x9", **flags})
    told = engine_settings(loaded.resolved())
    assert {name: getattr(told, name) for name in given} == given
    expected = model, Strategy("history", 4, 2, 9), 512, model.name
    assert (told.model, told.strategy, told.max_model_len, told.served_model_name) == expected


@pytest.mark.parametrize("text", ["eagle:7x4x32", "history:2x1x3"])
def test_strategy_parses_from_its_own_name(text: str) -> None:
    assert parse_strategy(text).name == text and OFF.name == "off"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eagle",
        "eagle:7x4",
        "eagle:0x4x32",
        "eagle:7x0x32",
        "eagle:7x4x1",
        "Eagle:7x4x32",
        "eagle:7x4x32x1",
        "eagle:-7x4x32",
        "eagle:7x4x32 ",
        "eagle:７x4x32",
        "eagle:7x4x٣٢",
    ],
)
def test_malformed_strategies_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="sd_strategy is"):
        parse_strategy(text)


def test_every_setting_documents_unit_and_default() -> None:
    for setting in settings():
        assert setting.doc.unit and setting.doc.sentence.endswith(".") and "; " in setting.help, (
            setting.name
        )
        default: Any = setting.default
        if (
            isinstance(default, int | float)
            and setting.doc.low is not None
            and setting.doc.high is not None
        ):
            assert setting.doc.low <= default <= setting.doc.high, setting.name
    [channels] = [each.doc.sentence for each in settings() if each.name == "weight_channels"]
    assert f": {', '.join(CHANNELS)};" in channels


@pytest.mark.parametrize(
    ("flags", "available", "ring_mb"),
    [
        ({}, 2**40, 16),
        ({"drafter_training": "idle"}, 2**40, 16),  # no features
        ({"drafter_feature_mb": "64"}, 2**40, 16),
        ({"drafter_training": "idle", "drafter_feature_mb": "64"}, 2**40, 896),
        ({"drafter_training": "idle", "drafter_feature_mb": "64", "device": "cuda"}, 2**40, 448),
        ({"drafter_training": "idle", "drafter_feature_mb": "64"}, 2**30, 128),
        ({"drafter_training": "idle", "drafter_feature_mb": "64"}, 2**20, 16),
        ({"drafter_training": "idle", "drafter_feature_mb": "64", "drafter_ring_mb": "5"}, 9, 5),
    ],
)
def test_feature_ring_holds_16384_tokens_given_memory(
    flags: dict[str, str],
    available: int,
    ring_mb: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description = {"max_position_embeddings": 4096, "hidden_size": 3584}
    (tmp_path / "config.json").write_text(json.dumps(description))
    monkeypatch.setattr(config, "host_memory", lambda: HostMemory(available, 2**41))
    assert load({"model": tmp_path, **flags}).resolved().drafter_ring_mb == ring_mb


def test_every_fault_of_the_settings_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown names and bad values of all three sources are told at once, a line each."""
    file = yaml_file(tmp_path, "port: eighty\nmax_queue: 0\nmax_qeue: 7\npolcy: off\n")
    monkeypatch.setenv("TLT_THREADS", "many")
    monkeypatch.setenv("TLT_MODLE", "x")
    with pytest.raises(StartupError) as refused:
        load({"model": str(model), "max_rows": "none", "prot": "1"}, file=file)
    lines = refused.value.message.splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        "unknown flag prot",
        "unknown variable TLT_MODLE",
        f"unknown key max_qeue of {file}",
        f"unknown key polcy of {file}",
        "threads is 'many' (TLT_THREADS)",
        "max_rows is 'none' (--max-rows)",
        "port is 'eighty' (the configuration file)",
        "max_queue is '0' (the configuration file)",
    ]
    assert not any(word in refused.value.message for word in RAW)


def test_every_conflicting_setting_is_named(model: Path) -> None:
    with pytest.raises(StartupError) as refused:
        load(
            {
                "model": str(model),
                "host": "0.0.0.0",
                "weight_channels": "disk,http,flop",
                "policy": "beg",
                "max_body_mb": "500",
            }
        )
    lines = refused.value.message.splitlines()
    assert [line.split()[0] for line in lines] == [
        "host",
        "weight_channels",
        "weight_channels",
        "weight_channels",
        "policy",
        "max_bodies_mb",
    ]
    names = {setting.name for setting in settings()}
    assert {line.split()[0] for line in lines} <= names and all("; " in line for line in lines)


def test_sound_settings_are_checked_next_to_bad_settings(tmp_path: Path) -> None:
    """A fault that names a bad value may be only that value's."""
    file = yaml_file(tmp_path, "port: eighty\nmodel: /none\nhost: 0.0.0.0\nmax_body_mb: many\n")
    with pytest.raises(StartupError) as refused:
        load({"max_bodies_mb": "1"}, file=file)
    lines = refused.value.message.splitlines()
    assert [line.split()[0] for line in lines] == ["port", "max_body_mb", "host", "model"]


def test_ignored_settings_count_as_not_given(model: Path, tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "port: eighty\nmax_queue: 5\nmax_qeue: 7\n")
    found = load({"model": str(model), "max_rows": "x"}, file=file, ignoring={"port", "max_rows"})
    assert (found.port, found.max_queue, found.max_rows) == (8000, 5, None)
