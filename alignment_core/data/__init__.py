"""From rows of any origin to tables of token ids: sources, formats, chat templates, mixing, split, statistics."""
