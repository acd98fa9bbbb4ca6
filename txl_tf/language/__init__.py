"""From a model's logits to text: sampling, beam search, stop strings."""
