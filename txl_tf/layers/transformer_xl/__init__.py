"""Transformer-XL's layer."""
