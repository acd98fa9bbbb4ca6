"""What programs that answer lines have in common: `score`, `tag`, `translate` and `generate`."""
