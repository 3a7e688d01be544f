"""Rows on the page of an artifact: completions with shaded tokens, loss masks, pairs side by side."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from alignment.flows.ui.sample_rows import _texts
from alignment_core.artifacts import ProvenanceDraft, Store
from alignment_core.artifacts.blobs import Blobs
from alignment_core.models.tokenizer import byte_tokenizer
from tests.answered import AT, publish_round
from tests.flows.ui.conftest import Make
from tests.flows.ui.test_pages import HOSTILE
from tests.images import write_images


def test_completions_are_shaded_by_the_probability_of_their_tokens(store: Store, tmp_path: Path, get: Any) -> None:
    rollouts, scores = publish_round(store, tmp_path / "made", prompts=6)
    page = get(f"/artifacts/{rollouts}/files").text
    # "a good answer": log-probabilities -0.01, -0.5, -1, -3, -0.01 …; probabilities 0.99, 0.61, 0.37, 0.05.
    assert 'a<span class="p1" title="-0.50"> </span><span class="p2" title="-1.00">g</span>' in page
    assert '<span class="p3" title="-3.00">o</span>od answer to 0&lt;eos&gt;' in page
    assert page.count('<section class="sample"') == 4
    assert "1 to 4 of 6" in page
    rest = get(f"/artifacts/{rollouts}/files?from=4").text
    assert rest.count('<section class="sample"') == 2
    assert "reward" not in re.sub(r"(?s)<h2>Metrics.*", "", page)
    scored = get(f"/artifacts/{scores}/files").text
    assert "reward 0 · finish reason stop" in scored
    assert "reward -1 · finish reason stop" in scored


def test_tokens_without_a_loss_are_marked(store: Store, make: Make, tmp_path: Path, get: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "policy")
    model = store.publish(tmp_path / "policy", "model")
    ids = tokenizer("why? yes")["input_ids"]
    mask = [0] * 5 + [1] * (len(ids) - 5)
    (tmp_path / "data").mkdir()
    table = {"input_ids": [ids], "loss_mask": [mask], "text": ["why? yes"], "source": ["s"]}
    pq.write_table(pa.table(table), tmp_path / "data" / "train.parquet")
    made = ProvenanceDraft(key="3" * 64, stage="dataset", label="sft/data", inputs={"tokenizer": model}, **AT)
    data = store.publish(tmp_path / "data", "dataset", made)
    page = get(f"/artifacts/{data}/files").text
    assert '<span class="masked">why? </span>yes' in page
    assert "without a loss" in page


def test_images_of_rows_are_shown_and_nothing_else_is_served_as_one(store: Store, tmp_path: Path, get: Any) -> None:
    images = write_images(tmp_path / "pictures")
    script = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    contents = [images["red"].read_bytes(), script]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    (tmp_path / "data" / "images").mkdir(parents=True)
    for digest, content in zip(digests, contents, strict=True):
        (tmp_path / "data" / "images" / digest).write_bytes(content)
    shown = f"<|vision_start|>[image sha256:{digests[0][:12]}]<|vision_end|>Which?"
    table = {"prompt_ids": [[1, 2]], "prompt": [shown], "label": ["red"], "images": [digests]}
    pq.write_table(pa.table(table), tmp_path / "data" / "train.parquet")
    data = store.publish(tmp_path / "data", "dataset")
    page = get(f"/artifacts/{data}/files").text
    assert f"[image sha256:{digests[0][:12]}]" in page
    assert f'<img class="picture" src="/images/{data}/{digests[0]}" alt="Image {digests[0][:12]}"' in page
    image = get(f"/images/{data}/{digests[0]}")
    assert (image.content, image.headers["content-type"]) == (contents[0], "image/png")
    assert image.headers["x-content-type-options"] == "nosniff"
    for name in (digests[1], "0" * 64, "..%2Ftrain.parquet"):
        get(f"/images/{data}/{name}", 404)


def test_images_are_fetched_when_they_are_shown_and_do_not_count_as_rows(
    store: Store, tmp_path: Path, get: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = write_images(tmp_path / "pictures")["red"].read_bytes()
    digest = hashlib.sha256(picture).hexdigest()
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "data" / "images" / digest).write_bytes(picture)
    with (tmp_path / "data" / "images" / ("0" * 64)).open("wb") as file:
        file.truncate((64 << 20) + 1)
    table = {"prompt_ids": [[1, 2]], "prompt": ["Which colour?"], "label": ["red"], "images": [[digest]]}
    pq.write_table(pa.table(table), tmp_path / "data" / "train.parquet")
    data = store.publish(tmp_path / "data", "dataset")
    fetched: list[str] = []
    get_blob, read_blob = Blobs.get, Blobs.read
    monkeypatch.setattr(
        Blobs, "get", lambda self, owner, entry, to: (fetched.append(entry.path), get_blob(self, owner, entry, to))[1]
    )
    monkeypatch.setattr(
        Blobs, "read", lambda self, owner, entry: (fetched.append(entry.path), read_blob(self, owner, entry))[1]
    )
    assert "Which colour?" in get(f"/artifacts/{data}/files").text
    assert fetched == ["train.parquet"]
    assert get(f"/images/{data}/{digest}").content == picture
    assert fetched == ["train.parquet", f"images/{digest}"]


def test_texts_are_shown_as_they_are_without_a_tokenizer(store: Store, tmp_path: Path, get: Any, make: Make) -> None:
    data = make("data", "dataset", {"prompt": HOSTILE, "chosen": HOSTILE, "rejected": "no"}, stage="dataset")
    page = get(f"/artifacts/{data}/files").text
    assert page.count("&lt;script&gt;alert(1)") >= 2
    assert '<div class="chosen">' in page
    assert '<div class="rejected">' in page


def test_damaged_and_large_artifacts_are_named(store: Store, tmp_path: Path, get: Any) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_text("nothing")
    data = store.publish(tmp_path / "data", "dataset")
    assert "Its rows cannot be read" in get(f"/artifacts/{data}/files").text
    with (tmp_path / "data" / "train.parquet").open("wb") as file:
        file.truncate((64 << 20) + 1)
    large = store.publish(tmp_path / "data", "dataset")
    assert "above 64 MiB are not shown" in get(f"/artifacts/{large}/files").text


def of_words() -> Tokenizer:
    """A tokenizer whose tokens are words with the space in front of them, as those of SentencePiece."""
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def of_bytes() -> Tokenizer:
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_texts_of_tokens_make_the_text_that_transformers_decodes() -> None:
    for tokenizer, text in ((of_words(), "Hello world Hello"), (of_bytes(), "naïve 日本語 🙂!")):
        ids = tokenizer.encode(text).ids
        texts = _texts(tokenizer, ids)
        assert "".join(piece for piece, _ in texts) == PreTrainedTokenizerFast(tokenizer_object=tokenizer).decode(ids)
        assert [place for _, place in texts][-1] == len(ids) - 1
    assert [piece for piece, _ in _texts(of_bytes(), of_bytes().encode("é🙂").ids)] == ["é", "🙂"]
    assert _texts(of_bytes(), of_bytes().encode("🙂").ids[:2]) == [("\N{REPLACEMENT CHARACTER}", 1)]
    assert _texts(of_words(), []) == []
