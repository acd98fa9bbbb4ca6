"""Shared by all layers: their base, arguments, dropout, gradients, products."""
