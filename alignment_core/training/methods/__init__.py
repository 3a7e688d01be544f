"""What is particular to a training method, one small object per module."""
