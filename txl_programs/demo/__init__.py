"""The web page that shows what models read, remember and generate. `demo.py` runs it, `shell.py` assembles it."""
