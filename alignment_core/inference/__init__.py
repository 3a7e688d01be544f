"""Inference: vLLM engines that stay warm and load new weights while they run."""
