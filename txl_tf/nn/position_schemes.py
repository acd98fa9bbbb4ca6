"""What a network knows of positions: one scheme for all its layers, chosen by name.

    scheme       what it changes                                                        paper
    relative     scores, by a learned product with the sinusoids of the distance        Dai et al. 2019, section 3.3
    sinusoids    embeddings, by the sinusoids of the place in the segment               Vaswani et al. 2017, section 3.5
    learned      embeddings, by a learned row for the place in the segment              Gehring et al. 2017, section 3.1
    alibi        scores, by a slope times the distance                                  Press et al. 2022
    rotary       queries and keys, which are turned by an angle of their number         Su et al. 2021

The equation of attention (`attention` in `txl_tf/equations.py`) asks a scheme for queries, for the angle of queries and
keys, and for scores. It does so in training and with every kind of cached memory, so a scheme is written once.

To write a scheme, see "A scheme of positions of your own" in docs/layers.md.

Shapes:
    B: batch      T: tgt_len, the queries      M: mem_len      K: keys, M + T      H: n_head      D: d_head
    E: d_model
"""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import SCHEMES, NetworkConfig
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.dtypes import at_least_float32, wide_dtype
from txl_tf.nn.ops import own_initializer
from txl_tf.nn.positions import inverse_frequencies, positional_embedding, relative_positions


