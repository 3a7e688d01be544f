"""Fields of a schedule that belong together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.contents import SFT, refusal


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ("{save_total_limit: 3}", "`save_total_limit` needs `save_steps`"),
        ("{save_steps: 0}", "sft.training.save_steps: "),
        ("{save_steps: 9, save_total_limit: 0}", "sft.training.save_total_limit: "),
        (
            "{save_steps: 9, max_steps: 9}",
            "`save_steps` has no effect with `max_steps` 9, because the last model is an output anyway: set it below 9",
        ),
        ("{decay_ratio: 0.2}", "`decay_ratio` has no effect without `lr_scheduler_type: wsd`: leave it out"),
        (
            "{lr_scheduler_type: linear, decay_type: 1-sqrt}",
            "`decay_type` has no effect without `lr_scheduler_type: wsd`",
        ),
        (
            "{lr_scheduler_type: wsd, warmup_ratio: 0.6, decay_ratio: 0.5}",
            "`warmup_ratio` 0.6 and `decay_ratio` 0.5 must not exceed 1 in sum",
        ),
        ("{lr_scheduler_type: wsd, decay_ratio: 0}", "sft.training.decay_ratio: "),
        (
            "{warmup_ratio: 0.1, warmup_steps: 5}",
            "`warmup_steps` 5 and `warmup_ratio` 0.1 are two lengths of one warm-up: set one of them to 0",
        ),
        ("{warmup_steps: 1.5}", "sft.training.warmup_steps: "),
        ("{num_train_epochs: 0}", "sft.training.num_train_epochs: "),
        ("{num_train_epochs: true}", "sft.training.num_train_epochs: "),
    ],
)
def test_phases_that_do_not_fit_get_a_sentence(load: Any, training: str, sentence: str) -> None:
    assert sentence in refusal(load, SFT, f"sft.training={training}")
