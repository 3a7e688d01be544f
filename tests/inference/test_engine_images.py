"""A warm vLLM engine with images in its prompts agrees with ``transformers``, for its present weights and for no others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from alignment_core.artifacts import Reference
from alignment_core.cluster.group import ActorGroup
from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.completions import Completion, Request
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.images import ImageProcessor
from alignment_core.models.model_ref import Model
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import GenerationConfig
from tests.images import tiny_llava, tiny_qwen_vl, write_images

pytestmark = pytest.mark.slow

STOP = 257  # <eos>
SAMPLING = GenerationConfig(num_generations=3, max_completion_length=12)
POLICY = {name: Reference.parse(f"model@sha256:{name * 64}") for name in "ab"}
KINDS = {"qwen": tiny_qwen_vl, "llava": tiny_llava}


@dataclass(frozen=True)
class Case:
    """Two models of one architecture, and prompts with one image, with two of different sizes, with none, and with one of noise
    that the processor resizes."""

    models: dict[str, Path]
    prompts: list[list[int]]
    images: list[list[Path]]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    models = {name: KINDS[request.param](folder / name, seed=seed) for seed, name in enumerate("ab")}
    files = write_images(folder / "images")
    processor = ImageProcessor.of(models["a"])
    assert processor is not None
    noise = np.random.default_rng(0).integers(0, 256, (77, 100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    images = [[files["red"]], [files["green"], files["wide"]], [], [folder / "noise.png"]]
    place = processor.expand(processor.placeholder, [files["red"]])
    assert place.count(processor.image_token_id) == {"qwen": 1, "llava": 4}[request.param]
    texts = [
        f"<user>{' and '.join([processor.placeholder] * len(of_prompt))}: what?<assistant>" for of_prompt in images
    ]
    prompts = [processor.expand(text, of_prompt) for text, of_prompt in zip(texts, images, strict=True)]
    return Case(models, prompts, images)


@pytest.fixture(scope="module")
def warm_engine(case: Case, machines: Any) -> Iterator[ActorGroup[Engine]]:
    with machines(1).engines(EngineRequest(Model(case.models["a"], POLICY["a"]), 128)) as group:
        yield group


@pytest.fixture
def engine(warm_engine: ActorGroup[Engine], case: Case) -> ActorGroup[Engine]:
    """The warm engine, holding policy a."""
    load(warm_engine, case, "a")
    return warm_engine


def load(engine: ActorGroup[Engine], case: Case, name: str) -> None:
    engine.one(0, Engine.load, case.models[name], str(POLICY[name]))


def generate(engine: ActorGroup[Engine], case: Case, name: str, **sampling: Any) -> list[list[Completion]]:
    config = SAMPLING.model_copy(update=sampling)
    policy = str(POLICY[name])
    completions = engine.one(0, Engine.generate, policy, case.prompts, config, [STOP], 5, 0, case.images)
    each = completions.each()
    return [each[first : first + config.num_generations] for first in range(0, len(each), config.num_generations)]


def plain_logps(model: Path, case: Case, number: int, ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities of ``ids`` after a prompt in the forward pass of ``transformers``, without the tokens that stand for
    images and videos, which are not sampled."""
    lm = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    prompt, images = case.prompts[number], case.images[number]
    input_ids = torch.tensor([[*prompt, *ids]])
    inputs: dict[str, Any] = {}
    processor = ImageProcessor.of(model)
    assert processor is not None
    if images:
        inputs = dict(processor.tensors(images))
        if "mm_token_type_ids" in inspect.signature(lm.forward).parameters:
            inputs["mm_token_type_ids"] = (input_ids == processor.image_token_id).int()
    with torch.no_grad():
        logits = lm(input_ids=input_ids, **inputs).logits[0, len(prompt) - 1 : -1]
    logits[:, processor.image_token_id] = -torch.inf
    if hasattr(lm.config, "video_token_id"):
        logits[:, lm.config.video_token_id] = -torch.inf
    logps = torch.log_softmax(logits, dim=-1)
    return logps.gather(1, input_ids[0, len(prompt) :, None])[:, 0].numpy()


