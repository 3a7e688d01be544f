"""Artifacts on the Hub, loaded there by name: models, adapters and reward models by their classes, data by ``load_dataset``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment_core.attestation.publishing import publish
from alignment_core.data.build import build, write
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from alignment_core.recipes import DataConfig
from tests.attestation.conftest import hub, hub_server  # noqa: F401 (fixtures)
from tests.exports.conftest import export, logits
from tests.exports.test_exported_adapters import ATTENTION, others_adapter
from tests.servers.hub import ORGANISATION

LOADS = """
import json, sys
import datasets, peft, torch, transformers
policy, reward, adapter, data = sys.argv[1:]
ids = torch.arange(40)[None]
results = {}
model = transformers.AutoModelForCausalLM.from_pretrained(policy).eval()
with torch.no_grad():
    results["policy"] = model(ids).logits[0, -1].tolist()
tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
tools = [{"type": "function", "function": {"name": "weather"}}]
results["tools"] = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=tools, tokenize=False)
results["temperature"] = transformers.GenerationConfig.from_pretrained(policy).temperature
judge = transformers.AutoModelForSequenceClassification.from_pretrained(reward).eval()
reads = transformers.AutoTokenizer.from_pretrained(reward)
batch = reads(["short<eos>", "somewhat longer<eos>"], padding=True, return_tensors="pt", return_token_type_ids=False)
with torch.no_grad():
    results["scores"] = judge(**batch).logits[:, 0].tolist()
beside = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(policy), adapter).eval()
with torch.no_grad():
    results["adapter"] = beside(ids).logits[0, -1].tolist()
splits = datasets.load_dataset(data)
results["rows"] = {name: table.num_rows for name, table in splits.items()}
results["ids"] = list(splits["train"][0]["input_ids"])
print(json.dumps(results))
"""


@pytest.mark.slow
def test_published_artifacts_are_loaded_by_name(hub: Any, store: Any, base: Any, tmp_path: Path) -> None:  # noqa: F811
    shows = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}" + CHAT_TEMPLATE
    source = base(chat_template={"default": CHAT_TEMPLATE, "tool_use": shows}, pad_token="<eos>")
    settings = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(settings | {"temperature": 0.9}))
    policy = export(source, tmp_path / "policy")
    judge = export(source, tmp_path / "reward", "score")
    adapted = others_adapter(tmp_path / "policy", tmp_path / "adapter", **ATTENTION)
    rows = [{"prompt": f"say {number}", "completion": f"it is {number}"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig.model_validate({"sources": [str(tmp_path / "rows.jsonl")], "test_rows": 3})
    built = build(data, [pin(source) for source in data.sources], byte_tokenizer(), "demonstrations", 0)
    write(built, tmp_path / "data")
    names = []
    for name, kind in (("policy", "model"), ("reward", "reward-model"), ("adapter", "adapter"), ("data", "dataset")):
        names.append(f"{ORGANISATION}/exports-{name}")
        publish(store, store.publish(tmp_path / name, kind), f"hf://{names[-1]}")

    environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "huggingface")}
    command = [sys.executable, "-c", LOADS, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    ids = torch.arange(40)[None]
    assert printed["policy"] == pytest.approx(logits(policy, ids)[0, -1].tolist(), abs=1e-5)
    assert printed["adapter"] == pytest.approx(adapted[0, -1].tolist(), abs=1e-5)
    assert printed["tools"] == "weather;<user>?"
    assert printed["temperature"] == 0.9
    texts = [[*b"short", 257], [*b"somewhat longer", 257]]
    assert printed["scores"] == pytest.approx(
        [logits(judge, torch.tensor([text])).item() for text in texts], rel=1e-4, abs=1e-5
    )
    assert printed["rows"] == {"train": 9, "test": 3}
    assert printed["ids"] == list(next(iter(built.of("train")))["input_ids"])
