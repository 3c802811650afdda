"""The native dialect end to end: what a reply holds, streamed and not."""

import json
import textwrap

import httpx
import pytest

import tlt_client
from tests.frontend.fake_engine import EOS, FAILS
from tests.frontend.live_server import LiveServer
from tlt_client import Client, Item, SdLimits, ServerError
from tlt_client.wire import Done, ItemResult, Token
from tlt_server.wire.records import DraftLimits


def test_a_batch_comes_back_in_order_with_every_field(client: Client) -> None:
    reply = client.generate(
        [{"id": "b", "prompt": "xyz"}, {"id": "a", "token_ids": [65, 66], "n": 2, "seed": 7}],
        sampling={"max_tokens": 5, "logprobs": 1, "raw_logprobs": True, "prompt_logprobs": 0},
    )
    assert [result.id for result in reply.results] == ["b", "a"]
    first, second = reply.results
    assert first.choices[0].text == "xyzxy"
    assert [choice.index for choice in second.choices] == [0, 1]
    choice = second.choices[0]
    assert choice.token_ids == [65, 66, 65, 66, 65]
    assert choice.logprobs == [-0.5] * 5 and choice.raw_logprobs == [-1.0] * 5
    assert choice.top_logprobs == [([token], [-0.5]) for token in choice.token_ids]
    assert choice.prompt_logprobs == [None, ([66, 65], [-2.0, -0.1])]
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)
    assert [(span.version, span.start, span.end) for span in choice.weight_versions] == [
        ("v0", 0, 5)
    ]
    assert [choice.seed for choice in second.choices] == [7, 7 + 10**6]
    assert choice.sd.mean_accept_length == 2.5 and choice.sd.histogram == [0, 1, 1]
    assert (choice.sd.steps, choice.sd.drafted) == (2, 6)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 15)
    assert reply.numerics == "strict"


def test_absent_seeds_differ_and_are_reported(client: Client, server: LiveServer) -> None:
    reply = client.generate([{"prompt": "a"}, {"prompt": "a"}], sampling={"max_tokens": 1})
    seeds = [result.choices[0].seed for result in reply.results]
    assert len(set(seeds)) == 2
    assert {request.seed for request in server.engine.submitted[-2:]} == set(seeds)


def test_sampling_of_an_item_overrides_each_field_it_sets(
    client: Client, server: LiveServer
) -> None:
    client.generate(
        [{"prompt": "ab", "n": 2, "sampling": {"top_k": 5}}, {"prompt": "ab", "group_id": "g"}],
        sampling={"max_tokens": 2, "top_k": 9, "temperature": 0.5},
    )
    first, second, third = server.engine.submitted[-3:]
    assert (first.sampling.top_k, first.sampling.temperature, third.sampling.top_k) == (5, 0.5, 9)
    assert first.group_id == second.group_id != third.group_id == "g"


def test_stop_token_is_in_the_ids_but_not_in_the_text(client: Client) -> None:
    by_eos, by_id = client.generate(
        [{"token_ids": [65, EOS]}, {"token_ids": [65, 66], "sampling": {"stop_token_ids": [66]}}]
    ).results
    assert (by_eos.choices[0].token_ids, by_eos.choices[0].text) == ([65, EOS], "A")
    assert by_eos.choices[0].stop_reason == EOS
    assert (by_id.choices[0].token_ids, by_id.choices[0].text) == ([65, 66], "A")
    assert by_id.choices[0].stop_reason == 66


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_cut_from_the_text_but_kept_in_the_ids(client: Client, stream: bool) -> None:
    item = {"prompt": "hello world", "sampling": {"stop": ["wo", "zz"], "max_tokens": 100}}
    if stream:
        events = list(client.stream([item]))
        tokens = [event for event in events if isinstance(event, Token)]
        result = next(event for event in events if isinstance(event, ItemResult))
        assert "".join(token.text or "" for token in tokens) == "hello "
        assert [id for token in tokens for id in token.token_ids] == list(b"hello wo")
    else:
        result = client.generate([item]).results[0]
    choice = result.choices[0]
    assert (choice.text, choice.token_ids) == ("hello ", list(b"hello wo"))
    assert (choice.finish_reason, choice.stop_reason, len(choice.logprobs)) == ("stop", "wo", 8)
    assert choice.weight_versions[-1].end == 8


