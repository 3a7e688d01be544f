"""Chat templates with typical pitfalls of training: EOS, newlines, and rewritten history."""

NEWLINE_AFTER_EOS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_EOS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS_THOUGHTS = (  # as Qwen3: the text before </think> of earlier turns is dropped from the history
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DROPS_THOUGHTS = (  # as DeepSeek-R1's first one: the text before </think> is dropped from every turn
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
