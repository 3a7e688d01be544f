"""A model of the cost of a recipe on hardware that need not be here: memory per GPU, seconds per step, GPU hours and money."""
