"""vLLM's OpenAI-compatible server: its command, and a context manager that runs it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment_core.cluster.device import Device, Place, local_gpus
from alignment_core.credentials import resolved
from alignment_core.data.context import longest_sampled
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.imports import uncollected
from alignment_core.inference.kv_cache import TOO_LARGE, mib_needed, room_mib
from alignment_core.inference.options import BY_DEVICE
from alignment_core.inference.server_log import ServerLog, root_cause
from alignment_core.inference.token_guard import VARIABLE
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.saving import check_loadable, checkpoint_dtype, dtype_of
from alignment_core.processes import end_with_parent, inherited
from alignment_core.recipes.sections.resources import ENGINE_MEMORY, ResourcesConfig

STOP_SECONDS = 20.0
LOADING_SECONDS = 10.0
"""Interval of calls of ``on_loading``."""
POLL_SECONDS = 0.05
"""Interval of requests until the server answers."""
SERVER = "alignment_core.inference.server_process"
GUARD = "alignment_core.inference.token_guard.RequireToken"
SAMPLED_AS_ASKED = "--generation-config=vllm"
"""vLLM's option to take only the tokens that end answers from generation_config.json, and no `repetition_penalty`, `top_p` or
others that a request leaves out."""
OPTIONS_VARIABLE = "ALIGN_SERVER_OPTIONS"
"""Environment variable with further options as JSON. They may be secrets, and other users can see command lines."""
AS_LONG_AS_FITS = -1
"""vLLM's value for the longest context that its key-value cache can hold, up to the model's."""
TOO_LONG = re.compile(
    r"max seq len \((\d+)\).* KV cache is needed.* estimated maximum model length is (\d+)", re.DOTALL
)
"""vLLM's message for a context that its cache cannot hold."""
NO_TOKEN = "Cannot auto-fit max_model_len"
"""vLLM's message for a cache that cannot hold any context; its advice is about GPUs even on a CPU."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    """Ends in ``/v1``."""
    context: int
    """Maximum number of tokens of prompt and completion."""
    token: str | None
    """Bearer token of requests."""
    process: subprocess.Popen[bytes]
    log: ServerLog
    shortened: str | None = None
    """A sentence if it is less than the model's context."""
    whole_mib: int | None = None
    """MiB of key-value cache that would hold the model's context, if known; None on a GPU, whose memory limits the cache."""
    stop_ids: tuple[int, ...] = ()
    """Tokens for ``stop_token_ids`` of requests, so that answers end where those of our engines do."""


def server_of(
    folder: str,
    name: str,
    host: str,
    port: int,
    resources: ResourcesConfig | None = None,
    token: str | None = None,
    options: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The server's command, and environment variables, with the same options as our engines.

    Its context is as long as its key-value cache allows. Without a recipe's ``resources`` it has a GPU for itself. ``options``
    are further options of vLLM, which override ours. Raises UserError for a variable of ``resources.engine_options`` that is
    not set.
    """
    is_alone = resources is None
    resources = resources or ResourcesConfig()
    device = Device.detect(resources.device, local_gpus())
    environment = device.engine_environment(resources, Place())
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    settings: dict[str, Any] = {
        **BY_DEVICE.get(device.kind, {}),
        **device.engine_options(resources, room_mib(resources)),
    }
    for of_sleep in ("enable_sleep_mode", "sleep_mode_offload_cudagraph"):
        settings.pop(of_sleep, None)
    if is_alone:  # the default of recipes leaves room for a trainer, that of vLLM does not
        settings.pop("gpu_memory_utilization", None)
    elif "gpu_memory_utilization" in settings:  # it shares its GPU also where engines have some of their own
        settings["gpu_memory_utilization"] = resources.gpu_memory_utilization or ENGINE_MEMORY[0]
    on_disk = (Path(folder) / "config.json").is_file()  # for a name on the Hub, vLLM chooses
    settings["dtype"] = device.inference_dtype(checkpoint_dtype(check_loadable(Path(folder))) if on_disk else "auto")
    if token:
        environment[VARIABLE] = token
        settings["middleware"] = GUARD
    settings["max-model-len"] = AS_LONG_AS_FITS
    if trust_remote_code:
        settings["trust-remote-code"] = True
    if resources.engine_options:
        further = _flags(resolved(resources.engine_options, "resources.engine_options"))
        environment[OPTIONS_VARIABLE] = json.dumps(further)
    flags = _flags({"model": folder, "served-model-name": name, "host": host, "port": port, **settings})
    return [sys.executable, "-P", "-m", SERVER, *flags, *options], environment


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Options of vLLM's server for these arguments of ``vllm.LLM``."""
    return [word for name, value in settings.items() for word in _flag(name.replace("_", "-"), value)]


def _flag(option: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, list):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}={json.dumps(value) if isinstance(value, dict) else value}"]


