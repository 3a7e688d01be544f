"""What others are told of an artifact: its provenance, its bill of materials, and a signature that they can check."""
