"""How each method begins: a module for each that can, by the method's name; others come with installed distributions."""
