"""A warm vLLM engine agrees with ``transformers``, for its present weights and for no others.

`make test-long` tests the other two shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.group import ActorGroup
from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.completions import Request
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.adapters import merged
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import save_checkpoint
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import GenerationConfig, LoraConfig
from tests.models.test_adapters import adapted

STOP = 257  # <eos>
PROMPTS = [[72, 101, 108], [1, 2, 3, 4, 5], [200], list(range(40))]  # the last fills more than a block of the cache
SAMPLING = GenerationConfig(num_generations=3, max_completion_length=12)
POLICY = {name: Reference.parse(f"model@sha256:{name * 64}") for name in "ab"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(("llama", True), id="llama, tied"), pytest.param(("qwen2", False), id="qwen2, untied")],
)
def models(request: pytest.FixtureRequest, tiny_model: Any) -> dict[str, Path]:
    """Two models of one architecture."""
    return {"a": tiny_model(*request.param, seed=1), "b": tiny_model(*request.param, seed=2)}


@pytest.fixture(scope="module")
def warm_engine(models: dict[str, Path], machines: Any) -> Iterator[ActorGroup[Engine]]:
    with machines(1).engines(EngineRequest(Model(models["a"], POLICY["a"]), 128)) as group:
        yield group


@pytest.fixture
def engine(warm_engine: ActorGroup[Engine], models: dict[str, Path]) -> ActorGroup[Engine]:
    """The warm engine, holding policy a; it was made with it, but other tests may have loaded b in between."""
    load(warm_engine, models, "a")
    return warm_engine


def load(engine: ActorGroup[Engine], models: dict[str, Path], name: str) -> float:
    return engine.one(0, Engine.load, models[name], str(POLICY[name]))


def parity(engine: ActorGroup[Engine], models: dict[str, Path], name: str) -> float:
    difference = engine.one(0, Engine.parity, Model(models[name], POLICY.get(name, POLICY["a"])), PROMPTS, [STOP])
    assert difference is not None
    return difference


def generate(
    engine: ActorGroup[Engine],
    policy: str = "a",
    prompts: Any = PROMPTS,
    seed: int = 5,
    stop_ids: Sequence[int] = (STOP,),
    **sampling: Any,
) -> Any:
    config = SAMPLING.model_copy(update=sampling)
    completions = engine.one(0, Engine.generate, str(POLICY[policy]), prompts, config, stop_ids, seed)
    each = completions.each()
    return [each[first : first + config.num_generations] for first in range(0, len(each), config.num_generations)]


def tokens(completions: Any) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in of_prompt] for of_prompt in completions]


def flat(completions: Any) -> list[Any]:
    return [completion for of_prompt in completions for completion in of_prompt]


def test_new_weights_in_a_running_engine_give_their_own_log_probabilities(
    engine: ActorGroup[Engine], models: dict[str, Path]
) -> None:
    assert parity(engine, models, "a") < 1e-4
    assert parity(engine, models, "b") > 1e-3  # the check can tell the two apart
    before = tokens(generate(engine))
    assert load(engine, models, "b") > 0
    assert parity(engine, models, "b") < 1e-4
    assert tokens(generate(engine, "b")) != before
    load(engine, models, "a")
    assert parity(engine, models, "a") < 1e-4
    assert tokens(generate(engine)) == before


def test_the_policy_that_is_in_the_engine_is_not_loaded_again(
    engine: ActorGroup[Engine], models: dict[str, Path]
) -> None:
    assert load(engine, models, "a") == 0.0


def test_equal_arguments_give_equal_completions_after_any_history(engine: ActorGroup[Engine]) -> None:
    first = generate(engine)
    generate(engine, prompts=PROMPTS[::-1], seed=99)
    again = generate(engine)
    assert tokens(first) == tokens(again)
    for completion, repeated in zip(flat(first), flat(again), strict=True):
        np.testing.assert_array_equal(completion.logps, repeated.logps)
    assert tokens(generate(engine, seed=6)) != tokens(first)


def test_the_samples_of_a_prompt_differ(engine: ActorGroup[Engine]) -> None:
    for of_prompt in tokens(generate(engine)):
        assert len(of_prompt) == SAMPLING.num_generations
        assert len({tuple(ids) for ids in of_prompt}) == SAMPLING.num_generations


def test_greedy_decoding_takes_the_likeliest_token(engine: ActorGroup[Engine], models: dict[str, Path]) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models["a"])
    for prompt, [ids] in zip(PROMPTS, tokens(generate(engine, num_generations=1, temperature=0.0)), strict=True):
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *ids]])).logits[0].argmax(-1)
        assert ids == best[len(prompt) - 1 : -1].tolist()


def test_log_probabilities_are_those_of_the_tempered_distribution(
    engine: ActorGroup[Engine], models: dict[str, Path]
) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models["a"])
    for prompt, of_prompt in zip(PROMPTS, generate(engine, temperature=0.5), strict=True):
        for completion in of_prompt:
            ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
            with torch.no_grad():
                logps = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.5, dim=-1)
            expected = logps.gather(1, ids[len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(completion.logps, expected.numpy(), atol=1e-4)


def test_any_stop_token_ends_a_completion_as_its_last_token(engine: ActorGroup[Engine]) -> None:
    likeliest = tokens(generate(engine, num_generations=1, temperature=0.0))[0][0]
    stop = likeliest[3]
    [[completion]] = generate(engine, prompts=PROMPTS[:1], stop_ids=(STOP, stop), num_generations=1, temperature=0.0)
    assert completion.token_ids.tolist() == likeliest[: likeliest.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert {each.finish_reason for each in flat(generate(engine, max_completion_length=2))} <= {"length", "stop"}


def test_asking_for_a_policy_that_is_not_in_the_engine_raises(engine: ActorGroup[Engine]) -> None:
    with pytest.raises(RuntimeError, match="engine holds model@sha256:a"):
        generate(engine, "b")


def test_a_first_check_is_made_once_after_new_weights(models: dict[str, Path], engine: ActorGroup[Engine]) -> None:
    def difference() -> float | None:
        return engine.one(0, Engine.first_parity, Model(models["b"], POLICY["b"]), PROMPTS, [STOP])

    def as_new(cell: Any) -> None:
        cell.object._updates, cell.object._checked = 0, False

    engine.ray.get(engine.actors[0].__ray_call__.remote(as_new))
    assert difference() is None, "it was made with its weights"
    load(engine, models, "b")
    assert (mean := difference()) is not None
    assert mean < 1e-4
    load(engine, models, "a")
    assert difference() is None


def update(engine: ActorGroup[Engine], models: dict[str, Path], name: str, version: int) -> None:
    """Send the weights as trainers and :class:`ActorGroup` do: in several buckets, not in the order of layers."""
    import transformers

    send(engine, transformers.AutoModelForCausalLM.from_pretrained(models[name]), name, version)


def send(engine: ActorGroup[Engine], model: Any, name: str, version: int) -> None:
    engine.all(Engine.begin_update)
    buckets = list(to_buckets(WeightStream(model, rank=0, zero_stage=0).tensors(), 50_000))
    assert sum(part.name == "model.embed_tokens.weight" for layout, _ in buckets for part in layout) == 2, (
        "the embedding takes two"
    )
    for bucket in reversed(buckets):
        engine.one(0, Engine.load_bucket, bucket)
    engine.all(Engine.end_update, str(POLICY[name]), version)


def test_weights_that_come_in_buckets_are_those_of_the_checkpoint(
    engine: ActorGroup[Engine], models: dict[str, Path]
) -> None:
    update(engine, models, "b", version=1)
    assert parity(engine, models, "b") < 1e-4
    update(engine, models, "a", version=2)
    assert parity(engine, models, "a") < 1e-4


def test_a_sleeping_engine_holds_no_memory_until_new_weights_wake_it(
    engine: ActorGroup[Engine], models: dict[str, Path]
) -> None:
    for _ in range(2):
        engine.all(Engine.sleep)
    assert asleep(engine) == (True, {"weights", "kv_cache"})
    with pytest.raises(RuntimeError, match="engine holds half-loaded weights"):
        generate(engine, "a")
    update(engine, models, "b", version=1)
    assert asleep(engine) == (False, set())
    assert parity(engine, models, "b") < 1e-4
    engine.all(Engine.release, True)  # as after a stage, on GPUs that it shares
    assert asleep(engine) == (True, {"weights", "kv_cache"})
    assert load(engine, models, "a") > 0
    assert parity(engine, models, "a") < 1e-4


def asleep(engine: ActorGroup[Engine]) -> Any:
    """Whether vLLM refuses requests, and which memory is released (which a CPU engine only reports)."""

    def look(cell: Any) -> Any:
        core = cell.object.llm.llm_engine.engine_core.engine_core
        return core.is_sleeping(), set(core.model_executor.sleeping_tags)

    return engine.ray.get(engine.actors[0].__ray_call__.remote(look))


def test_an_update_that_lacks_weights_is_no_policy(engine: ActorGroup[Engine], models: dict[str, Path]) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models["b"])
    weights = [(name, tensor) for name, tensor in model.named_parameters() if "layers.1.mlp" not in name]
    engine.all(Engine.begin_update)
    for bucket in to_buckets(weights):
        engine.one(0, Engine.load_bucket, bucket)
    says = r"had no weights for model\.layers\.1\.mlp\.down_proj\.weight, model\.layers\.1\.mlp\.gate_up_proj\.weight"
    with pytest.raises(RuntimeError, match=says):
        engine.all(Engine.end_update, str(POLICY["b"]), 1)
    with pytest.raises(RuntimeError, match="engine holds half-loaded weights"):
        generate(engine, "b")
    load(engine, models, "a")
    assert parity(engine, models, "a") < 1e-4


def test_adapters_reach_the_engine_merged_into_their_weights(
    engine: ActorGroup[Engine], models: dict[str, Path], tmp_path: Path
) -> None:
    model = adapted(models["a"], LoraConfig(r=4), seed=3)
    save_checkpoint(model, models["a"], tmp_path / "merged", merged(model, model.state_dict()))
    send(engine, model, "b", version=1)
    assert parity(engine, {"merged": tmp_path / "merged"}, "merged") < 1e-4
    assert parity(engine, models, "a") > 1e-3


def test_running_completions_continue_with_new_weights_and_record_a_version_per_token(
    engine: ActorGroup[Engine], models: dict[str, Path]
) -> None:
    import torch
    import transformers

    sampling = GenerationConfig(num_generations=1, max_completion_length=64)
    requests = [Request(str(number), prompt, 64, seed=number) for number, prompt in enumerate(PROMPTS)]
    update(engine, models, "a", version=3)
    done = []
    while not done:  # a few tokens each: their number depends on the clock, their ids do not
        done += engine.one(0, Engine.advance, requests, sampling, [STOP], 0.02)
        requests = []
        if not done:
            update(engine, models, "b", version=4)
            done += engine.one(0, Engine.advance, [], sampling, [STOP], 60.0)
    assert sorted(name for name, _ in done) == ["0", "1", "2", "3"]

    assert any(set(completion.versions.tolist()) == {3, 4} for _, completion in done)
    both = {
        3: transformers.AutoModelForCausalLM.from_pretrained(models["a"]),
        4: transformers.AutoModelForCausalLM.from_pretrained(models["b"]),
    }
    for name, finished in done:
        prompt = PROMPTS[int(name)]
        assert len(finished.token_ids) == 64 or finished.token_ids[-1] == STOP
        assert finished.versions.tolist() == sorted(finished.versions.tolist())
        ids = torch.tensor([*prompt, *finished.token_ids.tolist()])
        for version, model in both.items():
            with torch.no_grad():
                logps = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], dim=-1)
            expected = logps.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
            chosen = finished.versions == version
            np.testing.assert_allclose(finished.logps[chosen], expected[chosen], atol=1e-4)


def test_dropped_requests_return_no_completion(engine: ActorGroup[Engine]) -> None:
    sampling = GenerationConfig(num_generations=1, max_completion_length=64)
    engine.one(0, Engine.advance, [Request("old", [1, 2], 64, seed=1)], sampling, [STOP], 0.01)
    engine.all(Engine.drop_all)
    done = engine.one(0, Engine.advance, [Request("new", [1, 2], 4, seed=1)], sampling, [STOP], 60.0)
    assert [(name, len(completion.token_ids)) for name, completion in done] == [("new", 4)]
