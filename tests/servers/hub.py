"""A Hub on loopback: it speaks the Hugging Face Hub's HTTP protocol to the unmodified ``huggingface_hub`` client.

Large files go by LFS (the client needs ``HF_HUB_DISABLE_XET=1``). The user of ``TOKEN`` may write in ``ORGANISATION``, that
of ``READER`` may only read. A test orders a fault by ``HubServer.fail``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from tests.processes import free_port, wait_until
from tests.servers.hub_repos import Refused, Repo, Repos, commit, entries_of, keep

ORGANISATION = "org"
TOKEN, READER = "hf_writes", "hf_reads"
USERS = {TOKEN: "writer", READER: "reader"}
PART = 8 << 20
"""Bytes of a part of a large file; smaller ones go in one request."""
REGULAR = 1 << 20
"""Text up to so many bytes is committed as it is; other files are large ones."""
PAGES = {False: 1000, True: 50}
"""Entries of a page of a listing, without and with the last commit of each."""


class HubServer:
    """The server in a separate process, on a free port of loopback; its data is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, token: str = TOKEN) -> dict[str, str]:
        """Variables for a client. ``huggingface_hub`` reads these when imported."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def start(self) -> HubServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        root = Path(__file__).parents[2]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.servers.hub", str(self.folder), str(self.port)],
                cwd=root,
                stdout=log,
                stderr=log,
            )
        assert wait_until(self._answers, 60), (self.folder / "log").read_text()
        return self

    def end(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()

    def fail(self, request: str, how: str, times: int = 1) -> None:
        """Let the next ``times`` requests whose 'METHOD /path' matches fail: ``lose`` executes the request and resets the
        connection, ``cut:N`` ends it after N bytes of the body, ``503`` and the like answer that at once."""
        keep(self.folder / "fault", json.dumps([request, how, times]).encode())

    def commits(self, kind: str, name: str) -> list[str]:
        """Titles of the commits of a repo, oldest first."""
        repo = Repos(self.folder / "repos").get(kind, name)
        return [commit["title"] for commit in reversed(repo.history(repo.head))] if repo else []

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
            return True
        return False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    repos: Repos
    folder: Path

    def log_message(self, *_: object) -> None:
        """Nothing: the log is for errors."""

    def do_GET(self) -> None:
        """Every method comes here."""
        url = urlsplit(self.path)
        self.parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.left, self.fault = int(self.headers.get("Content-Length") or 0), self._fault(url.path)
        try:
            if self.fault.isdigit():
                raise Refused(int(self.fault), "", "as the test ordered")
            self._route()
        except Refused as refused:
            headers = {"X-Error-Message": str(refused)} | ({"X-Error-Code": refused.code} if refused.code else {})
            if refused.status == 429:
                headers["Retry-After"] = "1"
            self._answer({"error": str(refused)}, refused.status, headers)
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # ---------------------------------------------------------------- routes

    def _route(self) -> None:
        match self.command, *self.parts:
            case "GET", "api", "whoami-v2":
                orgs = [{"type": "org", "name": ORGANISATION, "roleInOrg": "write"}]
                self._answer({"type": "user", "name": self._user(), "orgs": orgs, "auth": {"type": "access_token"}})
            case "POST", "api", "validate-yaml":
                self._body()
                self._answer({"errors": [], "warnings": []})
            case "POST", "api", "repos", "create":
                fields = self._json()
                kind, name = self._named(fields)
                private = fields.get("private") or fields.get("visibility") == "private"
                self.repos.create(kind, name, bool(private))
                self._answer({"url": f"{self._host}/{'datasets/' if kind == 'dataset' else ''}{name}", "name": name})
            case "DELETE", "api", "repos", "delete":
                kind, name = self._named(self._json())
                self._repo(kind, name)
                self.repos.delete(kind, name)
                self._answer({})
            case (("GET" | "HEAD"), "api", "resolve-cache", kinds, organisation, name, oid, *path):
                repo = self._repo(kinds[:-1], f"{organisation}/{name}")
                entry = repo.tree(oid)["/".join(path)]
                self._send(repo.object(entry), {"X-Repo-Commit": oid, "ETag": f'"{entry["oid"]}"'})
            case _, "api", ("models" | "datasets") as kinds, organisation, name, *rest:
                writes = self.command != "GET" and rest[:1] not in (["paths-info"], ["preupload"])
                repo = self._repo(kinds[:-1], f"{organisation}/{name}", writes)
                self._api(repo, kinds[:-1], f"{organisation}/{name}", rest)
            case _, *start, organisation, name, "info", "lfs", "objects", "batch" if name.endswith(".git"):
                kind, name = "dataset" if start else "model", f"{organisation}/{name.removesuffix('.git')}"
                self._batch(self._repo(kind, name, writes=True), f"{kind}/{name}")
            case _, "lfs", kind, organisation, name, sha256, *place:  # as signed addresses are: no token
                self._large(self.repos.get(kind, f"{organisation}/{name}"), sha256, place)
            case (("GET" | "HEAD"), "datasets", organisation, name, "resolve", revision, *path):
                self._resolve("dataset", f"{organisation}/{name}", revision, "/".join(path))
            case (("GET" | "HEAD"), organisation, name, "resolve", revision, *path):
                self._resolve("model", f"{organisation}/{name}", revision, "/".join(path))
            case _:
                raise Refused(404, "", f"there is no {self.command} {self.path}")

    def _api(self, repo: Repo, kind: str, name: str, rest: list[str]) -> None:
        match self.command, *rest:
            case ("GET", "revision", _) | ("GET",):
                oid = repo.resolve(rest[1] if rest else "main")
                info = {"sha": oid, "private": repo.private, "author": name.split("/")[0], "gated": False, "tags": []}
                info["lastModified"] = repo.commit(oid)["date"]
                if "expand" not in self.query:
                    info["siblings"] = [{"rfilename": path} for path in sorted(repo.tree(oid))]
                self._answer({"_id": name, "id": name, **info})
            case "POST", "preupload", revision:
                tree, paths = repo.tree(repo.resolve(revision)), self._json()["files"]
                self._answer({"files": [self._mode(tree, file) for file in paths]})
            case "POST", "commit", "main":
                lines = self._body().splitlines()
                with repo.lock:
                    oid = commit(repo, [json.loads(line) for line in lines])
                self._answer({"success": True, "commitOid": oid, "commitUrl": f"{self._host}/{name}/commit/{oid}"})
            case "GET", "tree", revision, *path:
                self._tree(repo, repo.resolve(revision), "/".join(path))
            case "POST", "paths-info", revision:
                paths = parse_qs(self._body().decode())
                tree = entries_of(repo, repo.resolve(revision), paths.get("expand", [""])[-1].lower() == "true")
                self._answer([tree[path] for path in paths.get("paths", ()) if path in tree])
            case "GET", "commits", revision:
                chosen, link = self._page(repo.history(repo.resolve(revision)), 50)
                shown = [{key: commit[key] for key in ("id", "title", "message", "date")} for commit in chosen]
                self._answer([commit | {"authors": [{"user": "writer"}]} for commit in shown], headers=link)
            case "GET", "refs":
                branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.head}
                tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in repo.tags.items()]
                self._answer({"branches": [branch], "converts": [], "tags": tags})
            case "POST", "tag", revision:
                with repo.lock:
                    repo.set_tag(self._json()["tag"], repo.resolve(revision))
                self._answer({})
            case "DELETE", "tag", tag:
                with repo.lock:
                    repo.set_tag(tag, None)
                self._answer({})
            case _:
                raise Refused(404, "", f"there is no {self.command} {self.path}")

    def _mode(self, tree: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
        binary = b"\0" in base64.b64decode(file.get("sample", ""))
        large = binary or file["size"] > REGULAR or file["path"].endswith(".safetensors")
        known = tree.get(file["path"])
        oid = {"oid": known["lfs"] or known["oid"]} if known else {}
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **oid}

    def _tree(self, repo: Repo, oid: str, below: str) -> None:
        expand, recursive = (self.query.get(name, "").lower() == "true" for name in ("expand", "recursive"))
        prefix = f"{below}/" if below else ""
        entries = entries_of(repo, oid, expand)
        listed = [entry for path, entry in sorted(entries.items()) if path.startswith(prefix)]
        if below and not listed:
            raise Refused(404, "EntryNotFound", f"{below} does not exist on {oid}")
        shown = [entry for entry in listed if recursive or "/" not in entry["path"].removeprefix(prefix)]
        chosen, link = self._page(shown, PAGES[expand])
        self._answer(chosen, headers=link)

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        repo = self._repo(kind, name)
        oid = repo.resolve(revision)
        entry = repo.tree(oid).get(path)
        if entry is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": oid}
            self._answer({"error": "Entry not found"}, 404, headers)
        elif entry["lfs"]:
            headers = {"X-Repo-Commit": oid, "X-Linked-Etag": f'"{entry["lfs"]}"', "X-Linked-Size": str(entry["size"])}
            storage = self._host.replace(
                "127.0.0.1", "localhost"
            )  # another host, as the real one's: no token goes there
            self._answer({}, 302, headers | {"Location": f"{storage}/lfs/{kind}/{name}/{entry['lfs']}"})
        else:
            self._answer(
                {}, 307, {"X-Repo-Commit": oid, "Location": f"/api/resolve-cache/{kind}s/{name}/{oid}/{quote(path)}"}
            )

    def _batch(self, repo: Repo, place: str) -> None:
        objects = []
        for blob in self._json()["objects"]:
            oid, size = blob["oid"], blob["size"]
            action: dict[str, Any] = {"oid": oid, "size": size}
            if not repo.large(oid).exists():
                href = f"{self._host}/lfs/{place}/{oid}"
                upload: dict[str, Any] = {"href": f"{href}/0"}
                if size > PART:
                    starts = {str(number + 1): f"{href}/{start}" for number, start in enumerate(range(0, size, PART))}
                    upload = {"href": href, "header": {"chunk_size": str(PART), **starts}}
                action["actions"] = {"upload": upload, "verify": {"href": f"{href}/verify"}}
            objects.append(action)
        self._answer({"transfer": "multipart", "objects": objects})

    def _large(self, repo: Repo | None, sha256: str, place: list[str]) -> None:
        assert repo is not None
        match self.command, *place:
            case "PUT", start:
                repo.receive(sha256, int(start), self.rfile, self.left)
                self.left = 0
                self._answer({}, headers={"ETag": f'"{start}"'})
            case "POST", "verify":
                self._user()
                self._body()
                repo.finish(sha256)  # of one request
                self._answer({})
            case ("POST",):
                self._body()
                repo.finish(sha256)
                self._answer({})
            case _:
                self._send(repo.large(sha256), {"ETag": '"of-the-storage"'})

    # ---------------------------------------------------------------- users and requests

    def _user(self) -> str | None:
        """The user of the request; None without a token."""
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return None
        user = USERS.get(authorization.removeprefix("Bearer "))
        if user is None:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return user

    def _named(self, fields: dict[str, Any]) -> tuple[str, str]:
        """The repo that is to be created or deleted, if this user may."""
        user = self._user()
        organisation = fields.get("organization") or user
        if user is None:
            raise Refused(401, "", "Invalid username or password.")
        if user != USERS[TOKEN] or organisation not in (ORGANISATION, user):
            raise Refused(403, "", f'You don\'t have the rights to create a repo under the namespace "{organisation}"')
        return fields.get("type") or "model", f"{organisation}/{fields['name']}"

    def _repo(self, kind: str, name: str, writes: bool = False) -> Repo:
        user, repo = self._user(), self.repos.get(kind, name)
        if user is None and (repo is None or repo.private or writes):
            raise Refused(401, "RepoNotFound", "Repository not found, or it is private")
        if repo is None:
            raise Refused(404, "RepoNotFound", "Repository not found")
        if writes and user != USERS[TOKEN]:
            raise Refused(403, "", "Forbidden: you need write access to this repo")
        return repo

    def _body(self) -> bytes:
        data, self.left = self.rfile.read(self.left), 0
        return data

    def _json(self) -> dict[str, Any]:
        return dict(json.loads(self._body()))

    @property
    def _host(self) -> str:
        return f"http://{self.headers['Host']}"

    def _page(self, items: list[Any], size: int) -> tuple[list[Any], dict[str, str]]:
        start = int(self.query.get("cursor", 0))
        if start + size >= len(items):
            return items[start:], {}
        query = urlencode(self.query | {"cursor": str(start + size)})
        return items[start : start + size], {"Link": f'<{self._host}{urlsplit(self.path).path}?{query}>; rel="next"'}

    def _fault(self, path: str) -> str:
        with suppress(OSError):
            request, how, times = json.loads((self.folder / "fault").read_text())
            if re.search(request, f"{self.command} {path}"):
                keep(self.folder / "fault", json.dumps([request if times > 1 else "(?!)", how, times - 1]).encode())
                return str(how)
        return ""

    # ---------------------------------------------------------------- answers

    def _answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self._begin(status, {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})})
        self._end(lambda: self.wfile.write(data))

    def _send(self, path: Path, headers: dict[str, str]) -> None:
        """A file, or the requested range of it."""
        size = path.stat().st_size
        start, end, status = 0, size, 200
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end, status = int(span[1]), min(size, int(span[2] or size) + 1), 206
            if start >= size:
                raise Refused(416, "", "there are no such bytes")
            headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        self._begin(status, headers | {"Content-Length": str(end - start), "Accept-Ranges": "bytes"})
        if self.fault.startswith("cut:"):
            end = min(end, start + int(self.fault.removeprefix("cut:")))
            self.close_connection = True

        def send() -> None:
            if end > start:
                self.wfile.flush()
                with path.open("rb") as file:
                    self.connection.sendfile(file, start, end - start)

        self._end(send)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        if self.left:  # an unread body
            self._body()
        if self.fault == "lose":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no farewell
            raise ConnectionError("as the test ordered")
        self.send_response_only(status)
        for name, value in ({"Date": formatdate(time.time(), usegmt=True)} | headers).items():
            self.send_header(name, quote(value, safe=" !\"#$%&'()*+,/:;<=>?@[]{}"))
        self.end_headers()

    def _end(self, send: Callable[[], object]) -> None:
        if self.command != "HEAD":
            send()
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    Handler.folder = Path(sys.argv[1])
    Handler.repos = Repos(Handler.folder / "repos")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Server(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()


if __name__ == "__main__":
    main()
