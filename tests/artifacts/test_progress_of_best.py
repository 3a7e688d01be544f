"""The best model so far is progress: all of its files go to the store, and come back on another machine."""

from __future__ import annotations

from alignment_core.artifacts.stored_progress import settled
from alignment_core.models.saving import GENERATION_CONFIG, TOKENIZER_FILES


def test_the_tokenizer_and_templates_of_the_best_model_are_kept(tmp_path):
    """Without them a run that is resumed elsewhere would end with a model that has no chat template."""
    names = [
        pattern.replace("*", "tokenizer") for pattern in (*TOKENIZER_FILES, GENERATION_CONFIG, "model.safetensors")
    ]
    for name in names:
        path = tmp_path / "best-00000002" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    assert settled(tmp_path).keys() == {f"best-00000002/{name}" for name in names}
