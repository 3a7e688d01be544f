"""Training methods: the rows and the loss of each, one small object per module."""
