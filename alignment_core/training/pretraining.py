"""The loss of pre-training or fine-tuning mixed into a policy's steps: PPO-ptx."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from alignment_core.canonical import derive_seed
from alignment_core.models.microbatch import MicroBatch
from alignment_core.recipes.sections.rl import PretrainingConfig
from alignment_core.training.learner import Term
from alignment_core.training.methods.sft import Sft
from alignment_core.training.step_report import StepReport
from alignment_core.training.training_rows import batch_of_step, shuffles, training_rows


class Pretraining:
    """``coefficient`` times the mean negative log-likelihood per target token of the next ``batch_size`` rows.

    Ouyang et al. 2022, "Training language models to follow instructions with human feedback", equation 2. The rows of a step
    depend on its number and the seed alone; an epoch has each row once, and its last batch may be smaller.
    """

    def __init__(self, config: PretrainingConfig, data: Path, seed: int, scratch: Path | None) -> None:
        """``data`` is a table; its rows are kept in a file in ``scratch``."""
        self.config = config
        self.seed = derive_seed(seed, "pretraining")
        self.method = Sft()
        self.rows = training_rows(data, self.method, scratch)
        self.shuffles = shuffles(data)

    def term(self, step: int, report: StepReport) -> Term:
        """The term of optimiser step ``step`` (from 0)."""
        numbers = batch_of_step(step, len(self.rows), self.config.batch_size, self.seed, self.shuffles)
        batch = [self.rows[number] for number in numbers]
        return Term(batch, self._loss, self.method.normaliser(batch), report, self.config.coefficient)

    def _loss(self, output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps_K = output if output.dim() == 1 else output[0]  # [2, K] with entropies, if the policy's loss needs them
        return self.method.loss(logps_K, micro, None)
