"""The reference's log-probabilities with real trainer ranks: the right numbers, of the rows that are used, computed once."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import DataError, NumericError, Stopped
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig
from alignment_core.stages import reference_logps
from alignment_core.training.training_rows import batch_of_step
from tests.models.test_attention import model_of
from tests.models.test_rope_lengths import LONGROPE, spread
from tests.stages.killing import Killer, store_with

pytestmark = pytest.mark.slow

PAIRS = 14
Values = dict[str, dict[int, tuple[float, float]]]


@pytest.fixture
def pairs() -> pa.Table:
    """Each prompt has two pairs, with one chosen completion."""
    random = np.random.default_rng(5)
    ids = [random.integers(0, 256, random.integers(2, 30)).tolist() for _ in range(28)]
    sides = {"prompt_ids": [ids[n // 2] for n in range(PAIRS)], "chosen_ids": [ids[7 + n // 2] for n in range(PAIRS)]}
    return pa.table({**sides, "rejected_ids": ids[14:]})


@pytest.fixture
def four_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """21 different completions are 6 blocks."""
    monkeypatch.setattr(reference_logps, "BLOCK", 4)


def compute(
    store: Store,
    inputs: dict[str, Any],
    machines: Any,
    reporter: Any = lambda *_: None,
    stopping: threading.Event | None = None,
    **config: Any,
) -> StageResult:
    call = StageCall(stage="reference_logps", label="dpo/reference-logps", config=config, inputs=inputs)
    resources = ResourcesConfig(max_tokens_per_microbatch=128)
    request = StageRequest(store, call, machines, resources, reporter, stopping=stopping or threading.Event())
    return run_stage(request)


def values(store: Store, result: StageResult) -> Values:
    """By split and row, chosen and rejected."""
    logps: Values = {}
    for row in pq.read_table(store.fetch(result.reference) / "logps.parquet").to_pylist():
        logps.setdefault(row["split"], {})[row["row"]] = (row["chosen_logp"], row["rejected_logp"])
    return logps


def expected(folder: Path, pairs: pa.Table, bf16: bool = False, alpha: float = 1.0, **options: Any) -> np.ndarray:
    """The log-probability of each completion by the model that ``transformers`` loads with these ``options``, in which tokens
    beyond the shorter one of the pair weigh ``alpha``: [pairs, 2]."""
    import torch
    import transformers

    dtype = torch.bfloat16 if bf16 else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    model.train(bool(options))  # a quantized model rounds inputs, too, in evaluation mode; none has dropout

    def logp(prompt: list[int], completion: list[int], shared: int) -> float:
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logps = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
        of_tokens = logps.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        return float(of_tokens[:shared].sum() + alpha * of_tokens[shared:].sum())

    sides = ("chosen_ids", "rejected_ids")
    return np.array(
        [
            [logp(row["prompt_ids"], row[side], min(len(row[name]) for name in sides)) for side in sides]
            for row in pairs.to_pylist()
        ]
    )


def test_logps_equal_those_of_plain_forward_passes_on_one_and_two_ranks(
    four_a_block: None, machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    references = []
    for world in (1, 2):
        store, model, data = store_with(tmp_path / str(world), tiny_model(), pairs)
        result = compute(store, {"model": model, "data": data}, machines(world))
        references.append(result.reference)
        assert (result.reference.kind, result.metrics) == ("reference-logps", {"rows": PAIRS})
        assert (result.cost["score_seconds"] > 0, result.cost["score_tokens"]) == (True, sum(distinct_lengths(pairs)))
        assert result.cost["score_processor_seconds"] > 0
        assert 0 < result.cost["score_computed_tokens"] <= result.cost["score_tokens"], "a shared prompt counts once"
    assert references[0] == references[1], "to the bit: a block's results do not depend on its rank"
    logps = values(store, result)
    assert (logps.keys(), [*logps["train"]]) == ({"train"}, [*range(PAIRS)])
    np.testing.assert_allclose([*logps["train"].values()], expected(tiny_model(), pairs), rtol=1e-5)


def test_tokens_up_to_the_shorter_completion_are_those_of_the_whole_one(
    machines: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    """With rotary frequencies that change with the length of the sequence, as a training on it has them."""
    model = model_of("llama", vocab_size=256, rope_parameters={**LONGROPE, "original_max_position_embeddings": 30})
    spread(model).save_pretrained(tmp_path / "longrope")
    store, reference, data = store_with(tmp_path / "store", tmp_path / "longrope", pairs)
    logps = values(store, compute(store, {"model": reference, "data": data}, machines(1), ld_alpha=0.5))
    np.testing.assert_allclose([*logps["train"].values()], expected(tmp_path / "longrope", pairs, alpha=0.5), rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_tokens_beyond_the_shorter_completion_weigh_alpha_of_ld_dpo(
    alpha: float, machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    store, model, data = store_with(tmp_path / "store", tiny_model(), pairs)
    logps = values(store, compute(store, {"model": model, "data": data}, machines(1), ld_alpha=alpha))
    right = expected(tiny_model(), pairs, alpha=alpha)
    np.testing.assert_allclose([*logps["train"].values()], right, rtol=1e-5)
    assert not np.allclose(right, expected(tiny_model(), pairs), rtol=1e-2), "or nothing would be tested"


def distinct_lengths(pairs: pa.Table) -> list[int]:
    """Tokens of each different completion, with its prompt."""
    sides = {
        (*row["prompt_ids"], None, *row[side]) for row in pairs.to_pylist() for side in ("chosen_ids", "rejected_ids")
    }
    assert len(sides) == 21
    return [len(tokens) - 1 for tokens in sides]


def test_reference_logps_are_computed_in_the_precision_of_training(
    machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    store, model, data = store_with(tmp_path, tiny_model(), pairs)
    rough = [*values(store, compute(store, {"model": model, "data": data}, machines(1), bf16=True))["train"].values()]
    assert np.abs(rough - expected(tiny_model(), pairs)).max() > 1e-3, "of numbers that fp32 gives to 1e-4"
    np.testing.assert_allclose(rough, expected(tiny_model(), pairs, bf16=True), rtol=1e-2)


def test_reference_logps_of_a_quantized_policy_are_those_of_transformers(
    machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    import transformers

    store, model, data = store_with(tmp_path, tiny_model(), pairs)
    result = compute(store, {"model": model, "data": data}, machines(1), load_in_8bit=True)
    logps = np.array([*values(store, result)["train"].values()])
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    np.testing.assert_allclose(logps, expected(tiny_model(), pairs, quantization_config=config), rtol=1e-5)
    assert np.abs(logps - expected(tiny_model(), pairs)).max() > 1e-3


def test_only_rows_of_the_configured_steps_and_held_out_rows_are_computed(
    machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    store, model, _ = store_with(tmp_path, tiny_model(), pairs)
    pq.write_table(pairs[:3], tmp_path / "data" / "test.parquet")
    inputs = {"model": model, "data": store.publish(tmp_path / "data", "dataset")}
    result = compute(store, inputs, machines(1), max_steps=2, batch_size=3, order=11)
    few = values(store, result)
    assert [*few["train"]] == sorted({row for step in range(2) for row in batch_of_step(step, PAIRS, 3, 11)})
    assert (len(few["train"]), [*few["test"]], result.metrics) == (6, [0, 1, 2], {"rows": 9})
    everything = expected(tiny_model(), pairs)
    for split in few:
        np.testing.assert_allclose([*few[split].values()], everything[[*few[split]]], rtol=1e-5)
    whole = values(store, compute(store, inputs, machines(1), max_steps=5, batch_size=3, order=11))
    assert [*whole["train"]] == [*range(PAIRS)], "five steps are an epoch"


def test_the_death_of_a_rank_costs_the_blocks_under_way_and_changes_no_number(
    four_a_block: None, machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    def run(name: str, kill_at: int) -> tuple[StageResult, list[float]]:
        store, model, data = store_with(tmp_path / name, tiny_model(), pairs)
        killer = Killer(machines(2), "trainers", kill_at)
        return compute(store, {"model": model, "data": data}, machines(2), killer), killer.done

    whole, blocks = run("whole", kill_at=-1)
    assert blocks == [0, 1, 2, 3, 4, 5, 6]
    killed, blocks = run("killed", kill_at=3)
    assert killed.cost["restarts"] == 1
    assert blocks == sorted(blocks), "none was computed again"
    assert len(blocks) == 8, "the block that it resumed from is reported twice"
    assert killed.cost["score_tokens"] < whole.cost["score_tokens"]
    assert killed.reference == whole.reference


def test_a_stopped_pass_resumes_with_the_remaining_blocks(
    four_a_block: None, machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    store, model, data = store_with(tmp_path, tiny_model(), pairs)
    inputs, stopping, reports = {"model": model, "data": data}, threading.Event(), list[float]()

    def stop_at_three(done: float, *_: Any) -> None:
        reports.append(done)
        if done == 3:
            stopping.set()

    with pytest.raises(Stopped, match="stopped after 4 of 6 blocks"):
        compute(store, inputs, machines(1), stop_at_three, stopping)
    stopping.clear()
    result = compute(store, inputs, machines(1), lambda done, *_: reports.append(done), stopping)
    assert reports == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([*values(store, result)["train"].values()], expected(tiny_model(), pairs), rtol=1e-5)


def test_a_model_that_gives_no_number_is_an_error_that_names_the_row(
    machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(tiny_model(), tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: weight * torch.nan for name, weight in weights.items()}, broken / "model.safetensors", {"format": "pt"}
    )
    store, model, data = store_with(tmp_path, broken, pairs)
    says = r"the reference's log-probability of row 0 of the train rows is not finite"
    with pytest.raises(NumericError, match=says):
        compute(store, {"model": model, "data": data}, machines(1))


def test_a_data_set_without_training_rows_is_refused(
    machines: Any, tiny_model: Any, pairs: pa.Table, tmp_path: Path
) -> None:
    store, model, _ = store_with(tmp_path, tiny_model(), pairs)
    (tmp_path / "data" / "train.parquet").rename(tmp_path / "data" / "test.parquet")
    with pytest.raises(DataError, match="the data set holds no training rows"):
        compute(store, {"model": model, "data": store.publish(tmp_path / "data", "dataset")}, machines(1))
