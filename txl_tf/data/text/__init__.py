"""Running text: datasets, prepared folders, batches of a language model."""
