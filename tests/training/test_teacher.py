"""A teacher's log-probabilities, against a plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.models.microbatch import Row, TokenSequence
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.teacher import Teacher, TeacherJob

TOKENS = 264


@pytest.fixture
def wide_teacher(tiny_model: Any, tmp_path: Path) -> Path:
    """A model with 320 rows of embeddings for the 264 tokens of its tokenizer; rows that are no tokens are likely."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tied=False))
    model.resize_token_embeddings(320)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        model.lm_head.weight[TOKENS:] = 0.1 * torch.randn((320 - TOKENS, model.config.hidden_size), generator=generator)
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("top_k", "embeddings"), [(8, None), (320, None), (320, 320), (8, 260), (320, 260)])
def test_padding_rows_of_the_head_are_no_candidates(wide_teacher: Path, top_k: int, embeddings: int | None) -> None:
    """A student with fewer rows could not learn them. The distribution is the softmax over the logits of the 264 tokens, or of
    those that the student has embeddings for."""
    texts = [([1, 2, 3], [4, 5, 6, 7]), ([9] * 20, [8, 10])]
    rows = [Row(number, (TokenSequence.of_prompt_and_completion(*text),)) for number, text in enumerate(texts)]
    job = TeacherJob(Model(wide_teacher, Reference("model", "a" * 64)), top_k, False, embeddings)
    tokens = min(TOKENS, embeddings or TOKENS)
    predictions = Teacher(job, ResourcesConfig(), Device.detect("cpu", 0)).run(rows)
    candidates = [predictions[row.number] for row in rows]
    model = transformers.AutoModelForCausalLM.from_pretrained(wide_teacher).eval()
    outside = 0
    for (prompt, answer), (ids, logps) in zip(texts, candidates, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        outside += int((logits.argmax(-1) >= tokens).sum())
        expected = logits[:, :tokens].log_softmax(-1).sort(descending=True)
        assert ids.shape == (len(answer), min(top_k, tokens))
        np.testing.assert_array_equal(ids[:, :8], expected.indices[:, :8])
        np.testing.assert_allclose(logps, expected.values[:, : ids.shape[1]], rtol=1e-4, atol=1e-4)
    assert outside, "the test would prove nothing"
