"""The reason of a server that did not start, out of the log of vLLM."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.inference import http_server
from alignment_core.inference.server_log import ServerLog, root_cause

TRACE = "".join(f'  File "/lib/vllm/{number}.py", line {number}, in f\n    g()\n' for number in range(80))
CAUSE = "ValueError: To serve at least one request with the model's max seq len (8192), (0.35 GiB KV cache is needed, …"
PREFIX = "(EngineCore pid=6205) ERROR 11-25 19:17:14 [core.py:1510] "
LOG = (
    "(APIServer pid=5957) WARNING 11-25 19:16:52 [system_utils.py:255] OSError: [Errno 24] Too many open files\n"
    + "".join(f"{PREFIX}{line}\n" for line in f"Traceback (most recent call last):\n{TRACE}{CAUSE}".splitlines())
    + f"Process EngineCore:\nTraceback (most recent call last):\n{TRACE}{CAUSE}\n"
    + f"Traceback (most recent call last):\n{TRACE}"
    + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)
"""As vLLM 0.32 writes it (shortened): one process logs the cause and raises it, the other refers to it. The cause
is in the middle of 500 lines."""


def test_the_cause_is_the_exception_of_the_process_that_failed_first() -> None:
    assert root_cause(LOG) == CAUSE


def test_a_message_of_several_lines_is_whole() -> None:
    log = (
        'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Model architectures ['NoSuch'] are not supported for now. [type=value_error]\n"
        "    For further information visit a page\n"
    )
    assert root_cause(log) == (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, Model architectures "
        "['NoSuch'] are not supported for now. [type=value_error] For further information visit a page"
    )


def test_an_option_that_argparse_refuses_is_the_cause() -> None:
    log = "usage: api_server.py [-h] [--port PORT]\napi_server.py: error: unrecognized arguments: --no-such\n"
    assert root_cause(log) == "unrecognized arguments: --no-such"
    assert root_cause("INFO all is well\n") is None


def test_a_long_cause_keeps_its_beginning() -> None:
    assert str(root_cause(f"RuntimeError: why {'x' * 10_000}")).startswith("RuntimeError: why xxx")
    assert len(str(root_cause(f"RuntimeError: why {'x' * 10_000}"))) == 2000


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (
            "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
            "increasing `gpu_memory_utilization`.",
            "cannot hold a single token",
        ),
        (
            "ValueError: Available memory on node 0 (0.71/3.9 GiB) on kv cache allocation is less than requested memory for "
            "kv (1.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other "
            "processes.",
            "exceeds the memory that is free",
        ),
    ],
)
def test_a_cache_of_a_wrong_size_is_named_with_its_options_before_vllms_advice(cause: str, says: str) -> None:
    """The causes are what vLLM 0.32 raises on a CPU with ``--kv-cache-memory-bytes=500K``, which has no GPU memory, and with
    more than is free."""
    output = ServerLog(io.BytesIO(f"{cause}\n".encode()))
    sentence, _, log = http_server._why(1, output, None).partition(" (its log: ")
    Path(log.removesuffix(")")).unlink()
    assert sentence == (
        f"its key-value cache {says}; its size is set by resources.kv_cache_mib in a recipe and "
        "`-- --kv-cache-memory-bytes=2G` for align serve, on a GPU by resources.gpu_memory_utilization and "
        f"`-- --gpu-memory-utilization=0.95`; vLLM: {cause}"
    )


def test_output_is_kept_and_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print('one', flush=True); input(); print('two')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        log = ServerLog(process.stdout)
        while not log.text():
            pass
        log.show()
        process.stdin.write(b"\n")
        process.stdin.close()
        log.join(30)
    assert log.text() == "one\ntwo\n"
    assert capsys.readouterr().err == "two\n"
    saved = Path(log.save())
    assert saved.read_text() == "one\ntwo\n"
    assert os.stat(saved).st_mode & 0o077 == 0, "prompts may stand in it"
    saved.unlink()


def test_bytes_that_are_no_text_do_not_end_the_log() -> None:
    log = ServerLog(io.BytesIO(b"\xff\xfe\nRuntimeError: broken\n"))
    log.join(30)
    assert root_cause(log.text()) == "RuntimeError: broken"


def test_a_context_that_the_cache_cannot_hold_is_a_plain_sentence_before_vllms_own() -> None:
    """The figures are those of vLLM's message (version 0.32)."""
    words = (
        "ValueError: To serve at least one request with the model's max seq len (8192), (0.35 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.25 GiB). Based on the available memory, the estimated maximum model "
        "length is 5792. Try decreasing `max_model_len`"
    )
    output = ServerLog(io.BytesIO(f"Traceback (most recent call last):\n{TRACE}{words}\n{TRACE}".encode()))
    output.join(30)
    sentence, _, saved = http_server._why(1, output, None).partition(" (its log: ")
    Path(saved.removesuffix(")")).unlink()
    assert sentence.startswith(
        "its key-value cache can hold a context of 5,792 tokens, not of 8,192; its size is set by resources.kv_"
    )
    assert sentence.endswith(f"; vLLM: {words}")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-9, "it was killed by signal 9 (SIGKILL)"),
        (3, "it ended with exit code 3"),
        (None, "it did not answer within 60 seconds"),
    ],
)
def test_a_server_that_ends_without_an_exception_is_reported_with_its_exit_code(code: int | None, says: str) -> None:
    output = ServerLog(io.BytesIO(b"INFO loading\n"))
    output.join(30)
    sentence, _, saved = http_server._why(code, output, 60.0).partition(" (its log: ")
    Path(saved.removesuffix(")")).unlink()
    assert sentence == says
