"""A deployed night whose evaluation prompts are at an address that is refused: on record, and the next night tries again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from alignment_core.artifacts import open_store
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.nights.ledger import Ledger
from alignment_core.recipes import load_recipe

RECIPE = """
method: nightly
name: owl
store: {home}/store
model: {{scratch: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}}}
dpo: {{data: {home}/inbox}}
nightly: {{min_rows: 1}}
evaluation: {{prompts: "s3://bucket/nights/prompts.jsonl", verifier: "{home}/judge.py:share_of_a"}}
promotion: {{gates: [{{metric: accuracy, min_gain: 0}}]}}
resources: {{trainers: 1, engines: 1, threads: 1, kv_cache_mib: 16}}
"""
NIGHTS = """
import os, sys
from pathlib import Path
from alignment.flows.service import environment
environment.prepare()
from alignment.flows.deployment_flows import deployed_nightly
from alignment_core.errors import AlignmentError
from alignment_core.recipes import load_recipe

recipe = load_recipe(Path(sys.argv[1]))
for night in ("without the object", "without credentials"):
    if night == "without credentials":
        del os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    try:
        deployed_nightly(recipe, night=night)
    except AlignmentError as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_address_that_is_refused_fails_the_night_on_record_and_the_next_night_takes_its_rows(
    home: Path, bucket: str, prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [{"prompt": f"{number}?", "chosen": "a", "rejected": "b"} for number in range(8)]
    (home / "inbox").mkdir()
    (home / "inbox" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (home / "judge.py").write_text("def share_of_a(prompt, completion, label):\n    return 1.0\n")
    (home / "nightly.yaml").write_text(RECIPE.format(home=home))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "none"))
    done = subprocess.run(
        [sys.executable, "-c", NIGHTS, str(home / "nightly.yaml")],
        env={**os.environ, **prefect_api},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    missing, denied = done.stdout.splitlines()[-2:]
    address = "s3://bucket/nights/prompts.jsonl"
    assert missing == f"path: {address}: there is no such file"
    assert denied.startswith(f"path: cannot read {address}: there are no credentials")

    recipe = load_recipe(home / "nightly.yaml")
    assert isinstance(recipe, NightlyRecipe)
    ledger = Ledger(open_store(home / "store"), recipe)
    entries: list[tuple[Any, ...]] = [
        (entry.night, entry.state, entry.attempt, entry.failed_attempts) for entry in ledger.nights()
    ]
    assert entries == [
        ("without the object", "claimed", 1, 0),
        ("without the object", "failed", 1, 0),
        ("without credentials", "claimed", 2, 0),
        ("without credentials", "failed", 2, 0),
    ]
    assert [entry.reasons for entry in ledger.nights()][1::2] == [
        (f"UserError: {missing}",),
        (f"EnvironmentFault: {denied}",),
    ]
    client = botocore.session.get_session().create_client("s3")
    client.put_object(Bucket=bucket, Key="nights/prompts.jsonl", Body=b'{"prompt": "0?"}\n')
    with ledger.claim("with both") as claim:
        assert (claim.night.state, claim.night.attempt, claim.night.rows) == ("claimed", 3, len(pairs))