def test_min_tokens_disables_stop_strings_until_reached(client: Client) -> None:
    choice = (
        client.generate(
            [{"prompt": "ab"}], sampling={"stop": "b", "min_tokens": 5, "max_tokens": 9}
        )
        .results[0]
        .choices[0]
    )
    assert (choice.text, len(choice.token_ids)) == ("ababa", 6)


def test_streaming_gives_tokens_then_results_then_done(client: Client) -> None:
    events = list(
        client.stream(
            [{"id": "x", "prompt": "abc"}, {"id": "y", "prompt": "de", "n": 2}],
            sampling={"max_tokens": 7},
        )
    )
    assert isinstance(events[-1], Done) and events[-1].usage.completion_tokens == 21
    results = {event.id: event for event in events if isinstance(event, ItemResult)}
    assert set(results) == {"x", "y"}
    for id, result in results.items():
        for choice in result.choices:
            own = [
                event
                for event in events
                if isinstance(event, Token) and (event.id, event.index) == (id, choice.index)
            ]
            assert [token for event in own for token in event.token_ids] == choice.token_ids
            assert "".join(event.text or "" for event in own) == choice.text
            assert [value for event in own for value in event.logprobs] == choice.logprobs


def test_stream_frames_are_server_sent_events(server: LiveServer) -> None:
    body = {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}, "stream": True}
    response = httpx.post(f"{server.url}/generate", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in response.text.strip().split("\n\n")]
    assert [frame[0] for frame in frames] == ["event: token", "event: result", "event: done"]
    assert all(json.loads(frame[1].removeprefix("data: ")) for frame in frames)


def test_stream_carries_requested_top_and_prompt_logprobs(client: Client) -> None:
    events = list(
        client.stream(
            [{"prompt": "ab"}], sampling={"max_tokens": 5, "logprobs": 1, "prompt_logprobs": 0}
        )
    )
    tokens = [event for event in events if isinstance(event, Token)]
    choice = next(event for event in events if isinstance(event, ItemResult)).choices[0]
    assert [each for event in tokens for each in event.top_logprobs or []] == choice.top_logprobs
    assert [event.prompt_logprobs for event in tokens] == [choice.prompt_logprobs] + [None] * (
        len(tokens) - 1
    )


def test_max_tokens_null_allows_all_tokens_after_the_prompt(
    client: Client, server: LiveServer
) -> None:
    client.generate([{"token_ids": [65] * 500}], sampling={"max_tokens": None})
    assert server.engine.submitted[-1].sampling.max_tokens == 12


def test_messages_go_through_the_chat_template(client: Client, server: LiveServer) -> None:
    client.generate([{"messages": [{"role": "user", "content": "hi"}]}], sampling={"max_tokens": 1})
    assert server.engine.submitted[-1].token_ids == [257, *b"hi", 256, 258]


def test_failed_item_is_returned_as_an_error_among_results(client: Client) -> None:
    good, bad = client.generate(
        [{"prompt": "a"}, {"token_ids": [FAILS], "n": 3}], sampling={"max_tokens": 2}
    ).results
    assert good.choices and good.error is None
    assert bad.error is not None and bad.error.code == "engine_failed" and not bad.choices


