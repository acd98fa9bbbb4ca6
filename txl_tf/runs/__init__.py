"""The folder of a run, its training and its evaluation."""
