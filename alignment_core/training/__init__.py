"""Training: one DeepSpeed trainer; what is particular to a method is a small object beside it."""
