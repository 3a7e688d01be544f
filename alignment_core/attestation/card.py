"""The page of an artifact on the Hugging Face Hub: a README with metadata, made from the store's records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from alignment_core.artifacts import Manifest
from alignment_core.attestation.ancestry import Ancestor, Ancestry
from alignment_core.attestation.attest import BOM, PROVENANCE
from alignment_core.attestation.bom import intervals
from alignment_core.attestation.signing import SIGNATURE
from alignment_core.models.adapters import QUANTISATION

_BESIDE = {
    PROVENANCE: "an in-toto statement with SLSA provenance: every stage, its inputs and their digests",
    BOM: "a CycloneDX bill of materials: models, data and packages",
    SIGNATURE: "a signature over its files",
}
_SPLITS = ("train", "test")


def model_card(manifest: Manifest, ancestry: Ancestry, repo: str, beside: Collection[str]) -> str:
    """The README of a model; ``beside`` are the names of the attestations that are published with it."""
    from huggingface_hub import EvalResult, ModelCardData

    bases = [name for name, _ in ancestry.base_models()]
    data = ModelCardData(
        model_name=repo.rpartition("/")[2],
        base_model=bases or None,
        base_model_relation=_relation(manifest, ancestry) if bases else None,
        datasets=[name for name, _ in ancestry.on_hub(data=True)] or None,
        library_name="peft" if manifest.kind == "adapter" else "transformers",
        pipeline_tag="text-generation" if manifest.kind == "model" else None,
        tags=["alignment"],
        eval_results=[
            EvalResult("text-generation", "held-out-prompts", "held-out prompts", name, value)
            for name, value, _ in intervals(ancestry.measured)
        ],
    )
    return _page(data, manifest, ancestry, repo, beside)


def data_card(manifest: Manifest, ancestry: Ancestry, repo: str, beside: Collection[str]) -> str:
    """The README of a data set, with its splits."""
    from huggingface_hub import DatasetCardData

    files = {entry.path for entry in manifest.files}
    splits = [{"split": name, "path": f"{name}.parquet"} for name in _SPLITS if f"{name}.parquet" in files]
    data = DatasetCardData(
        source_datasets=[name for name, _ in ancestry.on_hub(data=True)] or None,
        tags=["alignment"],
        configs=[{"config_name": "default", "data_files": splits}] if splits else None,
    )
    return _page(data, manifest, ancestry, repo, beside)


def _relation(manifest: Manifest, ancestry: Ancestry) -> str | None:
    """The relation of the artifact to the models on the Hub that it descends from, in the Hub's words."""
    record = ancestry.artifact.record
    if manifest.kind == "adapter":
        return "adapter"
    if record is None or record.stage == "base_model":
        return None
    return "merge" if record.stage == "merge" else "finetune"


def _page(data: Any, manifest: Manifest, ancestry: Ancestry, repo: str, beside: Collection[str]) -> str:
    lines = [*_text(manifest, ancestry, repo, beside)]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"


def _text(manifest: Manifest, ancestry: Ancestry, repo: str, beside: Collection[str]) -> Iterator[str]:
    record = ancestry.artifact.record
    yield f"# {repo.rpartition('/')[2]}"
    yield ""
    maker = f", made by the stage `{record.label}` ({record.stage})" if record else ""
    yield f"The artifact `{manifest.reference}`{maker}."
    if measured := [*intervals(ancestry.measured)]:
        yield from ("", "## Evaluation", "", "| metric | value | interval |", "|---|---|---|")
        for name, value, ends in measured:
            yield f"| {name} | {value:.4g} | {f'[{ends[0]:.4g}, {ends[1]:.4g}]' if ends else ''} |"
    if manifest.kind == "adapter" and len(ancestry.weights) > 1:
        yield from _loading(ancestry, repo, any(file.path == QUANTISATION for file in manifest.files))
    if ancestry.earlier:
        yield from ("", "## Made from", "", "| as | artifact | by |", "|---|---|---|")
        for ancestor in ancestry.earlier:
            by = f"{ancestor.record.label} ({ancestor.record.stage})" if ancestor.record else ""
            yield f"| {ancestor.path} | `{ancestor.reference.short}` | {by} |"
    if beside:
        yield from ("", "## Provenance", "")
        yield from (f"- [{name}]({name}): {content}" for name, content in _BESIDE.items() if name in beside)
    if SIGNATURE in beside:
        verify = f"model_signing verify key FOLDER --signature {SIGNATURE} --public_key KEY.pub --ignore_unsigned_files"
        yield from ("", f"`{verify}` checks a download.")


def _loading(ancestry: Ancestry, repo: str, is_quantised: bool) -> Iterator[str]:
    """How to load an adapter. Its files are published as they are in the store, and name its base by the store's reference.

    One that ``is_quantised`` was trained, and measured, beside weights in fewer bits.
    """
    adapter, base = ancestry.weights[:2]
    commits = [source for source in base.sources if source.commit] if _stage_of(base) == "base_model" else []
    place = f'"{commits[0].path}", revision="{commits[0].commit}"' if commits else '"BASE"'
    scores = _stage_of(adapter) == "reward_model"
    task = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    settings = f"{', num_labels=1' if scores else ''}{', quantization_config=quantization' if is_quantised else ''}"
    yield from ("", "## Loading", "")
    beside = "" if commits else " in a folder BASE"
    if is_quantised:
        beside += ", rounded as in training (in 8 bits, bitsandbytes rounds inputs, too)"
    yield f"Load it beside the model that it was trained on, `{base.reference}`{beside}:"
    yield from ("", "```python")
    if is_quantised:
        yield from ("import json", "", "from huggingface_hub import hf_hub_download")
    yield "from peft import PeftModel"
    yield from (f"from transformers import {task}{', BitsAndBytesConfig' if is_quantised else ''}", "")
    if is_quantised:
        yield f'with open(hf_hub_download("{repo}", "{QUANTISATION}")) as file:'
        yield "    quantization = BitsAndBytesConfig(**json.load(file))"
    yield f"base = {task}.from_pretrained({place}{settings})"
    yield from (f'model = PeftModel.from_pretrained(base, "{repo}")', "```", "")
    yield (
        "Classes that look up the base in adapter_config.json, such as `AutoPeftModelForCausalLM`, do not find it: the file "
        "names it by this reference."
    )


def _stage_of(ancestor: Ancestor) -> str | None:
    return ancestor.record.stage if ancestor.record else None
