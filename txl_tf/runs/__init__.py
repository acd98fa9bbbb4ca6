"""The folder of a run, its training and its evaluation."""

from txl_tf.runs.families import encoder_decoder, language_model, tagger  # they register their families

__all__ = ["encoder_decoder", "language_model", "tagger"]
