"""An exported reward model, and a critic, which is one: ``AutoModelForSequenceClassification`` gives the score that we give.

It takes the logit at the last token of a row that is not ``config.pad_token_id``. Our score is that of the state after the
sequence's last token, EOS included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.tokenizer import CHAT_TEMPLATE
from tests.exports.conftest import TEXTS, edit, export

CHATML = (
    "{% for m in messages %}{{ '<user>' + m.role + ':' + m.content + '<system>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant:' }}{% endif %}"
)
"""Turns that end with a token other than EOS, as with Qwen2.5's base models."""
PADDING: dict[str, dict[str, Any]] = {
    "pad and EOS": {},
    "pad is EOS": {"pad_token": "<eos>"},
    "no pad": {"pad_token": None},
    "pad is EOS, and turns end otherwise": {"pad_token": "<eos>", "chat_template": CHATML},
    "pad ends turns": {"pad_token": "<system>", "chat_template": CHATML},
    "pad ends turns of the data": {"pad_token": "<system>"},
}


def scores(model: Any, sequences: list[list[int]]) -> list[float]:
    """As a training stage or a judge computes them: packed, without padding."""
    rows = [
        Row(number, (TokenSequence.of_prompt_and_completion(sequence, []),))
        for number, sequence in enumerate(sequences)
    ]
    with torch.no_grad():
        scores: list[float] = run_packed(PackedModel(model, "score"), pack(rows)).tolist()
    return scores


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", PADDING)
def test_padded_batches_have_the_scores_of_single_sequences(base, tmp_path, case, side):
    tokenizer = PADDING[case]
    source = base(**tokenizer)
    of_data = CHATML if case.endswith("of the data") else None
    trained = export(source, tmp_path / "out", "score", chat_template=of_data)
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    public = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert public.chat_template == (of_data or tokenizer.get("chat_template", CHAT_TEMPLATE))
    end = "<system>" if public.chat_template == CHATML else "<eos>"
    texts = [f"{text}{end}" for text in TEXTS]
    padded = public(texts, padding=True, padding_side=side, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        logits = loaded.eval()(**padded).logits[:, 0]
        alone = [loaded(torch.tensor([public(text)["input_ids"]])).logits.item() for text in texts]
    expected = scores(trained, [public(text)["input_ids"] for text in texts])
    assert max(expected) - min(expected) > 0.1
    assert alone == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert logits.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert loaded.config.pad_token_id == public.pad_token_id


def test_a_critic_has_a_value_at_each_place(base, tmp_path):
    """Its class has the head and the model: a value is the head's output at the state before a token."""
    trained = export(base(), tmp_path / "out", "value")
    prompt, answer = list(b"2 + 2?"), list(b"It is 4.")
    row = Row(0, (TokenSequence.of_prompt_and_completion(prompt, answer),))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        score = loaded.score(loaded.model(torch.tensor([prompt + answer])).last_hidden_state)[
            0, len(prompt) - 1 : -1, 0
        ]
        expected = run_packed(PackedModel(trained, "value"), pack([row]))
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-4)


def test_a_tokenizer_that_pads_well_is_copied_byte_for_byte(base, tmp_path):
    source = base()
    export(source, tmp_path / "out", "score")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_another_padding_token_changes_no_token_of_text(base, tmp_path):
    source = base(pad_token="<eos>")
    export(source, tmp_path / "out", "score")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    assert (ours.eos_token, ours.chat_template) == ("<eos>", CHAT_TEMPLATE)


def test_tokens_that_end_generation_are_no_padding(base, tmp_path):
    """Llama 3 Instruct stops at <|end_of_text|> and <|eot_id|>, whichever of them is the tokenizer's EOS."""
    source = base(pad_token="<unused0>")
    edit(source / "generation_config.json", eos_token_id=[257, 261])
    export(source, tmp_path / "out", "score")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids("<unused0>") == 261
    assert tokenizer.pad_token == "<pad>"


def test_a_reward_model_without_a_padding_token_refuses_batches_instead_of_scoring_wrongly(base, tmp_path):
    """As GPT-2. Without a padding token ``transformers`` scores single sequences at their last token."""
    source = base()
    only_eos(source)
    trained = export(source, tmp_path / "out", "score")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = [*b"an answer", 257]
    assert loaded(torch.tensor([ids])).logits.item() == pytest.approx(scores(trained, [ids])[0], rel=1e-4)
    with pytest.raises(ValueError, match="no padding token is defined"):
        loaded(torch.tensor([ids, ids]))


def only_eos(folder: Path) -> None:
    """Leave a tokenizer in ``folder`` with no special token but EOS, which also pads."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "<eos>"]
    for added in content["added_tokens"]:
        content["model"]["vocab"][added["content"]] = added["id"]
    content["model"]["vocab"]["<unused>"] = 256
    file.write_text(json.dumps(content))
    edit(folder / "tokenizer_config.json", pad_token="<eos>", added_tokens_decoder=None, extra_special_tokens=None)