@contextmanager
def served(
    folder: str,
    name: str,
    resources: ResourcesConfig | None = None,
    own_session: bool = False,
    start_seconds: float | None = None,
    on_loading: Callable[[float], None] = lambda _: None,
    trust_remote_code: bool = False,
) -> Iterator[Server]:
    """A server on a free port of loopback, with a random token. Raises EnvironmentFault if it does not start, within
    ``start_seconds`` if they are given.

    It samples as our engines do, if requests have its ``stop_ids``: as they ask, whatever the model's generation_config.json
    has beside stop tokens; a repetition penalty would change even greedy answers. In an ``own_session`` Ctrl-C does not reach
    it.
    """
    with socket.socket() as held:
        # It stays bound, without listening, so that no other process is given the port until the server binds it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        with running(
            folder,
            name,
            "127.0.0.1",
            held.getsockname()[1],
            resources,
            secrets.token_urlsafe(32),
            options=(SAMPLED_AS_ASKED,),
            own_session=own_session,
            start_seconds=start_seconds,
            on_loading=on_loading,
            trust_remote_code=trust_remote_code,
            reads_stop_ids=True,
        ) as server:
            yield server


def stop_ids(folder: str, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Tokens at which our engines end an answer of this model; none if the tokenizer or its template tells no end of a turn.

    vLLM's server stops only at those of the model's generation_config.json and at EOS, while the chat template of a base model
    may end turns with another token (Qwen2.5: ``<|im_end|>`` and ``<|endoftext|>``): the answer would go on with further turns.
    """
    with uncollected():
        import transformers  # noqa: F401

    try:
        tokenizer = load_tokenizer(folder, trust_remote_code)
        return Renderer(tokenizer, eos_token_ids=eos_token_ids(Path(folder))).turn_end.stop_ids
    except (UserError, OSError, ValueError):
        return ()


@contextmanager
def running(
    folder: str,
    name: str,
    host: str,
    port: int,
    resources: ResourcesConfig | None = None,
    token: str | None = None,
    options: Sequence[str] = (),
    own_session: bool = False,
    start_seconds: float | None = None,
    on_loading: Callable[[float], None] = lambda _: None,
    trust_remote_code: bool = False,
    reads_stop_ids: bool = False,
) -> Iterator[Server]:
    """A server, once it answers, without ``stop_ids`` by default. Raises EnvironmentFault with the reason if it does not start.

    ``on_loading`` is called every few seconds until then with the seconds since the start. ``reads_stop_ids`` takes seconds, in
    which the server loads its model. In an ``own_session`` the server ends with this process, even if that is killed: start it
    from the main thread.
    """
    _check_free(host, port)
    token = token or os.environ.get(VARIABLE) or None  # the server would inherit the variable, and require it
    command, environment = server_of(folder, name, host, port, resources, token, options, trust_remote_code)
    with ExitStack() as stack:
        process = subprocess.Popen(
            command,
            env=inherited(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
            preexec_fn=end_with_parent if own_session else None,
        )
        stack.callback(_end, process)
        assert process.stdout is not None
        output = ServerLog(process.stdout)
        scheme = "https" if any(option.startswith("--ssl") for option in options) else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"
        with ThreadPoolExecutor(1) as meanwhile:
            ids = meanwhile.submit(stop_ids, folder, trust_remote_code) if reads_stop_ids else None
            context = _wait(process, url, token, name, output, start_seconds, on_loading)
        shortened, whole = None, None
        if not _limits_context(options):
            shortened, whole = _shortened(folder, name, context, resources)
        yield Server(url, context, token, process, output, shortened, whole, ids.result() if ids else ())


def _check_free(host: str, port: int) -> None:
    """Raise EnvironmentFault if another server listens there, which would get our requests and token."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise EnvironmentFault(f"cannot listen at {host}:{port}: {error.strerror}") from None


def _wait(
    process: subprocess.Popen[bytes],
    url: str,
    token: str | None,
    name: str,
    output: ServerLog,
    seconds: float | None,
    on_loading: Callable[[float], None],
) -> int:
    """Wait until the server answers; returns its context in tokens."""
    import httpx

    started = time.monotonic()
    report_at = LOADING_SECONDS
    reached = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    # No proxy. Certificates are not verified: the server's own need not name this address, which `_check_free` found free.
    with httpx.Client(headers=authorization(token), timeout=5, trust_env=False, verify=False) as client:
        while process.poll() is None and (seconds is None or time.monotonic() - started < seconds):
            if (elapsed := time.monotonic() - started) >= report_at:
                report_at = elapsed + LOADING_SECONDS
                on_loading(elapsed)
            try:
                answer = client.get(f"{reached}/models")
                if answer.is_success:
                    return int(answer.json()["data"][0]["max_model_len"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                pass
            time.sleep(POLL_SECONDS)
    code = process.poll()
    if code is not None:
        output.join(5)
    raise EnvironmentFault(f"{name}: vLLM's server did not start: {_why(code, output, seconds)}")


def _why(code: int | None, output: ServerLog, seconds: float | None) -> str:
    """The reason why a server did not start, with the name of a file to which its output is saved."""
    cause = root_cause(output.text())
    if cause is None:
        if code is None:
            cause = f"it did not answer within {seconds:g} seconds"
        elif code < 0:
            cause = f"it was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            cause = f"it ended with exit code {code}"
    size = (
        "its size is set by resources.kv_cache_mib in a recipe and `-- --kv-cache-memory-bytes=2G` for align serve, on a GPU "
        "by resources.gpu_memory_utilization and `-- --gpu-memory-utilization=0.95`"
    )
    if lengths := TOO_LONG.search(cause):
        needed, possible = map(int, lengths.groups())
        cause = (
            f"its key-value cache can hold a context of {possible:,} tokens, not of {needed:,}; {size}; vLLM: {cause}"
        )
    elif NO_TOKEN in cause:
        cause = f"its key-value cache cannot hold a single token; {size}; vLLM: {cause}"
    elif TOO_LARGE.search(cause):
        cause = f"its key-value cache exceeds the memory that is free; {size}; vLLM: {cause}"
    return f"{cause} (its log: {output.save()})"


def authorization(token: str | None) -> dict[str, str]:
    """The header of requests with a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _limits_context(options: Sequence[str]) -> bool:
    return any(option.replace("_", "-").startswith("--max-model-len") for option in options)


def _shortened(
    folder: str, name: str, context: int, resources: ResourcesConfig | None
) -> tuple[str | None, int | None]:
    """A sentence if the model's context is longer than the server's, and MiB of cache to set on a CPU for all of it."""
    file = Path(folder) / "config.json"
    shape = json.loads(file.read_text()) if file.is_file() else {}
    most = longest_sampled(shape)
    if most is None or context >= most:
        return None, None
    length = f"{name}: a context of {context:,} of the model's {most:,} tokens"
    if context == _longrope_default(shape):
        return f"{length}, vLLM's default for LongRoPE; `align serve MODEL -- --max-model-len=N` serves more", None
    resources = resources or ResourcesConfig()
    device = Device.detect(resources.device, local_gpus())
    shape = {**shape, "dtype": device.inference_dtype(dtype_of(shape))}
    whole = mib_needed(shape, most, shards=resources.tensor_parallel_size)
    why = f"; {whole} MiB would hold all of them" if whole else ""
    return f"{length}, as long as its key-value cache allows{why}", whole if device.kind == "cpu" else None


def _longrope_default(shape: dict[str, Any]) -> int | None:
    """The context that vLLM takes for a model with LongRoPE positions (Phi-3 with 128k), however large its cache is."""
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    is_longrope = (rope.get("rope_type") or rope.get("type")) in ("longrope", "su")
    return shape.get("original_max_position_embeddings") if is_longrope else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server with all of its processes."""
    import psutil

    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(below, timeout=5)[1]:
        child.kill()