def difference(model: Path, case: Case, completions: list[list[Completion]]) -> float:
    """The greatest difference of a log-probability, in nats."""
    return max(
        float(np.abs(plain_logps(model, case, number, each.token_ids.tolist()) - each.logps).max())
        for number, of_prompt in enumerate(completions)
        for each in of_prompt
    )


def test_log_probabilities_are_those_of_transformers(engine: ActorGroup[Engine], case: Case) -> None:
    completions = generate(engine, case, "a")
    assert difference(case.models["a"], case, completions) < 1e-4
    assert difference(case.models["b"], case, completions) > 1e-3  # the check can tell the two apart


def test_an_image_changes_what_is_sampled(engine: ActorGroup[Engine], case: Case) -> None:
    """The same token ids with another image."""
    other = case.images[1][0]
    (before, *_), (after, *_) = (
        generate(engine, case if same else Case(case.models, case.prompts, [[other], *case.images[1:]]), "a")
        for same in (True, False)
    )
    first = [completion.logps[0] for completion in (before[0], after[0])]
    assert abs(first[0] - first[1]) > 1e-5


def test_new_weights_encode_the_same_images_again(engine: ActorGroup[Engine], case: Case) -> None:
    """Also the tower's and the projector's: none of vLLM's caches keeps what the old weights made of an image."""
    generate(engine, case, "a")
    load(engine, case, "b")
    assert difference(case.models["b"], case, generate(engine, case, "b")) < 1e-4
    send(engine, case, "a", version=2)
    assert difference(case.models["a"], case, generate(engine, case, "a")) < 1e-4


def send(engine: ActorGroup[Engine], case: Case, name: str, version: int) -> None:
    """Send the weights as trainers do: under their names in a checkpoint, in several buckets."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(case.models[name], dtype=torch.float32)
    engine.all(Engine.begin_update)
    for bucket in to_buckets(WeightStream(model, rank=0, zero_stage=0).tensors(), 50_000):
        engine.one(0, Engine.load_bucket, bucket)
    engine.all(Engine.end_update, str(POLICY[name]), version)


def test_running_completions_continue_with_new_weights(engine: ActorGroup[Engine], case: Case) -> None:
    """Their images are encoded again, too."""
    sampling = GenerationConfig(num_generations=1, max_completion_length=64)
    requests = [
        Request(str(number), prompt, 64, seed=number, images=tuple(images))
        for number, (prompt, images) in enumerate(zip(case.prompts, case.images, strict=True))
    ]
    send(engine, case, "a", version=3)
    done = engine.one(0, Engine.advance, requests, sampling, [STOP], 0.02)
    send(engine, case, "b", version=4)
    while len(done) < len(requests):
        done += engine.one(0, Engine.advance, [], sampling, [STOP], 60.0)
    assert any(set(completion.versions.tolist()) == {3, 4} for _, completion in done)
    for name, finished in done:
        for version, model in {3: "a", 4: "b"}.items():
            chosen = finished.versions == version
            expected = plain_logps(case.models[model], case, int(name), finished.token_ids.tolist())
            np.testing.assert_allclose(finished.logps[chosen], expected[chosen], atol=1e-4)


def test_places_of_images_are_never_sampled(engine: ActorGroup[Engine], case: Case) -> None:
    """In a tiny random model each token is as likely as any other: of 3,000, a dozen would be such places."""
    processor = ImageProcessor.of(case.models["a"])
    assert processor is not None
    completions = generate(engine, case, "a", num_generations=16, max_completion_length=64, temperature=2.0)
    sampled = np.concatenate([each.token_ids for of_prompt in completions for each in of_prompt])
    assert len(sampled) > 1000
    assert processor.image_token_id not in sampled


def test_the_check_of_an_engine_reads_images(engine: ActorGroup[Engine], case: Case) -> None:
    def parity(name: str) -> float:
        model = Model(case.models[name], POLICY["a"])
        value = engine.one(0, Engine.parity, model, case.prompts, [STOP], case.images)
        assert value is not None
        return value

    assert parity("a") < 1e-4
    assert parity("b") > 1e-3
