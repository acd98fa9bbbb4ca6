"""Exports of models to SavedModel, ONNX and TFLite; the signatures of served models; and batches of requests."""

# Imported because these modules register their signatures, see `serves`.
from txl_tf.serving import language_model, tagging, translation

__all__ = ["language_model", "tagging", "translation"]
