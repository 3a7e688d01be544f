"""The sections of recipes, which methods share."""
