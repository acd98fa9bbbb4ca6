"""The vanilla Transformer: encoder-decoder (Vaswani et al. 2017).

    model = txl_tf.Transformer(
        num_layers=2, d_model=64, num_heads=4, dff=128, input_vocab_size=30, target_vocab_size=20
    )
    logits = model((source, target))            # int [B, S], [B, T] -> [B, T, V]; 0 is padding
    model.compile(optimizer)
    model.fit(source, target)                   # targets with their start and end, as arrays or in a dataset
    model.fit((source, target[:, :-1]), target[:, 1:])          # the same
    ids, scores = model.generate(source, beam_size=4)

Shapes:
    B: batch      S: source      T: target      E: d_model      V: target_vocab_size
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import TransformerConfig, one_of
from txl_tf.data.pairs.parallel import PADDING
from txl_tf.errors import ParameterError
from txl_tf.kernels import cross_entropy, project
from txl_tf.kernels.dropout import split
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.packing import pack, packed_order, packed_positions
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, takes, values_of
from txl_tf.nn.base import CachedMemory, CheckedCalls, KerasHabits, Layer
from txl_tf.nn.checks import as_ids, check_tensors, checked_length, checked_sizes, shown, tensor_error
from txl_tf.nn.dropping import Dropping
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.ops import LayerNorm, Linear
from txl_tf.nn.parts import NotCacheable, is_library, why_not_cached
from txl_tf.nn.settings import FREE_SEED, compiled_method
from txl_tf.training.memoryless_model import Mean, MemorylessModel
from txl_tf.training.weighting import checked_weights, weights_of_labels
from txl_tf.vanilla import generation
from txl_tf.vanilla.embeddings import Embeddings, NoPositions, PositionalEncoding, PositionEmbedding
from txl_tf.vanilla.encoder_decoder import EPSILON, DecoderLayer, DecoderMemory, EncoderLayer
from txl_tf.vanilla.multi_head_attention import create_look_ahead_mask, create_padding_mask

# `{pos_embed: the layer that adds positions to embeddings}`
_ADDED_POSITIONS = {"sin": PositionalEncoding, "learned": PositionEmbedding, "rotary": NoPositions}

# `{kind of attention: the name of its weights in Transformer.forward}`, where {} is the number of the layer
ATTENTION = {"cross": "decoder_layer{}_block2", "encoder": "encoder_layer{}", "decoder": "decoder_layer{}_block1"}

_FULL_TARGET = "int [batch, target] of a start and what follows it"  # what `y` must be without `target_in`, for errors


class _Stack(Layer):
    """Base class of the encoder and the decoder: embedding, positions, layers and, with pre-norm, a last layer norm.

    Args:
        layer_class: `EncoderLayer` or `DecoderLayer`.
        embedding: `Embeddings`, which other layers may share.
        num_layers, max_len, pos_embed, rate, seed: see `Transformer`.
        layer_arguments: other arguments of each layer.
    """

    def __init__(
        self, layer_class: Any, embedding: Any, num_layers: int, max_len: int, pos_embed: Any, rate: float,
        layer_arguments: Any, seed: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.start_keys(seed, rate=rate, dropatt=layer_arguments["dropatt"], dropact=layer_arguments["dropact"])
        self.d_model = layer_arguments["d_model"]
        self.embedding = embedding
        options: dict[str, Any] = {"rate": rate, "seed": self.draw_key, "dtype": self.dtype_policy}
        self.pos_encoding = _ADDED_POSITIONS[pos_embed](self.d_model, max_len, **options, name="positional_encoding")
        self.stacked: list[Any] = [
            layer_class(**layer_arguments, **options, name=f"layer{i}") for i in range(num_layers)
        ]
        self.layernorm = None
        if layer_arguments["norm_first"]:
            self.layernorm = LayerNorm(EPSILON, dtype=self.dtype_policy, name="layernorm")

    def rates(self) -> list[float]:
        # All layers have the same rates, because `Transformer` sets them together.
        return [self.pos_encoding.rate, self.stacked[0].dropatt, self.stacked[0].dropact]

    def build(self, ids_shape: Any = None, **_: Any) -> None:
        if not self.embedding.built:
            self.embedding.build((None, None))
        parts = [self.pos_encoding, *self.stacked]
        if self.layernorm is not None:
            parts.append(self.layernorm)
        self.build_parts(None, *parts)

    def embed(self, ids: Tensor, first: Size = 0, dropout_key: Tensor | None = None) -> Any:
        """Embeddings of ids plus positions from `first` on, with dropout: `[B, any]` to `[B, any, E]`."""
        return self.pos_encoding(self.embedding(ids), first=first, dropout_key=dropout_key)

    def final_norm(self, x: Tensor) -> Tensor:
        """Applies the layer norm at the end of a pre-norm stack to the output of the last layer. Post-norm has none."""
        return x if self.layernorm is None else self.layernorm(x)


class Encoder(_Stack):
    """Computes hidden states `[B, S, E]` of source ids `[B, S]` and, with `return_attention_scores`, the weights.

    The attention weights are `{name: [B, H, S, S]}`, see `Transformer.forward`.
    """

    def call(
        self, ids: Tensor, mask: Tensor | None = None, return_attention_scores: bool = False,
        training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        embed_key, *keys = split(self.key_of_call(ids, training, dropout_key), 1 + len(self.stacked))
        x = self.embed(ids, dropout_key=embed_key)
        weights = {}
        for i, (layer, key) in enumerate(zip(self.stacked, keys, strict=True)):
            x, weights[f"encoder_layer{i}"] = layer(x, mask, return_attention_scores=True, dropout_key=key)
        x = self.final_norm(x)
        return (x, weights) if return_attention_scores else x

    def compute_output_shape(self, ids_shape: Any, **_: Any) -> Any:
        return (*ids_shape, self.d_model)


class Decoder(_Stack):
    """Computes hidden states `[B, T, E]` of target ids `[B, T]` from the encoder's output, and attention weights.

    It returns `(hidden, weights)`; `Transformer.forward` describes the weights. `enc_output` may also be a
    `TargetSoFar`. Then the ids are `[B, 1]`, the next element of each target, and the masks are not used.
    """

    def call(
        self, ids: Tensor, enc_output: Any, look_ahead_mask: Tensor | None = None, padding_mask: Tensor | None = None,
        training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        embed_key, *keys = split(self.key_of_call(ids, training, dropout_key), 1 + len(self.stacked))
        memory = enc_output if isinstance(enc_output, TargetSoFar) else None
        x = self.embed(ids, memory.position if memory else 0, embed_key)
        weights = {}
        for i, (layer, key) in enumerate(zip(self.stacked, keys, strict=True)):
            # The memory of a layer takes the places of the encoder's output and of both masks.
            context = [memory.layers[i]] * 3 if memory else [enc_output, look_ahead_mask, padding_mask]
            x, block1, block2 = layer(x, *context, dropout_key=key)
            weights |= {f"decoder_layer{i}_block1": block1, f"decoder_layer{i}_block2": block2}
        return self.final_norm(x), weights

    def compute_output_shape(self, ids_shape: Any, enc_output_shape: Any = None, **_: Any) -> Any:
        x_shape = (*ids_shape, self.d_model)
        weights = {}
        for i, layer in enumerate(self.stacked):
            _, block1, block2 = layer.compute_output_shape(x_shape, enc_output_shape)
            weights |= {f"decoder_layer{i}_block1": block1, f"decoder_layer{i}_block2": block2}
        return x_shape, weights


class TargetSoFar(CachedMemory):
    """Cached keys and values of source and target, as an argument of `Decoder` instead of the encoder's output.

    The decoder then reads the next element of the target.

    Args:
        decoder: `Decoder`.
        position: int scalar tensor, the position of the element.
        caches, sources, seen: the results of `Transformer.start_decoding`: keys and values of the target and of the
            source for each layer, and where the source has elements.
    """

    def __init__(self, decoder: Any, position: Tensor, caches: Any, sources: Sequence[Any], seen: Tensor) -> None:
        self.position = position
        parts = zip(decoder.stacked, caches, sources, strict=True)
        self.layers = [DecoderMemory(layer, position, cache, source, seen) for layer, cache, source in parts]


@keras.saving.register_keras_serializable("txl_tf")
class Transformer(CheckedCalls, KerasHabits, Dropping, MemorylessModel, keras.Model):
    """The encoder-decoder Transformer.

    Args:
        num_layers: layers of the encoder and of the decoder.
        d_model, num_heads, dff: width, attention heads, width inside the feed-forward nets.
        input_vocab_size, target_vocab_size: sizes of both vocabularies. Id 0 is padding in both.
        max_len: most tokens of a source or of a target.
        pos_embed: "sin" for sinusoids, or "learned" for a table of `max_len` rows in the encoder and in the decoder; or
            "rotary": every attention rotates queries and keys by their positions (Su et al. 2021).
        rate: dropout rate of embeddings and of the output of every sublayer.
        norm_first: pre-norm with `True`; post-norm, as in the paper, with `False`.
        share_embeddings: whether source, target and softmax share one table. Then both vocabularies must have the same
            size, and the softmax has no bias.
        label_smoothing: share of the probability that the loss distributes evenly over the target vocabulary.
        dropatt, dropact: dropout rates of the attention weights and after the relu.
        target_lengths: the lengths of the longest training targets for sources of up to 16, 32, 64, ... symbols. They
            limit translations. `None` if they are unknown.
        seed: int from which dropout derives. `None` draws one.

    Call arguments:
        inputs: `(source, target)`, int `[batch, any]` each. The target begins with its start token.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        float32 (float64 if the dtype is) logits `[batch, target, target_vocab_size]`. Position t predicts the token
        after `target[:, t]`.

    Training: `fit`, `evaluate` and the other methods of Keras take arrays or datasets:
        x, y: a source, and a target with its start and its end. Or `(source, target_in)` and `target_out`, of the same
            shape: the target without its end, and without its start.
        sample_weight: `[batch]` or `[batch, labels]`, finite and not negative. The loss is the sum over labels of
            weight times nll, divided by the sum of the weights of all replicas. The accuracy is weighted in the same
            way. Padding has no weight.
        class_weight: `{id of a label: weight}`, 1 for the others, in training only.

    Raises:
        ParameterError: an argument is out of its range, or `share_embeddings` is true and the vocabularies have
            different sizes.

    Reference:
        Vaswani et al. 2017.
    """

    free_settings = {"seed": FREE_SEED}
    copied_settings = {
        "rate": tuple(f"{side}.{part}.rate" for side in ("encoder", "decoder") for part in ("pos_encoding", "stacked")),
        "dropatt": ("encoder.stacked.dropatt", "decoder.stacked.dropatt"),
        "dropact": ("encoder.stacked.dropact", "decoder.stacked.dropact"),
        "max_len": ("encoder.pos_encoding.max_len", "decoder.pos_encoding.max_len"),
    }

    @takes(TransformerConfig)
    def __init__(
        self, *, input_vocab_size: int, target_vocab_size: int, num_layers: int, d_model: int, num_heads: int, dff: int,
        max_len: int = 1000, pos_embed: str = "sin", rate: float = 0.1, norm_first: bool = False,
        share_embeddings: bool = False, label_smoothing: float = 0.0, dropatt: float = 0.0, dropact: float = 0.0,
        target_lengths: Sequence[int] | None = None, seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        if self.share_embeddings and self.input_vocab_size != self.target_vocab_size:
            message = (
                f"share_embeddings needs vocabularies of one size, got input_vocab_size={self.input_vocab_size} and "
                f"target_vocab_size={self.target_vocab_size}"
            )
            raise ParameterError("share_embeddings", True, "False for vocabularies of different sizes", message)
        self.autocast = False  # float16 cannot represent ids above 2048 exactly
        self.start_keys(seed, always=True)

        def embeddings(vocab, name):
            return Embeddings(vocab=vocab, d_model=self.d_model, dtype=self.dtype_policy, name=name)

        self.target_embedding = source_embedding = embeddings(self.target_vocab_size, "target_embedding")
        if not self.share_embeddings:
            source_embedding = embeddings(self.input_vocab_size, "source_embedding")
        layer_arguments = {
            **values_of(self, ("d_model", "num_heads", "dff", "norm_first", "dropatt", "dropact")),
            "positions": "rotary" if self.pos_embed == "rotary" else None,
        }
        options: dict[str, Any] = {
            **values_of(self, ("num_layers", "max_len", "pos_embed", "rate")), "layer_arguments": layer_arguments,
            "seed": self.draw_key, "dtype": self.dtype_policy,
        }  # fmt: skip
        self.encoder = Encoder(EncoderLayer, source_embedding, **options, name="encoder")
        self.decoder = Decoder(DecoderLayer, self.target_embedding, **options, name="decoder")
        self.final_layer = None
        if not self.share_embeddings:
            self.final_layer = Linear(self.target_vocab_size, dtype=self.dtype_policy, name="final_layer")
        self.loss_mean = Mean("loss", dtype=self.metric_dtype)
        self.accuracy = Mean("accuracy", dtype=self.metric_dtype)
        self.grad_norm = Mean("grad_norm", dtype=self.metric_dtype)
        self.build_at_once(((None, None), (None, None)))

    def build(self, inputs_shape: Any = None) -> None:
        if not self.encoder.built:
            self.encoder.build((None, None))
            self.decoder.build((None, None))
            if self.final_layer is not None:
                self.final_layer.build((None, None, self.d_model))
        self.built = True

    def call(self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None) -> Any:
        source, target = self.checked(inputs)
        hidden, _ = self._packed_forward(source, target, training, dropout_key)
        return self.logits(hidden)

    def forward(
        self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the logits, as the call does, and the attention weights of all layers. Arguments: see the class.

        Returns:
            `(logits, weights)`: weights are a dictionary of `[B, H, queries, keys]`. `encoder_layer0` is the attention
            of the source to itself in the first layer, `decoder_layer0_block1` of the target to itself, and
            `decoder_layer0_block2` of the target to the source.
        """
        source, target = self.checked(inputs)
        hidden, weights = self._packed_forward(source, target, training, dropout_key)
        source_positions, target_positions = (packed_positions(ids != PADDING) for ids in (source, target))
        for name, probs in weights.items():  # from positions in packed rows to positions in the given rows
            queries = source_positions if name.startswith("encoder") else target_positions
            keys = target_positions if name.endswith("block1") else source_positions
            probs = tf.gather(probs, queries, axis=2, batch_dims=1)
            weights[name] = tf.gather(probs, keys, axis=3, batch_dims=1)
        return self.logits(hidden), weights

    def _packed_forward(
        self, source: Tensor, target: Tensor, training: bool | None = None, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes with packed rows, in which tokens come before padding, see `kernels/packing.py`.

        In packed rows, positions count only tokens, so the result does not depend on where the padding is.

        Returns:
            `(hidden, weights)`: hidden states `[B, T, E]` at the positions of `target`, and the attention weights at
            the positions of the packed rows, see `forward`.
        """
        is_token = target != PADDING
        source, target = (pack(ids != PADDING, ids)[1] for ids in (source, target))
        encoder_key, decoder_key = split(self.key_of_call(source, training, dropout_key), 2)
        padding_mask = create_padding_mask(source)
        enc_output, encoder_weights = self.encoder(
            source, padding_mask, return_attention_scores=True, dropout_key=encoder_key
        )
        ahead = tf.maximum(create_look_ahead_mask(shape_of(target)[1]), create_padding_mask(target))  # [B, 1, T, T]
        hidden, weights = self.decoder(target, enc_output, ahead, padding_mask, dropout_key=decoder_key)
        return _after_elements(hidden, is_token), {**encoder_weights, **weights}

    def attention(self, source: Tensor, target: Tensor, which: str = "cross") -> Tensor:
        """The attention weights of all layers and heads, without dropout.

        Args:
            source, target: int `[batch, any]`, see the call.
            which: "cross", target to source; "encoder", source to itself; or "decoder", target to itself.

        Returns:
            float32 (float64 if the dtype is) `[num_layers, num_heads, batch, queries, keys]`; they sum to 1 over the
            keys.

        Raises:
            ParameterError: `which` is another word, or an input has another shape.
        """
        one_of(ATTENTION)("which", which)
        _, weights = self.forward((source, target))
        weights_of_layers = [weights[ATTENTION[which].format(i)] for i in range(self.num_layers)]
        stacked = tf.stack(weights_of_layers)  # [layers, B, H, queries, keys]
        return at_least_float32(tf.transpose(stacked, [0, 2, 1, 3, 4]))

    def checked(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Checks the inputs of a call. Returns `(source, target)` as int32."""
        if not isinstance(inputs, (tuple, list)) or len(inputs) != 2:
            got = f"{len(inputs)} of them" if isinstance(inputs, (tuple, list)) else shown(inputs)
            allowed = "(source, target), int [batch, any] each"
            raise ParameterError("inputs", inputs, allowed, f"inputs must be {allowed}, got {got}")
        source, target = (as_ids(f"inputs[{i}]", ids, 2) for i, ids in enumerate(inputs))
        check_tensors({}, **{"inputs[0]": (source, "int batch source"), "inputs[1]": (target, "int batch target")})
        if tf.executing_eagerly():  # in graphs, a GPU would have to wait for the CPU to check them
            check_ids("inputs[0]", np.asarray(source), self.input_vocab_size)
            check_ids("inputs[1]", np.asarray(target), self.target_vocab_size)
        return source, target

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        _, target_shape = self.named_shapes(shapes, named)["inputs"]
        return (*target_shape, self.target_vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, `[..., E]` to `[..., V]`: float32, or float64 if the hidden states are float64."""
        if self.final_layer is None:
            return self.target_embedding.logits(hidden)
        if not is_library(self.final_layer, Linear):  # a layer of the user
            return at_least_float32(self.final_layer(hidden))
        kernel = tf.cast(self.final_layer.kernel, hidden.dtype)
        products = at_least_float32(project(hidden, kernel))
        bias = tf.cast(self.final_layer.bias, products.dtype)
        # `project` has joined the axes before the last one.
        return tf.reshape(products + bias, [*shape_of(hidden)[:-1], self.target_vocab_size])

    # ---------------------------------------------------------------------------------------------------- training

    measures = "the mean nll and the accuracy"
    redundant_names = ("accuracy",)
    form_of_batches = "as in fit(source, target) or fit((source, target_in), target_out)"
    unused_methods = {
        "forward": "the call and the steps do not use it: override call",
        "loss_of": "the steps do not use it: override compute_loss",
    }

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_mean, self.accuracy]

    @property
    def n_classes(self) -> int:
        return self.target_vocab_size

    def loss_of(self, inputs: Any, labels: Tensor, sample_weight: Any = None, **options: Any) -> tuple[Tensor, ...]:
        """Calls the model, with `**options` as further arguments, and returns `sums_of` its logits."""
        return self.sums_of(self(inputs, **options), labels, sample_weight)

    def sums_of(self, logits: Tensor, labels: Tensor, sample_weight: Any = None) -> tuple[Tensor, ...]:
        """Sums over the labels that are not padding, from which losses and the accuracy are computed.

        Args:
            logits: `[batch, target, target_vocab_size]`.
            labels: int `[batch, target]`.
            sample_weight: `[batch]` or `[batch, target]`, weights of the sums; `None` for 1.

        Returns:
            `(nll, smoothed, right, weight)`, scalars: the nll; the nll with label smoothing, which training minimises;
            the number of right predictions; and the number of labels. With weights, the labels count by their weights.
        """
        logits = tf.reshape(logits, [-1, self.target_vocab_size])
        weights = tf.reshape(self._weights(labels, sample_weight), [-1])
        labels = tf.reshape(as_ids("labels", labels), [-1])
        nll = smoothed = cross_entropy(labels, logits)
        if self.label_smoothing:
            # smoothed = (1 - s) nll + s (logsumexp - mean(logits)). With nll = logsumexp - label_logits, this is
            # nll + s (label_logits - mean(logits)).
            label_logits = tf.gather(logits, labels, batch_dims=1)
            smoothed = nll + self.label_smoothing * (label_logits - tf.reduce_mean(logits, -1))
        right = tf.cast(tf.argmax(logits, -1, output_type=tf.int32) == labels, nll.dtype)
        counted = [tf.math.multiply_no_nan(x, weights) for x in (nll, smoothed, right)]  # the nll of padding may be inf
        return *map(tf.reduce_sum, counted), tf.reduce_sum(weights)

    def _weights(self, labels: Tensor, sample_weight: Any) -> Tensor:
        """The weights of labels, `[B, T]` in the dtype of the loss: 1, or `sample_weight`; 0 at padding."""
        return weights_of_labels(sample_weight, tf.cast(labels != PADDING, self.loss_dtype))

    def _batch(self, data: Any) -> tuple[tuple[Tensor, Tensor], Tensor, Any]:
        """`((source, target_in), target_out, sample_weight)` of a batch in either form, see the class.

        In a row where `target_out` is `target_in` shifted by one token, padding moves to the end of both. Other rows,
        whose input and labels are not one text, do not change.
        """
        x, y, sample_weight = self.unpacked(data)
        y = as_ids("y", y, 2)
        if isinstance(x, (tuple, list)):
            source, target = self.checked(x)
            self.check_shapes((source, target), y)
            target, y = checked_sizes(**{"x[1]": (target, "batch target"), "y": (y, "batch target")})
            labels = y
            full_target = tf.concat([target[:, :1], y], 1)
        else:
            self.check_shapes(x, y)
            if y.shape[1] is None:
                has_labels = tf.debugging.Assert(tf.shape(y)[1] > 1, [f"y must be {_FULL_TARGET}, got", tf.shape(y)])
                with tf.control_dependencies([has_labels]):
                    y = tf.identity(y)
            source = x
            full_target = y
            target = y[:, :-1]
            labels = y[:, 1:]
        is_shifted = tf.reduce_all(target[:, 1:] == labels[:, :-1], 1, keepdims=True)
        order = tf.where(is_shifted, packed_order(full_target != PADDING), tf.range(shape_of(full_target)[1]))
        packed = tf.gather(full_target, order, batch_dims=1)
        if sample_weight is not None:
            sample_weight = checked_weights(sample_weight, tf.cast(labels, self.loss_dtype))
            if sample_weight.shape.rank == 2:  # label i is element i + 1 of the full target
                sample_weight = tf.gather(sample_weight, tf.maximum(order[:, 1:] - 1, 0), batch_dims=1)
        target = tf.where(is_shifted, packed[:, :-1], target)
        return (source, target), packed[:, 1:], sample_weight

    def check_batch(self, x: Any, y: Any = None) -> None:
        self.check_shapes(x, y)
        if not is_library(self, Transformer):  # an own call may read other ids
            return
        source, *target = x if isinstance(x, (tuple, list)) else (x,)
        read = [("x[0]" if target else "x", source, self.input_vocab_size)]
        read += [("x[1]", ids, self.target_vocab_size) for ids in target]
        if y is not None:
            read.append(("y", y, self.target_vocab_size))
        for name, ids, n_token in read:
            check_ids(name, as_ids(name, ids), n_token)

    def check_shapes(self, x: Any, y: Any = None) -> None:
        """Raises ParameterError if known lengths of `x` and `y` of a batch do not fit the model, or one another."""
        if not all(hasattr(ids, "shape") for ids in (x if isinstance(x, (tuple, list)) else [x])):
            self.checked(x)  # raises the error of a call with these inputs, such as a dictionary
        read: dict[str, tuple[Any, int]] = {}  # `{name: (ids, how many of them the model does not read)}`
        if isinstance(x, (tuple, list)):
            read = {f"x[{i}]": (ids, 0) for i, ids in enumerate(x)}
            if y is not None and len(x) == 2:
                check_tensors({}, **{"x[1]": (x[1], "number batch target"), "y": (y, "number batch target")})
        elif y is not None:
            check_tensors({}, y=(y, "number batch target"))
            if y.shape[1] in (0, 1):
                raise tensor_error("y", y, _FULL_TARGET)
            read = {"x": (x, 0), "y": (y, 1)}  # the decoder reads `y` without its end
        for name, (ids, extra) in read.items():
            shape = tf.TensorShape(ids.shape)
            if shape.rank == 2 and shape[1] is not None:
                allowed = f"at most max_len={self.max_len}{' + 1' if extra else ''} long"
                checked_length(name, shape[1], self.max_len + extra, allowed)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step of training on one replica's share of a batch. Returns the metrics so far, over all replicas."""
        inputs, labels, weights = self._batch(data)
        weights = self.weights_in_training(labels, weights)
        key = self.step_key(tf.shape(inputs[0])[0])
        with tf.GradientTape() as tape:
            logits = self(inputs, training=True, dropout_key=key)
            sums = self.sums_of(logits, labels, weights)
            own_loss = self.own_loss(inputs, labels, logits, weights, training=True)
            share = self._share_of_mean(sums)
            loss = self.optimizer.scale_loss(self.with_penalties(share) if own_loss is None else own_loss)
        update_logs = self.apply_gradients_of(loss, tape)
        logs = {**self._logs(sums, own_loss), **update_logs, **self._measure(labels, logits, weights)}
        return self.reported(logs, inputs, labels, logits, weights, training=True)

    def test_step(self, data: Any) -> dict[str, Any]:
        """One step of evaluation on one replica's share of a batch. Returns the metrics so far, over all replicas."""
        inputs, labels, weights = self._batch(data)
        logits = self(inputs)
        own_loss = self.own_loss(inputs, labels, logits, weights, training=False)
        logs = self._logs(self.sums_of(logits, labels, weights), own_loss)
        logs |= self._measure(labels, logits, weights)
        return self.reported(logs, inputs, labels, logits, weights, training=False)

    def _measure(self, labels: Tensor, logits: Tensor, weights: Any) -> dict[str, Any]:
        """Updates the metrics that `compile` was given, and returns their results as logs."""
        return self.measure(labels, logits, self._weights(labels, None), self._weights(labels, weights))

    def loss_share(self, x: Any, y: Tensor, y_pred: Tensor, sample_weight: Any) -> Tensor:
        """This replica's share of the mean loss of the batch."""
        return self._share_of_mean(self.sums_of(y_pred, y, sample_weight))

    def _share_of_mean(self, sums: tuple[Tensor, ...]) -> Tensor:
        """This replica's share of the mean loss of the batch, from its `sums_of`."""
        _, smoothed, _, weight = sums
        return tf.math.divide_no_nan(smoothed, self.over_replicas(weight))

    def _logs(self, sums: Any, own_loss: Any) -> dict[str, Any]:
        """Updates loss and accuracy with `sums_of` a batch, and returns them as logs, see `log_means`."""
        nll, _, right, tokens = sums  # logs do not contain the smoothed nll
        return self.log_means(nll, tokens, own_loss, (self.accuracy, right))

    def input_signature(self) -> Any:
        return tuple(keras.InputSpec(shape=(None, None), dtype="int32", name=name) for name in ("source", "target"))

    # -------------------------------------------------------------------------------------------------- generation

    generate = generation.generate
    _beam_search = compiled_method(reduce_retracing=True)(generation.beam_search)
    _sample = compiled_method(reduce_retracing=True)(generation.sample_sequences)

    def start_decoding(self, source: Tensor, rows_each: int, max_new_tokens: int) -> tuple[Any, Any, Any]:
        """The state before the first `decode_step`.

        Args:
            source: int `[batch, any]`.
            rows_each: number of targets for each source, in neighbouring rows.
            max_new_tokens: the largest number of tokens of a target, for models whose keys and values cannot be cached.

        Returns:
            `(caches, sources, seen)`: the empty cache of targets, the keys and values of the source, and the mask of
            the source, true at tokens. If keys and values cannot be cached, they are the empty targets, the source, and
            `None`. Axis 1 of the caches, also of the empty targets, is the row: the beam search selects rows there.
            Axis 2 is the position.
        """
        if self.why_not_cached() is not None:
            source = tf.repeat(source, rows_each, 0)
            return tf.zeros([1, shape_of(source)[0], max_new_tokens], tf.int32), source, None
        return self._start_cached(source, rows_each)

    def _start_cached(self, source: Tensor, rows_each: int) -> tuple[Any, Any, Any]:
        """The state before the first step with cached keys and values, see `start_decoding`."""
        source = pack(source != PADDING, source)[1]
        padding_mask = create_padding_mask(source)  # [B, 1, 1, S]
        enc_output = self.encoder(source, padding_mask)
        depth = self.d_model // self.num_heads
        empty = tf.zeros([self.num_heads, shape_of(source)[0] * rows_each, 0, depth], enc_output.dtype)
        caches = tuple((empty, empty) for _ in self.decoder.stacked)  # keys and values of each layer
        seen = tf.transpose(padding_mask == 0, [1, 0, 2, 3])  # [1, B, 1, S]
        return caches, tuple(layer.source_heads(enc_output) for layer in self.decoder.stacked), seen

    def decode_step(
        self, ids: Tensor, position: Tensor, caches: Any, sources: Any, seen: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Reads the token `ids` `[B]` at `position` of each target, and predicts the token after it.

        `caches`, `sources` and `seen` are results of `start_decoding`; later steps get the `caches` of the step before.

        Returns:
            `(log_probs, caches)`: log-probabilities of the next token, float32 (float64 if the dtype is) `[B, V]`, and
            the caches with the keys and values of `ids`.
        """
        if seen is None:  # without cached keys and values, the call reads the whole target so far: `caches`, [1, B, N]
            targets = tf.where(tf.range(shape_of(caches)[2]) == position, ids[:, None], caches[0])
            logits = self((sources, targets))
            return tf.nn.log_softmax(tf.gather(logits, position, axis=1)), targets[None]
        return self._cached_step(ids, position, caches, sources, seen)

    def _cached_step(
        self, ids: Tensor, position: Tensor, caches: Any, sources: Sequence[Any], seen: Tensor
    ) -> tuple[Tensor, Any]:
        """`decode_step` with cached keys and values."""
        memory = TargetSoFar(self.decoder, position, caches, sources, seen)
        hidden, _ = self.decoder(ids[:, None], enc_output=memory)
        log_probs = tf.nn.log_softmax(self.logits(hidden)[:, 0])
        return log_probs, tuple(layer.updated_cache() for layer in memory.layers)

    def why_not_cached(self) -> Exception | None:
        """The error of a part that cannot be computed from cached keys and values, or `None` if every part can."""

        def one_cached_step():
            """Decodes one dummy token. It is only traced: an error means that the model cannot be cached."""
            if not is_library(self, Transformer):
                raise NotCacheable(f"{type(self).__name__} has its own call")
            caches = self._start_cached(tf.ones([1, 1], tf.int32), 1)
            return self._cached_step(tf.ones([1], tf.int32), tf.constant(0), *caches)[0]

        def cached_and_whole():
            """Log-probabilities after each token of a target, from cached keys and values, and from one call."""
            length = min(3, self.max_len)
            source, target = (
                1 + tf.range(length)[None] % (size - 1) for size in (self.input_vocab_size, self.target_vocab_size)
            )
            caches, *rest = self._start_cached(source, 1)
            cached = []
            for i in range(length):
                log_probs, caches = self._cached_step(target[:, i], tf.constant(i), caches, *rest)
                cached.append(log_probs)
            return tf.stack(cached, 1), tf.nn.log_softmax(self((source, target)))

        has_symbols = min(self.input_vocab_size, self.target_vocab_size) > 1  # besides padding
        return why_not_cached(self, one_cached_step, cached_and_whole if has_symbols else None)


def _after_elements(hidden: Tensor, mask: Tensor) -> Tensor:
    """Moves packed states, `[B, T, E]`, back to the positions of the elements, where `mask` `[B, T]` is true.

    Padding before an element gets the state of the last element before the padding, because the same token follows. A
    row without such padding is packed already, and does not change.
    """
    has_gap = tf.reduce_any(mask[:, 1:] & ~mask[:, :-1], 1, keepdims=True)
    positions = tf.maximum(tf.cumsum(tf.cast(mask, tf.int32), 1) - 1, 0)
    return tf.gather(hidden, tf.where(has_gap, positions, tf.range(shape_of(mask)[1])), batch_dims=1)
