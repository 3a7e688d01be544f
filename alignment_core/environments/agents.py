"""Agents: user programs that drive the policy through an OpenAI-compatible endpoint, one for each episode.

An agent is the inverse of an environment: its next request is the policy's next observation. Agent and endpoint run in a
process of environments; each episode has its own address on the loopback interface.
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
from alignment_core.environments.observations import content_of_request
from alignment_core.user_code.errors import Failed

Message = dict[str, Any]
ANSWERING = ("user", "tool", "system", "developer")
"""Roles that may follow a turn of the policy."""

KEEP_ALIVE_SECONDS = 600
"""Maximum time between two turns of a policy."""


class Refused(Exception):
    """A request that is refused; the agent gets the message."""


class Agent:
    """One episode: calls ``function(prompt, label, base_url, api_key, **options)``, which returns the reward."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function = function
        self._options = options
        self._events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        """Requests of the agent, its end, or its error."""
        self._conversation: list[Message] = []
        """All messages so far; the agent's next request must begin with them."""
        self._tools: list[dict[str, Any]] | None = None
        self._turn: asyncio.Future[dict[str, Any]] | None = None
        """The policy's turn that the current request waits for."""

    async def reset(self, prompt: str, label: str | None) -> dict[str, Any]:
        """Start the agent; returns its first request. Raises the agent's errors."""
        self._endpoint = await endpoint()
        name = self._endpoint.admit(self)
        url = f"http://127.0.0.1:{self._endpoint.port}/episode/{name}/v1"
        self._running = asyncio.create_task(self._run(prompt, label, url, self._endpoint.token))
        event = await self._next()
        if event.get("done"):
            raise Failed("wrong_shape", "ended without sending a request to the policy")
        return event["observation"]

    async def step(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Answer the agent's request with the policy's turn; its next request, or its reward."""
        assert self._turn
        self._turn.set_result(turn)
        return await self._next()

    async def close(self) -> None:
        """Cancel the agent."""
        self._endpoint.dismiss(self)
        self._running.cancel()
        if self._turn and not self._turn.done():
            self._turn.set_exception(Refused("the episode is over"))

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

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request for the policy's next turn. Raises Refused, and fails the episode if the request does not continue
        its conversation."""
        messages, limit = _messages(body), body.get("max_completion_tokens") or body.get("max_tokens")
        if body.get("n") not in (None, 1):
            raise Refused("`n` above 1 is not supported")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise Refused("`max_tokens` must be 1 or more")
        known = len(self._conversation)
        if problem := self._problem(messages, body.get("tools")):
            self._events.put_nowait(Failed("wrong_shape", problem))
            raise Refused(problem)
        self._conversation = messages
        self._tools = body.get("tools")
        self._turn = asyncio.get_running_loop().create_future()
        request = {"messages": messages[known:], "tools": self._tools, "max_tokens": limit}
        self._events.put_nowait({"observation": request})
        turn = await self._turn
        message, reason = _reply(turn["text"], len(messages), bool(self._tools)), turn["finish_reason"]
        self._conversation = [*messages, _canonical(message)]
        self._turn = None
        return {
            "id": f"chatcmpl-{len(messages)}",
            "object": "chat.completion",
            "created": 0,
            "model": str(body.get("model", "policy")),
            "choices": [{"index": 0, "message": message, "finish_reason": _reason(message, reason), "logprobs": None}],
            "usage": turn["usage"],
        }

    def _problem(self, messages: list[Message], tools: Any) -> str:
        """Why a request does not continue the conversation of the episode; empty if it does."""
        known = len(self._conversation)
        if self._turn:
            return "sent a request while another one was open; an episode is one conversation, one request at a time"
        if list(map(_without_ids, messages[:known])) != list(map(_without_ids, self._conversation)):
            return "changed earlier messages; an episode is one conversation that only grows"
        if not messages[known:]:
            return "requested another turn without a new message"
        if known and (strange := [message["role"] for message in messages[known:] if message["role"] not in ANSWERING]):
            return f"added a message of the role {strange[0]!r} after the policy's own"
        if known and tools != self._tools:
            return "changed its tools within a conversation"
        return ""


def _messages(body: dict[str, Any]) -> list[Message]:
    given = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(given, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in given
    ):
        raise Refused("`messages` must be a list of objects with a `role`")
    return [_canonical(message) for message in given]


def _canonical(message: Message) -> Message:
    """A message as it is rendered: texts as one, images in parts, arguments as objects, no empty and no unknown fields."""
    try:
        content = content_of_request(message.get("content") or "")
    except ValueError as error:
        raise Refused(str(error)) from None
    canonical: Message = {"role": message["role"], "content": content}
    canonical |= {key: message[key] for key in ("name", "tool_call_id", *REASONING) if message.get(key)}
    if calls := message.get("tool_calls"):
        canonical["tool_calls"] = [{"type": "function", "function": _function(call), **_id(call)} for call in calls]
    return canonical


def _id(call: dict[str, Any]) -> dict[str, str]:
    return {"id": call["id"]} if isinstance(call.get("id"), str) else {}


def _without_ids(message: Message) -> Message:
    """A message without the ids of its calls, which an agent may omit when it repeats the message."""
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _function(call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        return {"name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"a tool call is malformed: {error}") from None


def _reply(text: str, place: int, has_tools: bool) -> Message:
    """The policy's turn as message number ``place``; with tools, well-formed calls become ``tool_calls``.

    Calls inside thoughts do not count.
    """
    rest, calls = tool_calls.parse(text)
    if not has_tools or not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    tool_messages = [
        {
            "id": tool_calls.call_id(place, number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": rest or None, "tool_calls": tool_messages}


def _reason(message: Message, reason: str) -> str:
    return "tool_calls" if "tool_calls" in message else reason


def _as_events(answer: dict[str, Any], options: Any) -> str:
    """An answer in the form of a stream: one chunk, and another one for the usage if the request's ``stream_options`` have
    ``include_usage``."""
    (choice,) = answer["choices"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    chunk = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    whole = answer | {"object": "chat.completion.chunk"}
    chunks = [whole | {"choices": [chunk], "usage": None}]
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append(whole | {"choices": []})
    return "".join(f"data: {event}\n\n" for event in (*map(json.dumps, chunks), "[DONE]"))


class Endpoint:
    """The HTTP endpoint of a process, which identifies its agents by names in their addresses."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._agents: dict[str, Agent] = {}

    def admit(self, agent: Agent) -> str:
        """Register an agent; its name."""
        name = secrets.token_hex(8)
        self._agents[name] = agent
        return name

    def dismiss(self, agent: Agent) -> None:
        """Unregister an agent."""
        self._agents = {name: other for name, other in self._agents.items() if other is not agent}

    async def serve(self) -> None:
        """Serve requests for the lifetime of the process."""
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
        # Any user of this machine can connect to the port; the comparison takes the same time for every wrong token.
        if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return JSONResponse(_error("the bearer token is not valid for this run"), 401)
        agent = self._agents.get(request.path_params["name"])
        if agent is None:
            return JSONResponse(_error("there is no such episode, or it is over"), 404)
        try:
            body = await request.json()
            answer = await agent.complete(body)
            if not body.get("stream"):
                return JSONResponse(answer)
            return Response(_as_events(answer, body.get("stream_options")), media_type="text/event-stream")
        except (Refused, ValueError, RecursionError) as error:
            return JSONResponse(_error(str(error)), 400)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


_ENDPOINT: list[tuple[Endpoint, asyncio.Task[None]]] = []


async def endpoint() -> Endpoint:
    """The endpoint of this process, which the first call starts."""
    if not _ENDPOINT:
        started = Endpoint()
        _ENDPOINT.append((started, asyncio.create_task(started.serve())))
    return _ENDPOINT[0][0]
