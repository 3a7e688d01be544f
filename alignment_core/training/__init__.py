"""Training: one DeepSpeed trainer, and a small object for each method."""
