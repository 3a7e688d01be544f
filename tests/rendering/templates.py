"""Chat templates in the formats of real families. The assistant's text is marked by ``generation``, as ``transformers``
reads it for ``return_assistant_tokens_mask``; the mark changes no rendering."""

from __future__ import annotations

import json


def _text(pattern: str, content: str = "text") -> str:
    """A Jinja expression for a pattern such as ``<|user|>{}<|end|>``, with the content in place of {}."""
    parts = [json.dumps(part, ensure_ascii=False) for part in pattern.split("{}")]
    return "{{ " + f" + {content} + ".join(parts) + " }}"


def template(
    user: str,
    cue: str,
    answer: str,
    behind: str = "",
    system: str | None = None,
    head: str = "",
    trim: bool = False,
    default_system: str | None = None,
) -> str:
    """A template from the patterns of its turns.

    ``cue`` is the generation prompt, ``answer`` the assistant's text, ``behind`` the template's text after it.
    ``head`` comes first. Without ``system`` a system message is refused.
    """
    refuse = "{{ raise_exception('System role not supported') }}"
    default = ""
    if default_system is not None:
        assert system is not None
        default = "{% if messages[0].role != 'system' %}" + _text(system.replace("{}", default_system)) + "{% endif %}"
    return (
        f"{head}{default}"
        + "{% for m in messages %}{% set text = m.content"
        + (" | trim" if trim else "")
        + " %}{% if m.role == 'system' %}"
        + (refuse if system is None else _text(system))
        + "{% elif m.role == 'user' %}"
        + _text(user)
        + "{% elif m.role == 'assistant' %}"
        + _text(cue)
        + "{% generation %}"
        + _text(answer)
        + "{% endgeneration %}"
        + _text(behind)
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + _text(cue)
        + "{% endif %}"
    )


BOS = "{{ bos_token }}"


def chatml(head: str = "", default_system: str | None = None, behind: str = "\n", end: str = "<|im_end|>") -> str:
    return template(
        "<|im_start|>user\n{}<|im_end|>\n",
        "<|im_start|>assistant\n",
        "{}" + end,
        behind,
        "<|im_start|>system\n{}<|im_end|>\n",
        head,
        default_system=default_system,
    )


def headers(start: str, stop: str, end: str) -> str:
    """Llama 3 and 4."""
    turn = f"{start}%s{stop}\n\n"
    return template(
        turn % "user" + "{}" + end, turn % "assistant", "{}" + end, "", turn % "system" + "{}" + end, BOS, trim=True
    )


def tags(end: str, behind: str = "\n", head: str = "", user_end: str = "") -> str:
    """``<|user|>`` and ``<|assistant|>`` on separate lines: Zephyr, StableLM, Tülu, OLMo, Falcon 3."""
    return template(
        "<|user|>\n{}" + user_end + "\n",
        "<|assistant|>\n",
        "{}" + end,
        behind,
        "<|system|>\n{}" + user_end + "\n",
        head,
    )


def inst(before: str, after: str, answer: str, head: str = BOS, user: str = "{}", each: str = "") -> str:
    """``[INST]`` and ``[/INST]``, with the system message at the beginning of the first question: Llama 2 and Mistral.

    ``each`` begins every question.
    """
    return (
        head
        + "{% if messages[0].role == 'system' %}{% set ns = namespace(system=messages[0].content) %}"
        + "{% set loop_messages = messages[1:] %}{% else %}{% set ns = namespace(system='') %}"
        + "{% set loop_messages = messages %}{% endif %}"
        + "{% for m in loop_messages %}"
        + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + "{% if m.role == 'user' %}{% set text = m.content %}{% if loop.first and ns.system %}"
        + "{% set text = '<<SYS>>\\n' + ns.system + '\\n<</SYS>>\\n\\n' + text %}{% endif %}"
        + each
        + _text(before + user + after)
        + "{% else %}{% set text = m.content | trim %}{% generation %}"
        + _text(answer)
        + "{% endgeneration %}{% endif %}{% endfor %}"
    )