class Positions:
    """A scheme that knows nothing of positions, and the base of all others.

    A scheme with weights is a Keras layer, too: `class Buckets(Positions, keras.layers.Layer)`.

    Attributes:
        known_as: the name that `positions=` takes, see `register_positions`.
        cached_by: "ring" if only the distance between a query and a key counts: cached keys stay what they are while
            the text goes on. "window" if places count from the beginning of a segment.
        refused: `{argument of the network: why the scheme does not take it}`.
    """

    known_as = None
    cached_by = "ring"
    refused = {
        "clamp_len": "is about the sinusoids of distances, which only positions='relative' has",
        "untie_r": "is about the biases u and v, which only positions='relative' has",
        "context_len": "is the window of places in a segment, which positions='sinusoids' and 'learned' have",
    }

    def check(self, owner):
        """Raises ParameterError where the scheme does not fit its `owner`: a network, its `Config` or an attention."""

    def check_refused(self, name, value):
        """Raises ParameterError for an argument of a network that the scheme does not take."""
        reason = self.refused.get(name)
        if reason is not None and value != getattr(NetworkConfig, name):
            message = f"{name} {reason}: leave it out with positions={self.known_as!r}, got {value}"
            raise ParameterError(name, value, f"left out with positions={self.known_as!r}", message)

    def overrides(self, *names, base=None):
        """Whether any of these methods is another than that of a `base`, `Positions` unless it is given."""
        return any(getattr(type(self), name) is not getattr(base or Positions, name) for name in names)

    @property
    def has_own_entrance(self):
        """Whether a user's class says what the layers get, in another way than the library's class that it extends."""
        of_library = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        return self.overrides("enter", "of_layer", base=of_library)

    def make_weights(self, owner: Any) -> None:
        """Makes the weights, for a network or an attention, which has `n_head`, `d_head` and `d_model`."""

    # What a network does.

    def enter(self, network, embeddings, mem_len, dropout_keys, zero=0):
        """What the layers get.

        Args:
            network: `TransformerXL`.
            embeddings: `[B, T, E]`.
            mem_len: M.
            dropout_keys: of the embeddings, and of what all layers know of positions.
            zero: 0, see `unknown_zero`.

        Returns:
            `(hidden, shared)`: `[B, T, E]`, and what `of_layer` takes.
        """
        return dropout(embeddings, network.dropout, dropout_keys[0]), None

    def of_layer(self, network: Any, i: int, shared: Any) -> tuple:
        """The arguments of the call of layer i that are about positions."""
        return ()

    # What attention does.

    def join(self, layer):
        """Makes the attention of a network's layer ask this scheme.

        Raises:
            ParameterError: the layer has no attention that asks schemes.
        """
        if not self.overrides("turn", "queries", "scores"):
            return
        if hasattr(getattr(layer, "rel_attn", None), "scheme"):
            layer.rel_attn.scheme = self
        elif type(self) is not Relative:  # whose table the call of every layer gets
            allowed = f"'relative', 'sinusoids' or 'learned' with {type(layer).__name__}, which has no rel_attn"
            raise ParameterError("positions", self.known_as, allowed)

    @property
    def turns(self):
        """Whether the scheme turns queries and keys."""
        return self.overrides("turn")

    @property
    def scores_positions(self):
        """Whether the scheme adds scores."""
        return self.overrides("scores")

    def turn(self, x: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        """Queries or keys `[..., n, D]`, of tokens before which `numbers`, int32 `[..., n]`, other tokens stand."""
        return x

    def queries(self, q: tf.Tensor, w: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Queries for what is at the keys, and for where they are: scaled, `[H, ..., T, D]` both.

        Args:
            q: `[H, ..., T, D]`.
            w: `txl_tf.equations.Attention`.
        """
        q = _times(q, w.scale)
        return q, q

    def scores(self, q: tf.Tensor, places: Any) -> tf.Tensor | None:
        """What is added to the products of queries and keys, or `None` for nothing.

        Args:
            q: `[H, ..., T, D]`, the queries for where the keys are.
            places: `txl_tf.equations.Places`, or another object with its functions.

        Returns:
            `[H, ..., T, K]`, or `[H, T, K]` alike for all rows of a batch, in the dtype of `q`.
        """


def _times(x, scale):
    return x if scale == 1.0 else x * scale


def register_positions(name):
    """Decorator of a subclass of `Positions`: makes it known as `positions=name`, in flags and `config.json`, too.

    Raises:
        ParameterError: the library has a scheme of this name, or the class is no subclass of `Positions`.
    """
    if not isinstance(name, str) or name in _BUILT_IN:
        raise ParameterError("name", name, f"text, and none of the library's names: {', '.join(_BUILT_IN)}")

    def register(cls):
        if not (isinstance(cls, type) and issubclass(cls, Positions)):
            raise ParameterError("cls", cls, "a subclass of txl_tf.layers.Positions")
        cls.known_as = name
        SCHEMES[name] = cls
        return cls

    return register


def scheme_of(positions):
    """A scheme for the argument `positions` of a layer or network: a name, or a scheme, which is returned."""
    if isinstance(positions, Positions):
        if type(positions) not in (Positions, SCHEMES.get(positions.known_as)):  # a configuration could not name it
            raise ParameterError("positions", positions, "of a class given to register_positions")
        return positions
    if positions is None:
        return Positions()
    if not isinstance(positions, str) or positions not in SCHEMES:
        raise ParameterError("positions", positions, [*SCHEMES, "or a name given to register_positions"])
    scheme = SCHEMES[positions]()
    if isinstance(scheme, keras.Layer):
        scheme.name = "positions"  # that of its weights in files, which Keras would count up
    return scheme


def checked_scheme(positions, owner):
    """`scheme_of` the `positions` of a network or of its `Config`, its `owner`, which must fit the scheme."""
    scheme = scheme_of(positions)
    for name in scheme.refused:
        scheme.check_refused(name, getattr(owner, name))
    scheme.check(owner)
    return scheme


class Relative(Positions):
    """Scores by distance: a query meets the projected sinusoids of the distance (section 3.3).

    The distance of a key is `i - j`, R_(i-j) its sinusoids, and the score of a query i and a key j

        (q_i + u).k_j + (q_i + v).(R_(i-j) W_(k,R))        times D**-0.5

    u and v are `r_w_bias` and `r_r_bias` of the network, W_(k,R) is the `r_kernel` of the layer.
    """

    known_as = "relative"
    refused = {"context_len": Positions.refused["context_len"]}

    def make_weights(self, owner):
        owner.r_w_bias, owner.r_r_bias = owner.build_biases()

    def table(self, network, klen, zero=0):
        """The sinusoids of the distances to `klen` keys, farthest first: `[1, klen, E]`."""
        dtype = wide_dtype(network.compute_dtype)
        distances = relative_positions(klen, network.clamp_len, dtype) + tf.cast(zero, dtype)
        return positional_embedding(distances, inverse_frequencies(network.d_model, dtype))

    def enter(self, network, embeddings, mem_len, dropout_keys, zero=0):
        r = tf.cast(network.position_table(mem_len + keras.ops.shape(embeddings)[1], zero), network.compute_dtype)
        # One mask for all layers and rows, as in the original.
        r = dropout(r, network.dropout, dropout_keys[1], row_axis=None)
        return dropout(embeddings, network.dropout, dropout_keys[0]), r

    def of_layer(self, network, i, shared):
        return shared, *network.biases(i)  # r, r_w_bias, r_r_bias

    def queries(self, q, w):
        return _times(q + w.u, w.scale), _times(q + w.v, w.scale)

    def scores(self, q, places):
        return places.scores_by_distance(q)


class Sinusoids(Positions):
    """The sinusoids of the places `0 ... T - 1` in a segment are added to its embeddings.

    A memory carries the places of its own segment: a key of the memory and one of the segment may have the same place,
    and nothing tells which is older. Relative positions mend that.
    """

    known_as = "sinusoids"
    cached_by = "window"
    refused = {
        **dict.fromkeys(("clamp_len", "untie_r"), "is about distances, of which absolute positions have none"),
        "reset_token": "resets the memory within a segment, whose absolute positions would go on",
    }

    def table(self, network, length, zero=0):
        """Rows for the places `0 ... length - 1`: `[1, length, E]`."""
        dtype = wide_dtype(network.compute_dtype)
        places = tf.range(tf.cast(length, dtype)) + tf.cast(zero, dtype)
        return positional_embedding(places, inverse_frequencies(network.d_model, dtype))

    def enter(self, network, embeddings, mem_len, dropout_keys, zero=0):
        rows = tf.cast(network.position_table(keras.ops.shape(embeddings)[1], zero), network.compute_dtype)
        return dropout(embeddings + rows, network.dropout, dropout_keys[0]), None


class Learned(Sinusoids):
    """Learned rows for the places `0 ... T - 1` in a segment are added to its embeddings: `pos_table`, `[W, E]`.

    W is the network's `context_len`, the most tokens of a segment.
    """

    known_as = "learned"

    def make_weights(self, owner):
        shape = owner.context_len, owner.d_model
        owner.pos_table = owner.add_table("pos_table", shape, own_initializer(owner.initializer))

    def table(self, network, length, zero=0):
        most = network.context_len
        if isinstance(length, int) and length > most:
            allowed = f"at most context_len={most} tokens, as many positions are learned"
            raise ParameterError("tokens", length, allowed, f"a segment must have {allowed}, got {length}")
        return at_least_float32(tf.convert_to_tensor(network.pos_table)[None, :length])


class Alibi(Positions):
    """Scores fall with the distance: `q_i.k_j * D**-0.5 - slope * (i - j)`, with a slope for every head."""

    known_as = "alibi"

    def scores(self, q, places):
        distances = tf.cast(places.distances(q), wide_dtype(q))  # [T, K]
        slopes = tf.constant(alibi_slopes(q.shape[0]), distances.dtype)
        return tf.cast(-slopes[:, None, None] * distances, q.dtype)  # [H, T, K]


def alibi_slopes(n_head):
    """The slopes of Press et al., their program's `get_slopes`: `2^(-8 / n), 2^(-16 / n), ...` for n heads.

    If n is no power of 2, they are those of the next lower power, and then every other one of the next higher.

    Returns:
        List of `n_head` floats.
    """
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes if power == n_head else slopes + alibi_slopes(2 * power)[::2][: n_head - power]


class Rotary(Positions):
    """Queries and keys are turned: dimensions d and `d + D / 2` of token n by the angle `n * 10000^(-2d / D)`.

    The product of a turned query and a turned key depends on their distance alone.
    """

    known_as = "rotary"

    def check(self, owner):
        if owner.d_head % 2:
            raise ParameterError(
                "d_head", owner.d_head, "even with positions='rotary', which turns pairs of dimensions"
            )

    def turn(self, x, numbers):
        # Angles are int32 fractions of a turn, which go on from 1 to 0 by themselves: exact, however long the text is.
        fractions = _fractions_of_turn(x.shape[-1]) * numbers[..., None]  # [..., n, D / 2]
        angles = tf.cast(fractions, wide_dtype(x)) * (2 * math.pi / 2**32)
        cos, sin = tf.cos(angles), tf.sin(angles)
        left, right = tf.split(tf.cast(x, cos.dtype), 2, -1)
        return tf.cast(tf.concat([left * cos - right * sin, right * cos + left * sin], -1), x.dtype)


def _fractions_of_turn(d_head):
    """How far a pair of dimensions turns from one token to the next: int32 `[D / 2]`, in units of 2^-32 turns."""
    frequencies = 10000.0 ** (-np.arange(0, d_head, 2) / d_head)
    return np.round(frequencies / (2 * np.pi) * 2**32).astype("int32")


_BUILT_IN = {cls.known_as: cls for cls in (Relative, Sinusoids, Learned, Alibi, Rotary)}
SCHEMES.update(_BUILT_IN)
