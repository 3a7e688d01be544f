"""Checks of a recipe's plan before anything heavy starts: rows, functions and shapes that cannot work."""