LLAMA_2 = inst("[INST] ", " [/INST]", " {} </s>", head="", each=BOS)
"""As meta-llama/Llama-2-7b-chat-hf: a space before EOS, and BOS before each question."""
MISTRAL_V1 = inst("[INST] ", " [/INST]", "{}</s>")
MISTRAL_V3 = inst("[INST] ", "[/INST]", " {}</s>")
MISTRAL_TEKKEN = inst("[INST]", "[/INST]", "{}</s>")
GEMMA = template(
    "<start_of_turn>user\n{}<end_of_turn>\n",
    "<start_of_turn>model\n",
    "{}<end_of_turn>",
    "\n",
    head=BOS,
    trim=True,
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""EOS stands at the end of a whole conversation, behind the end of the turn."""
PHI_4_MINI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
"""EOS stands directly behind the end of the last turn."""
PHI_4 = template(
    "<|im_start|>user<|im_sep|>{}<|im_end|>",
    "<|im_start|>assistant<|im_sep|>",
    "{}<|im_end|>",
    system="<|im_start|>system<|im_sep|>{}<|im_end|>",
)
VICUNA = template(
    "USER: {} ",
    "ASSISTANT:",
    " {}</s>",
    system="{}\n\n",
    head=BOS,
    default_system="A chat between a curious user and an artificial intelligence assistant.",
)
ALPACA = template("### Instruction:\n{}\n\n", "### Response:\n", "{}</s>", "\n\n", "{}\n\n", BOS)
SOLAR = template("### User:\n{}\n\n", "### Assistant:\n", "{}</s>", "\n\n", "### System:\n{}\n\n", BOS)
OPENCHAT = template(
    "GPT4 Correct User: {}<|end_of_turn|>",
    "GPT4 Correct Assistant:",
    " {}<|end_of_turn|>",
    system="GPT4 Correct System: {}<|end_of_turn|>",
    head=BOS,
)
COMMAND_R = template(
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "{}<|END_OF_TURN_TOKEN|>",
    "",
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
    BOS,
    trim=True,
)
DEEPSEEK_V2 = template("User: {}\n\n", "Assistant:", " {}<｜end▁of▁sentence｜>", "", "{}\n\n", BOS)
DEEPSEEK_V3 = template("<｜User｜>{}", "<｜Assistant｜>", "{}<｜end▁of▁sentence｜>", "", "{}", BOS)
TULU = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
"""As allenai/tulu-3: no newline behind the last turn."""
GRANITE = template(
    "<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n",
    "<|start_of_role|>assistant<|end_of_role|>",
    "{}<|end_of_text|>",
    "\n",
    "<|start_of_role|>system<|end_of_role|>{}<|end_of_text|>\n",
)
GLM_4 = template("<|user|>\n{}", "<|assistant|>", "\n{}", "", "<|system|>\n{}", "[gMASK]<sop>")
"""No end of turn: the model stops at the tag of the next speaker."""
BAICHUAN = template("<reserved_106>{}", "<reserved_107>", "{}", "", "{}")
"""No end of turn."""
EXAONE = template("[|user|]{}\n", "[|assistant|]", "{}[|endofturn|]", "\n", "[|system|]{}[|endofturn|]\n")
MINICPM = template("<用户>{}", "<AI>", "{}</s>", "", "{}", BOS)
KIMI = template(
    "<|im_user|>user<|im_middle|>{}<|im_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "{}<|im_end|>",
    "",
    "<|im_system|>system<|im_middle|>{}<|im_end|>",
)
REKA = template("human: {} <sep> ", "assistant:", " {} <sep>", " ", "system: {} <sep> ")
"""Spaces around the token that ends a turn."""
INSTRUCTION_TUNED_T5 = template("question: {} ", "answer: ", "{}</s>", " ", "{} ")
"""The generation prompt ends in a space, which SentencePiece joins to the answer's first word."""
DIALOGUE = template("{}<|endoftext|>", "", "{}<|endoftext|>", "", "{}<|endoftext|>")
"""As DialoGPT: no tags, no generation prompt."""
HUMAN_ASSISTANT = template("\n\nHuman: {}", "\n\nAssistant:", " {}", "", "{}")
"""Plain text without an end of turn."""
EOS_BETWEEN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant:' }}"
    "{{ ' ' + m.content }}{% if not loop.last %}{{ eos_token }}{% endif %}{{ '' }}"
    "{% else %}{{ m.role + ': ' + m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""EOS ends a turn once another follows; at the end of a conversation the template leaves it to the trainer."""
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant' }}{% generation %}"
    "{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
    "{% endgeneration %}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""gpt-oss: the last turn ends with another token than the turns before it."""
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.index0 > ns.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Thoughts of earlier turns are left out."""
