"""What a model's server gets from us: options, code that comes with the model, stop tokens, and advice about its context."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from alignment_core.cluster.device import Device
from alignment_core.errors import UserError
from alignment_core.inference import http_server
from alignment_core.recipes import ResourcesConfig

CPU = {"device": "cpu", "kv_cache_mib": 16}


def changed(folder: Path, source: Path, file: str, **values: Any) -> Path:
    shutil.copytree(source, folder)
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))
    return folder


def command(model: Path, trust_remote_code: bool = False, **resources: Any) -> tuple[list[str], dict[str, str]]:
    config = ResourcesConfig(**{**CPU, **resources})
    return http_server.server_of(str(model), "m", "127.0.0.1", 1, config, trust_remote_code=trust_remote_code)


def test_answers_stop_at_the_token_that_ends_a_turn_of_the_chat_template_too(tiny_model: Any, tmp_path: Path) -> None:
    """As of Qwen2.5, whose template ends turns with a token that the generation_config.json of the base model lacks."""
    model = changed(tmp_path / "base", tiny_model(), "generation_config.json", eos_token_id=3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert http_server.stop_ids(str(model)) == tuple(sorted({3, tokenizer.eos_token_id, end}))


def test_a_model_whose_end_of_turn_is_unknown_is_served_all_the_same(tmp_path: Path) -> None:
    assert http_server.stop_ids(str(tmp_path)) == ()


def test_a_model_is_served_under_its_name(tiny_model: Any) -> None:
    assert [word for word in command(tiny_model())[0] if "served-model-name" in word] == ["--served-model-name=m"]


def test_code_of_a_model_runs_only_if_it_is_trusted(tiny_model: Any) -> None:
    assert "--trust-remote-code" in command(tiny_model(), trust_remote_code=True)[0]
    assert not [word for word in command(tiny_model())[0] if "trust" in word]


def test_a_multimodal_model_is_served_in_the_float_type_of_its_text_part(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL and Qwen3.5 name it there alone. Of a processor without instructions for bf16 it would be fp32."""
    monkeypatch.setattr(Device, "inference_dtype", lambda _, stored: stored)
    model = changed(tmp_path / "nested", tiny_model(), "config.json", dtype=None, text_config={"dtype": "bfloat16"})
    assert "--dtype=bfloat16" in command(model)[0]
    assert "--dtype=float32" in command(tiny_model())[0]


def test_options_of_engines_reach_servers_and_not_their_command_line(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be secrets. vLLM's command line takes JSON for nested values, and several words for a list."""
    monkeypatch.setenv("A_KEY", "s3cret")
    options = {
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "hf_overrides": {"rope_theta": 1e6},
        "cudagraph_capture_sizes": [1, 2],
        "quantization": None,
        "hf_token": "env:A_KEY",
    }
    words, variables = command(tiny_model(), engine_options=options)
    assert json.loads(variables[http_server.OPTIONS_VARIABLE]) == [
        "--max-num-batched-tokens=8192",
        "--no-enable-prefix-caching",
        '--hf-overrides={"rope_theta": 1000000.0}',
        *("--cudagraph-capture-sizes", "1", "2"),
        "--hf-token=s3cret",
    ]
    assert "s3cret" not in " ".join(words)
    monkeypatch.delenv("A_KEY")
    with pytest.raises(UserError, match=r"^resources.engine_options.hf_token: the environment has no variable A_KEY"):
        command(tiny_model(), engine_options=options)
    assert http_server.OPTIONS_VARIABLE not in command(tiny_model())[1]


def test_a_server_reads_the_options_of_its_environment() -> None:
    """With stand-ins for vLLM, whose import takes seconds: the one that the module calls prints its arguments."""
    module = http_server.SERVER
    code = (
        "import sys, types, runpy\n"
        "entry = types.ModuleType('entry'); entry.main = lambda: print(sys.argv[1:])\n"
        "sys.modules.update({'vllm.entrypoints.launchers.api_server.entry': entry})\n"
        "import importlib.machinery\n"
        "for name in ('vllm', 'vllm.entrypoints', 'vllm.entrypoints.launchers', 'vllm.entrypoints.launchers.api_server'):\n"
        "    sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = []\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    environment = {**os.environ, http_server.OPTIONS_VARIABLE: '["--max-num-batched-tokens=64"]'}
    done = subprocess.run(
        [sys.executable, "-c", code, "--port=1"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['--port=1', '--max-num-batched-tokens=64']"


def test_without_a_recipe_a_server_has_the_gpu_for_itself(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own default is 0.92 of its memory (config/cache.py); that of recipes leaves room for a trainer."""
    monkeypatch.setattr(Device, "detect", lambda *_: Device("cuda", 1))

    def shares(resources: ResourcesConfig | None) -> list[str]:
        words, _ = http_server.server_of(str(tiny_model()), "m", "127.0.0.1", 1, resources)
        return [word for word in words if "memory" in word]

    assert shares(None) == []
    assert shares(ResourcesConfig()) == ["--gpu-memory-utilization=0.4"]
    assert shares(ResourcesConfig(gpu_memory_utilization=0.45)) == ["--gpu-memory-utilization=0.45"]


def test_no_larger_cache_is_advised_on_a_gpu_which_has_no_more_memory(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = changed(tmp_path / "long", tiny_model(), "config.json", max_position_embeddings=8192)
    _, mib = http_server._shortened(str(model), "long", 4096, ResourcesConfig(**CPU))  # type: ignore[arg-type]
    assert mib is not None
    monkeypatch.setattr(Device, "detect", lambda *_: Device("cuda", 1))
    assert http_server._shortened(str(model), "long", 4096, None) == (
        f"long: a context of 4,096 of the model's 8,192 tokens, as long as its key-value cache allows; {mib} MiB would hold "
        "all of them",
        None,
    )


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="other builds of torch count the GPUs")
def test_on_a_cpu_the_command_of_a_server_needs_no_torch(tiny_model: Any) -> None:
    """Its import takes a second, before the server starts."""
    code = (
        "import sys\n"
        "from alignment_core.inference.http_server import server_of\n"
        f"server_of({str(tiny_model())!r}, 'm', '127.0.0.1', 1)\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_the_short_context_of_longrope_is_not_blamed_on_the_cache(field: str, tiny_model: Any, tmp_path: Path) -> None:
    """Of Phi-4-mini with 131,072 tokens vLLM serves 4,096 (config/model.py: `original_max_position_embeddings`)."""
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    shape = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
    model = changed(tmp_path / "phi", tiny_model(), "config.json", **shape, **{"rope_parameters": None, field: rope})
    resources = ResourcesConfig(**CPU)  # type: ignore[arg-type]
    assert http_server._shortened(str(model), "phi", 4096, resources) == (
        "phi: a context of 4,096 of the model's 131,072 tokens, vLLM's default for LongRoPE; "
        "`align serve MODEL -- --max-model-len=N` serves more",
        None,
    )
    sentence, mib = http_server._shortened(str(model), "phi", 2048, resources)
    assert sentence is not None
    assert "as long as its key-value cache allows" in sentence
    assert mib
