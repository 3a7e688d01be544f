"""Kinds of reward, one module each: what a recipe says, what of that decides a result, and how it is opened."""
