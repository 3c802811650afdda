"""LoRA adapters in every dialect: loaded, named by requests, listed, unloaded, refused by name."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server, serving
from tests.waiting import until
from tlt_client import AsyncClient, Client
from tlt_client.errors import NotFound
from tlt_server.wire.commands import Manifest, PushWeights, UnloadAdapter

PROMPT = {"prompt": "abc", "max_tokens": 4}
CONFIG = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
TENSORS = [{"name": "w", "dtype": "float32", "shape": [2], "checksum": "x"}]


server = serving(scope="function", served_model_name="tiny", max_loras=2, max_lora_rank=8)


def post(server: LiveServer, route: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{route}", json=body, timeout=30)


def load(server: LiveServer, name: str = "math", **fields: object) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path="a", **fields)


def test_requests_name_their_adapter_in_each_dialect(server: LiveServer) -> None:
    assert load(server).text == "Success: LoRA adapter 'math' added successfully."
    command = server.engine.weight_commands[0]
    assert isinstance(command, PushWeights)
    assert command.manifest == Manifest(role="adapter", adapter="math", path="a")
    replies = [
        post(server, "/v1/completions", model="math", **PROMPT),
        post(server, "/generate", requests=[{"prompt": "abc", "lora": "math"}]),
        post(server, "/inference/v1/generate", model="math", token_ids=[97]),
        post(server, "/generate", text="abc", lora_path="math"),
        post(server, "/generate", text=["abc", "abd"], lora_path=["math", None]),
        post(server, "/v1/completions", model="tiny", **PROMPT),
        post(server, "/v1/responses", model="math", input="abc", max_output_tokens=2),
    ]
    assert [reply.status_code for reply in replies] == [200] * 7
    assert replies[0].json()["model"] == replies[-1].json()["model"] == "math"
    asked = ["math", "math", "math", "math", "math", "", "", "math"]
    assert [request.lora for request in server.engine.submitted] == asked


def test_an_unloaded_adapter_is_not_found(server: LiveServer) -> None:
    load(server)
    for reply in (
        post(server, "/v1/completions", model="art", **PROMPT),
        post(server, "/generate", requests=[{"prompt": "abc", "lora": "art"}]),
        post(server, "/inference/v1/generate", model="art", token_ids=[97]),
        post(server, "/generate", text="abc", lora_path="art"),
    ):
        assert reply.status_code == 404 and "'art'" in reply.text and "math" in reply.text
    assert not server.engine.submitted


def test_model_and_weight_routes_list_adapters(server: LiveServer) -> None:
    load(server)
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in models][-1] == ("math", "tiny")
    assert models[0]["parent"] is None
    assert httpx.get(f"{server.url}/v1/models/math").json()["parent"] == "tiny"
    assert httpx.get(f"{server.url}/weights").json()["adapters"] == {"math": "named"}
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["vllm_config"]["lora_config"] == {"max_loras": 2, "max_lora_rank": 8}
    assert info["engine"]["adapters"] == {"math": "named"}
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'tlt_lora_adapter_info{name="math",version="named"} 1.0' in metrics
    assert 'tlt_weight_pushes_total{result="committed",role="adapter"} 1.0' in metrics
    post(server, "/v1/completions", model="math", n=3, **PROMPT)
    counted = 'tlt_lora_sequences_total{name="math"} 3.0'
    assert counted in httpx.get(f"{server.url}/metrics").text
    httpx.delete(f"{server.url}/adapters/math")
    assert 'name="math"' not in httpx.get(f"{server.url}/metrics").text


def test_reload_in_the_vllm_form_needs_load_inplace(server: LiveServer) -> None:
    load(server)
    again = load(server)
    assert again.status_code == 400 and "load_inplace" in again.text
    assert load(server, load_inplace=True).status_code == 200
    again = post(server, "/load_lora_adapter", lora_name="math", lora_path="a")
    assert again.status_code == 200, "prime-rl replaces its adapter so"


def test_adapter_names_unfit_for_spans_are_refused(server: LiveServer) -> None:
    for name in ("a+b", "a@b", "a\u202eb", "a\u200bb", "a\nb", "../a", "a//b"):
        for route in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            refused = post(server, route, lora_name=name, lora_path="a")
            assert refused.status_code == 400, name
            assert "no '+', '@', control or format" in refused.text, name
        manifest = {"version": "1", "role": "adapter", "adapter": name, "path": "a"}
        assert post(server, "/update_weights", **manifest).status_code == 400, name
    assert not server.engine.weight_commands


def test_request_and_version_names_refuse_invisible_characters(server: LiveServer) -> None:
    for name in ("a\u202eb", "a\u2028b", "a\nb", "a\x85b"):
        native = {"requests": [{"prompt": "abc", "id": name}]}
        grouped = {"requests": [{"prompt": "abc", "group_id": name}]}
        for route, body in (
            ("/generate", native),
            ("/generate", grouped),
            ("/generate", {"text": "abc", "rid": name}),
            ("/v1/completions", {"prompt": "abc", "request_id": name}),
            ("/inference/v1/generate", {"token_ids": [97], "request_id": name}),
            ("/update_weights", {"version": name, "path": "a"}),
            ("/update_weight_version", {"new_version": name}),
            ("/destroy_weights_update_group", {"group_name": name}),
        ):
            refused = post(server, route, **body)
            assert refused.status_code == 400, (route, name, refused.text)
    ambiguous = post(server, "/update_weights", version="v0+math@1", path="a")
    assert ambiguous.status_code == 400 and "no '@' after a '+'" in ambiguous.text


def test_adapter_named_like_the_model_serves_the_models_requests(server: LiveServer) -> None:
    assert load(server, "tiny").status_code == 200
    for body in ({"model": "tiny"}, {}):
        assert post(server, "/v1/completions", **body, **PROMPT).status_code == 200
    assert [request.lora for request in server.engine.submitted] == ["tiny", ""]
    [model] = httpx.get(f"{server.url}/v1/models").json()["data"][:1]
    assert (model["id"], model["parent"]) == ("tiny", None)
    assert httpx.delete(f"{server.url}/adapters/tiny").status_code == 200


def test_adapter_names_with_slashes_are_unloaded_by_every_route(server: LiveServer) -> None:
    load(server, "org/math")
    assert httpx.delete(f"{server.url}/adapters/org/math").status_code == 200
    load(server, "org/math")
    with Client(server.url) as client:
        assert client.unload_adapter("org/math")["state"] == "unloaded"


def test_weight_dir_with_an_adapter_is_loaded_for_the_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "adapter_config.json").write_text("{}")
    (tmp_path / "whole").mkdir()
    settings = {"served_model_name": "org/tiny", "max_loras": 1, "weight_root": tmp_path}
    with live_server(model, **settings) as server:
        for directory in ("whole", "none", "step_3", str(tmp_path / "step_3")):
            assert post(server, "/update_weights", weight_dir=directory).status_code == 200
        pushed = [command.manifest for command in server.engine.weight_commands]
        *whole, adapted, absolute = pushed
        assert (adapted.role, adapted.adapter, adapted.path) == ("adapter", "org/tiny", "step_3")
        assert (absolute.role, absolute.adapter) == ("adapter", "org/tiny")
        assert [(each.role, each.adapter) for each in whole] == [("target", "")] * 2
        post(server, "/v1/completions", model="org/tiny", **PROMPT)
        assert server.engine.submitted[-1].lora == "org/tiny"


def test_model_name_unfit_for_spans_allows_no_adapter(model: Path, tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "adapter_config.json").write_text("{}")
    settings = {"served_model_name": "qwen+math@2", "max_loras": 1, "weight_root": tmp_path}
    with live_server(model, **settings) as server:
        refused = post(server, "/update_weights", weight_dir="step")
        assert refused.status_code == 400 and not server.engine.weight_commands
        assert "served_model_name is 'qwen+math@2'" in refused.text
        assert "POST /load_lora_adapter" in refused.text


def test_adapters_are_shared_by_all_keys(model: Path) -> None:
    keyed = {key: {"authorization": f"Bearer {key}"} for key in "abpq"}
    with live_server(
        model,
        max_loras=2,
        keys=(
            "a scopes=data name=a\nb scopes=data name=b\n"
            "p scopes=push-weights name=p\nq scopes=push-weights name=q\n"
        ),
    ) as server:
        named = {"lora_name": "math", "lora_path": "a"}
        for key in "pq":
            url = f"{server.url}/load_lora_adapter"
            assert httpx.post(url, json=named, headers=keyed[key]).status_code == 200
        asked = {"model": "math", **PROMPT}
        for key in "ab":
            url = f"{server.url}/v1/completions"
            assert httpx.post(url, json=asked, headers=keyed[key]).status_code == 200
            assert (
                httpx.delete(f"{server.url}/adapters/math", headers=keyed[key]).status_code == 403
            )
        assert httpx.delete(f"{server.url}/adapters/math", headers=keyed["p"]).status_code == 200


def test_unload_ends_running_requests_after_its_drain_time(model: Path) -> None:
    with live_server(model, max_loras=2, drain_timeout_s=0.2) as server:
        load(server, "busy")
        began = time.monotonic()
        assert httpx.delete(f"{server.url}/adapters/busy", timeout=240).status_code == 200
        assert time.monotonic() - began >= 0.2
        ends = [
            each.in_flight
            for each in server.engine.weight_commands
            if isinstance(each, UnloadAdapter)
        ]
        assert ends == ["drain", "abort"]


def test_adapters_are_unloaded_in_each_dialect(server: LiveServer) -> None:
    for name, unload in (
        ("a", lambda: post(server, "/v1/unload_lora_adapter", lora_name="a")),
        ("b", lambda: post(server, "/unload_lora_adapter", lora_name="b")),
        ("c", lambda: httpx.delete(f"{server.url}/adapters/c?in_flight=abort")),
    ):
        reply = post(server, "/load_lora_adapter", lora_name=name, lora_path="a")
        assert reply.json() == {
            "success": True,
            "error_message": "",
            "loaded_adapters": {name: "named"},
        }
        assert unload().status_code == 200
        assert unload().status_code == 404
    command = server.engine.weight_commands[-1]
    assert isinstance(command, UnloadAdapter) and command.in_flight == "abort"
    assert httpx.delete(f"{server.url}/adapters/c?in_flight=keep").status_code == 400
    refused = post(server, "/load_lora_adapter_from_tensors", lora_name="a")
    assert refused.status_code == 415 and "pickle" in refused.text


def test_both_clients_unload_adapters(server: LiveServer) -> None:
    for name in ("a", "b c"):
        post(server, "/load_lora_adapter", lora_name=name, lora_path="a")
    with Client(server.url) as client:
        assert client.unload_adapter("b c", "abort")["state"] == "unloaded"
        with pytest.raises(NotFound, match="b c"):
            client.unload_adapter("b c")

    async def unload() -> None:
        async with AsyncClient(server.url) as client:
            await client.unload_adapter("a")

    asyncio.run(unload())
    commands = server.engine.weight_commands
    orders = [each.in_flight for each in commands if isinstance(each, UnloadAdapter)]
    assert orders == ["abort", "drain", "drain"]


def test_adapter_manifest_carries_its_configuration(server: LiveServer) -> None:
    manifest = {"version": "1", "role": "adapter", "adapter": "math", "path": "a"}
    reply = post(server, "/update_weights", **manifest, in_flight="drain")
    assert (reply.json()["role"], reply.json()["state"]) == ("adapter", "committed")
    shared = {"version": "2", "role": "adapter", "adapter": "math", "channel": "broadcast"}
    shared |= {"group": "g", "tensors": TENSORS, "adapter_config": CONFIG}
    assert post(server, "/update_weights", **shared).status_code == 200
    pushed = server.engine.weight_commands[-1]
    assert isinstance(pushed, PushWeights)
    assert pushed.manifest.adapter_config == {**CONFIG, "use_rslora": False}
    for change, said in (
        ({"adapter": None}, "adapter"),
        ({"role": "target"}, "adapter"),
        ({"adapter_config": None}, "adapter_config"),
        ({"partial": True}, "partial"),
        ({"adapter": "a@b"}, "adapter is 'a@b'"),
        ({"adapter_config": {**CONFIG, "use_dora": True}}, "use_dora"),
    ):
        body = {name: value for name, value in (shared | change).items() if value is not None}
        refused = post(server, "/update_weights", **body)
        assert refused.status_code == 400 and said in refused.text, change


def test_restarted_engine_has_its_target_and_no_adapter(server: LiveServer) -> None:
    load(server)
    server.engine.dies = True
    until(lambda: post(server, "/v1/completions", model="math", **PROMPT).status_code == 404)
    assert post(server, "/v1/completions", **PROMPT).status_code == 200
