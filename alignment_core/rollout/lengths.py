"""Check that prompts and completions fit into a model's context."""

from __future__ import annotations

import json
from pathlib import Path

from alignment_core.data.context import longest_sampled
from alignment_core.errors import UserError


def check_length(model: Path, longest_prompt: int, length: int) -> None:
    """Raise UserError if ``length``, the tokens of the longest prompt and a completion, exceeds the model's context."""
    most = longest_sampled(json.loads((model / "config.json").read_text()))
    if most is not None and length > most:
        raise UserError(
            f"generation: the longest prompt has {longest_prompt} tokens; with max_completion_length that makes {length}, "
            f"but the model takes at most {most}. Lower generation.max_completion_length or prompts.max_prompt_length"
        )
