"""Stages that sample, with images in their prompts: completions for them, rows for training, and a policy that learns them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from PIL import Image

from alignment_core.artifacts import Store, open_store
from alignment_core.artifacts.reference import Reference
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.key import key_of
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.inference.images import never_sampled
from alignment_core.models.images import ImageProcessor
from alignment_core.models.saving import read_json
from alignment_core.recipes import GenerationConfig, ResourcesConfig, RlConfig
from alignment_core.stages.generate import GenerateConfig
from alignment_core.stages.rl import RlStageConfig
from tests.images import COLOURS, SIDE, tiny_llava, tiny_qwen_vl, write_images
from tests.matrix import matrix
from tests.servers.s3 import S3Server
from tests.stages.rl_program import run_program

pytestmark = pytest.mark.slow

EOS = 257
KINDS = {"qwen": tiny_qwen_vl, "llava": tiny_llava}
RESOURCES = ResourcesConfig(device="cpu", trainers=1, engines=1, kv_cache_mib=16, wait_timeout_seconds=120)
NAMES_THE_COLOUR = """
def names_the_colour(prompt, completion, label):
    return float(completion == label)
"""
SHOWS_A_PICTURE = """
import base64

import httpx


def part(path):
    with open(path, "rb") as file:
        url = f"data:image/png;base64,{base64.b64encode(file.read()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def shows_a_picture(prompt, label, base_url, api_key, images, picture):
    client = httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60)
    messages = []
    for path, text in ((images[0], "what?"), (picture.format(label=label), "and?")):
        messages.append({"role": "user", "content": [part(path), {"type": "text", "text": text}]})
        answer = await client.post("/chat/completions", json={"messages": messages, "max_tokens": 5})
        messages.append(answer.json()["choices"][0]["message"])
    return float(len(messages[-1]["content"]))
"""


def prompts(model: Path, folder: Path) -> Path:
    """A data set of prompts: each picture with a question, whose label is the first letter of its colour."""
    processor = ImageProcessor.of(model)
    assert processor is not None
    pictures = write_images(folder / "pictures")
    (folder / "data" / "images").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number, colour in enumerate(COLOURS):
        content = pictures[colour].read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        (folder / "data" / "images" / digest).write_bytes(content)
        text = f"<user>{processor.placeholder}?<assistant>"
        rows.append(
            {
                "prompt_ids": processor.expand(text, [pictures[colour]]),
                "prompt": text,
                "label": colour[0],
                "task": None,
                "source": f"rows.jsonl:{number + 1}",
                "images": [digest],
            }
        )
    table = pa.Table.from_pylist(rows)
    table = table.set_column(table.schema.get_field_index("task"), "task", pa.nulls(len(rows), pa.string()))
    pq.write_table(table, folder / "data" / "train.parquet")
    return folder / "data"


def knows_the_letters(model: Path, data: Path, folder: Path) -> Path:
    """The model after it has learnt that the answer is any colour's letter: with every picture each is as likely."""
    lm = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    rows = pq.read_table(data / "train.parquet").to_pylist()
    letters = [ord(colour[0]) for colour in COLOURS]
    processor = ImageProcessor.of(model)
    assert processor is not None
    inputs = []
    for row in rows:
        tensors = processor.tensors([data / "images" / row["images"][0]])
        for letter in letters:
            ids = torch.tensor([[*row["prompt_ids"], letter, EOS]])
            types = (
                {"mm_token_type_ids": (ids == processor.image_token_id).int()}
                if "qwen" in type(lm).__name__.lower()
                else {}
            )
            inputs.append((ids, {**tensors, **types}))
    optimiser = torch.optim.AdamW(lm.parameters(), lr=2e-3)
    for _ in range(25):
        for ids, more in inputs:
            logits = lm(input_ids=ids, **more).logits[0, -3:-1]
            (torch.nn.functional.cross_entropy(logits, ids[0, -2:]) / len(inputs)).backward()
        optimiser.step()
        optimiser.zero_grad()
    shutil.copytree(model, folder)
    lm.save_pretrained(folder)
    return folder


