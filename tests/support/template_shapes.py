"""What sets chat templates apart in what they print of a chat: forms of calls, of the system turn, of thinking."""

import random

from tests.support.chats import CLOSING, TURNS

CALL_FORMS = {
    "JSON": "{{ call.name }} {{ call.arguments | tojson }}",
    "JSON of the entire call": "{{ call | tojson }}",
    "sorted JSON in ASCII, indented": "{{ call | tojson(ensure_ascii=true, indent=4, sort_keys=true) }}",
    "compact JSON": "{{ call.name }}{{ call.arguments | tojson(separators=(',', ':')) }}",
    "JSON as a JSON string": "{{ {'name': call.name, 'arguments': call.arguments | tojson(ensure_ascii=true)} | tojson }}",
    "Python": "{{ call.name }}({{ call.arguments }})",
    "Python's keywords": "{{ call.name }}({% for k, v in call.arguments.items() %}{{ k }}={{ [v] }}, {% endfor %})",
    "XML, as Qwen3-Coder": "<function={{ call.name }}>{% for k, v in call.arguments.items() %}\n<parameter={{ k }}>\n"
    "{{ v if v is string else (v | tojson) }}\n</parameter>{% endfor %}</function>",
    "XML with Python's values": "<function={{ call.name }}>{% for k, v in call.arguments.items() %}\n<parameter={{ k }}>\n"
    "{{ v | string }}\n</parameter>{% endfor %}</function>",
    "pairs, as GLM": "{{ call.name }}\n{% for k, v in call.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}",
    "escaped XML": "<call name='{{ call.name | e }}'>{{ call.arguments | tojson | e }}</call>",
}


def print_calls(form: str, content: str = "{{ m.content }}") -> str:
    """A template with tools, and calls in one of `CALL_FORMS`."""
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + content
        + "{% for item in m.tool_calls or [] %}{% set call = item.function or item %}[CALL]"
        + form
        + "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


CONTENT_ONLY = {
    "ChatML": TURNS,
    "Llama 3": """\
{%- for m in messages %}
    {%- set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' %}
    {%- if loop.first %}{% set text = bos_token + text %}{% endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "Gemma, which folds the system turn": """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content | trim + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "Phi-3": CLOSING,
}
"""Templates that print a message's content and nothing else."""

MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""
"""Prints users and the assistant; no other role."""

CUTTING = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{ '<|User|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
"""Leaves out thinking, as DeepSeek's."""

PARSING = """\
{%- for m in messages %}
    {%- set content, thinking = m.content, m.reasoning_content %}
    {%- if '</think>' in content %}
        {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}{% set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + ('<think>\\n' + thinking.strip() + '\\n</think>\\n\\n' if thinking else '') }}
    {{- content.strip() + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Prints thinking, from the content or from a key, in a form of its own, as Qwen3's."""

NASTY = (
    """
x|a b|say "hi"|it's|\\|C:\\new\\u0041\\|é ü ß|日本語|😀👍🏽
<b>&amp; &lt;i&gt;</b>|AT&T &copy=1|{'a': 1}|{"a": [1, null]}|{{ x }} {% y %}
\\n\\\\n|1|True|<im_end>|\\U0001F600 \\x41 \\Uffffffff|&#39;&#x27;&quot;|'"`
""".strip()
    .replace("\n", "|")
    .split("|")
)
NASTY += ["", " ", "line\nbreak\ttab\r\n", "\u200b\u2028\x85", "\x07\x1b[0m\x7f", "\u00a0nbsp\u3000wide", "\ufeffbom", "a" * 300]
"""Texts that escaping, trimming and quoting change."""


def random_value(rng: random.Random, depth: int = 3):
    kind = rng.randrange(8 if depth else 6)
    if kind < 3:
        return "".join(rng.choices(NASTY, k=rng.randrange(3)))
    if kind == 3:
        return rng.choice([True, False, None])
    if kind == 4:
        return rng.choice([0, -1, 7, 10**20, 123456])
    if kind == 5:
        return rng.choice([0.5, -2.0, 1e22, 1e-7, 3.14159])
    values = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return values if kind == 6 else {rng.choice(NASTY) + str(i): value for i, value in enumerate(values)}
