"""The common parts of the programs that answer lines: `score`, `tag`, `translate` and `generate`."""