def test_reply_without_a_result_has_the_first_errors_status(server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/generate", json={"requests": [{"token_ids": [FAILS]}]})
    assert response.status_code == 500
    assert response.json()["results"][0]["error"]["code"] == "engine_failed"


def test_probes_metrics_and_server_info_answer(server: LiveServer, client: Client) -> None:
    for path in ("/health", "/livez", "/readyz", "/startupz"):
        assert httpx.get(server.url + path).status_code == 200
    info = client.server_info()
    assert info["numerics"] == "strict" and info["engine"]["weight_version"] == "v0"
    assert "api_key_file" not in info["config"]
    client.generate([{"prompt": "a"}], sampling={"max_tokens": 1})
    text = httpx.get(f"{server.url}/metrics").text
    for line in (
        'tlt_sequences_total{result="length"}',
        "tlt_pages_free 60.0",
        'tlt_strategy_in_force{strategy="off"} 1.0',
        'tlt_engine_figure{name="odd_gauge"} 1.0',
        "tlt_open_sequences 0.0",
        "tlt_build_info{",
    ):
        assert line in text


def test_server_info_passes_the_checks_of_sglang_trainers(server: LiveServer) -> None:
    """slime and Miles start on an external engine only if each of these is equal."""
    host, port = server.url.removeprefix("http://").split(":")
    expected = {
        "enable_memory_saver": False,  # their `offload_rollout`, which only colocated runs have
        "host": host,
        "port": int(port),
        "nnodes": 1,
        "node_rank": 0,
        "gpu_id_step": 1,
        "base_gpu_id": 0,
        "tp_size": 1,
        "dp_size": server.client.replicas.count,
        "pp_size": 1,
        "ep_size": 1,
        "enable_metrics": True,
        "enable_lora": False,
        "dtype": "float32",
        "disaggregation_mode": "null",
    }
    for path in ("/server_info", "/get_server_info"):
        info = httpx.get(server.url + path).json()
        assert {name: info.get(name) for name in expected} == expected


def test_each_replica_counts_as_a_rank_that_takes_weights(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.client.replicas), "count", 3)
    assert httpx.get(f"{server.url}/get_world_size").json() == {"world_size": 3}
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["vllm_config"]["parallel_config"] == {
        "tensor_parallel_size": 1,
        "data_parallel_size": 3,
    }
    assert (info["tp_size"], info["dp_size"], info["num_gpus"]) == (1, 3, 0)
    begun = httpx.post(f"{server.url}/collective_rpc", json={"method": "skyrl_start_weight_update"})
    assert begun.json() == {"results": [None] * 3}


def test_unknown_paths_and_methods_get_typed_errors(server: LiveServer) -> None:
    assert (
        "did you mean /generate?" in httpx.get(f"{server.url}/generat").json()["error"]["message"]
    )
    assert httpx.get(f"{server.url}/livez//").status_code == 404  # only one last slash is left out
    response = httpx.get(f"{server.url}/generate")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert error["message"] == "GET is not a method of /generate; use POST"
    assert httpx.delete(f"{server.url}/strategy").headers["allow"] == "GET, PUT"
    wrong = httpx.get(f"{server.url}/weights/v1/commit")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_a_bug_during_a_stream_is_an_error_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, output: object) -> None:
        raise ZeroDivisionError("secret prompt")

    monkeypatch.setattr("tlt_server.frontend.generation.choice.GrowingChoice.push", broken)
    events = list(client.stream([{"id": "x", "prompt": "secret"}]))
    assert [
        event.error.code for event in events if isinstance(event, ItemResult) and event.error
    ] == ["internal"]
    with pytest.raises(ServerError) as caught:
        client.generate([{"prompt": "secret"}])
    assert (caught.value.code, caught.value.status) == ("internal", 500)
    assert "secret" not in caught.value.message


def test_the_example_in_the_client_package_runs(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tlt_client.__doc__ is not None
    code = textwrap.dedent(tlt_client.__doc__.partition("\n\n")[2]).replace(
        "http://127.0.0.1:8000", server.url
    )
    exec(code, {})
    assert capsys.readouterr().out.count("2 + 2 =") >= 4


def test_draft_limits_of_an_item_reach_the_engine(client: Client, server: LiveServer) -> None:
    said = ["auto", "off", True, False, SdLimits(max_rows=4), SdLimits(max_depth=2)]
    client.generate([{"prompt": "a"}, *(Item(prompt="a", sd=sd) for sd in said)])
    found = [request.sd for request in server.engine.submitted[-len(said) - 1 :]]
    limits = [DraftLimits(max_rows=4), DraftLimits(max_depth=2)]
    assert found == [True, True, False, True, False, *limits]
