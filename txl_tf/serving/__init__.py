"""SavedModels, and the signatures that they serve."""

from txl_tf.serving import language_model, tagging, translation  # they register their signatures

__all__ = ["language_model", "tagging", "translation"]
