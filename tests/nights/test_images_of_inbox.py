"""Rows of the inbox with images: which are new, which wait, and what a night's artifact of rows has."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store
from alignment_core.data.build import examples
from alignment_core.data.image_reader import ImageReader
from alignment_core.data.images import image_part, images_in_messages
from alignment_core.data.kinds.preferences import KIND
from alignment_core.data.pin import pin
from alignment_core.data.statistics import Ledger as Statistics
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.nights.inbox import Inbox, read_inbox
from alignment_core.nights.ledger import Ledger
from alignment_core.recipes import DataSource
from tests.images import tiny_qwen_vl, write_images
from tests.nights.conftest import pair
from tests.processes import ended, in_child


@pytest.fixture
def pictures(inbox: Path) -> dict[str, Path]:
    return write_images(inbox / "pictures")


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def read(store: Store, inbox: Path, tmp_path: Path) -> Callable[..., Inbox]:
    def reading(path: str | Path = inbox, seen: Inbox | None = None, kept: str = "kept", **source: Any) -> Inbox:
        known = {row.digest for row in seen.rows} if seen else set()
        reader = ImageReader(tmp_path / kept)
        return read_inbox([DataSource(path=str(path), **source)], known, store, lambda: reader)

    return reading


def test_images_of_every_form_are_kept_once(
    read: Callable[..., Inbox], drop: Callable[..., None], pictures: dict[str, Path], tmp_path: Path
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(pictures['blue'].read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    drop("a.jsonl", pair(1, images=["pictures/red.png"]), pair(2, prompt=[{"role": "user", "content": parts}]))
    drop("b.jsonl", pair(3, image="pictures/red.png"), pair(4))
    rows = read().rows
    red, blue = digest_of(pictures["red"]), digest_of(pictures["blue"])
    assert [row.images for row in rows] == [(red,), (blue,), (red,), ()]
    assert rows[0].pair["prompt"] == [
        {"role": "user", "content": [image_part(red), {"type": "text", "text": "prompt 1"}]}
    ]
    assert rows[3].pair["prompt"] == "prompt 4"
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == sorted([red, blue])


def test_a_row_waits_for_its_image_and_a_known_one_is_not_kept_again(
    read: Callable[..., Inbox], drop: Callable[..., None], pictures: dict[str, Path], tmp_path: Path
) -> None:
    drop("a.jsonl", pair(1, images=["pictures/red.png"]), pair(2, images=["pictures/late.png"]))
    (pictures["red"].parent / "broken.png").write_bytes(pictures["red"].read_bytes()[:40])
    drop("a.jsonl", pair(3, images=["pictures/broken.png"]))
    first = read()
    assert [row.pair["prompt"][0]["content"][1]["text"] for row in first.rows] == ["prompt 1"]
    missing, broken = first.malformed
    assert missing.startswith("a.jsonl:2: `images[0]` is 'pictures/late.png': there is no such file")
    assert broken.startswith("a.jsonl:3: `images[0]` is")
    pictures["wide"].rename(pictures["wide"].parent / "late.png")
    second = read(seen=first, kept="second")
    assert [row.where for row in second.rows] == ["a.jsonl:2"]
    assert [file.name for file in (tmp_path / "second").iterdir()] == [*second.rows[0].images]


def test_equal_rows_with_other_images_are_two_rows(
    read: Callable[..., Inbox], drop: Callable[..., None], inbox: Path
) -> None:
    for day, colour in (("monday", "red"), ("tuesday", "blue"), ("wednesday", "red")):
        write_images(inbox / day)[colour].rename(inbox / day / "1.png")
        drop(f"{day}/a.jsonl", pair(1, images=["1.png"]))
    rows = read(f"{inbox}/*/a.jsonl").rows
    assert [row.where for row in rows] == ["monday/a.jsonl:1", "tuesday/a.jsonl:1"]


def test_a_row_whose_image_changes_while_it_is_read_waits_and_is_then_taken_once(
    read: Callable[..., Inbox], drop: Callable[..., None], pictures: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a file that another process is still copying: a row with the digest of a part of it would be new once more."""
    whole = pictures["red"].read_bytes()
    pictures["red"].write_bytes(whole[:40])
    keep = ImageReader._content

    def complete(reader: ImageReader, place: str, image: str) -> bytes:
        if type(reader) is ImageReader:  # which reads it for the second time
            pictures["red"].write_bytes(whole)
        return keep(reader, place, image)

    monkeypatch.setattr(ImageReader, "_content", complete)
    drop("a.jsonl", pair(1, images=["pictures/red.png"]), pair(2, images=["pictures/red.png"]), pair(3))
    first = read()
    assert [row.where for row in first.rows] == ["a.jsonl:3"]
    says = "`images`: a file changed while the inbox was read; the next night reads it again"
    assert first.malformed == [f"a.jsonl:{line}: {says}" for line in (1, 2)]
    second = read(seen=first)
    assert [(row.where, row.images) for row in second.rows] == [
        ("a.jsonl:1", (digest_of(pictures["red"]),)),
        ("a.jsonl:2", (digest_of(pictures["red"]),)),
    ]
    seen = Inbox(rows=[*first.rows, *second.rows])
    assert read(seen=seen).rows == []


