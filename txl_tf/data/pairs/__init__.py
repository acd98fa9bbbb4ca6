"""Pairs of lines for encoder-decoders."""
