"""Programs that call tools, unmodified: the OpenAI SDK, langchain, pydantic-ai and openai-agents
against one server, whose model calls each tool once.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.saying import CALLS, write_saying
from tests.mostly_long import mostly_long
from tests.tokenizers import FAMILIES
from tests.waiting import in_loop

MODEL = "tiny"


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


JSON = '{"city": "Paris", "degrees": 22}'
WEATHER = Weather(city="Paris", degrees=22)


def degrees(city: str) -> str:
    """Return the temperature in a city."""
    return f"22 degrees in {city}"


@pytest.fixture(scope="module", params=mostly_long(FAMILIES, "qwen3", "special marks"))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    model = write_saying(tmp_path_factory.mktemp("model"), CALLS, FAMILIES[request.param])
    with live_server(
        model,
        served_model_name=MODEL,
        engine={"max_model_len": 2**14},
        max_model_len=2**14,
        reasoning_parser="think",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_openai_sdk_parses_and_runs_tools(sdk: openai.OpenAI, server: LiveServer) -> None:
    said: Any = [{"role": "user", "content": JSON}]
    answer = sdk.chat.completions.parse(model=MODEL, messages=said, response_format=Weather)
    assert answer.choices[0].message.parsed == WEATHER
    held = server.engine.submitted[-1].sampling.structured_outputs
    assert held is not None and '"degrees"' in held.text
    assert (
        sdk.responses.parse(model=MODEL, input=JSON, text_format=Weather).output_parsed == WEATHER
    )

    tools: Any = [openai.pydantic_function_tool(Weather)]
    asked: Any = [{"role": "user", "content": "How warm is Paris?"}]
    called = sdk.chat.completions.parse(model=MODEL, messages=asked, tools=tools)
    [call] = called.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == WEATHER
    with sdk.chat.completions.stream(model=MODEL, messages=asked, tools=tools) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and final.finish_reason == "tool_calls"
    assert (final.message.tool_calls or [])[0].function.parsed_arguments == WEATHER
    answered = [
        *asked,
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "22"},
    ]
    last = sdk.chat.completions.create(model=MODEL, messages=answered, tools=tools)
    assert last.choices[0].message.content == "It is 22."


def test_langchain_binds_tools_and_gets_structured_outputs(server: LiveServer) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        chat = ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            model=MODEL,
            max_retries=0,
            use_responses_api=responses,
        )
        bound = chat.bind_tools([tool(degrees)])
        question = HumanMessage("How warm is Paris?")
        answer = bound.invoke([question])
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("degrees", {"city": "Paris"})
        streamed: Any = None
        for chunk in bound.stream([question]):
            streamed = chunk if streamed is None else streamed + chunk
        assert [each["args"] for each in streamed.tool_calls] == [{"city": "Paris"}]
        last = bound.invoke([question, answer, ToolMessage("22", tool_call_id=call["id"])])
        assert last.text == "It is 22."
        for method in ("function_calling", "json_schema"):
            made = chat.with_structured_output(Weather, method=method)
            assert made.invoke(JSON) == WEATHER
        required = chat.bind_tools([tool(degrees)], tool_choice="required").invoke([question])
        assert required.tool_calls[0]["name"] == "degrees"
        assert server.engine.submitted[-1].sampling.structured_outputs is not None


def test_clients_read_a_truncated_call_as_content(sdk: openai.OpenAI, server: LiveServer) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    cut = '<tool_call>\n{"name": "degrees", "arguments": {"city": '
    [ids] = server.text.encode([f"<think>I call degrees.</think>\n\n{cut}"], special=False)
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How warm is Paris?"}],
        "tools": [openai.pydantic_function_tool(Weather, name="degrees")],
        "max_tokens": len(ids),
    }
    [choice] = sdk.chat.completions.create(**asked).choices
    assert choice.message.tool_calls is None and choice.finish_reason == "length"
    assert choice.message.content == cut
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**asked)
    for responses in (False, True):
        chat = ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            model=MODEL,
            max_tokens=len(ids),  # type: ignore[call-arg]
            use_responses_api=responses,
        ).bind_tools([tool(degrees)])
        streamed: Any = None
        for chunk in chat.stream("How warm is Paris?"):
            streamed = chunk if streamed is None else streamed + chunk
        for answer in (chat.invoke("How warm is Paris?"), streamed):
            assert answer.text == cut
            assert not answer.tool_calls and not answer.invalid_tool_calls


def test_pydantic_ai_runs_tools_and_types_its_output(server: LiveServer) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        free = Agent(model, tools=[degrees])
        assert free.run_sync("How warm is Paris?").output == "It is 22 degrees in Paris."
        typed = Agent(model, tools=[degrees], output_type=Weather)
        assert typed.run_sync("How warm is Paris?").output == WEATHER
        native = Agent(model, output_type=NativeOutput(Weather))
        assert native.run_sync(JSON).output == WEATHER

        async def streamed(agent: Any) -> str:
            async with agent.run_stream("How warm is Paris?") as result:
                return await result.get_output()

        assert asyncio.run(streamed(free)) == "It is 22 degrees in Paris."


@in_loop
async def test_openai_agents_run_over_responses_and_chat(server: LiveServer) -> None:
    import agents

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            model = kind(model=MODEL, openai_client=client)
            tools = [agents.function_tool(degrees)]
            free = agents.Agent("a", instructions="Help.", model=model, tools=tools)
            done = await agents.Runner.run(free, "How warm is Paris?")
            assert done.final_output == "It is 22 degrees in Paris."
            stream = agents.Runner.run_streamed(free, "How warm is Paris?")
            kinds = {event.type async for event in stream.stream_events()}
            assert stream.final_output == done.final_output and "run_item_stream_event" in kinds
            typed = agents.Agent("b", model=model, output_type=Weather)
            assert (await agents.Runner.run(typed, JSON)).final_output == WEATHER


def test_instructor_gets_structured_outputs(sdk: openai.OpenAI) -> None:
    instructor = pytest.importorskip(
        "instructor",
        reason="its newest release (1.17.0) asks for rich below 15; this passes with it after "
        "pip install --no-deps instructor docstring-parser",
    )
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(sdk, mode=mode)
        made = client.chat.completions.create(
            model=MODEL, response_model=Weather, messages=[{"role": "user", "content": JSON}]
        )
        assert made.model_dump() == WEATHER.model_dump()
