"""Inference: vLLM engines that stay warm and take new weights while they run."""
