"""The vanilla Transformer: encoder-decoder and language model."""
