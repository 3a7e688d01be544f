"""Losses: pure tensor functions that import nothing but torch.

Suffixes name the axes: ``_B`` rows, ``_P`` pairs, ``_K`` target tokens of a packed micro-batch, ``_V`` vocabulary.
"""
