"""Chat templates of several families, shortened to what sets them apart, and a tokenizer that knows their tokens."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ ' ' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """\
{%- if messages[0].role == 'system' %}
    {%- set rest = messages[1:] %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set rest = messages %}{% set system = '' %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message.content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Leaves out the thinking of all turns but the last, as Qwen3's does.
STRIPPING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Marks what the assistant says, and strips as well.
MARKED = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content.split('</think>')[-1].lstrip() + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TURNS = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Closes every text with the end token, as Phi-3's does.
CLOSING = TURNS.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")

# Prints the generation prompt whether asked for or not, as the first one of Llama 3 did.
PROMPTING = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"""

WORDS = ["hello there", "what is two and two", "it is four", "be brief", "thanks", "welcome", "assistant", "user", "system"]


def build_chat_tokenizer(*special_tokens: str, template: str | None = None, vocab_size: int = 400):
    """A byte-level tokenizer trained on `WORDS`, with `special_tokens` added, and `<s>` and `</s>` as first and last token."""
    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer

    tokenizer = train_byte_level_tokenizer(WORDS * 3, vocab_size)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": list(special_tokens)})
    tokenizer.chat_template = template
    return tokenizer


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of users and assistants in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns
