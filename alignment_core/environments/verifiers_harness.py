"""A harness of `verifiers`: the loop of requests to the policy and calls of an environment's tools, in this process."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["Chat"]
"""`verifiers` loads the one harness that is named here."""


class Chat(Harness[HarnessConfig]):
    """Asks until an answer calls no tool. Its harness `null` does the same in a virtual environment that it installs."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """One segment of the conversation, up to an answer without calls."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack, httpx.AsyncClient(headers=headers, timeout=None) as client:
            schemas, tools, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": schemas} if schemas else {})
            while True:
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if not answer.is_success:  # the trace has the reason
                    return ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    result = await _result(call["function"], tools, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _result(call: dict[str, str], tools: dict[str, tuple[str, str]], connections: dict[str, Any]) -> Any:
    """The result of a tool, or a message about a malformed call."""
    if call["name"] not in tools:
        return f"Error: there is no tool {call['name']!r}; there are {', '.join(tools)}"
    return await call_mcp(connections, tools, call["name"], json.loads(call["arguments"]))
