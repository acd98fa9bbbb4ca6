"""The programs that draw, `plot.py` and `plot_ner.py`, and the parts of their pictures."""
