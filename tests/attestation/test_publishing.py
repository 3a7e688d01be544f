"""A publication is an ordinary repository: others load it by name, and its model card documents its origin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, HfApi, ModelCard

from alignment_core.artifacts import Reference, Store
from alignment_core.attestation.ancestry import ancestry_of
from alignment_core.attestation.attest import attest, check_ready
from alignment_core.attestation.bom import bill
from alignment_core.attestation.card import model_card
from alignment_core.attestation.publishing import publish, tag_of
from alignment_core.attestation.signing import sign
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.models.adapters import QUANTISATION
from alignment_core.recipes import ModelConfig, PromotionConfig
from alignment_core.stages.base_model import BaseModelConfig
from tests.align import align_here
from tests.attestation.conftest import COMMIT, Publish

LOADS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import transformers
from alignment_core.recipes import ModelConfig
from alignment_core.stages.base_model import pin_model, run
repo, tag, output = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(repo, revision=tag)
tokenizer = transformers.AutoTokenizer.from_pretrained(repo, revision=tag)
pinned = pin_model(ModelConfig(name=repo, revision=tag))
Path(output).mkdir()
metrics = run(SimpleNamespace(output=Path(output), seed=0), pinned)
print(json.dumps({"parameters": model.num_parameters(), "published": metrics["parameters"], "commit": pinned.commit}))
"""


def files_of(repo: str, kind: str = "model", revision: str = "main") -> set[str]:
    return set(HfApi().list_repo_files(repo, repo_type=kind, revision=revision)) - {".gitattributes"}


def card_of(repo: str, tmp_path: Path, kind: Any = "model") -> Any:
    """The README as it is on the Hub."""
    file = HfApi().hf_hub_download(repo, "README.md", repo_type=kind, local_dir=tmp_path / "downloaded")
    return (ModelCard if kind == "model" else DatasetCard)(Path(file).read_text())


@pytest.mark.slow
def test_a_published_model_is_loaded_by_name_and_is_the_model_of_another_recipe(hub, repo, store, tiny_model, tmp_path):
    reference = store.publish(tiny_model(), "model")
    done = publish(store, reference, f"hf://{repo}")
    environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "huggingface")}
    command = [sys.executable, "-c", LOADS, repo, tag_of(reference), str(tmp_path / "base")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout.splitlines()[-1])
    assert rows["commit"] == done.commit
    assert rows["parameters"] == rows["published"] > 0
    ours = {entry.path: entry.sha256 for entry in store.manifest(reference).files}
    again = store.publish(tmp_path / "base", "model")
    theirs = {entry.path: entry.sha256 for entry in store.manifest(again).files}
    assert ours == theirs, "the weights have come round"


def test_the_model_card_has_base_model_data_metrics_and_attestations(hub, repo, store, references, keys, tmp_path):
    attest(store, references["sft"])
    sign(store, references["sft"], keys("one")[0])
    publish(store, references["sft"], f"hf://{repo}", tag="v1")
    assert files_of(repo, revision="v1") == {
        *("README.md", "config.json", "content", "bom.cdx.json", "model.sig", "provenance.intoto.json")
    }
    card = card_of(repo, tmp_path)
    fields = card.data.to_dict()
    assert (fields["base_model"], fields["base_model_relation"]) == (["org/base"], "finetune")
    assert (fields["datasets"], fields["library_name"]) == (["org/rows"], "transformers")
    assert [(result.metric_type, result.metric_value) for result in card.data.eval_results] == [("accuracy", 0.5)]
    for text in (
        str(references["sft"]),
        "| accuracy | 0.5 | [0.25, 0.75] |",
        references["data"].short,
        "(provenance.intoto.json)",
    ):
        assert text in card.content


def test_base_models_are_those_whose_weights_were_trained_or_merged(store: Store, references, publish: Publish):
    """As huggingface_hub's ModelCardData says, ``base_model`` names the model that a finetune or an adapter derives from.
    Models that reward, teach or are a reference contribute no weights; the bill of materials has them all."""

    def from_hub(name: str) -> Reference:
        config = BaseModelConfig(model=ModelConfig(name=name), commit=COMMIT)
        return publish("base_model", "model", {}, config=config.model_dump(mode="json"))

    def bases(reference: Reference) -> Any:
        page = model_card(store.manifest(reference), ancestry_of(store, reference), "org/name", ())
        return ModelCard(page).data.to_dict()["base_model"]

    sft, data = references["sft"], references["data"]
    judge, other, teacher = map(from_hub, ("org/judge", "org/other", "org/teacher"))
    trained = publish("reward_model", "reward-model", {"model": other, "data": data})
    sampled = {"policy": sft, "prompts": data, "reference": teacher, "reward-0": judge, "reward-1": trained}
    policy = publish("rl", "model", {**sampled, "critic": judge})
    logps = publish("teacher_logps", "dataset", {"model": teacher, "student": references["base"], "data": data})
    student = publish("distillation", "model", {"model": policy, "data": logps})
    assert (bases(policy), bases(student), bases(trained)) == (["org/base"], ["org/base"], ["org/other"])
    named = {
        component["name"] for component in bill(store.manifest(student), ancestry_of(store, student), {})["components"]
    }
    assert {"org/base", "org/judge", "org/other", "org/teacher"} <= named
    assert bases(publish("rl", "critic", {**sampled, "critic": judge})) == ["org/judge"]
    assert bases(publish("rl", "critic", sampled)) == ["org/base"], "it starts from the policy"
    tuned = publish("sft", "model", {"model": other, "data": data})
    merged = publish("merge", "model", {"model-1": student, "model-2": tuned, "base": references["base"]})
    assert sorted(bases(merged)) == ["org/base", "org/other"]
    assert bases(publish("dpo", "adapter", {"model": merged, "data": data})) == bases(merged)


