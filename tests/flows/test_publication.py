"""A run that promotes, signs and publishes its policy: `align resume` completes a publication that failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from alignment_core.artifacts import Reference, open_store
from alignment_core.artifacts.attachments import attachments
from tests.align import Align, states
from tests.conftest import TinyModel
from tests.servers.hub import ORGANISATION, HubServer

RECIPE = """
method: sft
name: small
model: {{name: {model}}}
sft: {{data: {{task: reverse, rows: 64}}, training: {{batch_size: 32, max_steps: 2}}}}
promotion: {{sign: key, publish: "hf://{repo}"}}
resources: {{trainers: 1, engines: 1, threads: 1}}
"""


CONTINUED = """
method: sft
name: continued
model: {{name: policy/production}}
sft: {{data: {{task: reverse, rows: 64}}, training: {{batch_size: 32, max_steps: 2}}}}
promotion: {{publish: "hf://{repo}"}}
resources: {{trainers: 1, engines: 1, threads: 1}}
"""


@pytest.mark.slow
def test_a_failed_publication_is_completed_by_resuming(align: Align, tiny_model: TinyModel, tmp_path: Path) -> None:
    home, key, repo = tmp_path / "home", tmp_path / "key.pem", f"{ORGANISATION}/policy"
    home.mkdir()
    new = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(new, check=True, capture_output=True)
    (home / "small.yaml").write_text(RECIPE.format(model=tiny_model(), repo=repo))
    hub = HubServer(tmp_path / "hub").start()
    try:
        variables = {**hub.environment(), "ALIGN_SIGNING_KEY": str(key), "HF_HOME": str(tmp_path / "huggingface")}
        hub.fail("POST .*/commit/main", "400", 1)
        first = align(home, "run", str(home / "small.yaml"), expect=5, **variables)
        assert (first["promotion"]["state"], first["promotion"]["publication"]["state"]) == ("promoted", "failed")
        policy = Reference.parse(first["outputs"]["policy"])
        store = open_store(first["store"])
        assert store.tags.get("policy/production") == policy
        assert attachments(store, policy).keys() == {
            *("bom.cdx.json", "model.sig", "provenance.intoto.json"),
            "curve.jsonl",  # of its training, which stays in the store
        }

        again = align(home, "resume", "last", **variables)
        assert set(states(again).values()) == {"cached"}
        assert (again["promotion"]["state"], again["promotion"]["publication"]["state"]) == ("unchanged", "published")
        assert hub.commits("model", repo)[-1] == f"Publish {policy.short}"
    finally:
        hub.end()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_resumed_run_starts_from_what_its_tag_pointed_to_before_its_own_promotion(
    align: Align, tiny_model: TinyModel, tmp_path: Path
) -> None:
    home, repo = tmp_path / "home", f"{ORGANISATION}/continued"
    home.mkdir()
    first_recipe = RECIPE.format(model=tiny_model(), repo=repo).replace("sign: key, ", "")
    (home / "small.yaml").write_text(first_recipe)
    (home / "continued.yaml").write_text(CONTINUED.format(repo=repo))
    hub = HubServer(tmp_path / "hub").start()
    try:
        variables = {**hub.environment(), "HF_HOME": str(tmp_path / "huggingface")}
        first = align(home, "run", str(home / "small.yaml"), **variables)
        hub.fail("POST .*/commit/main", "400", 1)
        second = align(home, "run", str(home / "continued.yaml"), expect=5, **variables)
        policy = Reference.parse(second["outputs"]["policy"])
        assert second["promotion"]["previous"] == first["outputs"]["policy"]
        assert second["promotion"]["state"] == "promoted"

        again = align(home, "resume", "last", **variables)
        assert set(states(again).values()) == {"cached"}
        assert (again["promotion"]["state"], again["promotion"]["publication"]["state"]) == ("unchanged", "published")
        assert again["outputs"]["policy"] == str(policy)
        assert hub.commits("model", repo)[-1] == f"Publish {policy.short}"
    finally:
        hub.end()
