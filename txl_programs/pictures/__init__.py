"""The programs `plot.py` and `plot_ner.py`, which draw pictures, and the functions that draw the figures."""