def test_the_page_of_an_adapter_shows_how_to_load_it_beside_its_base(store: Store, references, publish: Publish):
    """Its adapter_config.json names the base by the store's reference, and files are published as they are in the store."""

    def page(reference: Reference) -> str:
        return model_card(store.manifest(reference), ancestry_of(store, reference), "org/name", ())

    on_hub = {"model": references["base"], "data": references["data"]}
    of_base = page(publish("dpo", "adapter", on_hub))
    assert "quantization" not in of_base
    assert f'base = AutoModelForCausalLM.from_pretrained("org/base", revision="{COMMIT}")\n' in of_base
    assert 'model = PeftModel.from_pretrained(base, "org/name")\n' in of_base
    of_judge = page(publish("reward_model", "adapter", on_hub))
    assert (
        f'base = AutoModelForSequenceClassification.from_pretrained("org/base", revision="{COMMIT}", num_labels=1)\n'
    ) in of_judge
    sampled = {"policy": references["sft"], "prompts": references["data"], "reward-0": references["base"]}
    of_policy = page(publish("rl", "adapter", sampled))
    assert 'base = AutoModelForCausalLM.from_pretrained("BASE")\n' in of_policy
    assert f"`{references['sft']}` in a folder BASE" in of_policy
    assert "PeftModel" not in page(references["sft"])
    assert "PeftModel" not in page(publish("imported", "adapter")), "the records do not know its base"


def test_the_page_of_an_adapter_beside_rounded_weights_rounds_them(store: Store, references, publish: Publish):
    """As QLoRA trained it: neither peft nor transformers reads the file in an adapter's folder."""
    adapter = publish("dpo", "adapter", {"model": references["base"], "data": references["data"]})
    manifest = store.manifest(adapter)
    (entry,) = manifest.files
    rounded = manifest.model_copy(update={"files": (*manifest.files, entry.model_copy(update={"path": QUANTISATION}))})
    page = model_card(rounded, ancestry_of(store, adapter), "org/name", ())
    code = page.split("```python")[1].split("```")[0]
    compile(code, "page", "exec")
    assert 'hf_hub_download("org/name", "quantization_config.json")' in code
    assert "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n" in code
    assert f'from_pretrained("org/base", revision="{COMMIT}", quantization_config=quantization)\n' in code
    assert "`, rounded as in training (in 8 bits, bitsandbytes rounds inputs, too):" in page


def test_the_same_artifact_again_makes_no_commit_and_an_edited_page_is_a_new_version(hub, repo, store, references):
    assert publish(store, references["sft"], f"hf://{repo}").new
    assert not publish(store, references["sft"], f"hf://{repo}").new
    attest(store, references["sft"])
    assert publish(store, references["sft"], f"hf://{repo}").new, "the attestations are newer"
    assert publish(store, references["base"], f"hf://{repo}").new
    tags = {tag.name for tag in HfApi().list_repo_refs(repo).tags}
    assert tags == {tag_of(references["sft"]), tag_of(references["base"])}
    assert len(hub.commits("model", repo)) == 4


def test_a_data_set_is_a_data_set_repository_and_other_kinds_are_refused(hub, repo, store, references, tmp_path):
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.parquet").write_bytes(b"PAR1")
    reference = store.publish(tmp_path / "rows", "dataset")
    publish(store, reference, f"hf://{repo}", public=True)
    assert not HfApi().repo_info(repo, repo_type="dataset").private
    splits = [{"split": name, "path": f"{name}.parquet"} for name in ("train", "test")]
    fields = card_of(repo, tmp_path, "dataset").data.to_dict()
    assert fields["configs"] == [{"config_name": "default", "data_files": splits}]
    with pytest.raises(UserError, match="is a scores: only models and data sets"):
        publish(store, references["scores"], f"hf://{repo}")


def test_the_command_publishes(hub, repo, store, references, tmp_path):
    command = [
        "artifacts",
        "publish",
        references["sft"].short,
        f"hf://{repo}",
        "--tag",
        "v1",
        "--store",
        store.uri,
        "--json",
    ]
    for state in ("published", "unchanged"):
        done = align_here(tmp_path / "home", *command)
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout.splitlines()[-1])
        assert (outcome["state"], outcome["tags"]) == (state, [tag_of(references["sft"]), "v1"])
    command[3] = "hf://name"
    assert align_here(tmp_path / "home", *command).returncode == 2


def test_a_publishing_recipe_without_a_token_is_refused_before_the_run(hub, monkeypatch, tmp_path):
    section = PromotionConfig(publish="hf://org/name")
    check_ready(section)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(EnvironmentFault, match="set HF_TOKEN"):
        check_ready(section)
    with pytest.raises(ValueError, match="write hf://organisation/name"):
        PromotionConfig(publish="org/name")
