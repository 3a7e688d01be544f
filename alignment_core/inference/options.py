"""What engines are told that depends on the device and may change what is sampled."""

# Blocks of 32: the default of 128 never caches a short prompt. A prompt in chunks breaks seeded sampling: vLLM then rewinds
# the random generator, which a CPU generator cannot do.
BY_DEVICE = {"cpu": {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}}
"""Arguments of ``vllm.LLM``, by the kind of device."""