def test_images_without_a_place_make_a_row_malformed(
    read: Callable[..., Inbox], drop: Callable[..., None], pictures: dict[str, Path]
) -> None:
    """As in a data set."""
    drop("a.jsonl", pair(1, prompt="<image>what?", images=["pictures/red.png", "pictures/blue.png"]))
    arrived = read()
    assert arrived.rows == []
    assert arrived.malformed == ["a.jsonl:1: `images` has 2 images, and the messages have places for 1"]


def test_rows_of_the_store_name_images_of_their_own_artifact(
    read: Callable[..., Inbox], store: Store, pictures: dict[str, Path], tmp_path: Path
) -> None:
    write_images(tmp_path / "rows")
    names = ["red.png", str(pictures["red"]), "../inbox/pictures/red.png"]
    lines = [json.dumps(pair(number, images=[name])) + "\n" for number, name in enumerate(names)]
    (tmp_path / "rows" / "a.jsonl").write_text("".join(lines))
    store.tags.move("preferences/monday", store.publish(tmp_path / "rows", "rows"), expected=None, reason="export")
    arrived = read("store:preferences/")
    assert [row.pair["prompt"][0]["content"][1]["text"] for row in arrived.rows] == ["prompt 0"]
    assert [line.rpartition(": ")[2] for line in arrived.malformed] == [
        "rows of the store name images below their own folder"
    ] * 2


def test_a_model_of_text_reads_no_images(
    store: Store, inbox: Path, drop: Callable[..., None], pictures: dict[str, Path]
) -> None:
    parts = [{"type": "image", "image": "pictures/red.png"}, {"type": "text", "text": "what?"}]
    drop("a.jsonl", pair(1, prompt=[{"role": "user", "content": parts}]), pair(2, images=["pictures/red.png"]))
    arrived = read_inbox([DataSource(path=str(inbox))], set(), store)
    assert [row.pair["prompt"] for row in arrived.rows] == ["prompt 2"]
    assert "only text is read here" in arrived.malformed[0]
    again = read_inbox([DataSource(path=str(inbox))], {arrived.rows[0].digest}, store)
    assert again.rows == [], "an unread column counts as it did"


def test_a_model_that_cannot_be_inspected_is_no_fault_of_a_row(
    store: Store, inbox: Path, drop: Callable[..., None], pictures: dict[str, Path]
) -> None:
    """And is asked for once."""
    drop("a.jsonl", *(pair(number, images=["pictures/red.png"]) for number in range(3)))
    calls = []

    def unanswered() -> ImageReader:
        calls.append(1)
        raise UserError("model: the Hub does not answer")

    with pytest.raises(UserError, match="the Hub does not answer"):
        read_inbox([DataSource(path=str(inbox))], set(), store, unanswered)
    assert len(calls) == 1


@pytest.fixture
def ledger(store: Store, recipe: Callable[..., NightlyRecipe], tmp_path: Path) -> Ledger:
    content = recipe().model_dump(mode="json", exclude_unset=True)
    model = {"name": str(tiny_qwen_vl(tmp_path / "model"))}
    return Ledger(store, NightlyRecipe.model_validate({**content, "model": model}))


