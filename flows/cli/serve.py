"""``align serve`` and ``align serve-reward``: models of the store behind HTTP."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alignment.flows.console import JsonOption, StoreOption, err, print_json
from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.errors import EnvironmentFault, UserError

if TYPE_CHECKING:
    from alignment_core.models.model_ref import Model
    from alignment_core.recipes import ModelConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
REWARD_MODELS = ("reward-model", "model")
TOKEN = "ALIGN_SERVE_TOKEN"
"""Environment variable with the token of both commands."""
OURS = {"--host": "--host", "--port": "--port", "--api-key": "--token", "--uds": "--host", "--middleware": "--token"}
"""Options of vLLM's server that decide who can call it, with our option to use instead."""

HostOption = Annotated[str, typer.Option(help="Address to listen at; addresses beyond loopback need a token.")]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help=f"Token that clients must send. Other users can see command lines; set it as {TOKEN} in the environment instead."
    ),
]
TokenVariableOption = Annotated[
    str | None, typer.Option(help=f"Environment variable with the token, instead of {TOKEN}.")
]

TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model, once you have read it.")
]


def serve(
    model: Annotated[str, typer.Argument(help="Reference or tag of the store, a folder, or a Hub name.")],
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    token: TokenOption = None,
    token_variable: TokenVariableOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients. Default: MODEL.")] = None,
    options: Annotated[list[str] | None, typer.Argument(help="Further options of vLLM's server, after --.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model over OpenAI's HTTP API (chat, completions, models) until SIGTERM or Ctrl-C."""
    secret = token_of(host, token, token_variable)
    _check_options(options or ())
    from alignment_core.inference.http_server import running

    with ExitStack() as until:
        folder, shown = model_of(model, store, until)
        if not as_json:
            err.print(f"{shown}: vLLM is loading the model", markup=False)
        called = name or shown
        server = until.enter_context(
            running(
                folder,
                called,
                host,
                port,
                token=secret,
                options=options or (),
                own_session=True,
                on_loading=loading(shown),
            )
        )
        server.log.show()
        if as_json:
            print_json({"url": server.url, "model": called, "context": server.context, "token": bool(server.token)})
        else:
            err.print(f"{called} at {server.url}: a context of {server.context:,} tokens", markup=False)
            if server.shortened:
                larger = f" (-- --kv-cache-memory-bytes={server.whole_mib}M)" if server.whole_mib else ""
                err.print(f"{server.shortened}{larger}", markup=False)
            _warn_if_open(server.token)
        ended = _ends_on_signals(server.process.terminate)
        code = server.process.wait()
        if not ended.is_set():
            from alignment_core.inference.server_log import root_cause

            cause = root_cause(server.log.text()) or f"exit code {code}"
            raise EnvironmentFault(f"{called}: vLLM's server ended by itself: {cause} (its log: {server.log.save()})")


def _ends_on_signals(end: Callable[[], object]) -> threading.Event:
    """Call ``end`` on SIGTERM and Ctrl-C. The event is set after a signal."""
    received = threading.Event()

    def stop(*_: object) -> None:
        received.set()
        threading.Thread(target=end).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return received


def _check_options(options: Sequence[str]) -> None:
    """Raise UserError for an option of vLLM's that bypasses our checks of who can call the server."""
    for option in options:
        flag = option.partition("=")[0].replace("_", "-")
        for vllm_option, own_option in OURS.items():
            if len(flag) > 3 and vllm_option.startswith(flag):  # argparse accepts abbreviations
                raise UserError(f"{option}: give {own_option} before the --, where it is checked")


def token_of(host: str, token: str | None, variable: str | None) -> str | None:
    """The token. Raises UserError for a server beyond loopback without one, and for a token that does not fit into a header."""
    if token is not None and variable is not None:
        raise UserError("give --token or --token-variable, not both")
    if token is None:
        if variable is not None and not os.environ.get(variable):
            raise UserError(f"--token-variable: the environment has no variable {variable}")
        token = os.environ.get(variable or TOKEN)
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise UserError("the token must be of printable ASCII characters without spaces, and not empty")
    if host not in LOOPBACK and token is None:
        raise UserError(f"--host {host}: others can reach it, so set a token with {TOKEN} or --token")
    return token


def loading(shown: str) -> Callable[[float], None]:
    """A callback that prints how long the model has been loading."""
    return lambda seconds: err.print(f"{shown}: vLLM has been loading the model for {seconds:.0f} s", markup=False)


def _warn_if_open(token: str | None) -> None:
    if token is None:
        err.print(f"no token: every user of this machine can call it; {TOKEN} or --token sets one", markup=False)


def model_of(model: str, store: str | None, until: ExitStack, kinds: tuple[str, ...] = ("model",)) -> tuple[str, str]:
    """The folder or Hub name of a model, and its name. A folder of the store stays until ``until`` is closed.

    Raises UserError for a path that does not exist.
    """
    from alignment_core.recipes.paths import is_address, is_written_as_path

    opened, config, reference = _in_store(model, store, kinds)
    if reference is not None:
        return str(opened.fetch(reference, until)), model
    model = str(config.name)  # the address of a whole repository is its name on the Hub
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder), model
    if is_address(model):
        raise UserError(f"model: {model}: is an address; give an artifact of the store, a folder or a name on the Hub")
    if is_written_as_path(model):
        raise UserError(f"model: {folder}: no such folder")
    return model, model  # a name on the Hub: vLLM reports a missing one


def _in_store(model: str, store: str | None, kinds: tuple[str, ...]) -> tuple[Store, ModelConfig, Reference | None]:
    """The store, the model as recipes name it, and its artifact if it is one."""
    from pydantic import ValidationError

    from alignment_core.recipes import ModelConfig
    from alignment_core.stages.base_model import in_store

    opened = open_store(store, writes=False)
    try:
        config = ModelConfig(name=model)
    except ValidationError as error:
        raise UserError(f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    return opened, config, in_store(opened, config, kinds)


def serve_reward(
    model: Annotated[str, typer.Argument(help="Reference or tag of a reward model in the store, or a folder.")],
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 is any that is free.")] = 5000,
    token: TokenOption = None,
    token_variable: TokenVariableOption = None,
    trust_remote_code: TrustOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a reward model over HTTP, for `urls` in recipes and OpenRLHF's remote reward models, until SIGTERM or Ctrl-C."""
    secret = token_of(host, token, token_variable)
    with ExitStack() as until:  # the files are needed until the model is loaded
        folder, shown = model_of(model, store, until, REWARD_MODELS)
        if not Path(folder).is_dir():
            raise UserError(
                f"model: {model}: neither an artifact nor a folder; a reward model has to be on this machine"
            )
        from alignment_core.models.model_ref import Model

        reference = _in_store(model, store, REWARD_MODELS)[2] or Reference("model", "0" * 64)
        compute = _scores(Model(Path(folder), reference, trust_remote_code))
    from alignment_core.rewards.server import RewardServer

    try:
        server = RewardServer(compute, shown, host, port, secret)
    except OSError as error:
        raise EnvironmentFault(f"cannot listen at {host}:{port}: {error.strerror}") from None
    _ends_on_signals(server.shutdown)
    url = f"http://{host}:{server.server_port}"
    if as_json:
        print_json({"url": url, "model": shown, "token": bool(secret)})
    else:
        err.print(f"{shown} at {url}; /health, /metrics", markup=False)
        _warn_if_open(secret)
    server.serve_forever()
    server.stop()
    if not as_json:
        err.print(f"ended after {server.batcher.texts} texts", markup=False)


def _scores(model: Model) -> Any:
    from alignment_core.cluster.device import Device, local_gpus
    from alignment_core.data.context import context_length
    from alignment_core.recipes import ResourcesConfig
    from alignment_core.rewards.server import scores_of_texts
    from alignment_core.training.forward import ForwardJob

    device = Device.detect("auto", local_gpus())
    forward = ForwardJob(model, "score").open(ResourcesConfig(), device)
    return scores_of_texts(forward, context_length(model.path))
