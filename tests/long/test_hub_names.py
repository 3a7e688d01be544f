"""Model and data by their names on the Hub: a real client downloads them from a hub on loopback, pinned by commit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.align import Align
from tests.flows.fake_hub import commit_of, fake_hub

RECIPE = """
method: dpo
name: hub
model: someone/tiny
dpo:
  data: someone/pairs
  training: {batch_size: 8}
resources: {trainers: 1, threads: 1}
"""


@pytest.mark.slow
def test_a_run_from_the_hub_is_pinned_cached_and_continues_offline(
    align: Align, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pairs = tmp_path / "model", tmp_path / "pairs"
    shutil.copytree(tiny_model(), model)
    pairs.mkdir()
    rows = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n)} for n in range(1, 17)]
    (pairs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "hub.yaml"
    recipe.write_text(RECIPE)
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")

    with fake_hub({("models", "someone/tiny"): model, ("datasets", "someone/pairs"): pairs}) as (endpoint, requests):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        first = align(home, "run", str(recipe))
        assert {stage["state"] for stage in first["stages"]} == {"run"}
        assert any(path.endswith("model.safetensors") for path in requests)

        base = align(home, "artifacts", "show", first["stages"][0]["reference"])
        (record,) = base["provenance"]
        assert record["key_parts"]["config"]["hub"] == "someone/tiny"
        assert record["key_parts"]["config"]["commit"] == commit_of(model)

        downloads = len([path for path in requests if "/resolve/" in path])
        again = align(home, "run", str(recipe))
        assert {stage["state"] for stage in again["stages"]} == {"cached"}
        assert len([path for path in requests if "/resolve/" in path]) == downloads, "nothing had to be fetched again"

        missing = align(home, "run", str(recipe), "--set", "model=someone/nothing", expect=2)
        assert (
            "someone/nothing: neither a file or folder (relative paths are relative to the recipe's file"
            in missing["error"]
        )
        assert "nor a model on the Hub" in missing["error"]

    unreachable = align(home, "run", str(recipe), expect=2)
    assert "set HF_HUB_OFFLINE=1 to use earlier downloads" in unreachable["error"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = align(home, "run", str(recipe), "--set", "dpo.training.batch_size=4")
    states = {stage["label"]: stage["state"] for stage in offline["stages"]}
    assert states == {"model": "cached", "dpo/data": "cached", "dpo/reference-logps": "cached", "dpo": "run"}
