"""Text, vocabularies, corpora and batches."""
