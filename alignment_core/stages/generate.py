"""Stage: sample completions of prompts from a policy, in fixed shards that are written atomically."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment_core.cluster.actor import Call, call
from alignment_core.cluster.group import ActorGroup
from alignment_core.data.completion_text import CompletionText
from alignment_core.data.context import check_embedded, embedding_rows
from alignment_core.data.image_tokens import tokens_of_images
from alignment_core.data.images import FOLDER
from alignment_core.data.own_template import Row, has_truncated_rows, in_own_template
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import chat_template_of, eos_token_ids, pass_chat_template_on
from alignment_core.errors import DataError, NumericError
from alignment_core.execution.base import SamplingPlan, Stage, StageConfig, StageContext
from alignment_core.inference.completions import Completions
from alignment_core.inference.decoding import Decoding
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.recipes import GenerationConfig
from alignment_core.rollout.images import copy_images, have_images, images_of, with_paths
from alignment_core.rollout.lengths import check_length
from alignment_core.rollout.schemas import rollout_schema, shard_rows, write_table

PARITY_PROMPTS = 4


class GenerateConfig(StageConfig):
    """What to sample."""

    generation: GenerationConfig
    first_prompt: int = 0
    """Index of the first prompt; indices wrap around the end of the data set."""
    prompts: int | None = None
    """Number of prompts; None: all."""
    own_template: bool = False
    """Whether to render the prompts by the policy's chat template, where their data set has that of another model. A
    `chat_template` of the data set itself is for all policies."""

    def content(self) -> Any:
        content = super().content()
        if not self.own_template:
            del content["own_template"]
        return content

    def sampling(self) -> SamplingPlan:
        return SamplingPlan(self.generation, self.prompts)


def run(context: StageContext, config: GenerateConfig) -> dict[str, Any]:
    prompts = with_paths(_prompts(context.inputs["prompts"], config), context.inputs["prompts"])
    warnings: list[str] = []
    if config.own_template and chat_template_of(context.inputs["prompts"]) is None:
        prompts, warnings = _in_own_template(context, prompts)
    shards = [
        prompts[i : i + config.generation.shard_size] for i in range(0, len(prompts), config.generation.shard_size)
    ]
    missing = [number for number in range(len(shards)) if not _shard(context.progress, number).is_file()]
    metrics: dict[str, Any] = {}
    if missing:
        metrics = _sample(context, config, shards, missing)
    pass_chat_template_on(context.inputs["prompts"], context.output)
    for number in range(len(shards)):
        _shard(context.output, number).write_bytes(_shard(context.progress, number).read_bytes())
    copy_images(prompts, context.inputs["prompts"], context.output)
    completions = len(prompts) * config.generation.num_generations
    notes = {"warnings": warnings} if warnings else {}
    return {"prompts": len(prompts), "completions": completions, **metrics, **notes}


def _in_own_template(context: StageContext, prompts: list[Row]) -> tuple[list[Row], list[str]]:
    """The prompts as the policy's chat template renders them, and warnings. Raises UserError for prompts that it refuses, or
    tokens that the policy has no embeddings for."""
    import numpy as np

    model, name = context.model("policy"), context.references["policy"].short
    tokenizer = model.tokenizer()
    some_are_truncated = has_truncated_rows(context.inputs["prompts"])
    processor = model.image_processor() if have_images(prompts) else None
    images = tokens_of_images(processor, context.inputs["prompts"] / FOLDER)
    rendered, warnings = in_own_template(prompts, Renderer(tokenizer, images=images), some_are_truncated, name)
    embeddings = embedding_rows(model.path)
    for row in rendered:
        ids = {"source": row.get("source"), "prompt_ids": np.asarray(row["prompt_ids"])}
        check_embedded(ids, embeddings, tokenizer.convert_ids_to_tokens)
    return rendered, warnings


def _sample(context: StageContext, config: GenerateConfig, shards: list[Any], missing: list[int]) -> dict[str, Any]:
    model = context.model("policy")
    tokenizer = model.tokenizer()
    chat_template = chat_template_of(context.inputs["prompts"])
    turn_end = Renderer(tokenizer, chat_template, eos_token_ids(model.path)).turn_end
    stop_ids = turn_end.stop_ids
    text, decoding = CompletionText(tokenizer, turn_end), Decoding(model, turn_end)
    policy = model.reference
    generation = config.generation
    longest = max(len(prompt["prompt_ids"]) for shard in shards for prompt in shard)
    length = longest + generation.max_completion_length
    check_length(model.path, longest, length)
    request = EngineRequest(model, length)
    schema = rollout_schema(have_images(prompt for shard in shards for prompt in shard))
    with context.machines.engines(request, context.ticket) as engines:
        update = max(engines.all(Engine.load, model.path, str(policy)))
        parity = _check_parity(context, engines, shards, stop_ids, update > 0)
        calls = (
            (number, _generate(str(policy), shards[number], config, stop_ids, context.seed, number, decoding))
            for number in missing
        )
        started = time.monotonic()
        used = engines.processor_seconds()
        tokens = 0
        done = len(shards) - len(missing)
        context.report(done, len(shards), "shards")
        for number, completions in engines.spread(calls):
            rows = shard_rows(shards[number], number * generation.shard_size, completions.each(), text, str(policy))
            write_table(rows, schema, _shard(context.progress, number))
            tokens += sum(len(row["completion_ids"]) for row in rows)
            done += 1
            speed = tokens / (time.monotonic() - started)
            context.report(done, len(shards), "shards", tokens_per_second=speed)
        seconds = time.monotonic() - started
        processor_seconds = engines.processor_seconds() - used
    context.cost.update(
        prompt_tokens=sum(len(prompt["prompt_ids"]) for number in missing for prompt in shards[number]),
        completion_tokens=tokens,
        generate_seconds=round(seconds, 3),
        weight_update_seconds=round(update, 4),
    )
    if context.resources.tensor_parallel_size == 1:  # otherwise the engines compute in processes of vLLM's workers
        context.cost.update(generate_processor_seconds=round(processor_seconds, 3))
    return {"tokens_per_second": tokens / seconds, **parity}


def _generate(
    policy: str,
    shard: list[Row],
    config: GenerateConfig,
    stop_ids: Sequence[int],
    seed: int,
    number: int,
    decoding: Decoding,
) -> Call[Engine, Completions]:
    prompt_ids = [prompt["prompt_ids"] for prompt in shard]
    images = [images_of(prompt) for prompt in shard]
    first = number * config.generation.shard_size
    return call(Engine.generate, policy, prompt_ids, config.generation, stop_ids, seed, first, images, decoding)


def _check_parity(
    context: StageContext, engines: ActorGroup[Engine], shards: list[Any], stop_ids: Sequence[int], updated: bool
) -> dict[str, float]:
    """Compare the engine's log-probabilities with the model's after a weight update. Raises NumericError.

    Only the first engine is checked, because all of them run the same code.
    """
    when = context.resources.parity_check
    if not updated or when == "never":
        return {}
    model = context.model("policy")
    # With 30 layers and 49,152 tokens rounding makes 5e-6 of it in fp32, and 0.05 in bf16.
    tolerance = 1e-4 if model.dtype == "float32" else 0.1
    sample = [prompt["prompt_ids"] for prompt in shards[0][:PARITY_PROMPTS]]
    images = [images_of(prompt) for prompt in shards[0][:PARITY_PROMPTS]]
    method = Engine.parity if when == "always" else Engine.first_parity
    difference = engines.one(0, method, model, sample, stop_ids, images)
    if difference is None:
        return {}
    if not difference <= tolerance:
        raise NumericError(
            f"after the weight update vLLM's log-probabilities differ from the model's by {difference:.2g} nats on average "
            f"(at most {tolerance:g} is allowed): the engine does not hold the policy"
        )
    return {"parity": difference}


def _prompts(directory: Path, config: GenerateConfig) -> list[Row]:
    """The prompts of this call, which wrap around the end of the data set."""
    import pyarrow.parquet as pq

    path = directory / "train.parquet"
    rows = pq.read_table(path).to_pylist() if path.is_file() else []
    if not rows:
        raise DataError("the data set holds no prompts")
    count = config.prompts or len(rows)
    return [rows[(config.first_prompt + i) % len(rows)] for i in range(count)]


def _shard(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.parquet"


SHOWS = {"completions": "completions"}
STAGE = Stage(
    "generate",
    1,
    {"rollouts": "rollouts"},
    GenerateConfig,
    run,
    SHOWS,
    packages=("jinja2", "tokenizers", "torch", "transformers", "vllm"),
)
