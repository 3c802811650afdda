"""Templates with the constructs of published ones give what transformers gives, and show calls of
messages without a text.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from tests.frontend.tiny_model import byte_tokenizer
from tests.tokenizers import FAMILIES as TOKENIZERS
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.generation.templates import ChatTemplate, for_template
from tlt_server.frontend.generation.text import Text

ARGUMENTS = '{"b": 1, "a": "é <&>"}'
CALL = {"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
PARSED = json.loads(ARGUMENTS)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é", "parameters": {"type": "object"}},
    }
]
# Each shows one kind of construct, in the manner of a family of models.
FAMILIES = {
    "qwen": """{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}{%- for tool in tools %}
{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.open and message.role == 'user' and message.content is string and not
 (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}
{%- else %}{%- set content = '' %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}{%- endif %}{{- content }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}
{%- else %}{{- call.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}""",
    "distill": """{% set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<U>' + message['content']}}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{'<A>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n' +
 tool['function']['arguments'] + '\\n```'}}
{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{'<A>' + content + '<eos>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{{'<out>' + message['content']}}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{'<A><think>\\n'}}{% endif %}""",
    "glm": """[gMASK]<sop>{%- if tools -%}<|system|>{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}{% endfor %}{%- endif -%}
{%- macro visible_text(content) -%}
{%- if content is string -%}{{- content }}
{%- elif content is iterable and content is not mapping -%}
{%- for item in content -%}{{- item.text }}{%- endfor -%}
{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}
{%- for m in messages %}{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking
 and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = visible_text(m.content) %}{%- if content.strip() -%}{{ '\\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}
{%- endif %}{{ '\\n<tool_call>' + tc.name }}{% set _args = tc.arguments %}
{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
{{- '<|observation|>' }}{%- endif %}{{ m.content }}{%- else -%}<|system|>
{{ visible_text(m.content) }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}""",
    "minimax": """{%- macro render_tools(list) -%}{%- for tool in list -%}
<tool>{{ tool.function | tojson(ensure_ascii=False, sort_keys=True, separators=(',', ':')) }}</tool>
{% endfor -%}{%- endmacro -%}
{%- set ns = namespace(last_user=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}
{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- render_tools(tools) if tools -}}
{%- for m in messages -%}]~b]{{ m.role }}
{% if m.role == 'assistant' and m.tool_calls -%}
{%- for call in m.tool_calls -%}{%- set call = call.function or call -%}
<invoke name="{{ call.name }}">{% for k, v in call.arguments | items -%}
<p name="{{ k }}">{{ v if v is string else v | tojson(indent=2) }}</p>{%- endfor -%}</invoke>
{%- endfor -%}{%- else -%}{{- m.content | trim -}}{%- endif -%}[e~[
{% endfor -%}{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\\n' -}}{%- endif -%}""",
    "llama": """{{- bos_token }}{%- if not date_string is defined %}
{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + system }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}
{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
    "hermes": """{%- macro json_to_python_type(spec) %}{%- set types = {'object': 'dict'} %}
{%- if types[spec.type] is defined %}{{- types[spec.type] }}{%- else %}{{- 'Any' }}{%- endif %}
{%- endmacro %}{{- bos_token }}{%- if tools %}{%- for tool in tools %}
{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
{{- '{"type": "function", "function": ' }}{{- '{"name": "' + tool.name + '", ' }}
{{- '"description": "' + tool.name + '(' + json_to_python_type(tool.parameters) + ')' }}
{{- '"}}' if loop.last else '"}}\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or
 (message.role == 'assistant' and message.tool_calls is not defined) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}
{%- for tool_call in message.tool_calls %}{{- '\\n<tool_call>\\n' }}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\\n' }}{%- endif %}
{{- '<tool_response>\\n' }}{{- message.content }}
{{- '\\n</tool_response>' if loop.last else '\\n</tool_response>\\n' }}
{%- if not loop.last and loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}
{%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"},
    {"role": "user", "content": "é\n<b> "},
]
CALLED = [*TALK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "{}"}]


def rendered(family: str, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
    """Return what the server makes of messages that come over HTTP."""
    text = Text(byte_tokenizer(), FAMILIES[family], {"bos_token": "<s>"})
    return text.render(for_template(received(messages)), tools, options)


def received(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    known = {"role", "content"}
    return [
        ChatMessage(
            **{name: value for name, value in message.items() if name in known},
            more={name: value for name, value in message.items() if name not in known},
        )
        for message in messages
    ]


def expected(family: str, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
    [[text], _] = render_jinja_template(
        [messages],
        tools,
        chat_template=FAMILIES[family],
        add_generation_prompt=True,
        bos_token="<s>",
        **options,
    )
    return text


def told(family: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as trainers give it to a template of this family."""
    call = CALL if family == "distill" else {"function": {"name": "f", "arguments": PARSED}}
    calls = {"tool_calls": [call]} if "tool_calls" in message else {}
    return {"content": "" if family == "glm" else None, **message, **calls}


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_render_as_in_transformers(family: str) -> None:
    said = [{"role": "system", "content": "Be."}, *TALK]
    for messages in (TALK, said, [*said[:1], *CALLED]):
        plain = [told(family, message) for message in messages]
        for tools in (None, TOOLS):
            for options in ({}, {"enable_thinking": False}):
                assert rendered(family, messages, tools, **options) == expected(
                    family, plain, tools, **options
                )


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_chat_has_the_tokens_of_transformers(tokenizer: str, tmp_path: Path) -> None:
    model = TOKENIZERS[tokenizer].write(tmp_path)
    ours, theirs = Text.load(model), PreTrainedTokenizerFast.from_pretrained(model)
    marks = {"role": "user", "content": "".join(ours.specials) + "<tool_call>a</think> 1234"}
    said = [{"role": "system", "content": "Be."}, *TALK, marks]
    for template in FAMILIES.values():
        text = Text(ours.tokenizer, template, ours.tokens)
        found = text.render(for_template(received(said)), TOOLS)
        assert ours.encode([found], special=False)[0] == theirs.apply_chat_template(
            said, TOOLS, chat_template=template, add_generation_prompt=True, return_dict=False
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_tool_calls_without_text_reach_the_prompt(family: str, content: dict[str, Any]) -> None:
    messages = [*TALK, {"role": "assistant", "tool_calls": [CALL], **content}]
    prompt = rendered(family, messages, TOOLS)
    assert "None" not in prompt.replace("Any", "")
    assert prompt.rindex("f") > prompt.rindex("<b>")
    for part in ("f", "b", "1"):
        assert part in prompt[prompt.rindex("<b>") + 3 :]
    assert rendered(family, [*TALK, {"role": "assistant", **content}], None)


# What templates ask about the content of a message, `c`, and do with it.
ASKS = (
    *("{{ c is none }}", "{{ c is not none }}", "{{ c is sameas none }}", "{{ c == none }}"),
    *("{{ c != none }}", "{{ none == c }}", "{{ c in [none] }}", "{{ c is in [none] }}"),
    "{% if c is none %}{% for t in m.tool_calls %}{{ t.function.name }}{% endfor %}{% endif %}",
    "{% if c is not none %}{{ c }}{% else %}{{ m.tool_calls | length }}{% endif %}",
)
USES = (
    *("{{ c is string }}", "{{ c is defined }}", "{{ c is mapping }}", "{{ c is number }}"),
    *("{{ c is true }}", "{{ c == '' }}", "{{ c != '' }}", "{{ c is eq '' }}", "{{ not c }}"),
    *("{{ 1 if c else 2 }}", "{{ c or 'x' }}", "{{ c | default('x', true) }}", "{{ m | tojson }}"),
    *("{{ c | default('x') }}", "{{ 'content' in m }}", "{{ m }}", "{{ m.get('content', 'x') }}"),
    *("{{ m.content.text }}", "{{ c['text'] }}", "{{ c[0] }}"),
    *("{{ c }}", "{{ c ~ 'a' }}", "{{ 'a' ~ c }}", "{{ c + 'a' }}", "{{ 'a' + c }}", "{{ c + c }}"),
    *("{{ 'a' + c + 'b' }}", "{{ 'a' in c }}", "{{ '' in c }}", "{{ c | length }}"),
    *("{{ c.split('a') }}", "{{ c.split('</think>')[-1].lstrip() }}x", "{{ c.startswith('a') }}"),
    *("{{ c.strip() }}", "{{ c[:3] }}", "{{ c | trim }}", "{{ c | trim | length }}", "{{ c.no }}"),
    *("{{ c | string }}", "{{ c | replace('a', 'b') }}", "{{ c | upper }}", "{{ c | list }}"),
    *("{{ c | first }}", "{{ c | last }}", "{{ c | join(',') }}", "{{ '%s' % c }}"),
    *("{{ 'a{}'.format(c) }}", "{% for x in c %}{{ x }}{% endfor %}", "{{ c | indent }}"),
    *("{{ [c, 'a'] | join }}", "{% set c = c + 'a' %}{{ c is string }}", "{{ c | tojson }}"),
    "{% if c is string %}{{ c }}{% else %}{% for x in c %}{{ x.text }}{% endfor %}{% endif %}",
    "{% if c is iterable and c is not mapping %}{{ c | tojson }}{% else %}{{ c }}{% endif %}",
)
CONTENT = "{% set m = messages[0] %}{% set c = m.content %}"


def in_transformers(template: str, *tries: dict[str, Any]) -> str:
    """Return what transformers gives for the first of these messages on which it does not fail."""
    for message in tries:
        try:
            [[text], _] = render_jinja_template([[message]], chat_template=template)
        except (TypeError, jinja2.UndefinedError):
            continue
        return text
    raise AssertionError("it fails on each")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("use", [*ASKS, *USES])
def test_templates_take_absent_content_as_none_or_empty(use: str, *, strict: bool) -> None:
    """A template that asks sees none. Else it is what `apply_chat_template` gives, which leaves
    null out, or if that fails, what it gives for an empty text.
    """
    template = ChatTemplate(CONTENT + use, {}, strict=strict)
    parsed = {"type": "function", "function": {"name": "f", "arguments": PARSED}}
    for fields, told in (({}, {}), ({"tool_calls": [CALL]}, {"tool_calls": [parsed]})):
        absent = {"role": "assistant", **told}
        null, empty = absent | {"content": None}, absent | {"content": ""}
        tries = [null] if use in ASKS else [absent, empty]
        expected = in_transformers(CONTENT + use, *tries)
        for sent in (fields, {**fields, "name": None, "tool_calls": fields.get("tool_calls")}):
            asked = [
                ChatMessage(role="assistant", more=sent),
                ChatMessage(role="assistant", content=None, more=sent),
            ]
            for message in asked:
                assert template.render(for_template([message])) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "ensure_ascii=False",
        "True",
        "ensure_ascii=True, indent=4",
        "indent=2",
        "indent='\t'",
        "separators=(',', ':')",
        "sort_keys=True",
        "False, 2, (', ', ': '), True",
    ],
)
def test_tojson_takes_the_arguments_of_transformers(arguments: str) -> None:
    template = "{{ messages | tojson(" + arguments + ") }}"
    messages = [{"role": "user", "content": "é <b>&'\"", "a": [1, {"c": None}]}]
    [[text], _] = render_jinja_template([messages], chat_template=template)
    assert Text(byte_tokenizer(), template).render(messages) == text