def run(
    store: Store, machines: Any, stage: str, config: Any, **inputs: Reference
) -> tuple[dict[str, Path], StageResult]:
    call = StageCall(stage=stage, label=stage, config=config.model_dump(mode="json"), inputs=inputs)
    result = run_stage(StageRequest(store, call, machines, RESOURCES, lambda *_: None))
    return {name: store.fetch(output) for name, output in result.outputs.items()}, result


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rollouts_hold_the_images_of_their_prompts(kind: str, machines: Any, tmp_path: Path) -> None:
    model = KINDS[kind](tmp_path / "model")
    data = prompts(model, tmp_path)
    store = open_store(tmp_path / "store")
    config = GenerateConfig(generation=GenerationConfig(num_generations=2, max_completion_length=4, shard_size=3))
    policy, rows = store.publish(model, "model"), store.publish(data, "dataset")
    outputs, _ = run(store, machines(1), "generate", config, policy=policy, prompts=rows)
    rollouts = [
        row for file in sorted(outputs["rollouts"].glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]
    expected = [row["images"] for row in pq.read_table(data / "train.parquet").to_pylist() for _ in range(2)]
    assert [row["images"] for row in rollouts] == expected
    for digest in {digest for row in expected for digest in row}:
        assert hashlib.sha256((outputs["rollouts"] / "images" / digest).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("kind", matrix(["qwen", "llava"], usual=["qwen"]))
def test_a_policy_learns_to_name_colours(kind: str, machines: Any, tmp_path: Path) -> None:
    """GRPO of a policy that answers with any colour's letter. The reward is 1 for that of the picture, else 0."""
    start = KINDS[kind](tmp_path / "start")
    data = prompts(start, tmp_path)
    model = knows_the_letters(start, data, tmp_path / "model")
    (tmp_path / "reward.py").write_text(NAMES_THE_COLOUR)
    section = {
        "prompts": {"task": "reverse", "rows": 4},  # those of the input are used
        "steps": 60,
        "prompts_per_step": 4,
        "generation": {"num_generations": 64, "max_completion_length": 1},
        "rewards": [{"verifier": f"{tmp_path / 'reward.py'}:names_the_colour"}],
        "training": {"batch_size": 256, "learning_rate": 3e-3, "lr_scheduler_type": "constant"},
        "trajectories": {"keep": "all"},
    }
    store = open_store(tmp_path / "store")
    policy, rows = store.publish(model, "model"), store.publish(data, "dataset")
    config = RlStageConfig(section=RlConfig.model_validate(section))
    outputs, _ = run(store, machines(1), "rl", config, policy=policy, prompts=rows)
    steps = [pq.read_table(file).to_pylist() for file in sorted(outputs["trajectories"].iterdir())]
    means = [float(np.mean([row["reward"] for row in of_step])) for of_step in steps]
    print(kind, means)  # shown if it fails
    assert np.mean(means[:3]) < 0.4
    assert np.mean(means[-3:]) > 0.9


def shown_pictures(folder: Path) -> dict[str, Path]:
    """A picture for each label, in the colour of the label and another one: no prompt has it."""
    (folder / "shown").mkdir()
    files = {}
    for name, colour in COLOURS.items():
        picture = Image.new("RGB", (2 * SIDE, SIDE), colour)
        picture.paste((20, 20, 20), (0, 0, SIDE, SIDE))
        files[name[0]] = folder / "shown" / f"{name[0]}.png"
        picture.save(files[name[0]])
    return files


def of_episodes(folder: Path, steps: int, **more: Any) -> RlStageConfig:
    """Of so many steps, of an agent that shows the picture of each prompt's label (:func:`shown_pictures`)."""
    (folder / "agent.py").write_text(SHOWS_A_PICTURE)
    environment = {
        "agent": f"{folder / 'agent.py'}:shows_a_picture",
        "options": {"picture": f"{folder}/shown/{{label}}.png"},
        "images": True,
    }
    section = {
        "prompts": {"task": "reverse", "rows": 4},  # those of the input are used
        "steps": steps,
        "prompts_per_step": 4 // steps,
        "generation": {"num_generations": 2, "max_completion_length": 64},
        "environment": environment,
        "rewards": [{"environment": True}],
        # Several updates of a step need the first log-probabilities.
        "training": {"batch_size": 4 // steps, "learning_rate": 1e-3},
        "trajectories": {"keep": "all"},
        **more,
    }
    return RlStageConfig(section=RlConfig.model_validate(section))


def check_first_step(trajectories: Path, model: Path, data: Path, shown: dict[str, Path]) -> None:
    """Log-probabilities are those of plain ``transformers``, and images of observations are beside the steps."""
    kept = {file.name: digest_of(file) for file in (trajectories / "images").iterdir()}
    assert kept == {digest: digest for digest in map(digest_of, shown.values())}
    plain = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = ImageProcessor.of(model)
    assert processor is not None
    rows = pq.read_table(trajectories / "step-000000.parquet").to_pylist()
    compared = 0
    for row in rows:
        assert row["images"][1:] == [digest_of(shown[row["label"]])]
        files = [folder / "images" / row["images"][at] for at, folder in enumerate((data, trajectories))]
        ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
        types = (ids == processor.image_token_id).int()
        more = {"mm_token_type_ids": types} if "qwen" in type(plain).__name__.lower() else {}
        with torch.no_grad():
            logits = plain(input_ids=ids, **processor.tensors(files), **more).logits[0, len(row["prompt_ids"]) - 1 : -1]
        places, targets = torch.tensor(row["mask"]), torch.tensor(row["completion_ids"])[:, None]
        trained = logits.log_softmax(-1).gather(-1, targets)[:, 0]
        logits[:, list(never_sampled(read_json(model / "config.json")))] = float("-inf")
        sampled = logits.log_softmax(-1).gather(-1, targets)[:, 0]
        assert (torch.tensor(row["old_logps"]) - trained)[places].abs().max() < 1e-5
        assert (torch.tensor(row["rollout_logps"]) - sampled)[places].abs().max() < 1e-4
        compared += sum(row["mask"])
    assert compared >= len(rows) * 2


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(("kind", "max_staleness"), matrix(KINDS, [0, 1], usual=[("qwen", 0), ("qwen", 1)]))
def test_episodes_with_images_have_the_log_probabilities_of_plain_transformers(
    kind: str, max_staleness: int, machines: Any, tmp_path: Path
) -> None:
    """Of turns behind images of the prompt and of an observation; the files of the latter are beside the trajectories."""
    model = KINDS[kind](tmp_path / "model")
    data, shown = prompts(model, tmp_path), shown_pictures(tmp_path)
    store = open_store(tmp_path / "store")
    policy, rows = store.publish(model, "model"), store.publish(data, "dataset")
    config = of_episodes(tmp_path, steps=1, execution={"max_staleness": max_staleness})
    outputs, _ = run(store, machines(1), "rl", config, policy=policy, prompts=rows)
    check_first_step(outputs["trajectories"], model, data, shown)


@pytest.mark.exhaustive
def test_a_run_that_samples_ahead_keeps_the_images_of_observations_on_another_machine(
    s3_server: S3Server, bucket: str, home: Path
) -> None:
    """Its machine is lost after the first step, and only the store in S3 is left of it. By then all prompts were sampled; those
    of the first step are not sampled again."""
    model = tiny_qwen_vl(home / "model")
    data, shown = prompts(model, home), shown_pictures(home)
    store = open_store(f"s3://{bucket}/{home.name}")
    inputs = {"policy": store.publish(model, "model"), "prompts": store.publish(data, "dataset")}
    config = of_episodes(home, steps=2, execution={"max_staleness": 1}).model_dump(mode="json")
    call = StageCall(stage="rl", label="rl", config=config, inputs=inputs)
    resources = RESOURCES.model_copy(update={"progress": "store", "progress_seconds": 1e-3})
    variables = s3_server.environment()
    assert run_program(store.uri, call, resources, 1, {**variables, "ALIGN_HOME": str(home / "lost")}) == [0, 1]
    shutil.rmtree(home / "lost")
    assert run_program(store.uri, call, resources, None, {**variables, "ALIGN_HOME": str(home / "other")}) == [1, 2]
    record = store.records.find(key_of(call).value)
    assert record is not None
    folder = store.fetch(record.outputs["trajectories"])
    check_first_step(folder, model, data, shown)
    steps = [pq.read_table(file).to_pylist() for file in sorted(folder.glob("*.parquet"))]
    assert sorted(row["label"] for rows in steps for row in rows) == sorted([*shown] * 2), "each prompt once"
    assert all(row["images"][1] == digest_of(shown[row["label"]]) for rows in steps for row in rows)
