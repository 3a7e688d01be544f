"""Bytes are changed in the store or in the local cache, one damage at a time: a loader must get the published bytes, or an
error before it reads anything."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.paths import blob_path, manifest_path, stage_path
from alignment_core.artifacts.workspace import files_below, remove_tree
from alignment_core.errors import Corrupt, NotFound
from tests.campaigns.places import Outcome, Place, draft, outcome

COUNT, STORES = 2000, ("folder", "s3")
KEYS = ["a" * 64, "b" * 64]


def run(place: Place, count: int, seed: int) -> Outcome:
    rng, detected, kinds = random.Random(seed), 0, dict[str, int]()
    store = place.store(place.backend())
    contents = [
        {f"weights/{part}": rng.randbytes(3000) for part in range(3)} | {"config.json": b'{"layers": %d}' % number}
        for number in range(2)
    ]
    models = [
        store.publish(place.write(files), "model", draft(key, seed=7))
        for files, key in zip(contents, KEYS, strict=True)
    ]
    record = store.records.find(KEYS[0])
    for _ in range(count):
        reader = place.store(store.backend)  # as another machine, that has verified nothing yet
        model, files = models[0], contents[0]
        where = rng.choice(("blob", "manifest", "record", "cache"))
        if where == "cache":
            directory = reader.fetch(model)
            how = _damage_file(rng, directory)
            detected += _is_found(lambda: reader.fetch(model), files)  # noqa: B023
        else:
            paths = _paths(store, models)[where]
            kept = {path: store.backend.read(path) for path in paths}
            how = _damage(rng, store, where, paths, kept)
            if where == "record":
                detected += reader.records.find(KEYS[0]) in (
                    None,
                    record,
                )  # the name of the checksum itself may have changed
            else:
                detected += _is_found(lambda: reader.fetch(model), files) and bool(reader.verify(model))  # noqa: B023
            for path, data in kept.items():
                _overwrite(store, path, data)
            for entry in store.manifest(model).files:
                store.backend.delete(f"suspects/{entry.sha256}")
        kinds[f"{where}: {how}"] = kinds.get(f"{where}: {how}", 0) + 1
        remove_tree(reader.workspace.root)
    return outcome(
        "corruption", place, count, seed, count - detected, "not found before a loader reads", kinds=len(kinds)
    )


def _paths(store: Store, models: list[Reference]) -> dict[str, list[str]]:
    """Paths to damage: those of the artifact that is read, then of another."""
    blobs = [blob_path(entry.sha256) for entry in store.manifest(models[0]).files]
    return {
        "blob": blobs,
        "manifest": [manifest_path(model.digest) for model in models],
        "record": [stage_path(key) for key in KEYS],
    }


def _damage(rng: random.Random, store: Store, where: str, paths: list[str], kept: dict[str, bytes]) -> str:
    """Change one object of the store, or exchange two; which way."""
    path = rng.choice(paths) if where == "blob" else paths[0]
    ways: dict[str, Callable[[bytes], bytes]] = {
        "flipped": lambda data: _flipped(rng, data),
        "truncated": lambda data: data[: rng.randrange(len(data))],
        "longer": lambda data: data + rng.randbytes(rng.randint(1, 9)),
        "swapped": lambda data: kept[rng.choice([other for other in paths if other != path])],
        "deleted": lambda data: b"",
    }
    if where != "blob":
        ways["edited"] = lambda data: _edited(rng, where, data)
    how = rng.choice(list(ways))
    store.backend.delete(path)
    if how != "deleted":
        store.backend.put(path, ways[how](kept[path]))
    return how


def _edited(rng: random.Random, where: str, data: bytes) -> bytes:
    """The document with one value changed to another that is as good in itself."""
    document = json.loads(data)
    if where == "manifest":
        entry = rng.choice(document["files"])
        name = rng.choice(("sha256", "size", "path"))
        entry[name] = {"sha256": rng.randbytes(32).hex(), "size": entry["size"] + 1, "path": "other/name"}[name]
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    name = rng.choice(("seed", "label", "outputs", "metrics"))
    document[name] = {
        "seed": 8,
        "label": "round-2/sft",
        "outputs": {"model": f"model@sha256:{rng.randbytes(32).hex()}"},
        "metrics": {"loss": 0.1},
    }[name]
    return json.dumps(document, indent=2, ensure_ascii=False).encode()


def _damage_file(rng: random.Random, directory: Path) -> str:
    """Change a fetched artifact; which way."""
    files = sorted(files_below(directory))
    file = directory / rng.choice(files)
    for path in (file, file.parent, directory):
        path.chmod(0o755)
    data = file.read_bytes()
    how = rng.choice(("flipped", "truncated", "longer", "swapped", "deleted", "added", "linked"))
    if how == "added":
        (directory / "added.py").write_text("print('mine')")
        return how
    os.unlink(file)  # it may be a link to the blob in a folder store
    if how == "linked":
        elsewhere = directory.parent / "elsewhere"
        elsewhere.write_bytes(data)
        file.symlink_to(elsewhere)
    elif how != "deleted":
        other = directory / rng.choice([name for name in files if directory / name != file])
        changed = {
            "flipped": lambda: _flipped(rng, data),
            "truncated": lambda: data[: rng.randrange(len(data))],
            "longer": lambda: data + b"\0",
            "swapped": lambda: other.read_bytes(),
        }[how]()
        file.write_bytes(changed)
    return how


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _is_found(fetch: Callable[[], Path], files: dict[str, bytes]) -> bool:
    """Whether a loader gets an error, or exactly the bytes that were published."""
    try:
        directory = fetch()
    except (Corrupt, NotFound):
        return True
    return all(not (directory / name).is_symlink() for name in files_below(directory)) and files == {
        name: (directory / name).read_bytes() for name in files_below(directory)
    }


def _overwrite(store: Store, path: str, data: bytes) -> None:
    store.backend.delete(path)
    assert store.backend.put(path, data)
