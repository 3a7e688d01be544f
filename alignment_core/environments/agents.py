"""Agents: programs of the user's that drive the policy through an OpenAI-compatible endpoint, one for each episode.

An agent is the inverse of an environment: its next request is the policy's next observation. It runs in a process of
environments, and so does the endpoint, at an address of the loopback interface that each episode has for itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from typing import Any

from alignment_core.data.message_fields import REASONING
from alignment_core.environments import tool_calls
from alignment_core.environments.calling import called
from alignment_core.user_code.errors import Failed

Message = dict[str, Any]
ANSWERING = ("user", "tool", "system", "developer")
"""Roles that may follow a turn of the policy."""

KEEP_ALIVE_SECONDS = 600
"""A policy's turns may be that far apart."""


class Refused(Exception):
    """A request that is not answered; the message tells the agent why."""


class Agent:
    """One episode: ``function(prompt, label, base_url, api_key, **options)`` runs until it returns the reward."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        """What the agent does: it asks, ends, or fails."""
        self._conversation: list[Message] = []
        """All messages so far, as the agent must repeat them."""
        self._tools: list[dict[str, Any]] | None = None
        self._said: asyncio.Future[dict[str, Any]] | None = None
        """The policy's turn that a request waits for."""

    async def reset(self, prompt: str, label: str | None) -> dict[str, Any]:
        """Start the agent; its first request. Raises what the agent raises."""
        self._endpoint = await endpoint()
        name = self._endpoint.admit(self)
        url = f"http://127.0.0.1:{self._endpoint.port}/episode/{name}/v1"
        self._running = asyncio.create_task(self._run(prompt, label, url, self._endpoint.token))
        event = await self._next()
        if event.get("done"):
            raise Failed("wrong_shape", "ended without sending a request to the policy")
        return event["observation"]

    async def step(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Let the agent have the policy's turn; what it asks next, or its reward."""
        assert self._said
        self._said.set_result(turn)
        return await self._next()

    async def close(self) -> None:
        """End the agent, wherever it is."""
        self._endpoint.dismiss(self)
        self._running.cancel()
        if self._said and not self._said.done():
            self._said.set_exception(Refused("the episode is over"))

    async def _run(self, prompt: str, label: str | None, url: str, token: str) -> None:
        try:
            reward = float(await called(self._function, prompt, label, url, token, **self._options))
            self._events.put_nowait({"reward": reward, "done": True})
        except Exception as error:  # the user's code runs here
            self._events.put_nowait(error)

    async def _next(self) -> dict[str, Any]:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request for the policy's next turn. Raises Refused, and fails the episode if it is not its next turn."""
        messages, limit = _messages(body), body.get("max_completion_tokens") or body.get("max_tokens")
        if body.get("n") not in (None, 1):
            raise Refused("`n` above 1 is not supported")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise Refused("`max_tokens` must be 1 or more")
        known = len(self._conversation)
        if problem := self._problem(messages, body.get("tools")):
            self._events.put_nowait(Failed("wrong_shape", problem))
            raise Refused(problem)
        self._conversation, self._tools = messages, body.get("tools")
        self._said = asyncio.get_running_loop().create_future()
        request = {"messages": messages[known:], "tools": self._tools, "max_tokens": limit}
        self._events.put_nowait({"observation": request})
        turn = await self._said
        message, reason = _reply(turn["text"], len(messages), bool(self._tools)), turn["finish_reason"]
        self._conversation = [*messages, _canonical(message)]
        self._said = None
        return {
            "id": f"chatcmpl-{len(messages)}",
            "object": "chat.completion",
            "created": 0,
            "model": str(body.get("model", "policy")),
            "choices": [{"index": 0, "message": message, "finish_reason": _reason(message, reason), "logprobs": None}],
            "usage": turn["usage"],
        }

    def _problem(self, messages: list[Message], tools: Any) -> str:
        """Why a request does not go on with the conversation of the episode; empty if it does."""
        known = len(self._conversation)
        if self._said:
            return "sent a request while another one was open; an episode is one conversation, one request at a time"
        if list(map(_without_ids, messages[:known])) != list(map(_without_ids, self._conversation)):
            return "changed earlier messages; an episode is one conversation that only grows"
        if not messages[known:]:
            return "requested another turn without a new message"
        if known and (strange := [one["role"] for one in messages[known:] if one["role"] not in ANSWERING]):
            return f"added a message of the role {strange[0]!r} after the policy's own"
        if known and tools != self._tools:
            return "changed its tools within a conversation"
        return ""


def _messages(body: dict[str, Any]) -> list[Message]:
    given = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(given, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in given
    ):
        raise Refused("`messages` must be a list of objects with a `role`")
    return [_canonical(one) for one in given]


def _canonical(message: Message) -> Message:
    """A message as it is rendered: content as text, arguments as objects, no empty fields, and none of unknown meaning."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused("the policy reads only text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused("`content` must be a text, or a list of parts with a `text`")
    found: Message = {"role": message["role"], "content": content}
    found |= {key: message[key] for key in ("name", "tool_call_id", *REASONING) if message.get(key)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [{"type": "function", "function": _function(call), **_id(call)} for call in calls]
    return found


def _id(call: dict[str, Any]) -> dict[str, str]:
    return {"id": call["id"]} if isinstance(call.get("id"), str) else {}


def _without_ids(message: Message) -> Message:
    """A message as it is compared: an agent may leave out the ids of calls."""
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _function(call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        return {"name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"a tool call is malformed: {error}") from None


def _reply(text: str, place: int, has_tools: bool) -> Message:
    """The policy's turn as message number ``place``; with tools, calls as such, if they are well formed.

    Calls inside its thoughts do not count.
    """
    rest, calls = tool_calls.parse(text)
    if not has_tools or not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    found = [
        {
            "id": tool_calls.call_id(place, number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": rest or None, "tool_calls": found}


def _reason(message: Message, reason: str) -> str:
    return "tool_calls" if "tool_calls" in message else reason


def _as_events(answer: dict[str, Any]) -> str:
    """An answer as it is streamed: in one chunk, and one more for its usage."""
    (choice,) = answer["choices"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    chunk = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    whole = answer | {"object": "chat.completion.chunk"}
    chunks = [whole | {"choices": [chunk], "usage": None}, whole | {"choices": []}]
    return "".join(f"data: {one}\n\n" for one in (*map(json.dumps, chunks), "[DONE]"))


class Endpoint:
    """The HTTP endpoint of a process, which knows its agents by the names in their addresses."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._agents: dict[str, Agent] = {}

    def admit(self, agent: Agent) -> str:
        """A name for the agent."""
        name = secrets.token_hex(8)
        self._agents[name] = agent
        return name

    def dismiss(self, agent: Agent) -> None:
        """Know the agent no longer."""
        self._agents = {name: one for name, one in self._agents.items() if one is not agent}

    async def serve(self) -> None:
        """Answer requests for as long as the process lives."""
        import uvicorn
        from fastapi import FastAPI

        app = FastAPI(openapi_url=None)
        app.add_route("/episode/{name}/v1/chat/completions", self._chat, methods=["POST"])
        await uvicorn.Server(
            uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS)
        ).serve(sockets=[self._socket])

    async def _chat(self, request: Any) -> Any:
        from fastapi.responses import JSONResponse, Response

        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return JSONResponse(_error("the bearer token is not valid for this run"), 401)
        agent = self._agents.get(request.path_params["name"])
        if agent is None:
            return JSONResponse(_error("there is no such episode, or it is over"), 404)
        try:
            body = await request.json()
            answer = await agent.ask(body)
            streams = body.get("stream")
            return Response(_as_events(answer), media_type="text/event-stream") if streams else JSONResponse(answer)
        except (Refused, ValueError, RecursionError) as error:
            return JSONResponse(_error(str(error)), 400)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


_ENDPOINT: list[tuple[Endpoint, asyncio.Task[None]]] = []


async def endpoint() -> Endpoint:
    """The endpoint of this process, which is started by the first who asks."""
    if not _ENDPOINT:
        one = Endpoint()
        _ENDPOINT.append((one, asyncio.create_task(one.serve())))
    return _ENDPOINT[0][0]
