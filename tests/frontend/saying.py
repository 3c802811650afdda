"""A model that says what it is told: the fake engine answers with the prompt from its beginning,
and this template puts the answer there.
"""

import json
from pathlib import Path

from tests.frontend.tiny_model import SPECIALS
from tests.tokenizers import FAMILIES, Family

EOS = SPECIALS[0]
# The last message, and for the form of calls a word that the template holds.
SAYS = (
    "{{ messages[-1].content }}{{ eos_token }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>"
)


def write_saying(
    directory: Path, template: str = SAYS, family: Family = FAMILIES["no marks"]
) -> Path:
    """Write a model with this template."""
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return family.write(directory, template)


# A model that calls each tool once and then answers: it calls the first one that no message has
# called, with arguments that fit its schema. A message that is JSON it says again.
CALLS = """{%- macro value(schema, root) -%}
{%- if '$ref' in schema -%}{{ value(root['$defs'][schema['$ref'].split('/')[-1]], root) }}
{%- elif 'enum' in schema -%}{{ schema.enum[0] | tojson }}
{%- elif schema.type == 'integer' -%}22
{%- elif schema.type == 'boolean' -%}true
{%- elif schema.type == 'array' -%}[{{ value(schema['items'], root) }}]
{%- elif schema.type == 'object' -%}{
{%- for name, each in schema.properties.items() -%}
{{ name | tojson }}: {{ value(each, root) }}{{ ', ' if not loop.last }}
{%- endfor -%}}
{%- else -%}"Paris"
{%- endif -%}
{%- endmacro -%}
{%- set found = namespace(called=[], tool=none) -%}
{%- for message in messages -%}{%- for call in message.tool_calls or [] -%}
{%- set found.called = found.called + [call.function.name] -%}
{%- endfor -%}{%- endfor -%}
{%- for tool in tools or [] -%}
{%- if not found.tool and tool.function.name not in found.called -%}
{%- set found.tool = tool.function -%}
{%- endif -%}
{%- endfor -%}
{%- set said = messages[-1].content -%}
{%- if found.tool -%}
{%- set schema = found.tool.parameters -%}
<think>I call {{ found.tool.name }}.</think>

<tool_call>
{"name": "{{ found.tool.name }}", "arguments": {{ value(schema, schema) }}}
</tool_call>
{%- elif messages[-1].role == 'tool' -%}It is {{ said }}.
{%- else -%}{{ said }}{%- endif -%}{{ eos_token }}"""
