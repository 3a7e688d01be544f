"""A reward model with another vocabulary and chat template, and its score of a text by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from alignment_core.data.messages import Messages, assistant

TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def reward_model_with_another_tokenizer(folder: Path, model: Path, template: str | None = TEMPLATE) -> Path:
    """A copy of a tiny ``model`` with a head that scores, whose ids of bytes are two above the policy's."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    shutil.copytree(model, folder)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["user assistant"],
        trainers.BpeTrainer(vocab_size=264, initial_alphabet=alphabet, special_tokens=["<end>", "<bos>"]),  # type: ignore[call-arg]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", bos_token="<bos>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    fast.save_pretrained(folder)
    return folder


def score_of(judge: Path, text: str) -> float:
    """A plain forward pass over the model's own tokens of a rendered text."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).eval()
    with torch.no_grad():
        return float(model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits[0, 0])


def rendered(judge: Path, messages: Messages, answer: str) -> str:
    """A conversation by the model's own chat template, with its line break behind the EOS of the answer."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(judge)
    return str(tokenizer.apply_chat_template([*messages, *assistant(answer)], tokenize=False))
