"""Whether two tokenizers are the same: by what they encode, and not by how their files are written."""

from __future__ import annotations

import filecmp
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model")
"""Equal files of these names need no closer look."""
TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    " leading,  double   and trailing spaces \t\n\n  tab\r\n",
    "0 12 345 6789 1,000,000 3.14159 -1e-5 2026-11-25",
    "def f(x):\n    return {'a': [x ** 2, x != 0]}  # `comment` <b>&amp;</b>\n",
    "Ünïcödé naïve ﬁ ² Å A\u030a é e\u0301 ß ẞ İ ı",
    "中文字符 日本語テキスト 한국어 العربية עברית हिन्दी ไทย 👩‍👩‍👧 🏳️‍🌈 \u200b\ufeff",
    "CamelCase snake_case UPPER lower MiXeD http://example.org/?q=a%20b user@example.org",
)
"""Where normalisers and pre-tokenizers differ: spaces, digits, case, accents, composed characters, scripts, symbols."""


def other_token(ours: Any, theirs: Any) -> str | None:
    """A clause about the first token of the tokenizer ``ours`` that is another one, or none, to ``theirs``."""
    known = theirs.get_vocab()
    for token, number in sorted(ours.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            return f"the token {token!r} is {number} in one and {known.get(token, 'missing')} in the other"
    return None


def difference(one: Path, other: Path) -> str | None:
    """A clause about how the tokenizers in two folders differ; None if they are the same, whatever their files look like.

    The same are their tokens with the ids, and what they encode texts to.
    """
    equal, _, _ = filecmp.cmpfiles(one, other, FILES, shallow=False)
    if equal == [name for name in FILES if (one / name).is_file() or (other / name).is_file()] != []:
        return None
    try:
        ours, theirs = _load(one), _load(other)
    except Exception as error:  # whatever its parsers raise for broken files
        return f"one of them cannot be read: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
    if clause := other_token(ours, theirs) or other_token(theirs, ours):
        return clause
    for text in TEXTS:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (ours, theirs)]
        if ids[0] != ids[1]:
            return f"one encodes {text[:40]!r} in {len(ids[0])} tokens and the other in {len(ids[1])} others"
    return None


def check_same_tokenizer(store: Store, base: Reference, policy: Reference, what: str, cure: str) -> None:
    """Raise UserError if data that ``base``'s tokenizer prepared would mean something else to ``policy``: ``what`` that is, and
    what to do."""
    ours, theirs = ({e.path: e.sha256 for e in store.manifest(one).files} for one in (base, policy))
    if all(ours.get(name) == theirs.get(name) for name in FILES):
        return
    with ExitStack() as held:
        clause = difference(store.fetch(base, held), store.fetch(policy, held))
    if clause:
        raise UserError(
            f"{what} ({policy.short}) has another tokenizer than the recipe's model ({base.short}): {clause}; {cure}"
        )


def _load(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
