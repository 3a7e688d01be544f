"""The data of a Hub: repos with commits, tags and large files, in a folder; acknowledged writes survive a kill.

A commit is a JSON file with the whole tree after it; ``head`` and ``tags.json`` of a repo are replaced by a rename.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[str, dict[str, Any]]
"""By path: size, git oid, the SHA-256 of a large file or None, and the last commit that wrote it."""


class Refused(Exception):
    """An answer that is an error: status, X-Error-Code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def keep(path: Path, data: bytes) -> None:
    """Write a file so that a kill leaves the old one or the new one, and the disk has it before this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def pointer_of(sha256: str, size: int) -> bytes:
    """Git's pointer to a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


@dataclass
class Repo:
    folder: Path
    lock: threading.RLock = field(default_factory=threading.RLock)
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def create(self, private: bool) -> None:
        keep(self.folder / "tags.json", b"{}")
        self.write({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}, [], "initial commit", "")
        keep(self.folder / "repo.json", json.dumps({"private": private}).encode())  # from here on it exists

    @property
    def private(self) -> bool:
        return bool(json.loads((self.folder / "repo.json").read_text())["private"])

    @property
    def head(self) -> str:
        return (self.folder / "head").read_text()

    @property
    def tags(self) -> dict[str, str]:
        return dict(json.loads((self.folder / "tags.json").read_text()))

    def commit(self, oid: str) -> dict[str, Any]:
        if oid not in self.commits:
            self.commits[oid] = json.loads((self.folder / "commits" / oid).read_text())
        return self.commits[oid]

    def tree(self, oid: str) -> Tree:
        return dict(self.commit(oid)["tree"])

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a tag or a commit names."""
        commit = self.head if revision in ("main", "refs/heads/main") else self.tags.get(revision, revision)
        if "/" in commit or commit.startswith(".") or not (self.folder / "commits" / commit).exists():
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def history(self, oid: str | None) -> list[dict[str, Any]]:
        """A commit and those before it, newest first."""
        history = []
        while oid is not None:
            history.append(self.commit(oid))
            oid = history[-1]["parent"]
        return history

    def object(self, entry: dict[str, Any]) -> Path:
        return self.large(entry["lfs"]) if entry["lfs"] else self.folder / "objects" / entry["oid"]

    def large(self, sha256: str) -> Path:
        return self.folder / "lfs" / sha256

    def write(
        self, files: dict[str, bytes | tuple[str, int] | None], folders: list[str], title: str, message: str
    ) -> str:
        """One commit: files with their bytes, large ones as (SHA-256, size), None deletes; and folders to delete."""
        parent = self.head if (self.folder / "head").exists() else None
        tree = self.tree(parent) if parent else {}
        oid = hashlib.sha1(uuid.uuid4().bytes, usedforsecurity=False).hexdigest()
        for folder in folders:
            tree = {path: entry for path, entry in tree.items() if not path.startswith(f"{folder.rstrip('/')}/")}
        for path, content in files.items():
            if content is None:
                if tree.pop(path, None) is None:
                    raise Refused(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
            elif isinstance(content, bytes):
                keep(self.folder / "objects" / git_oid(content), content)
                tree[path] = {"size": len(content), "oid": git_oid(content), "lfs": None, "commit": oid}
            else:
                sha256, size = content
                if not self.large(sha256).exists():
                    raise Refused(400, "", f"{path}: there is no object {sha256}")
                tree[path] = {"size": size, "oid": git_oid(pointer_of(sha256, size)), "lfs": sha256, "commit": oid}
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())  # git has whole seconds
        description = {"id": oid, "parent": parent, "title": title, "message": message, "date": date, "tree": tree}
        keep(self.folder / "commits" / oid, json.dumps(description).encode())
        keep(self.folder / "head", oid.encode())
        return oid

    def set_tag(self, name: str, oid: str | None) -> None:
        tags = self.tags
        if oid is None:
            if tags.pop(name, None) is None:
                raise Refused(404, "RevisionNotFound", f"there is no tag {name}")
        elif name in tags:
            raise Refused(409, "", f"Tag {name} already exists")
        else:
            tags[name] = oid
        keep(self.folder / "tags.json", json.dumps(tags).encode())

    def receive(self, sha256: str, start: int, data: Any, length: int) -> None:
        """Write a part of a large file that comes in at its place."""
        path = self.folder / "uploads" / sha256
        path.parent.mkdir(exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while length and (chunk := data.read(min(length, 1 << 20))):
                start, length = start + os.pwrite(file, chunk, start), length - len(chunk)
        finally:
            os.close(file)
        if length:
            raise ConnectionError("the client went away")

    def finish(self, sha256: str) -> None:
        """Keep an upload whose bytes have the digest in its name."""
        path, large = self.folder / "uploads" / sha256, self.large(sha256)
        with self.lock:
            if large.exists():
                return
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise Refused(400, "", f"the bytes do not have the digest {sha256}")
                os.fsync(file.fileno())
            large.parent.mkdir(exist_ok=True)
            path.rename(large)
            sync_directory(large.parent)


class Repos:
    """All repos below a folder, by kind (model, dataset) and ``organisation/name``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock, self.known = folder, threading.Lock(), dict[str, Repo]()

    def get(self, kind: str, name: str) -> Repo | None:
        path = self.folder / f"{kind}s" / name
        if not (path / "repo.json").exists():
            return None
        with self.lock:
            return self.known.setdefault(str(path), Repo(path))

    def create(self, kind: str, name: str, private: bool) -> None:
        with self.lock:
            path = self.folder / f"{kind}s" / name
            if (path / "repo.json").exists():
                raise Refused(409, "", "You already created this repo")
            shutil.rmtree(path, ignore_errors=True)  # of a creation that was killed
            path.mkdir(parents=True)
            Repo(path).create(private)

    def delete(self, kind: str, name: str) -> None:
        with self.lock:
            path = self.folder / f"{kind}s" / name
            self.known.pop(str(path), None)
            with suppress(FileNotFoundError):
                (path / "repo.json").unlink()
            shutil.rmtree(path, ignore_errors=True)


def commit(repo: Repo, lines: list[dict[str, Any]]) -> str:
    """Make a commit of the lines of a request, if the parent that they name is the head."""
    files: dict[str, bytes | tuple[str, int] | None] = {}
    folders, title, message = list[str](), "", ""
    for key, value in ((line["key"], line["value"]) for line in lines):
        match key:
            case "header":
                title, message = value["summary"], value.get("description", "")
                if value.get("parentCommit") not in (None, repo.head):
                    raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = value["oid"], value.get("size") or repo.large(value["oid"]).stat().st_size
            case "deletedFile":
                files[value["path"]] = None
            case "deletedFolder":
                folders.append(value["path"])
    return repo.write(files, folders, title, message)


def entries_of(repo: Repo, oid: str, expand: bool) -> dict[str, dict[str, Any]]:
    """Files and folders of a commit, as the Hub lists them."""
    entries: dict[str, dict[str, Any]] = {}
    for path, entry in repo.tree(oid).items():
        entries[path] = {"type": "file", "path": path, "oid": entry["oid"], "size": entry["size"]}
        if entry["lfs"]:
            entries[path]["lfs"] = {"oid": entry["lfs"], "size": entry["size"], "pointerSize": 134}
        if expand:
            last = repo.commit(entry["commit"])
            entries[path]["lastCommit"] = {key: last[key] for key in ("id", "title", "date")}
        for folder in map(str, list(Path(path).parents)[:-1]):
            entries.setdefault(folder, {"type": "directory", "path": folder, "oid": oid, "size": 0})
    return entries
