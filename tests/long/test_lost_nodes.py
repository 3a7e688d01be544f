"""A node is lost in the middle of each kind of stage that holds actors: the run goes on elsewhere, to the same digests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignment_core import journal
from tests.align import references, run_align, states
from tests.processes import wait_until
from tests.servers.halts import Halt
from tests.servers.ray_nodes import RayNodes
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = """
name: nodes
seed: 1
model:
  scratch: {architecture: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
reward_model:
  data: {sources: [{task: reverse, rows: 48}], test_rows: 8}
  training: {batch_size: 8, max_steps: 6, save_steps: 2, learning_rate: 1.0e-3}
"""
RECIPES = {
    "preferences": f"""
method: iterative-dpo
{MODEL}
sft:
  data: {{sources: [{{task: reverse, rows: 48}}]}}
  training: {{batch_size: 8, max_steps: 6, save_steps: 2, learning_rate: 1.0e-3}}
iterative_dpo:
  rounds: 1
  prompts: {{task: reverse, rows: 96}}
  prompts_per_round: 96
  generation: {{num_generations: 4, max_completion_length: 6, shard_size: 12}}
  selection: {{min_margin: 0, truncated: keep}}
  training: {{batch_size: 8, max_steps: 6, save_steps: 2, learning_rate: 1.0e-4}}
evaluation:
  prompts: {{task: reverse, split: test, rows: 96}}
  generation: {{num_generations: 4, max_completion_length: 6, shard_size: 12}}
  verifier: task
resources: {{trainers: 2, engines: 2, threads: 1, zero_stage: 2, kv_cache_mib: 16, progress_seconds: 0.001}}
""",
    "rl": f"""
method: rl
{MODEL}
rl:
  prompts: {{task: reverse, rows: 72}}
  steps: 4
  prompts_per_step: 72
  generation: {{num_generations: 4, max_completion_length: 6, shard_size: 36}}
  rewards: [{{reward_model: ours}}, {{function: "FOLDER/rewards.py:length"}}]
  importance_sampling_correction: {{stop_above: 1.0e-5}}
  training: {{batch_size: 288, learning_rate: 1.0e-3}}
resources: {{trainers: 2, engines: 2, judges: 2, threads: 1, zero_stage: 2, kv_cache_mib: 16, progress_seconds: 0.001}}
""",
    "distillation": """
method: distillation
name: nodes
seed: 1
model:
  scratch: {architecture: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
distillation:
  teacher:
    model:
      scratch: {architecture: llama, hidden_size: 96, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 2}
  top_k: 4
  data: {sources: [{task: reverse, rows: 400}]}
  training: {batch_size: 8, max_steps: 6, save_steps: 2, learning_rate: 1.0e-3}
resources: {trainers: 2, threads: 1, zero_stage: 2, progress_seconds: 0.001}
""",
    "kto": """
method: kto
name: nodes
seed: 1
model:
  scratch: {architecture: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
kto:
  data: {sources: [{task: reverse, rows: 96}]}
  training: {batch_size: 8, max_steps: 6, save_steps: 2, learning_rate: 1.0e-4}
resources: {trainers: 2, threads: 1, zero_stage: 2, progress_seconds: 0.001}
""",
}
"""Training reports and saves every two steps, with ``save_steps``. More completions than a block of scores has."""
REWARDS = """
import time
from pathlib import Path

def length(rows):
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.1)
    return [len(row["completion"]) for row in rows]
"""
"""Until the file ``go`` is there it is so slow that other nodes take calls, too."""
SAVED, SHARDS, SCORES = "step-*/complete.json", "shard-*.parquet", "*.npy"
"""What a stage has in its progress in its middle: a checkpoint, completions, or blocks of scores."""
TRAINER = "alignment_core.training.trainer:Trainer"
POLICY = "alignment_core.training.policy_trainer:PolicyTrainer"
ENGINE = "alignment_core.inference.engine:Engine"
TEACHER = "alignment_core.training.teacher:Teacher"
FORWARD = "alignment_core.training.forward:Forward.run"


@dataclass(frozen=True)
class Loss:
    """The first actor on another node whose ``call`` of ``function`` it is halts there; its node is lost once the stage has
    ``progress``, a pattern of files."""

    recipe: str
    stage: str
    function: str
    call: int
    progress: str
    times: int = 1
    returns: bool = False
    """Whether a node with the same address joins at once."""
    settings: tuple[str, ...] = ()


BROADCAST = "alignment_core.inference.channels.buckets:Assembler.add"
DELTAS = (
    "resources.weight_update_mode=delta",
    "rl.training.bf16=true",
    "rl.training.learning_rate=1e-5",
    "rl.importance_sampling_correction.stop_above=0.1",
)
"""In bf16, with steps of which each changes less than half of the weights."""
OF_REWARD = ("resources.trainers=1", "resources.engines=1")
LOSSES = {
    "sft": Loss("preferences", "sft", f"{TRAINER}.train", 2, SAVED),
    "reward-model": Loss("preferences", "reward-model", f"{TRAINER}.train", 2, SAVED),
    "generate": Loss("preferences", "round-1/generate", f"{ENGINE}.generate", 1, SHARDS),
    "score": Loss("preferences", "round-1/score", FORWARD, 1, SCORES),
    "logps": Loss("preferences", "round-1/reference-logps", FORWARD, 1, SCORES),
    "teacher": Loss("distillation", "distillation/teacher-logps", f"{TEACHER}.run", 1, "*.npz"),
    "distillation": Loss("distillation", "distillation", f"{TRAINER}.train", 2, SAVED),
    "kto": Loss("kto", "kto", f"{TRAINER}.train", 2, SAVED),
    "evaluate": Loss("preferences", "round-1/evaluation/score", FORWARD, 1, SCORES),
    "dpo": Loss("preferences", "round-1/dpo", f"{TRAINER}.train", 2, SAVED),
    "rl-trainer": Loss("rl", "rl", f"{POLICY}.update", 2, SAVED),
    "rl-engine": Loss("rl", "rl", f"{ENGINE}.sample", 2, SAVED),
    "rl-reward": Loss("rl", "rl", FORWARD, 2, SAVED, settings=OF_REWARD),
    "rl-function": Loss("rl", "rl", "alignment_core.user_code.pool:NodePool.answers", 1, "", settings=OF_REWARD),
    "rl-broadcast": Loss("rl", "rl", BROADCAST, 2, SAVED),
    "rl-deltas": Loss("rl", "rl", BROADCAST, 2, SAVED, settings=DELTAS),
    "save": Loss("preferences", "sft", "alignment_core.artifacts.blobs:Blobs.put_files", 2, SAVED),
    "twice": Loss("preferences", "sft", f"{TRAINER}.train", 2, SAVED, times=2),
    "returns": Loss("preferences", "sft", f"{TRAINER}.train", 2, SAVED, returns=True),
}
"""``save``: while a rank puts its part of a checkpoint into the store. ``rl-broadcast`` and ``rl-deltas``: while an engine
receives weights."""


class Undisturbed:
    """Runs on a single machine, which have filled the store."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.go = folder / "go"
        (folder / "rewards.py").write_text(REWARDS)
        self.known: dict[tuple[str, ...], dict[str, str]] = {}

    def command(self, loss: Loss) -> list[str]:
        """Arguments of ``align`` for the run that loses nodes."""
        path = self.folder / f"{loss.recipe}.yaml"
        path.write_text(RECIPES[loss.recipe].replace("FOLDER", str(self.folder)))
        changes = [part for setting in loss.settings for part in ("--set", setting)]
        return ["run", str(path), "--store", f"s3://bucket/{loss.recipe}-{len(loss.settings)}", *changes]

    def results(self, loss: Loss) -> dict[str, str]:
        """The digests of all stages."""
        key = (loss.recipe, *loss.settings)
        self.go.touch()
        if key not in self.known:
            home = self.folder / f"home-{len(self.known)}"
            home.mkdir()
            done = run_align(home, *self.command(loss), expect=0, timeout=900, **self.environment)
            self.known[key] = references(done)
        return self.known[key]


@pytest.fixture(scope="module")
def undisturbed(
    s3_server: S3Server, prefect_api: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), s3_server.environment() | prefect_api)


@pytest.fixture
def nodes(s3_server: S3Server) -> Iterator[RayNodes]:
    nodes = RayNodes(s3_server.environment())
    yield nodes
    nodes.end()


def lost(halt: Halt, number: int, run: Future[Any]) -> str:
    """The name of the node that is to be lost, once a process of it has halted; fails with the run."""
    assert wait_until(lambda: halt.node(number) is not None or run.done(), 300), "no process halted"
    name = halt.node(number)
    assert name is not None, f"the run ended before: {run.result()}"
    return name


@pytest.mark.parametrize("name", LOSSES)
def test_a_stage_that_loses_a_node_ends_with_the_same_digests(
    name: str,
    nodes: RayNodes,
    undisturbed: Undisturbed,
    prefect_api: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = LOSSES[name]
    expected = undisturbed.results(loss)
    halts, *homes = (tmp_path / folder for folder in ("halts", "one", "two", "three"))
    for folder in (halts, *homes):
        folder.mkdir()
    halt = Halt(loss.function, str(halts), loss.call, loss.times)
    if name == "rl-function":
        undisturbed.go.unlink()
    nodes.start(homes[0])
    others = {home.name: nodes.start(home, [homes[0]], halt=halt) for home in homes[1:]}
    with ThreadPoolExecutor(1) as pool:
        command = [*undisturbed.command(loss), "--from-stage", loss.stage]
        variables = nodes.environment() | prefect_api
        run = pool.submit(lambda: run_align(homes[0], *command, expect=0, timeout=900, **variables))
        for number in range(loss.times):
            of_node = lost(halt, number, run)
            assert wait_until(lambda: any(homes[0].glob(f"stores/*/progress/*/{loss.progress}")), 120)
            undisturbed.go.touch()
            nodes.kill(others[of_node])
            if loss.returns:
                nodes.start(tmp_path / of_node, [homes[0]], place=list(others).index(of_node) + 1)
        outcome = run.result()
    assert states(outcome)[loss.stage] == "run"
    assert references(outcome) == expected
    monkeypatch.setenv("ALIGN_HOME", str(homes[0]))
    restarts = journal.stages(outcome["run_id"])[loss.stage].restarts
    assert len(restarts) == loss.times, restarts