def test_rows_with_images_are_not_taken_while_the_model_cannot_be_inspected(
    ledger: Ledger, drop: Callable[..., None], pictures: dict[str, Path], tmp_path: Path
) -> None:
    drop("a.jsonl", pair(1, images=["pictures/red.png"]))
    config = tmp_path / "model" / "config.json"
    content = config.read_text()
    config.write_text("{")
    with pytest.raises(EnvironmentFault, match=r"^model: .*config\.json, which says .* cannot be read now"):
        ledger.claim("monday").__enter__()
    config.write_text(content)
    with ledger.claim("monday") as claim:
        assert claim.night.batch is not None
        assert (ledger.store.fetch(claim.night.batch) / "images").is_dir()


def test_two_nights_take_rows_with_their_images(
    ledger: Ledger, drop: Callable[..., None], pictures: dict[str, Path], tmp_path: Path
) -> None:
    """Each row goes to one night, whose artifact has its images; the data set of the night reads them from there, though the
    inbox has lost them."""
    drop("a.jsonl", pair(1, images=["pictures/red.png"]), pair(2, images=["pictures/wide.png", "pictures/red.png"]))
    with ledger.claim("monday") as claim:
        monday = claim.night
        ledger.record(monday.model_copy(update={"state": "stopped"}))
    with ledger.claim("monday") as claim:
        assert claim.night.batch == monday.batch, "resumed with the same rows"
        ledger.record(claim.night.model_copy(update={"state": "promoted"}))
    drop("a.jsonl", pair(3, images=["pictures/blue.png"]))
    with ledger.claim("tuesday") as claim:
        tuesday = claim.night
    assert (monday.rows, tuesday.rows) == (2, 1)
    digests = {name: digest_of(path) for name, path in pictures.items()}
    for path in pictures.values():
        path.unlink()
    for night, names in ((monday, ("red", "wide")), (tuesday, ("blue",))):
        assert night.batch is not None
        folder = ledger.store.fetch(night.batch)
        assert sorted(file.name for file in (folder / "images").iterdir()) == sorted(digests[name] for name in names)
        pinned = pin(DataSource(path=str(folder / "rows.jsonl"), format=KIND.native))
        statistics = Statistics([pinned], 0.0, KIND)
        rows: Any = examples(pinned, 0, statistics, KIND, 0, reader=ImageReader(tmp_path / night.night))
        images = {digest for _, example, *_ in rows for digest in images_in_messages(example.prompt)}
        assert images == {digests[name] for name in names}


def test_nights_of_the_same_moment_take_each_row_once_with_its_images(
    ledger: Ledger, drop: Callable[..., None], pictures: dict[str, Path], inbox: Path
) -> None:
    """Each night's rows have a picture that only they have, and one that all have."""
    drop("a.jsonl", *(pair(number, images=["pictures/red.png"]) for number in range(6)))
    start, go = os.pipe()
    colours = ("green", "blue", "yellow", "wide")

    def night(colour: str) -> Callable[[], None]:
        def run() -> None:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            drop("a.jsonl", pair(10, images=[f"pictures/{colour}.png"]), pair(11, images=["pictures/red.png"]))
            with ledger.claim(colour) as claim:
                if claim.night.batch is not None:
                    ledger.record(claim.night.model_copy(update={"state": "refused"}))

        return run

    children = [in_child(night(colour)) for colour in colours]
    os.close(go)
    os.close(start)
    assert [ended(child) for child in children] == [0] * len(children)
    with ledger.claim("last"):
        pass
    claimed = [entry for entry in ledger.nights() if entry.state == "claimed"]
    red = digest_of(pictures["red"])
    taken: list[tuple[str, str]] = []
    for entry in claimed:
        assert entry.batch is not None
        folder = ledger.store.fetch(entry.batch)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        of_rows = [(row["prompt"][0]["content"][1]["text"], *images_in_messages(row["prompt"])) for row in rows]
        assert {file.name for file in (folder / "images").iterdir()} == {digest for _, digest in of_rows}
        assert all(digest_of(file) == file.name for file in (folder / "images").iterdir())
        taken += of_rows
    texts = {f"prompt {number}" for number in range(6)} | {"prompt 11"}  # which all have, with the same picture
    expected = [*((text, red) for text in texts), *(("prompt 10", digest_of(pictures[colour])) for colour in colours)]
    assert sorted(taken) == sorted(expected)
