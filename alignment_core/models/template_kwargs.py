"""`chat_template_kwargs`: arguments of a model's chat template, which become defaults in the template itself.

Every use of the template then has them: data, sampling, rewards by models with this tokenizer, agents, a served or exported
model. An argument that a caller gives still has precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError
from alignment_core.models.saving import CHAT_TEMPLATES, read_json

TEMPLATE_FILE = "chat_template.jinja"


def with_kwargs(template: str, kwargs: Mapping[str, Any]) -> str:
    """The Jinja template with defaults for the arguments that it reads, in front of it.

    The line break behind each is removed by ``trim_blocks``, with which `transformers` renders.
    """
    read = {name: value for name, value in kwargs.items() if re.search(rf"\b{name}\b", template)}
    lines = [
        f"{{% set {name} = {name} | default({json.dumps(value, ensure_ascii=False)}) %}}\n"
        for name, value in read.items()
    ]
    return "".join(lines) + template


def set_template_kwargs(directory: Path, kwargs: Mapping[str, Any]) -> None:
    """Write the arguments into all chat templates of the tokenizer in ``directory``. Raises UserError for an argument that
    no template reads."""
    if not kwargs:
        return
    config = read_json(directory / "tokenizer_config.json")
    files = [path for path in (directory / TEMPLATE_FILE, *sorted(directory.glob(CHAT_TEMPLATES))) if path.is_file()]
    inline = config.get("chat_template") or []
    named = inline if isinstance(inline, list) else [{"template": inline}]
    texts = [*(path.read_text(encoding="utf-8") for path in files), *(item["template"] for item in named)]
    check_read(texts, kwargs)
    for path, text in zip(files, texts, strict=False):
        path.write_text(with_kwargs(text, kwargs), encoding="utf-8")
    if named:
        of_config = [{**item, "template": with_kwargs(item["template"], kwargs)} for item in named]
        config["chat_template"] = of_config if isinstance(inline, list) else of_config[0]["template"]
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def check_read(templates: list[str], kwargs: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that none of the chat templates reads."""
    for name in kwargs:
        if not templates:
            raise UserError("model.chat_template_kwargs: the tokenizer has no chat template; set `model.chat_template`")
        if not any(re.search(rf"\b{name}\b", template) for template in templates):
            raise UserError(
                f"model.chat_template_kwargs: the chat template does not read `{name}`, so it would have no effect: leave it "
                "out, or set a `model.chat_template` that reads it"
            )
