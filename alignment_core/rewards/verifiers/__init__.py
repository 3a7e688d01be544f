"""Built-in verifiers, one module each."""
