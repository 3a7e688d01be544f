"""`served_judge`: a language model of the store, a folder or the Hub that judges, on a server which the stage starts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.rewards.base import Opening, RewardKind, Rows, content_without_model
from alignment_core.rewards.endpoint import Endpoint
from alignment_core.rewards.kinds.judge import Judged, asking
from alignment_core.rewards.results import Answers

NAME = "judge"
"""The server's name of the model."""
SERVER = "the judge's server, and loads its model"
"""The end of a sentence for people about the start."""


class ServedJudge(Judged):
    """What a language model thinks of a completion, which a server of vLLM's holds for as long as the stage rewards."""

    KEY: ClassVar[str] = "served_judge"

    served_judge: ModelConfig
    """The model. It needs memory beside the run's own engines and trainers."""

    @property
    def model(self) -> ModelConfig:
        return self.served_judge


class Served:
    """A judge whose server ends with it."""

    def __init__(self, endpoint: Endpoint, server: ExitStack) -> None:
        self._endpoint = endpoint
        self._server = server

    def __call__(self, rows: Rows) -> Answers:
        return self._endpoint(rows)

    def close(self) -> None:
        self._endpoint.close()
        self._server.close()


def _content(reward: ServedJudge, field: str) -> dict[str, Any]:
    content = content_without_model(reward, field)
    content.pop("max_concurrency", None)
    return content


def _open(reward: ServedJudge, opening: Opening) -> Served:
    from alignment_core.inference.http_server import served

    assert opening.model is not None
    with ExitStack() as stack:
        with opening.starting(SERVER):
            model = opening.model
            server = stack.enter_context(
                served(
                    str(model.path),
                    NAME,
                    opening.resources,
                    start_seconds=opening.resources.wait_timeout_seconds,
                    trust_remote_code=model.trust_remote_code,
                )
            )
        if server.shortened:
            opening.warnings.append(f"{opening.field}: {server.shortened}")
        endpoint = asking(reward, opening, reward.KEY, [server.url], NAME, token=server.token, stop_ids=server.stop_ids)
        return Served(endpoint, stack.pop_all())


REWARD = RewardKind(
    ServedJudge,
    _open,
    description=lambda reward: f"the judge {reward.served_judge.name or NAME}",
    content=_content,
    code=lambda reward: (
        "alignment_core.inference.http_server",
        "alignment_core.inference.options",
        "alignment_core.rewards.kinds.judge",
        "alignment_core.rewards.llm_judge",
    ),
    packages=lambda reward: ("jinja2", "transformers", "vllm"),
    kept=True,
    reads_text=True,
)
