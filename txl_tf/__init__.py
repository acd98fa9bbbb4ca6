"""Transformer-XL for TensorFlow 2 and Keras 3, faithful to the original (Dai et al. 2019, arXiv 1901.02860).

The public interface is `__all__`. It includes `txl_tf.layers`, the functions and layers of which the models consist.
All other names are private until 1.0.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from txl_tf.environment import check_backend, check_versions

check_backend()  # before the imports below, because they import Keras, which then keeps its backend
check_versions()

from txl_tf import layers
from txl_tf.calls import unknown_name as _unknown_name
from txl_tf.cluster.preparation import prepare
from txl_tf.convert.hub import push_to_hub
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.tags import allowed_transitions
from txl_tf.data.text.batches import Segments, choose_bin_capacities, segments
from txl_tf.data.text.corpus import prepare_ids
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import FixedAttributeError, ParameterError, UnknownArgumentError
from txl_tf.kernels.precision import set_matmul_precision
from txl_tf.language.constraint import Constraint
from txl_tf.language.language_model import TransformerXLLM
from txl_tf.language.reading import nll_by_memory
from txl_tf.language.transformer_lm import TransformerLM
from txl_tf.public_calls import OTHER_NAMES as _OTHER_NAMES
from txl_tf.runs.families.pipeline import pipeline
from txl_tf.runs.folder import load_run
from txl_tf.runs.harness import harness_model
from txl_tf.runs.vectors import text_vectors
from txl_tf.runs.weights import load_tf1_checkpoint, save_tf1_checkpoint, tf1_variables
from txl_tf.serving.export import export_saved_model
from txl_tf.serving.portable import export_portable
from txl_tf.taggers.bilstm import BiLSTM
from txl_tf.taggers.flat import Flat
from txl_tf.taggers.tagger import Tagger
from txl_tf.taggers.tener import Tener
from txl_tf.training.optimization import make_optimizer
from txl_tf.training.threads import set_threads
from txl_tf.transformer_xl.network import TransformerXL
from txl_tf.vanilla.ensemble import Ensemble
from txl_tf.vanilla.transformer import Transformer

__version__ = "0.1.0"

__all__ = [
    "BiLSTM",
    "Constraint",
    "Ensemble",
    "FixedAttributeError",
    "Flat",
    "Lexicon",
    "ParameterError",
    "Segments",
    "Tagger",
    "Tener",
    "Transformer",
    "TransformerLM",
    "TransformerXL",
    "TransformerXLLM",
    "UnknownArgumentError",
    "Vocab",
    "allowed_transitions",
    "choose_bin_capacities",
    "export_portable",
    "export_saved_model",
    "harness_model",
    "layers",
    "load_run",
    "load_tf1_checkpoint",
    "make_optimizer",
    "nll_by_memory",
    "pipeline",
    "prepare",
    "prepare_ids",
    "push_to_hub",
    "save_tf1_checkpoint",
    "segments",
    "set_matmul_precision",
    "set_threads",
    "text_vectors",
    "tf1_variables",
]


if not _TYPE_CHECKING:  # type checkers report other names themselves

    def __getattr__(name: str) -> _Any:
        """Raises an error for a name that is not public, with the name to write in its place if one is known."""
        in_layers = {public: f"txl_tf.layers.{public}" for public in layers.__all__}
        raise _unknown_name(__name__, name, __all__, {**_OTHER_NAMES, **in_layers})
