"""Transformer-XL: the network, and its cached inference."""
