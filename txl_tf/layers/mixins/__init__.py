"""Mixins of all layers and models: what a Keras user expects of them besides the call."""
