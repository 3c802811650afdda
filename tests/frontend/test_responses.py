"""The Responses API against the fake engine: items, events, continuation, the bounded store."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.openai_calls import post
from tests.frontend.saying import write_saying
from tests.frontend.test_tools import ARGUMENTS, CALL
from tests.mostly_long import mostly_long
from tests.tokenizers import FAMILIES
from tlt_server.errors import NotFound
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.dialects.openai.responses import requests
from tlt_server.frontend.dialects.openai.responses.growing import GrowingResponse, kept_messages
from tlt_server.frontend.dialects.openai.responses.requests import (
    Conversation,
    ResponseRequest,
    messages_of,
)
from tlt_server.frontend.http.keys import EVERYBODY, Caller
from tlt_server.frontend.rollouts.responses import KeptResponse, ResponseShelf
from tlt_server.wire.packed import PackedText

# The answer is the last message; then the whole conversation, which the engine gets.
HISTORY = (
    "{{ messages[-1].content }}{{ eos_token }}<tool_call>{{ tools | tojson if tools }}"
    "{% for m in messages %}|{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}:"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
URL = "/v1/responses"


@pytest.fixture(scope="module", params=mostly_long(FAMILIES, "qwen3", "special marks"))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    model = write_saying(tmp_path_factory.mktemp("model"), HISTORY, FAMILIES[request.param])
    with live_server(
        model,
        served_model_name="tiny",
        engine={"max_model_len": 4096},
        max_model_len=4096,
        reasoning_parser="think",
    ) as running:
        yield running


def respond(server: LiveServer, input: Any, **fields: Any) -> dict[str, Any]:
    response = post(server, URL, input=input, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: LiveServer, input: Any, **fields: Any) -> list[dict[str, Any]]:
    frames = post(server, URL, input=input, stream=True, **fields).text.strip().split("\n\n")
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def plain(items: list[dict[str, Any]]) -> list[Any]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def seen(server: LiveServer) -> list[str]:
    """Return the messages that the engine got last, as the template shows them."""
    return server.text.decode(server.engine.submitted[-1].token_ids).split("|")[1:]


def test_a_response_has_items_and_usage(server: LiveServer) -> None:
    text = f"<think>hm</think>I look. {CALL}\n{CALL}"
    found = respond(server, text, tools=TOOLS, metadata={"a": "b"})
    thought, message, call, _ = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0] == {
        "type": "output_text",
        "text": "I look.",
        "annotations": [],
        "logprobs": [],
    }
    assert (call["name"], call["arguments"], call["status"]) == ("f", ARGUMENTS, "completed")
    assert found["status"] == "completed" and found["metadata"] == {"a": "b"}
    usage = found["usage"]
    assert usage["output_tokens"] == len(server.text.encode([text], special=False)[0]) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert [part["type"] for part in found["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


@pytest.mark.parametrize("text", ["so", "", CALL, f"<think>hm</think>I look. {CALL}{CALL}so"])
@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 30}])
def test_streamed_events_add_up_to_the_response(
    server: LiveServer, text: str, fields: dict[str, Any]
) -> None:
    whole = respond(server, text, tools=TOOLS, **fields)
    found = events(server, text, tools=TOOLS, **fields)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert plain(last["response"]["output"]) == plain(whole["output"])
    assert last["response"]["incomplete_details"] == whole["incomplete_details"]
    grown: dict[int, str] = {}
    open_items: set[int] = set()
    for event in found[2:-1]:
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert event["item"]["status"] == "in_progress" and index == len(grown)
            grown[index] = ""
            open_items.add(index)
            continue
        assert open_items == {index}
        if event["type"].endswith(".delta"):
            grown[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            open_items.remove(index)
            item = event["item"]
            assert item == last["response"]["output"][index]
            said = item["arguments"] if "arguments" in item else item["content"][0]["text"]
            assert said == grown[index]
    assert not open_items and len(grown) == len(whole["output"])


def test_conversation_continues_by_previous_response_id(server: LiveServer) -> None:
    first = respond(
        server,
        [
            {"role": "developer", "content": "be short"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": f"<think>hm</think>{CALL}"}],
            },
        ],
        instructions="now",
        tools=TOOLS,
    )
    assert seen(server)[0] == "system::now:" and seen(server)[1].startswith("system::be short")
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "22 degrees"}
    second = respond(server, [output], previous_response_id=first["id"])
    *_, answer, tool = seen(server)
    assert answer == "assistant:hm::f1" and tool == f"tool::22 degrees:{call['call_id']}"
    assert not any("now" in message for message in seen(server))
    third = respond(server, "more", previous_response_id=second["id"], store=False)
    assert seen(server)[-2:] == ["assistant::22 degrees:", "user::more:"]
    # The same conversation, sent whole.
    items = [{"role": "user", "content": "a"}, *first["output"], output, *second["output"]]
    respond(server, [*items, {"role": "user", "content": "more"}])
    assert seen(server)[1:] == ["assistant:hm::f1", tool, "assistant::22 degrees:", "user::more:"]
    for id, status in ((second["id"], 200), (third["id"], 404), ("resp_no", 404)):
        assert httpx.get(f"{server.url}{URL}/{id}").status_code == status
    assert httpx.get(f"{server.url}{URL}/{second['id']}").json() == second
    assert httpx.delete(f"{server.url}{URL}/{second['id']}").json()["deleted"] is True
    gone = post(server, URL, input="a", previous_response_id=second["id"])
    assert gone.status_code == 404 and "max_responses" in gone.json()["error"]["message"]


def test_long_response_inputs_reach_the_template(server: LiveServer) -> None:
    """The body is read by another process. Too many tokens for this model are counted in it."""
    long, user = "x" * 2**18, {"role": "user", "content": "a"}
    output = {"type": "function_call_output", "call_id": "1", "output": long}
    for input in (long, [{**user, "content": [{"type": "input_text", "text": long}]}], [output]):
        error = post(server, URL, input=input).json()["error"]
        assert error["code"] == "context_length_exceeded", error
    for name, value in (
        ("metadata", {"text": long}),
        ("tools", [{**TOOLS[0], "parameters": {"content": long}}]),
        ("text", {"format": {"type": "json_schema", "schema": {"text": long}}}),
    ):
        response = post(server, URL, input="a", **{name: value})
        assert response.status_code == 400 and "262144: shorten it" in response.text, name


def test_long_texts_become_messages() -> None:
    long = PackedText.of("x" * 2**18)
    for content in (long, [{"type": "input_text", "text": long}]):
        [message] = messages_of([{"role": "user", "content": content}])
        assert message.content == "x" * 2**18
    assert messages_of(long) == [message]


def test_only_stored_responses_are_encoded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the conversation is encoded")

    monkeypatch.setattr(GrowingResponse, "_kept", never)
    assert respond(server, "a", store=False)["store"] is False


def test_stored_conversation_has_its_counted_size() -> None:
    messages = [ChatMessage(role="user", content="a", more={"n": [i]}) for i in range(5000)]
    asked = ResponseRequest(input="a")
    growing = GrowingResponse(asked, "resp_a", "a", "tiny", None, messages)
    tracemalloc.start()
    kept = growing._kept()
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del messages, growing
    assert took < 1.1 * kept.size + 10_000
    assert kept_messages(kept)[-2] == ChatMessage(role="user", content="a", more={"n": [4999]})
    assert all(isinstance(part, str | bytes) for part in kept)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "input has 0"),
        ({"input": "x" * 5000}, "input has a prompt of"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference'"),
        ({"input": [{"content": "a"}]}, "input[0].role is None"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content is 5"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0].type is 5"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments is None"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id is None"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice requires a call"),
        ({"text": {"format": {"type": "json_schema"}}}, "no schema"),
        ({"verbosity": "low"}, "verbosity is 'low'; its name is text.verbosity here"),
        ({"truncation": "auto"}, "truncation is 'auto'"),
        ({"background": True}, "background is True"),
        ({"max_output_tokens": -1}, "max_output_tokens is -1"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    server: LiveServer, fields: dict[str, Any], says: str
) -> None:
    response = post(server, URL, **{"input": "a", **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and says in error["message"], error
    assert error["param"] == next(iter(fields))


def test_refused_structure_is_named_as_in_the_body(server: LiveServer) -> None:
    text = {"format": {"type": "json_schema", "schema": {"else": {}}}}
    error = post(server, URL, input="a", text=text).json()["error"]
    assert error["message"].startswith("text.format: the JSON schema") and error["param"] == "text"
    text = {"format": {"type": "json_object"}}
    error = post(server, URL, input="a", text=text, ignore_eos=True).json()["error"]
    assert error["message"].startswith("ignore_eos is given with text.format, and ")


def test_response_format_reaches_the_engine(server: LiveServer) -> None:
    format = {"type": "json_schema", "name": "x", "schema": {"type": "integer"}, "strict": True}
    respond(server, "7", text={"format": format})
    assert server.engine.submitted[-1].sampling.structured_outputs is not None
    respond(server, CALL, tools=TOOLS, tool_choice={"type": "function", "name": "f"})
    assert server.engine.submitted[-1].sampling.structured_outputs is not None


def test_kept_responses_are_bounded_and_belong_to_a_key() -> None:
    kept = ResponseShelf(3, 100)

    def keep(id: str, owner: str, size: int = 10) -> bool:
        done = kept.keep(KeptResponse(id, owner, b"", bytes(size)))
        kept.check()
        return done

    a, b = (Caller(name, frozenset({"data"})) for name in "ab")
    assert keep("a1", "a") and keep("b1", "b") and keep("a2", "a") and keep("a3", "a")
    with pytest.raises(NotFound):
        kept.find("a1", a)
    assert kept.find("b1", b).owner == "b" and kept.find("b1", EVERYBODY)
    with pytest.raises(NotFound):
        kept.find("b1", a)
    assert keep("b2", "b", 70) and not keep("b3", "b", 101) and keep("b4", "b", 60)
    assert kept.find("b4", b)
    with pytest.raises(NotFound):
        kept.find("b1", b)
    kept.delete("b4", b)
    kept.check()
    assert not ResponseShelf(0, 100).keep(KeptResponse("a", "a", b"", b"a"))


def get(server: LiveServer, path: str, **query: Any) -> httpx.Response:
    return httpx.get(server.url + URL + path, params=query, timeout=10)


def test_input_items_list_the_whole_conversation(server: LiveServer) -> None:
    first = respond(server, f"<think>hm</think>I look. {CALL}", tools=TOOLS)
    *_, call = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    asked = [output, {"role": "user", "content": [{"type": "input_text", "text": "so"}]}]
    second = respond(server, asked, previous_response_id=first["id"], instructions="Be.")
    found = get(server, f"/{second['id']}/input_items", order="asc").json()
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in found["data"]] == kinds
    texts = [item["content"][0]["text"] for item in found["data"] if "content" in item]
    assert texts[1:] == ["hm", "I look.", "so"]
    assert found["data"][3]["call_id"] == found["data"][4]["call_id"] == call["call_id"]
    assert found["data"][3]["arguments"] == ARGUMENTS and found["has_more"] is False
    assert [found["first_id"], found["last_id"]] == [found["data"][at]["id"] for at in (0, -1)]
    # The items can be sent again as an input.
    assert messages_of(found["data"]) == messages_of(
        [{"role": "user", "content": texts[0]}, *first["output"], *asked]
    )
    newest = get(server, f"/{second['id']}/input_items", limit=4).json()
    assert newest["data"] == found["data"][:1:-1] and newest["has_more"] is True
    rest = get(server, f"/{second['id']}/input_items", limit=4, after=newest["last_id"]).json()
    assert rest["data"] == found["data"][1::-1] and rest["has_more"] is False


ORDERS = ("asc", "desc")


def test_pages_of_input_items_add_up_in_either_order(server: LiveServer) -> None:
    asked = [{"role": "user", "content": f"{i}"} for i in range(23)]
    id = respond(server, asked)["id"]
    for order, limit in ((order, limit) for order in ORDERS for limit in (None, 1, 7, 23, 100)):
        found, after = list[dict[str, Any]](), {}
        more, sizes = True, list[int]()
        while more:
            asks = after if limit is None else {"limit": limit, **after}
            page = get(server, f"/{id}/input_items", order=order, **asks).json()
            found, more = found + page["data"], page["has_more"]
            sizes.append(len(page["data"]))
            assert [page["first_id"], page["last_id"]] == [page["data"][i]["id"] for i in (0, -1)]
            after = {"after": page["last_id"]}
        assert sizes[:-1] == [limit or 20] * (len(sizes) - 1) and 0 < sizes[-1] <= (limit or 20)
        texts = [item["content"][0]["text"] for item in found]
        assert texts == [message["content"] for message in asked][:: 1 if order == "asc" else -1]
        assert get(server, f"/{id}/input_items", order=order, **after).json()["data"] == []


def test_page_of_input_items_builds_only_its_own_items(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    item = requests._item
    monkeypatch.setattr(requests, "_item", lambda *part: made.append(part[0]) or item(*part))
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    more = {"reasoning_content": "hm", "tool_calls": [call] * 10**4}
    conversation = Conversation("resp_1", [ChatMessage(role="assistant", more=more)] * 2)
    assert len(conversation) == 2 * (10**4 + 1) and not made
    last = conversation[len(conversation) - 1]
    assert last["call_id"] == "c" and made == ["function_call"]
    assert conversation.number_of(last["id"]) == len(conversation) - 1
    for strange in ("item_01_1", "item_-1_1", "item_20002_1", "item_²_1", "item_1_2", "1", ""):
        assert conversation.number_of(strange) is None
    assert conversation.number_of("item_" + "9" * 10**6 + "_1") is None


@pytest.mark.parametrize(
    ("query", "says"),
    [({"limit": limit}, "limit is") for limit in (101, 0, -1, "1e1", "nan", "", "9" * 5000)]
    + [({"after": after}, "after is") for after in ("x", "", "item_0_resp", "item_99_1")]
    + [({"order": "up"}, "order is")],
)
def test_a_list_of_input_items_is_bounded(
    server: LiveServer, query: dict[str, Any], says: str
) -> None:
    id = respond(server, "so")["id"]
    response = get(server, f"/{id}/input_items", **query)
    assert response.status_code == 400 and says in response.text
    assert get(server, "/resp_none/input_items").status_code == 404


def test_a_response_under_way_is_cancelled_by_its_id(server: LiveServer) -> None:
    body = {"input": "x" * 1000, "stream": True}
    with httpx.stream("POST", server.url + URL, json=body, timeout=20) as stream:
        lines = stream.iter_lines()
        data = next(line for line in lines if line.startswith("data: "))
        id = json.loads(data.removeprefix("data: "))["response"]["id"]
        cancelled = httpx.post(f"{server.url}{URL}/{id}/cancel", timeout=10)
        *_, last = (line for line in lines if line.startswith("data: "))
    assert cancelled.json() == {"id": id, "object": "response", "status": "cancelled"}
    ended = json.loads(last.removeprefix("data: "))["response"]
    assert ended["status"] == "incomplete" and ended["incomplete_details"] == {"reason": "abort"}
    again = httpx.post(f"{server.url}{URL}/{id}/cancel", timeout=10)
    assert again.status_code == 400 and "has ended" in again.text
    for name in ("resp_none", "0"):
        assert httpx.post(f"{server.url}{URL}/{name}/cancel", timeout=10).status_code == 404
