"""The page that shows what models read, remember and write: `demo.py` runs it, `shell.py` puts it together."""
