"""A store in the pages of `align ui`, without a browser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from alignment.flows.ui.app import application
from alignment_core.artifacts import ProvenanceDraft, Reference, Store, open_store
from alignment_core.canonical import digest_of

Make = Callable[..., Reference]
TOKEN = "a-token-of-tests"
ORIGIN = "http://127.0.0.1"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    return open_store(tmp_path / "store")


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Make:
    """Publish the output of a stage, with a row of text if it is a data set."""

    def publish(label: str, kind: str = "model", row: Mapping[str, str] = {}, **fields: Any) -> Reference:
        folder = tmp_path / digest_of([label, kind])[:10]
        folder.mkdir()
        (folder / "content").write_text(label)
        if row:
            pq.write_table(pa.table({name: pa.array([text]) for name, text in row.items()}), folder / "train.parquet")
        number = len(list(tmp_path.iterdir()))
        at = f"2026-11-25T10:{number // 60:02}:{number % 60:02}.000+00:00"
        made = {"key": digest_of([label, kind]), "stage": "sft", "label": label, "started_at": at, "finished_at": at}
        return store.publish(folder, kind, ProvenanceDraft.model_validate(made | fields))

    return publish


@pytest.fixture
def get(store: Store) -> Callable[..., Any]:
    """A page, looked up in the store as it is now."""

    def fetch(path: str, status: int = 200, **headers: str) -> Any:
        client = TestClient(application(store, TOKEN), base_url=ORIGIN, follow_redirects=False)
        response = client.get(path, headers=headers)
        assert response.status_code == status, response.text
        return response

    return fetch


@pytest.fixture
def signed_in(store: Store) -> TestClient:
    """A browser that has signed in, on pages over the store."""
    client = TestClient(application(store, TOKEN), base_url=ORIGIN, follow_redirects=False, headers={"Origin": ORIGIN})
    assert client.get("/runs?token=" + TOKEN).status_code == 303
    return client
