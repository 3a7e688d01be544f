"""A reward model behind HTTP, for :mod:`~alignment_core.rewards.endpoint` and OpenRLHF's remote reward models.

POST with JSON ``{"query": [texts]}``, prompt and completion as one text with special tokens, is answered with
``{"rewards": [...], "scores": [...], "extra_logs": {}}``: a number for each, or null for a text that is longer than the
model's context. Requests that come together are computed together. GET ``/health`` and ``/metrics`` (Prometheus) need no
token.
"""

from __future__ import annotations

import hmac
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.rewards.model_reward import trained_to_turn_end

if TYPE_CHECKING:
    from alignment_core.training.forward import Forward

Rewards = list[float | None]

LARGEST_BODY = 64 << 20
"""Bytes of a request."""
MOST_TOGETHER = 256
"""Maximum number of texts that are computed together; a request is never split."""
STOP_SECONDS = 60.0
"""Time for requests in progress when the server ends."""


class Batcher:
    """Calls ``compute`` in a thread of its own, with all waiting texts."""

    def __init__(self, compute: Callable[[list[str]], Rewards]) -> None:
        self._compute = compute
        self._waiting: queue.Queue[tuple[list[str], Future[Rewards]] | None] = queue.Queue()
        self.batches = self.texts = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def __call__(self, texts: list[str]) -> Rewards:
        """The reward of each text, once its turn has come; raises what ``compute`` raised."""
        done: Future[Rewards] = Future()
        self._waiting.put((texts, done))
        return done.result()

    def waiting(self) -> int:
        return self._waiting.qsize()

    def close(self) -> None:
        """Finish all waiting texts."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            together, last = [first], False
            while sum(len(texts) for texts, _ in together) < MOST_TOGETHER and not last:
                try:
                    request = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if request is None:
                    last = True
                else:
                    together.append(request)
            self._answer(together)
            if last:
                return

    def _answer(self, together: Sequence[tuple[list[str], Future[Rewards]]]) -> None:
        started = time.monotonic()
        try:
            rewards = self._compute([text for texts, _ in together for text in texts])
        except Exception as error:
            for _, done in together:
                done.set_exception(error)
            return
        self.batches += 1
        self.texts += len(rewards)
        self.seconds += time.monotonic() - started
        place = 0
        for texts, done in together:
            done.set_result(rewards[place : place + len(texts)])
            place += len(texts)


class RewardServer(ThreadingHTTPServer):
    """Listens once it is made; :meth:`serve_forever` answers until :meth:`stop` is called from another thread."""

    daemon_threads = True
    request_queue_size = 128  # the standard library's backlog of 5 drops connections when many clients come at once

    def __init__(
        self, compute: Callable[[list[str]], Rewards], name: str, host: str, port: int, token: str | None
    ) -> None:
        """``compute`` gives the reward of each text; ``name`` is the model's. Raises OSError for an address that is taken."""
        super().__init__((host, port), _Handler)
        self.batcher = Batcher(compute)
        self.name = name
        self.token = token
        self.requests = self.refused = 0
        self.under_way = 0
        self.changed = threading.Condition()

    def stop(self) -> None:
        """Refuse further requests, and finish those in progress."""
        self.shutdown()
        self.server_close()
        # server_close joins no daemon thread. Joining them would wait for idle keep-alive connections, too.
        with self.changed:
            self.changed.wait_for(lambda: not self.under_way, STOP_SECONDS)
        self.batcher.close()

    def metrics(self) -> str:
        """In Prometheus' text form."""
        counted = {
            "requests_total": self.requests,
            "refused_total": self.refused,
            "texts_total": self.batcher.texts,
            "batches_total": self.batcher.batches,
            "compute_seconds_total": round(self.batcher.seconds, 6),
        }
        now = {"requests_under_way": self.under_way, "requests_waiting": self.batcher.waiting()}
        lines = [
            line
            for kind, values in (("counter", counted), ("gauge", now))
            for name, value in values.items()
            for line in (f"# TYPE align_reward_{name} {kind}", f"align_reward_{name} {value}")
        ]
        return "\n".join(lines) + "\n"


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, json.dumps({"status": "ok", "model": self.server.name}))
        elif self.path == "/metrics":
            self._send(200, self.server.metrics(), "text/plain; version=0.0.4")
        else:
            self._send(404, json.dumps({"error": 'there are /health, /metrics, and POST of {"query": [...]}'}))

    def do_POST(self) -> None:
        server = self.server
        with server.changed:
            server.requests += 1
            server.under_way += 1
        try:
            rewards = server.batcher(self._texts())
            self._send(200, json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {}}))
        except _Refused as refused:
            server.refused += 1
            self.close_connection = True  # the request may not have been read to its end
            self._send(refused.status, json.dumps({"error": str(refused)}))
        except OSError:
            raise  # the client went away
        except Exception as error:
            self._send(500, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        finally:
            with server.changed:
                server.under_way -= 1
                server.changed.notify_all()

    def _texts(self) -> list[str]:
        token = self.server.token
        if token and not hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()
        ):
            raise _Refused(401, "send the token as `Authorization: Bearer …`")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise _Refused(411, "a request needs its Content-Length")
        if len(length) > len(str(LARGEST_BODY)) or int(length) > LARGEST_BODY:
            raise _Refused(413, f"a request may have {LARGEST_BODY} bytes; send fewer texts")
        try:
            content = json.loads(self.rfile.read(int(length)))
        except RecursionError:
            raise _Refused(400, "the JSON of the body is nested too deeply") from None
        except ValueError:
            raise _Refused(400, "the body is not JSON") from None
        texts = content.get("query") if isinstance(content, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _Refused(400, 'the body needs "query", a list of texts: prompt and completion with special tokens')
        if not all(_is_unicode(text) for text in texts):
            raise _Refused(400, "a text holds half of a surrogate pair, which is no character")
        return texts

    def _send(self, status: int, text: str, kind: str = "application/json") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing for each request."""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def scores_of_texts(forward: Forward, most: int | None) -> Callable[[list[str]], Rewards]:
    """A function that scores texts by an open reward model.

    A text ends as the texts of its training did; one of more than ``most`` tokens has no score.
    """
    model = forward.job.model
    renderer = Renderer(model.tokenizer(), eos_token_ids=eos_token_ids(model.path))
    with_tail = not trained_to_turn_end(model)

    def compute(texts: list[str]) -> Rewards:
        ids = [renderer.closed(text, with_tail) for text in texts]
        fits = [number for number, text_ids in enumerate(ids) if most is None or len(text_ids) <= most]
        rewards: Rewards = [None] * len(ids)
        scores = forward.run([(ids[number][:-1], ids[number][-1:]) for number in fits])
        for number, score in zip(fits, scores.tolist(), strict=True):
            rewards[number] = score
        return rewards

    return compute
