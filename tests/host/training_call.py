"""A tiny training stage for the tests; as a program, a flow that trains until it is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from alignment_core.data.pin import pin
from alignment_core.execution.base import StageCall
from alignment_core.host.client import Host
from alignment_core.recipes import DataConfig, DataSource, ModelConfig, ResourcesConfig, TrainingConfig
from alignment_core.stages.base_model import pin_model
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.stages.sft import SftStageConfig

STEPS_BEFORE_READY = 3


def training_call(host: Host, model_folder: Path, steps: int) -> StageCall:
    """The call of a training stage, whose model and data the host brings into the store first."""
    model_config = pin_model(ModelConfig(name=str(model_folder)))
    model = host.run(
        StageCall(stage="base_model", label="model", config=model_config.model_dump(mode="json"), inputs={})
    )
    data = DataConfig(sources=(DataSource(task="reverse", rows=64),))
    data_config = DatasetConfig(data=data, sources=(pin(data.sources[0]),), kind="demonstrations")
    rows = host.run(
        StageCall(
            stage="dataset",
            label="data",
            config=data_config.model_dump(mode="json"),
            inputs={"tokenizer": model.reference},
        )
    )
    config = SftStageConfig(training=TrainingConfig(batch_size=32, num_train_epochs=steps, max_steps=steps))
    inputs = {"model": model.reference, "data": rows.reference}
    return StageCall(stage="sft", label="sft", config=config.model_dump(mode="json"), inputs=inputs)


def main(store: str, model: str, steps: int, resources: str = "{}") -> None:
    """Print the step that training begins with once it is under way; the last reported one is in a file beside the store."""
    given = {"trainers": 1, "zero_stage": 0, **json.loads(resources)}
    host = Host(store, ResourcesConfig.model_validate(given), Path(store + ".log"))
    done: list[float] = []

    def on_progress(message: dict[str, float]) -> None:
        before, now = (done or [0.0])[-1], message["done"]
        done.append(now)
        Path(store + ".step").write_text(f"{now:g}")
        if now >= done[0] + STEPS_BEFORE_READY > before:
            print(int(done[0]), flush=True)

    host.run(training_call(host, Path(model), steps), on_progress)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
