"""The layers of the vanilla Transformer."""
