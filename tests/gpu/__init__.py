"""``make gpu``: a self-check of one GPU in at most ten minutes, with what is installed there."""
