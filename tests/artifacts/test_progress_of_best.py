"""The best model so far is progress: all of its files go to the store, and come back on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.stored_progress import settled
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import GENERATION_CONFIG, TOKENIZER_FILES
from alignment_core.training.checkpoints import link_model


def test_the_tokenizer_and_templates_of_the_best_model_are_kept(tmp_path: Path) -> None:
    """Without them a run that is resumed elsewhere would end with a model that has no chat template."""
    names = [
        pattern.replace("*", "tokenizer") for pattern in (*TOKENIZER_FILES, GENERATION_CONFIG, "model.safetensors")
    ]
    for name in names:
        path = tmp_path / "best-00000002" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    assert settled(tmp_path).keys() == {f"best-00000002/{name}" for name in names}


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_the_best_model_is_that_of_the_trained_model(tmp_path: Path, trusted: bool) -> None:
    """Code does not travel as progress: someone with write access to a store could put some there."""
    for name in ("trained/modeling_own.py", "best/modeling_own.py", "best/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"of {name}")
    assert settled(tmp_path).keys() == {"best/config.json"}
    (tmp_path / "best" / "modeling_own.py").unlink()  # as it comes back on another machine
    link_model(
        tmp_path / "best", tmp_path / "output", Model(tmp_path / "trained", Reference("model", "0" * 64), trusted)
    )
    written = {path.name: path.read_text() for path in (tmp_path / "output").iterdir()}
    code = {"modeling_own.py": "of trained/modeling_own.py"} if trusted else {}
    assert written == {"config.json": "of best/config.json", **code}
