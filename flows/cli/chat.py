"""``align chat``: chat with a model, or with two side by side, in the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from alignment.flows.cli.serve import TrustOption, loading, model_of
from alignment.flows.console import JsonOption, StoreOption, err, out, print_json
from alignment_core.credentials import remember
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.inference.http_server import authorization, served
from alignment_core.printable import printable
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.http_errors import because

UNAUTHORISED = (401, 403)
REASONING = ("reasoning", "reasoning_content")
"""Fields of a streamed piece of reasoning: vLLM's, and its earlier one, which is DeepSeek's."""
GPU_MEMORY = 0.9
"""Fraction of a GPU's memory that the models share."""
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it"


def chat(
    models: Annotated[
        list[str], typer.Argument(help="One or two: reference, tag, folder, Hub name, or the URL of a server (…/v1).")
    ],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    token_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the token for the server of a URL.")
    ] = None,
    trust_remote_code: TrustOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model, or send every message to two models. Answers are streamed; each model has its own history."""
    if len(models) > 2:
        raise UserError("name one model, or two to compare")
    token = os.environ.get(token_variable) if token_variable else None
    if token_variable and not token:
        raise UserError(f"--token-variable: the environment has no variable {token_variable}")
    remember(token or "")  # to redact it: a server may repeat it in an error
    with ExitStack() as open_:
        # all are located before the first is loaded, which takes long
        located = [model if "://" in model else model_of(model, store, open_) for model in models]
        local = sum(not isinstance(url, str) for url in located)
        resources = ResourcesConfig(gpu_memory_utilization=GPU_MEMORY / max(1, local))
        servers = [
            (url, token, ())
            if isinstance(url, str)
            else open_.enter_context(_loaded(*url, trust_remote_code, resources))
            for url in located
        ]
        voices = [Voice(model, *server, system) for model, server in zip(models, servers, strict=True)]
        if not as_json:
            err.print(HELP)
        for line in _lines(prompted=sys.stdin.isatty()):
            if line in ("/quit", "/exit"):
                return
            if line == "/reset":
                for voice in voices:
                    voice.reset()
                continue
            answers = {}
            for voice in voices:
                if len(voices) > 1 and not as_json:
                    out.print(f"\n[{voice.name}]", markup=False, style="bold")
                pieces = voice.answer(line, temperature, max_tokens)
                answers[voice.name] = _print_answer(pieces, quiet=as_json)
                if voice.note and not as_json:
                    err.print(f"{voice.name}: {voice.note}", markup=False)
            if as_json:
                notes = {voice.name: voice.note for voice in voices if voice.note}
                print_json({"prompt": line, "answers": answers, **({"notes": notes} if notes else {})})


def _lines(prompted: bool) -> Iterator[str]:
    """The user's messages, until the end of input."""
    while True:
        if prompted:
            sys.stdout.write("\n> ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _print_answer(pieces: Iterator[str], quiet: bool) -> str:
    """Print an answer as it is streamed, and return it. Ctrl-C ends the answer, not the conversation."""
    text = []
    try:
        for piece in pieces:
            text.append(piece)
            if not quiet:
                sys.stdout.write(printable(piece))
                sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return "".join(text)


class Voice:
    """A model behind a URL, and its conversation."""

    def __init__(self, name: str, url: str, token: str | None, stop_ids: Sequence[int], system: str | None) -> None:
        """``stop_ids`` are tokens that end an answer beside the server's own. Raises EnvironmentFault if no server answers at
        the URL."""
        self.name = name
        self.url = url.rstrip("/")
        self._system = system
        self._stop_ids = list(stop_ids)
        self._headers = authorization(token)
        self.messages: list[dict[str, str]] = []
        self.note: str | None = None
        """Why the last answer is incomplete or empty."""
        self.reset()
        self._model = _first_model(self.url, self._headers)

    def reset(self) -> None:
        """Forget the conversation except for the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, line: str, temperature: float, max_tokens: int) -> Iterator[str]:
        """The pieces of the answer, which is added to the history even if it is interrupted. Raises EnvironmentFault."""
        import httpx

        self.messages.append({"role": "user", "content": line})
        content = {
            "model": self._model,
            "messages": self.messages,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stream": True,
            **({"stop_token_ids": self._stop_ids} if self._stop_ids else {}),
        }
        received: list[str] = []
        reasoned = cut_off = False
        self.note = None
        try:
            place = f"{self.url}/chat/completions"
            with httpx.stream("POST", place, json=content, headers=self._headers, timeout=None) as response:
                if not response.is_success:
                    response.read()
                    raise EnvironmentFault(
                        f"{self.url} answered {response.status_code}{because(response)}{_hint(response)}"
                    )
                for choice in self._choices(response.iter_text()):
                    delta = choice.get("delta") or {}
                    if piece := delta.get("content"):
                        received.append(piece)
                        yield piece
                    reasoned = reasoned or any(delta.get(field) for field in REASONING)
                    cut_off = cut_off or choice.get("finish_reason") == "length"
            ending = f"cut off at --max-tokens {max_tokens}" if cut_off else ""
            empty = "only reasoning, and no answer" if reasoned and not received else ""
            self.note = ", ".join(filter(None, (empty, ending))) or None
        except httpx.HTTPError as error:
            raise EnvironmentFault(f"{self.url}: {error or type(error).__name__}") from None
        finally:
            self.messages.append({"role": "assistant", "content": "".join(received)})

    def _choices(self, pieces: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The first choice of each event of a stream. Raises EnvironmentFault for an event about an error, by which servers
        report a request that fails once they have answered 200."""
        import httpx

        for event in _events(pieces):
            field, _, data = event.partition(":")
            if field != "data" or (data := data.strip()) == "[DONE]":
                continue
            chunk = json.loads(data)
            if chunk.get("error"):
                raise EnvironmentFault(f"{self.url} failed during the answer{because(httpx.Response(200, text=data))}")
            yield (chunk.get("choices") or [{}])[0]


def _events(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a response. httpx's `iter_lines` would also split at U+2028 and the like, which JSON may contain."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    yield rest


def _first_model(url: str, headers: dict[str, str]) -> str:
    import httpx

    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=30)
        if answer.status_code in UNAUTHORISED:
            raise EnvironmentFault(f"{url}/models answered {answer.status_code}{because(answer)}{_hint(answer)}")
        models = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
        model = models[0]
    except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise EnvironmentFault(f"{url}/models: no OpenAI-compatible server answers there ({error})") from None
    if len(models) > 1:
        err.print(f"{url}: {model} answers, the first of its {len(models)} models", markup=False)
    return model


def _hint(response: Any) -> str:
    return "; --token-variable names the variable with its token" if response.status_code in UNAUTHORISED else ""


@contextmanager
def _loaded(
    folder: str, name: str, trust_remote_code: bool, resources: ResourcesConfig
) -> Iterator[tuple[str, str | None, Sequence[int]]]:
    """The URL, token and stop tokens of a vLLM server for a model. Ctrl-C does not reach the server."""
    err.print(f"{name}: vLLM is loading the model", markup=False)
    with served(
        folder, name, resources, own_session=True, on_loading=loading(name), trust_remote_code=trust_remote_code
    ) as server:
        err.print(server.shortened or f"{name}: a context of {server.context:,} tokens", markup=False)
        yield server.url, server.token, server.stop_ids
