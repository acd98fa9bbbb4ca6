"""Transformer-XL for TensorFlow 2 and Keras 3, faithful to the original (Dai et al. 2019, arXiv 1901.02860)."""

from txl_tf.checkpoint import load_tf1_checkpoint, save_tf1_checkpoint, tf1_variables
from txl_tf.corpus import segments
from txl_tf.export import export_saved_model
from txl_tf.language_model import TransformerXLLM
from txl_tf.model import TransformerXL
from txl_tf.optimization import make_optimizer

__version__ = "0.1.0"

__all__ = [
    "TransformerXL",
    "TransformerXLLM",
    "export_saved_model",
    "load_tf1_checkpoint",
    "make_optimizer",
    "save_tf1_checkpoint",
    "segments",
    "tf1_variables",
]
