"""Chat templates in the shapes of published ones, with the control tokens they write and conversations for them."""

CHATML = """{% for message in messages %}
{%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
INST = """{%- if messages[0]['role'] == 'system' -%}
    {%- set loop_messages = messages[1:] -%}
    {%- set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' -%}
{%- else -%}{%- set loop_messages = messages -%}{%- set system = false -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('user and assistant take turns') -}}
    {%- endif -%}
    {%- if loop.index0 == 0 and system %}{% set content = system + message.content %}
    {%- else %}{% set content = message.content %}{% endif -%}
    {%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif -%}
{%- endfor -%}
"""
HEADERS = """{{- bos_token }}
{%- if custom is defined %}{% set date = custom %}{% else %}{% set date = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting date: ' + date + '\\n\\n<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}
    {%- endfor %}{% endif -%}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages -%}
{% if message.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message.role %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
TOOLS = """{{- bos_token }}{% set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- if tools is not none %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS]' }}[
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2, sort_keys=true) }}{{ '}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}]{{ eos_token }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]{"content": ' + message.content | string | tojson + '}' }}
    {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}{{ '' if ns.last < 0 else ' ' }}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
ROLES = """{% for message in messages %}
{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n ' }}{% else %}{{ eos_token }}{% endif %}"""
QWEN = """{%- macro opened(role) %}{{- '<|im_start|>' ~ role ~ '\\n' }}{% endmacro %}
{%- if tools %}
    {{- opened('system') }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" %}{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}{%- endif %}
        {{- opened('assistant') }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- content.lstrip('\\n') }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- opened('user')[:-1] }}{%- endif %}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- opened(message.role) ~ content ~ '<|im_end|>' ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- opened('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
NOOKS = """{#- a comment -#}
{%- generation -%}{% set inside = 'x' %}a{{ inside }}{%- endgeneration -%}{{ inside | default('gone') }}
{% for n in range(9) %}{% if n is odd %}{% continue %}{% elif n > 6 %}{% break %}{% endif %}
{{ n }}{{ loop.cycle('-', '+') }}{% else %}none{% endfor %}
  {% for m in messages if m.role != 'system' recursive %}{{ loop.index }}/{{ loop.length }}
{{ (loop.previtem or {}).role }}{{ m.content }}{{ loop.depth0 }}{% endfor %}
{{ {'b': 'é<&>', 'a': [1, none, true, 1.5]} | tojson }} {{ [1, 2] | tojson(indent=4) }}
{{ 'ü' | tojson(ensure_ascii=true) }}
{{ 'a' * 3 ~ 2 ~ none ~ missing ~ [1, 'x'] }} {{ 7 // 2 }} {{ 2 ** 5 }}
{{ '%s-%03d' % ('x', 7) }} {{ 'q' in 'qed' }} {{ -7 % 3 }}
{{ messages | map(attribute='role') | join(',') | upper }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages[-1].content.split(' ')[0].replace('H', 'h') | capitalize }} {{ dict(a=1).items() | list }} {{ (1, 2) }}
{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ cls_token }}{{ image_token }}|
{{ unk_token is defined }}|{{ documents is none }}|{{ tools is none }}
{% filter trim %}   spaced   {% endfilter %}{% set block %} b {{ 1 + 1 }} {% endset %}{{ block }}
{% with z = 3 %}{{ z }}{% endwith %}
{%- macro two(x) %}{{ caller(x) }}{{ caller(x) }}{% endmacro %}
{% call(y) two('k') %}[{{ y }}]{% endcall %}{{ extra }}   \t"""

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": " Hello world,\n\nwho are you?  "},
    {"role": "assistant", "content": "\n I am 😀. größer\u00a0"},
    {"role": "user", "content": "1 < 2 & 'x' > \"y\""},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now <b>é</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "at": None, "a": 1.0}}}
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "weather", "content": '{"sun": true}'},
    {"role": "tool", "content": "21"},
    {"role": "assistant", "content": "Sunny.", "reasoning": "\nIt says so.\n", "tool_calls": None},
]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}], "none": None},
    {"role": "assistant", "content": "A cat."},
]

CHATS = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], TALK, {}),
    "inst": (INST, ["<s>", "</s>"], [SYSTEM, *TALK], {}),
    "headers": (HEADERS, ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], [*TALK, *PARTS], {}),
    "headers at": (HEADERS, ["<s>", "<|eot_id|>"], TALK, {"custom": "5 May"}),
    "turns": (TURNS, ["<s>", "<start_of_turn>", "<end_of_turn>"], TALK, {}),
    "tools": (TOOLS, ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], CALLS, {"tools": [WEATHER]}),
    "no tools": (TOOLS, ["<s>", "</s>"], TALK, {"tools": []}),
    "zephyr": (ZEPHYR, ["</s>"], [SYSTEM, *TALK], {}),
    "roles": (ROLES, ["<|user|>", "<|assistant|>", "<|end|>", "</s>"], TALK, {}),
    "qwen": (QWEN, ["<|im_start|>", "<|im_end|>"], [SYSTEM, *CALLS], {"tools": [WEATHER, WEATHER]}),
    "qwen bare": (QWEN, ["<|im_start|>", "<|im_end|>"], TALK, {"enable_thinking": False}),
    "nooks": (NOOKS, ["<s>", "</s>", "<pad>", "<cls>", "<img>"], [SYSTEM, *TALK], {"extra": {"k": (1, 2.5)}}),
}
"""By name: the template, its control tokens, a conversation, and what else the template is given."""
