"""Ways of a policy's weights from the trainers to running engines, without the process that drives both."""
