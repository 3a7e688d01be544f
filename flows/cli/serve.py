"""``align serve`` and ``align serve-reward``: models of the store behind HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from alignment.flows.console import JsonOption, StoreOption, err, print_json
from alignment_core.artifacts import open_store
from alignment_core.errors import UserError
from alignment_core.processes import inherited

LOOPBACK = ("127.0.0.1", "localhost", "::1")
REWARD_MODELS = ("reward-model", "model")


def serve(
    model: Annotated[str, typer.Argument(help="Reference or tag of the store, a folder, or a Hub name.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    token_variable: Annotated[
        str | None,
        typer.Option(help="Environment variable with the token that clients must send; needed unless on loopback."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model. Default: as it is given here.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(help="Further options of vLLM's server, after --, as it has them.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API has it (chat, completions, models), until SIGTERM or Ctrl-C."""
    token = _token(host, token_variable)
    folder, shown = model_of(model, store)
    from alignment_core.inference.http_server import server_of

    command, environment = server_of(folder, name or shown, host, port)
    if token:
        environment["VLLM_API_KEY"] = token
    url = f"http://{host}:{port}/v1"
    if as_json:
        print_json({"url": url, "model": name or shown})
    else:
        err.print(f"{shown} at {url} once vLLM is ready", markup=False)
    os.execve(sys.executable, [*command, *(options or ())], inherited(**environment))


def _token(host: str, variable: str | None) -> str | None:
    """What clients must send. Raises UserError where others could reach a server without one."""
    token = os.environ.get(variable) if variable else None
    if variable and not token:
        raise UserError(f"--token-variable: the environment has no variable {variable}")
    if host not in LOOPBACK and not token:
        raise UserError(f"--host {host}: others can reach it, so name a token with --token-variable")
    return token


def model_of(model: str, store: str | None, kinds: tuple[str, ...] = ("model",)) -> tuple[str, str]:
    """Where its weights are, and what it is called. Raises UserError if neither store nor disk has it."""
    from alignment_core.recipes import ModelConfig
    from alignment_core.recipes.paths import is_written_as_path
    from alignment_core.stages.base_model import in_store

    opened = open_store(store, writes=False)
    reference = in_store(opened, ModelConfig(name=model), kinds)
    if reference is not None:
        return str(opened.fetch(reference)), model
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder), model
    if is_written_as_path(model):
        raise UserError(f"model: {folder}: no such folder")
    return model, model  # a name on the Hub: vLLM says if there is none


def serve_reward(
    model: Annotated[str, typer.Argument(help="Reference or tag of a reward model in the store, or a folder.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 is any that is free.")] = 5000,
    token_variable: Annotated[
        str | None,
        typer.Option(help="Environment variable with the token that clients must send; needed unless on loopback."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a reward model over HTTP, as `urls` of recipes and OpenRLHF's remote reward models ask, until SIGTERM or Ctrl-C."""
    import signal
    import threading

    token = _token(host, token_variable)
    folder, shown = model_of(model, store, REWARD_MODELS)
    if not Path(folder).is_dir():
        raise UserError(f"model: {model}: neither an artifact nor a folder; a reward model has to be on this machine")
    compute = _scores(Path(folder))
    from alignment_core.errors import EnvironmentFault
    from alignment_core.rewards.server import RewardServer

    try:
        server = RewardServer(compute, shown, host, port, token)
    except OSError as error:
        raise EnvironmentFault(f"cannot listen at {host}:{port}: {error.strerror}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    url = f"http://{host}:{server.server_port}"
    if as_json:
        print_json({"url": url, "model": shown})
    else:
        err.print(f"{shown} at {url}; /health, /metrics", markup=False)
    server.serve_forever()
    server.stop()
    if not as_json:
        err.print(f"ended after {server.batcher.texts} texts", markup=False)


def _scores(folder: Path) -> Any:
    import torch

    from alignment_core.artifacts import Reference
    from alignment_core.cluster.device import Device
    from alignment_core.data.context import context_length
    from alignment_core.models.handle import Model
    from alignment_core.recipes import ResourcesConfig
    from alignment_core.rewards.server import scores_of_texts
    from alignment_core.training.forward import ForwardJob

    model = Model(folder, Reference("reward-model", "0" * 64))
    device = Device.detect("auto", torch.cuda.device_count())
    forward = ForwardJob(model, "score").open(ResourcesConfig(), device)
    return scores_of_texts(forward, model.tokenizer(), context_length(folder))
