"""Images on their way from prompts to engines, trainers, trajectories, and the rows that are selected from rollouts."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Reference
from alignment_core.environments.episode import Episode
from alignment_core.errors import UserError
from alignment_core.inference.images import MODULES, _stand_in, never_sampled, without_torchvision
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.model_ref import Model
from alignment_core.recipes import GenerationConfig, ResourcesConfig, SelectionConfig
from alignment_core.recipes.sections.rejection_sampling import BestConfig
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.recipes.sections.rl import TrajectoriesConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.images import have_images, with_paths
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.rollout import to_batch
from alignment_core.rollout.schemas import SCORES, read_rollouts, rollout_schema, score_schema, write_table
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.stages import select_best, select_pairs
from tests.images import QWEN_IMAGE, TEMPLATE, tiny_llava, tiny_qwen_vl
from tests.rollout.rollouts import rollout

RED, BLUE = "a" * 64, "b" * 64


def test_a_request_has_the_files_of_its_prompt(tmp_path: Path) -> None:
    rows = with_paths([{"prompt_ids": [1, 2], "images": [RED, BLUE]}, {"prompt_ids": [3]}], tmp_path)
    schedule = PromptSchedule(rows, GenerationConfig(num_generations=1, max_completion_length=4), seed=0, shuffle=False)
    requests = [schedule.request(episode) for draw in range(2) for episode in schedule.episodes(draw)]
    assert [request.images for request in requests] == [
        (tmp_path / "images" / RED, tmp_path / "images" / BLUE),
        (),
    ]
    assert have_images(rows)
    assert not have_images(rows[1:])


def test_trainers_get_the_files_of_each_completion() -> None:
    rollouts = [rollout([True], images=(Path("x/red"), Path("x/blue"))), rollout([True, True], group=1)]
    assert [row.sequences[0].images for row in to_batch(rollouts).rows()] == [("x/red", "x/blue"), ()]
    assert [row.sequences[0].images for row in to_batch(rollouts[1:]).rows()] == [()]


def test_an_episode_keeps_its_images_when_it_begins_again() -> None:
    episode = Episode(0, 0, 0, {"prompt_ids": [1], "images": (Path("x/red"),)}, 4)
    episode.restart()
    assert episode.images == (Path("x/red"),)


def test_trajectories_name_images_by_their_digests_and_have_no_column_without(tmp_path: Path) -> None:
    """All steps of a run have one schema, whether the prompts of a step have images or not."""
    image, text = rollout([True], used=True, images=(Path("x", RED),)), rollout([True], used=True)
    steps = [[image, text], [text]]
    for with_images in (True, False):
        folder = tmp_path / str(with_images)
        with closing(Trajectories(folder, TrajectoriesConfig(), 2, with_images)) as written:
            for number, rollouts in enumerate(steps):
                written.write(number, rollouts, to_batch(rollouts))
        tables = [pq.read_table(file) for file in sorted(folder.iterdir())]
        assert tables[0].schema == tables[1].schema
        columns = [table.column("images").to_pylist() for table in tables if "images" in table.column_names]
        assert columns == ([[[RED], []], [[]]] if with_images else [])


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Rollouts of two prompts with equal tokens and different images, and their scores."""
    folders = {name: tmp_path / name for name in ("scores", "rollouts", "output", "origins")}
    for folder in folders.values():
        folder.mkdir()
    (folders["rollouts"] / "images").mkdir()
    scores, rollouts = [], []
    for prompt, digest in enumerate((RED, BLUE)):
        (folders["rollouts"] / "images" / digest).write_text(digest)
        for sample, text in enumerate(("good", "bad")):
            shared = {"prompt": prompt, "sample": sample, "finish_reason": "stop"}
            scores.append({**shared, "tokens": 4, "reward": 1.0 - sample, "policy_logp": -1.0})
            rollouts.append({**shared, "prompt_ids": [1], "completion_ids": [*text.encode()], "images": [digest]})
            rollouts[-1] |= {"prompt_text": "p", "completion_text": text, "source": "rows:1"}
    write_table(scores, score_schema(), folders["scores"] / SCORES)
    write_table(rollouts, rollout_schema(with_images=True), folders["rollouts"] / "shard-00000.parquet")
    return folders


def selected(folders: dict[str, Path], stage: Any, config: Any) -> list[dict[str, Any]]:
    context: Any = SimpleNamespace(inputs=folders, output=folders["output"], outputs=folders, derive=lambda *_: 0)
    del folders["output"], folders["origins"]
    context.outputs = {**folders, "origins": context.output.parent / "origins"}
    stage.run(context, config)
    return pq.read_table(context.output / "train.parquet").to_pylist()


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        (select_pairs, select_pairs.SelectPairsConfig(selection=SelectionConfig())),
        (select_best, select_best.SelectBestConfig(selection=BestConfig())),
    ],
    ids=["pairs", "best"],
)
def test_selected_rows_keep_their_images(folders: dict[str, Path], stage: Any, config: Any) -> None:
    """Equal tokens after different images are no duplicates."""
    output = folders["output"]
    rows = selected(folders, stage, config)
    assert [row["images"] for row in rows] == [[RED], [BLUE]]
    assert sorted(file.name for file in (output / "images").iterdir()) == [RED, BLUE]


