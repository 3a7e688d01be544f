"""Whether two tokenizers, or their chat templates, are the same: compared by what they make of texts, not by their files."""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import UserError, first_line
from alignment_core.models.load_tokenizer import load_tokenizer

log = logging.getLogger(__name__)
FILES = ("tokenizer.json", "tokenizer.model")
"""If these files are equal, the tokenizers are."""
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja")
"""If these files are equal, too, the chat templates are."""
TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    " leading,  double   and trailing spaces \t\n\n  tab\r\n",
    "0 12 345 6789 1,000,000 3.14159 -1e-5 2026-11-25",
    "def f(x):\n    return {'a': [x ** 2, x != 0]}  # `comment` <b>&amp;</b>\n",
    "Ünïcödé naïve ﬁ ² Å A\u030a é e\u0301 ß ẞ İ ı",
    "中文字符 日本語テキスト 한국어 العربية עברית हिन्दी ไทย 👩‍👩‍👧 🏳️‍🌈 \u200b\ufeff",
    "CamelCase snake_case UPPER lower MiXeD http://example.org/?q=a%20b user@example.org",
)
"""Texts that normalisers and pre-tokenizers may treat differently: spaces, digits, case, accents, scripts, symbols."""


def other_token(first: Any, second: Any) -> str | None:
    """A clause about a token of ``first`` that ``second`` has under another id or not at all; None if there is none."""
    known = second.get_vocab()
    for token, number in sorted(first.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            return f"the token {token!r} is {number} in one and {known.get(token, 'missing')} in the other"
    return None


def difference(first: Path, second: Path) -> str | None:
    """A clause about how the tokenizers in two folders differ; None if they have the same tokens with the same ids and encode
    :data:`TEXTS` alike, even if their files differ."""
    equal, _, _ = filecmp.cmpfiles(first, second, FILES, shallow=False)
    if equal == [name for name in FILES if (first / name).is_file() or (second / name).is_file()] != []:
        return None
    try:
        tokenizers = load_tokenizer(first), load_tokenizer(second)
    except Exception as error:  # parsers of broken files raise all kinds
        return f"one of them cannot be read: {first_line(error)}"
    if clause := other_token(*tokenizers) or other_token(*reversed(tokenizers)):
        return clause
    for text in TEXTS:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
        if ids[0] != ids[1]:
            return f"one encodes {text[:40]!r} in {len(ids[0])} tokens and the other in {len(ids[1])} others"
    return None


def check_same_tokenizer(store: Store, base: Reference, policy: Reference, what: str, cure: str) -> None:
    """Raise UserError if the tokenizers of ``base``, which prepared the data, and ``policy`` differ. ``what`` names the policy
    in the sentence, ``cure`` says what to do."""
    if _have_equal_files(store, base, policy, FILES):
        return
    with ExitStack() as uses:  # keeps both in the cache while they are read
        clause = difference(store.fetch(base, uses), store.fetch(policy, uses))
    if clause:
        raise UserError(
            f"{what} ({policy.short}) has another tokenizer than the recipe's model ({base.short}): {clause}; {cure}"
        )


def check_same_template(store: Store, base: Reference, policy: Reference, what: str, cure: str) -> None:
    """Raise UserError if the chat templates of ``base``, which renders the data, and ``policy`` render conversations otherwise.
    ``what`` names the policy in the sentence, ``cure`` says what to do."""
    from alignment_core.data.template import Renderer

    if _have_equal_files(store, base, policy, (*FILES, *TEMPLATE_FILES)):
        return
    with ExitStack() as uses:
        try:
            first, second = (Renderer(load_tokenizer(store.fetch(model, uses))) for model in (base, policy))
        except Exception as error:  # such as that of a tokenizer with code of its own, which stages may run
            log.warning(
                "%s: its chat template is not compared with that of the recipe's model: %s", what, first_line(error)
            )
            return
        if first.template and second.template:
            alike = first.renders_as(second, prompts=True)
        else:
            alike = first.template == second.template
    if not alike:
        raise UserError(
            f"{what} ({policy.short}) has another chat template than the recipe's model ({base.short}): {cure}"
        )


def _have_equal_files(store: Store, first: Reference, second: Reference, names: Sequence[str]) -> bool:
    digests = [{entry.path: entry.sha256 for entry in store.manifest(model).files} for model in (first, second)]
    return all(digests[0].get(name) == digests[1].get(name) for name in names)
