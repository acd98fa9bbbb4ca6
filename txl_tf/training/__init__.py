"""Fitting with carried memory, optimizers, devices."""
