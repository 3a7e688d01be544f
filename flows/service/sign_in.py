"""Sign-in to the pages of Prefect's server: our own page, with a password that does not change.

Prefect's login page shows two errors before any input, and accepts only the server's token, which changes with each start. Here
a page of Prefect's without a valid password in the browser redirects to our page, and a request with the password is accepted
like one with the token. Processes use the token: if they send it to another user's process that has taken the port of dead
services, it is worthless at the next start.
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

PAGE = "/sign-in"
GUARD = """<script>
(() => {
  const known = localStorage.getItem("prefect-password");
  const request = new XMLHttpRequest();
  request.open("GET", "/api/version", false);
  request.setRequestHeader("authorization", "Basic " + known);
  if (known) request.send();
  if (known && request.status !== 401) return;
  localStorage.removeItem("prefect-password");
  window.stop();
  const here = location.pathname === "/login" ? "/" : location.pathname + location.search;
  location.replace("/sign-in?next=" + encodeURIComponent(here));
})();
</script>"""
"""Runs in each page before Prefect's scripts, which store the password under this name, encoded as in the header."""
SIGN_IN = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 24rem; margin: 15vh auto 0; padding: 0 1rem; }
input, button { font: inherit; box-sizing: border-box; width: 100%; padding: .5rem; margin-top: .5rem; }
</style>
</head>
<body>
<main>
<h1>Sign in</h1>
<form id="form">
<label for="password">Password of these services</label>
<input id="password" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button>
<p id="problem" role="alert"></p>
</form>
<p>It is in the file that <code>align up</code> names: <code>services/password</code> below <code>ALIGN_HOME</code>.</p>
</main>
<script>
document.getElementById("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const problem = document.getElementById("problem");
  problem.textContent = "";
  const bytes = new TextEncoder().encode(document.getElementById("password").value.trim());
  const value = btoa(String.fromCharCode(...bytes));
  try {
    const answer = await fetch("/api/version", { headers: { authorization: "Basic " + value } });
    if (answer.status === 401) {
      problem.textContent = "This is not the password.";
      return;
    }
    if (!answer.ok) throw new Error(answer.status);
  } catch (error) {
    problem.textContent = "The server does not answer. Is `align up` running?";
    return;
  }
  localStorage.setItem("prefect-password", value);
  const next = new URLSearchParams(location.search).get("next") || "/";
  location.replace(/^[/](?![/\\\\])[^\\t\\r\\n]*$/.test(next) ? next : "/");
});
</script>
</body>
</html>
"""


def credentials(secret: str) -> bytes:
    """The authorization header for a secret."""
    return b"Basic " + b64encode(secret.encode())


class SignIn:
    """ASGI middleware that serves the sign-in page, and accepts ``password`` in place of ``token``."""

    def __init__(self, application: Application, token: str, password: str) -> None:
        self._application = application
        self._token = credentials(token)
        self._password = credentials(password)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        headers = [
            (name, self._token_for(value) if name == b"authorization" else value) for name, value in scope["headers"]
        ]
        path = scope["path"]
        reads = scope["method"] in ("GET", "HEAD")
        if reads and path == PAGE:
            return await _answer(send, SIGN_IN.encode())
        if reads and not path.startswith("/api/"):
            plain = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")
            headers = [(name, value) for name, value in headers if name not in plain]
            send = _Guarded(send)
        return await self._application({**scope, "headers": headers}, receive, send)

    def _token_for(self, value: bytes) -> bytes:
        return self._token if hmac.compare_digest(value, self._password) else value


class _Guarded:
    """Forwards an answer; pages get the :data:`GUARD`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._page: list[Message] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not _is_page(message):
                return await self._send(message)
            self._page = [message]
            return None
        if not self._page:
            return await self._send(message)
        self._page.append(message)
        if message.get("more_body"):
            return None
        body = b"".join(part.get("body", b"") for part in self._page[1:])
        self._page = []
        return await _answer(self._send, body.replace(b"<script", GUARD.encode() + b"<script", 1))


def _is_page(start: Message) -> bool:
    kind = dict(start["headers"]).get(b"content-type", b"")
    return start["status"] == 200 and bytes(kind).startswith(b"text/html")


async def _answer(send: Send, page: bytes) -> None:
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(page)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-frame-options", b"DENY"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": page})
