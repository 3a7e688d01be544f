"""Models: made from scratch, loaded with the head that a method needs, and saved as plain Hugging Face folders."""
