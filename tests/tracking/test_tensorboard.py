"""TensorBoard files as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.execution.curve import Curve
from alignment_core.tracking import Progress, file_trackers, listening
from alignment_core.tracking.tensorboard import TensorBoard
from tests.tracking.watched import recipe_with, result


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def steps(listener: TensorBoard, label: str, losses: dict[int, float | None]) -> None:
    listener.started(label)
    for step, loss in losses.items():
        listener.progress(label, Progress(step, 10, "steps", {"loss": loss}))


def test_each_stage_is_a_folder_with_its_curves_and_its_result(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    steps(board, "sft", {1: 2.0, 2: 1.5, 3: None})
    steps(board, "round-1/dpo", {1: 0.7})
    board.finished(result("sft", loss=1.25, policies={"sft": {"accuracy": 1}}))
    board.finished(result("round-1/evaluation", accuracy=0.5))  # cached: never started
    board.ended(True)
    assert curves(tmp_path / "sft") == {"loss": [(1, 2.0), (2, 1.5)], "result/loss": [(0, 1.25)]}
    assert curves(tmp_path / "round-1" / "dpo") == {"loss": [(1, 0.7)]}
    assert curves(tmp_path / "round-1" / "evaluation") == {"result/accuracy": [(0, 0.5)]}


def test_steps_that_are_done_again_after_a_crash_are_drawn_once(tmp_path: Path) -> None:
    killed = TensorBoard(tmp_path)
    steps(killed, "sft", {1: 4.0, 2: 3.0, 3: 2.0})  # the last checkpoint was after step 1; no end
    killed._writer("sft").flush()  # a separate thread writes; after an early crash there is nothing to draw
    again = TensorBoard(tmp_path)
    steps(again, "sft", {2: 3.5, 3: 2.5, 4: 1.5})
    again.ended(True)
    assert curves(tmp_path / "sft") == {"loss": [(1, 4.0), (2, 3.5), (3, 2.5), (4, 1.5)]}


def test_a_stage_resumed_within_its_run_is_drawn_once(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    steps(board, "dpo", {1: 4.0, 2: 3.0, 3: 2.0})
    board.progress("dpo", Progress(2, 10, "steps", {}))  # a rank died, the last checkpoint was after step 2
    for step, loss in {3: 2.5, 4: 1.5}.items():
        board.progress("dpo", Progress(step, 10, "steps", {"loss": loss}))
    board.ended(True)
    assert curves(tmp_path / "dpo") == {"loss": [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.5)]}


@pytest.mark.parametrize("same_home", [True, False])
def test_a_run_that_is_resumed_from_a_checkpoint_has_every_step_once(tmp_path: Path, same_home: bool) -> None:
    if same_home:
        killed = TensorBoard(tmp_path)
        steps(killed, "sft", {1: 4.0, 2: 3.0, 3: 2.0})
        killed._writer("sft").flush()
    saved = Curve()
    for step, loss in {1: 4.0, 2: 3.0}.items():
        saved.add(step, "steps", {"loss": loss})
    board = TensorBoard(tmp_path)
    board.started("sft")
    board.resumed("sft", saved.lines)
    board.progress("sft", Progress(2, 10, "steps", {}))
    board.progress("sft", Progress(2, 10, "steps", {"test_loss": 9.0}))
    board.progress("sft", Progress(3, 10, "steps", {"loss": 2.5}))
    board.ended(True)
    assert curves(tmp_path / "sft") == {"loss": [(1, 4.0), (2, 3.0), (3, 2.5)], "test_loss": [(2, 9.0)]}


def test_texts_with_any_characters_become_a_table(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.texts("samples", [{"prompt": "1 | 2\n", "sft": "<b>"}, {"prompt": "3", "round-1": "4"}])
    board.ended(True)
    read = EventAccumulator(str(tmp_path)).Reload()
    (text,) = read.Tensors("samples")
    assert text.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | sft | round-1 |",
        "| --- | --- | --- |",
        "| 1 &#124; 2<br> | &lt;b&gt; |  |",
        "| 3 |  | 4 |",
    ]


@pytest.mark.parametrize("chosen", [True, "logs"], ids=["true", "folder"])
def test_files_are_below_align_home_or_below_the_folder_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool | str
) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    warnings: list[str] = []
    recipe = recipe_with({"tensorboard": chosen})
    with file_trackers(recipe, warnings.append) as trackers, listening(trackers, warnings.append) as (listener,):
        listener.finished(result("sft", loss=1.0))
    (file,) = tmp_path.rglob("events.out.*")
    place = "home/tracking/small-*/tensorboard/sft/*" if chosen is True else "logs/small-*/sft/*"
    assert file.relative_to(tmp_path).match(place)
    assert warnings == []


def test_a_full_or_forbidden_disk_costs_the_trackers_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    (tmp_path / "tracking").write_text("a file where a folder is needed")
    warnings: list[str] = []
    with file_trackers(recipe_with({"tensorboard": True}), warnings.append) as trackers:
        assert trackers == {}
    assert warnings[0].startswith("W&B and TensorBoard are off: ")