def test_paths_of_rollouts_lead_to_their_files(folders: dict[str, Path]) -> None:
    rows = with_paths(read_rollouts(folders["rollouts"]), folders["rollouts"])
    assert [image.read_text() for row in rows for image in row["images"]] == [RED, RED, BLUE, BLUE]


def test_rows_without_an_image_beside_others_have_no_paths(folders: dict[str, Path]) -> None:
    rows = [{**row, "images": () if row["prompt"] else row["images"]} for row in read_rollouts(folders["rollouts"])]
    write_table(rows, rollout_schema(with_images=True), folders["rollouts"] / "shard-00000.parquet")
    images = [row["images"] for row in with_paths(read_rollouts(folders["rollouts"]), folders["rollouts"])]
    assert images[2:] == [(), ()]
    assert [image.name for image in images[0]] == [RED]


def test_rows_of_text_have_no_column_of_images(folders: dict[str, Path]) -> None:
    rows = [{**row, "images": ()} for row in read_rollouts(folders["rollouts"])]
    write_table(rows, rollout_schema(), folders["rollouts"] / "shard-00000.parquet")
    output = folders["output"]
    pairs = selected(folders, select_pairs, select_pairs.SelectPairsConfig(selection=SelectionConfig()))
    assert "images" not in pairs[0]
    assert not (output / "images").exists()


def test_tokens_in_the_places_of_images_are_never_sampled() -> None:
    """By the names that Qwen and LLaVA have for them; of other tokens, and of a text model, nothing changes."""
    shape = {"image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 5, "eos_token_id": 1}
    assert never_sampled(shape) == {7: float("-inf"), 8: float("-inf")}
    assert never_sampled({"image_token_index": 9}) == {9: float("-inf")}
    assert never_sampled({"eos_token_id": 1}) == {}


def test_the_stand_in_for_torchvision_is_gone_after_an_import() -> None:
    before = {name for name in sys.modules if name.startswith("torchvision")}
    with _stand_in():
        functional = importlib.import_module("torchvision.transforms.v2.functional")
        assert importlib.import_module("torchvision").transforms.v2.functional is functional
        assert set(MODULES) <= sys.modules.keys()
    assert {name for name in sys.modules if name.startswith("torchvision")} == before


JUDGE = {"served_judge": "./model", "template": "{prompt} {completion}"}


@pytest.mark.parametrize("given", [JUDGE, {"process_reward_model": "./model"}], ids=["judge", "process"])
def test_rewards_that_read_text_are_refused(given: dict[str, str]) -> None:
    opening: Any = Opening("rl.rewards", ResourcesConfig(), prompts=[{"images": ("x/red",)}])
    field = rf"^rl\.rewards\.0\.{next(iter(given))}: it reads text, and prompts or observations have images"
    with pytest.raises(UserError, match=field):
        RewardSources([CHOICE.validate(given)], opening, {})


@pytest.mark.parametrize(
    ("kind", "template", "says"),
    [
        (tiny_qwen_vl, None, None),
        (tiny_qwen_vl, TEMPLATE, "has another chat template than the prompts, so it would read text alone"),
        (tiny_llava, None, "has another tokenizer than the policy, so it would read text alone"),
        (None, None, "prompts or observations have images, and .* reads none: use an image-text model"),
    ],
    ids=["same", "template", "tokenizer", "text"],
)
def test_a_reward_model_that_would_not_see_images_is_refused_before_actors_start(
    kind: Any, template: str | None, says: str | None, tmp_path: Path
) -> None:
    policy = tiny_qwen_vl(tmp_path / "policy")
    judge = (kind or tiny_qwen_vl)(tmp_path / "judge")
    if kind is None:
        (judge / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    if template:
        tokenizer = load_tokenizer(judge)
        tokenizer.chat_template = template.replace("IMAGE", QWEN_IMAGE).replace("'<'", "'<<'")
        tokenizer.save_pretrained(judge)
    opening = Opening(
        "rl.rewards", ResourcesConfig(), tokenizer=load_tokenizer(policy), prompts=[{"images": (Path("x/red"),)}]
    )
    models = {0: Model(judge, Reference("model", "a" * 64))}
    refused: Any = (
        pytest.raises(UserError, match=rf"^rl\.rewards\.0\.reward_model: .*{says}") if says else nullcontext()
    )
    with refused:
        RewardSources([CHOICE.validate({"reward_model": "./judge"})], opening, models)


def test_workers_of_a_parallel_engine_need_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: False)
    with pytest.raises(UserError, match=r"^resources\.tensor_parallel_size: without torchvision"):
        without_torchvision(["LlavaForConditionalGeneration"], workers=2)
