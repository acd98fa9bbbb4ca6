"""Keras's `quantize` is not supported: an error says so.

Cached inference and the fused products read the kernels directly, so weights of 8 bits would not work. Weights in
bfloat16 make a smaller model.
"""

from typing import Any

from txl_tf.errors import UnsupportedError
from txl_tf.nn.bases import MixedIntoLayer


class Unquantized(MixedIntoLayer):
    """Mixin of layers and models whose weights Keras cannot quantize.

    Attributes:
        smaller: how to get a smaller model, for messages.
    """

    smaller: str = 'dtype="bfloat16" in the constructor makes weights of half the size'

    def quantize(self, mode: Any = None, *args: Any, **options: Any) -> None:
        """Raises UnsupportedError, which says how to get a smaller model.

        `keras.Model.quantize` calls this method of the layers in a model, and quantizes only Keras's own layers. It
        shows the errors of the others as warnings, or, from Keras 3.16 on, lists these layers in its report.
        """
        message = (
            f"quantize({mode!r}) is not supported: like all layers and models of txl_tf, {type(self).__name__} "
            f"computes with its weights as they are. Use instead: {self.smaller}"
        )
        raise UnsupportedError("quantize", mode, self.smaller, message)
