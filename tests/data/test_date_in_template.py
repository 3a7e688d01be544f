"""Data does not depend on the day on which it is built, although a chat template may ask for the date."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as of_transformers

from alignment_core.data.build import BuiltDataset
from alignment_core.data.statistics import losses

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

TEMPLATE = (
    "{%% if not date_string is defined %%}{%% set date_string = %s %%}{%% endif %%}Today: {{ date_string }}\n"
    "{%% for m in messages %%}<{{ m.role }}>{{ m.content }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}<assistant>{%% endif %%}"
)
ROWS = [{"prompt": f"p{number}", "completion": "c"} for number in range(3)]


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
def test_the_same_rows_give_the_same_table_on_another_day(
    built: Build, jsonl: Write, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of `transformers` is set to another day; the date is that of Llama 3.1's template, 26 Jul 2024."""

    class OtherDay(of_transformers.datetime):  # type: ignore[name-defined, misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2031, 1, 2)

    asks = TEMPLATE % 'strftime_now("%d %b %Y")'
    monkeypatch.setattr(of_transformers, "datetime", OtherDay)
    of_transformers._compile_jinja_template.cache_clear()
    data = built(jsonl(ROWS), kind, chat_template=asks)
    same = built(jsonl(ROWS), kind, chat_template=TEMPLATE % '"26 Jul 2024"')
    assert data.train == same.train
    ours = [warning for warning in losses(data.statistics, "first_exhausted") if "strftime_now" in warning]
    assert ours == [
        "the chat template asks for today's date (strftime_now): it gets 2024-07-26, whenever the data is built"
    ]
    assert losses(same.statistics, "first_exhausted") == []
