"""Kinds of reward, one module each: the recipe's fields, their part of a stage's key, and how the reward is opened."""
