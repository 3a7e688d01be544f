"""The content digest of a source covers the images that its rows name by paths, wherever their columns are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.canonical import digest_of_file
from alignment_core.data import kinds, pinned_images
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.errors import DataError
from alignment_core.recipes.sections.data import DataSource
from tests.images import write_images

Row = dict[str, Any]
IMAGE = "pictures/red.png"
MESSAGES = [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Which?"}]}]
SHAREGPT = [{"from": "human", "value": [{"type": "image", "path": IMAGE}]}]
OPENAI = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    return write_images(tmp_path / "pictures")


def jsonl(rows: list[Row], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def parquet(rows: list[Row], folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def arrow(rows: list[Row], folder: Path) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    return folder / "rows.arrow"


FORMATS = {"jsonl": jsonl, "parquet": parquet, "arrow": arrow}


def pinned(path: Path, columns: dict[str, str] | None = None) -> PinnedSource:
    return pin(DataSource.model_validate({"path": str(path), "columns": columns or {}}))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": MESSAGES}, {}),
        ({"messages": OPENAI}, {}),
        ({"conversations": SHAREGPT}, {}),
        ({"prompt": "Which?", "images": [IMAGE]}, {}),
        ({"prompt": "Which?", "image": IMAGE}, {}),
        ({"prompt": "Which?", "pictures": [IMAGE]}, {"images": "pictures"}),
        ({"prompt": "Which?", "bïld": IMAGE}, {"images": "bïld"}),
        ({"prompt": "Which?", "meta": {"picture": IMAGE}}, {"images": "meta.picture"}),
        ({"prompt": "Which?", "meta.picture": IMAGE}, {"images": "meta.picture"}),
        ({"prompt": "Which?", "pictures": ["no.png", IMAGE]}, {"images": "pictures.1"}),
        ({"data": {"messages": MESSAGES}}, {"messages": "data.messages"}),
    ],
)
def test_another_image_gives_another_digest(
    images: dict[str, Path], tmp_path: Path, format: str, row: Row, columns: dict[str, str]
) -> None:
    path = FORMATS[format]([row], tmp_path)
    before = pinned(path, columns).content()
    assert pinned(path, columns).content() == before
    images["red"].write_bytes(images["blue"].read_bytes())
    after = pinned(path, columns).content()
    assert after["files"] == before["files"]
    assert after["images"] != before["images"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": 'He said "image": and "images" to the \\"image\\"', "completion": "a"},
        {"prompt": "Which?", "images": ["https://example.org/a.png"], "completion": "a"},
        {"prompt": "a", "completion": "b", "meta": {"path": IMAGE, "image": IMAGE, "type": "image"}},
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"type": "function", "path": IMAGE}]}]},
    ],
)
def test_rows_without_paths_of_images_have_the_digest_of_their_files_alone(
    images: dict[str, Path], tmp_path: Path, format: str, row: Row
) -> None:
    assert "images" not in pinned(FORMATS[format]([row], tmp_path)).content()


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_bytes_of_images_are_not_read(images: dict[str, Path], tmp_path: Path, format: str) -> None:
    content = images["red"].read_bytes()
    embedded = FORMATS[format]([{"image": {"bytes": content, "path": IMAGE}}] * 2, tmp_path)
    assert "images" not in pinned(embedded).content()
    rows: list[Row] = [{"image": {"bytes": content, "path": IMAGE}}, {"image": {"bytes": None, "path": IMAGE}}]
    some = FORMATS[format](rows, tmp_path)
    read = getattr(pinned_images, f"_of_{format}")(some, pinned_images._Columns({}))
    assert all(set(row["image"]) == {"path"} for row in read)
    assert "images" in pinned(some).content()


def test_an_image_is_read_once_while_it_stays_the_same(
    images: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def noting(path: Path) -> str:
        read.append(path)
        return digest_of_file(path)

    monkeypatch.setattr(pinned_images, "digest_of_file", noting)
    path = jsonl([{"image": IMAGE}, {"image": IMAGE}], tmp_path)
    first = pinned(path)
    assert pinned(path) == first
    assert read == [images["red"]]
    source = DataSource.model_validate({"path": str(path)})
    assert pin(source, images=False).images is None
    images["red"].write_bytes(images["wide"].read_bytes())
    assert pinned(path) != first
    assert read == [images["red"]] * 2


@pytest.mark.parametrize("becomes", ["blue", None])
def test_an_image_that_changes_behind_pinning_fails_as_a_changed_file_does(
    images: dict[str, Path], tmp_path: Path, becomes: str | None
) -> None:
    source = pinned(jsonl([{"prompt": "Which?", "image": IMAGE}], tmp_path))
    kind = kinds.load("prompts")
    assert len(list(source.read(0, 0, kind))) == 1
    if becomes:
        images["red"].write_bytes(images[becomes].read_bytes())
    else:
        images["red"].unlink()
    with pytest.raises(DataError, match="images of its rows are gone or have changed since this run started"):
        list(source.read(0, 0, kind))
