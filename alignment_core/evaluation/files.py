"""Names of files by which stages tell each other what was measured."""

HELD_OUT = "held_out.json"
"""Beside a reward model's weights: metrics on the held-out pairs, so that its accuracy is known wherever it is used."""
VERDICTS = "verdicts.json"
"""Of the verdicts of a judge: the share of wins for each prompt, and how many verdicts changed with the position."""
SPREAD = "rewards.json"
"""Beside a reward model's weights: mean and deviation of what it gives to answers that it was trained on."""
