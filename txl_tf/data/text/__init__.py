"""Running text: data sets, prepared folders, batches of a language model."""
