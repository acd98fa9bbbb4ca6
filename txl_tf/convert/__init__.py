"""Checkpoints and corpora of other programs."""
