"""Schemes of positions. A network has one scheme for all its layers, chosen by name.

    scheme       what it changes                                                        paper
    relative     scores, by a learned product with the sinusoids of the distance        Dai et al. 2019, section 3.3
    sinusoids    embeddings, by the sinusoids of the position in the segment            Vaswani et al. 2017, section 3.5
    learned      embeddings, by a learned row for the position in the segment           Gehring et al. 2017, section 3.1
    alibi        scores, by a slope times the distance                                  Press et al. 2022
    rotary       queries and keys, which it rotates by an angle for their position      Su et al. 2021

The equation of attention (`attention` in `txl_tf/equations.py`) calls the scheme to change queries, to rotate queries
and keys, and to add scores. It does this in training and with every kind of cached memory, so a scheme is written once.

To write a scheme, see "A scheme of positions of your own" in docs/layers.md. A scheme of the library itself also needs
its name in `SCHEMES` and `REFUSED` of `txl_config/models.py`, and its class in `_BUILT_IN` below. If its `enter` calls
`network.position_table`, it needs a method `table(network, length, zero)`, which computes this table.

Shapes:
    B: batch      T: tgt_len, the queries      M: mem_len      K: keys, M + T      H: n_head      D: d_head
    E: d_model
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import keras
import tensorflow as tf

from txl_config.models import OWN_SCHEMES, REFUSED, REFUSED_BY_DEFAULT
from txl_tf.config import SCHEMES, NetworkConfig
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.dtypes import at_least_float32, wide_dtype
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.checks import checked_length
from txl_tf.nn.ops import own_initializer
from txl_tf.nn.positions import inverse_frequencies, positional_embedding, relative_positions, rotate


class Positions:
    """A scheme without information about positions, and the base class of all schemes.

    A scheme with weights adds them to its owner (`make_weights`), or is itself a Keras layer that has them: `class
    Buckets(Positions, keras.layers.Layer)`.

    Attributes:
        known_as: the name for the argument `positions`, see `register_positions`.
        cached_by: "ring" if the scheme depends only on the distance between query and key, so that cached keys do not
            change while a text continues; "window" if it depends on the position in a segment.
        refused: `{argument of the network: why the scheme does not accept it}`.
    """

    known_as: Any = None
    cached_by: str = "ring"
    refused: Mapping[str, str] = REFUSED_BY_DEFAULT

    def check(self, owner: Any) -> None:
        """Raises ParameterError if the scheme does not fit its `owner`: a network, its `Config` or an attention."""

    def check_refused(self, name: str, value: Any) -> None:
        """Raises ParameterError if the scheme does not accept the argument `name` and its value is not the default."""
        reason = self.refused.get(name)
        if reason is not None and value != getattr(NetworkConfig, name):
            message = f"{name} {reason}: leave it out with positions={self.known_as!r}, got {value}"
            raise ParameterError(name, value, f"left out with positions={self.known_as!r}", message)

    def overrides(self, *names: str, base: type | None = None) -> bool:
        """Whether the scheme overrides any of these methods of the class `base`, by default `Positions`."""
        return any(getattr(type(self), name) is not getattr(base or Positions, name) for name in names)

    @property
    def has_own_entrance(self) -> bool:
        """Whether a user's subclass overrides `enter` or `of_layer` of the library's class that it derives from."""
        library_class = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        return self.overrides("enter", "of_layer", base=library_class)

    def make_weights(self, owner: Any) -> None:
        """Makes the weights for an `owner` with `n_head`, `d_head` and `d_model`: a network or an attention."""

    # These methods are called by a network.

    def enter(self, network: Any, embeddings: Tensor, mem_len: Size, dropout_keys: Any, zero: Size = 0) -> Any:
        """The inputs of the layers. By default, the embeddings with dropout, and no information that layers share.

        Args:
            network: `TransformerXL`.
            embeddings: `[B, T, E]`.
            mem_len: M.
            dropout_keys: two keys, for the embeddings and for `shared`; each may be `None` for no dropout.
            zero: 0, see `unknown_zero` of `transformer_xl/network.py`. A scheme adds it to a table that it computes.

        Returns:
            `(hidden, shared)`: `[B, T, E]`, the input of the first layer; and the information about positions that all
            layers share, for `of_layer`.
        """
        return dropout(embeddings, network.dropout, dropout_keys[0]), None

    def of_layer(self, network: Any, i: int, shared: Any) -> tuple[Any, ...]:
        """The arguments about positions in the call of layer i, after its input. By default, there are none.

        `shared` is the second result of `enter`.
        """
        return ()

    # These methods are called by attention.

    def join(self, layer: Any) -> None:
        """Makes the attention of a network's layer use this scheme.

        A scheme that changes only the input of the layers does nothing here.

        Raises:
            ParameterError: the layer has no attention that uses schemes. `Relative` does not need one.
        """
        if not self.overrides("turn", "queries", "scores"):
            return
        if hasattr(getattr(layer, "rel_attn", None), "scheme"):
            layer.rel_attn.scheme = self
        elif type(self) is not Relative:  # its table and biases are arguments of the layer's call
            allowed = f"'relative', 'sinusoids' or 'learned' with {type(layer).__name__}, which has no rel_attn"
            raise ParameterError("positions", self.known_as, allowed)

    @property
    def turns(self) -> bool:
        """Whether the scheme rotates queries and keys."""
        return self.overrides("turn")

    @property
    def scores_positions(self) -> bool:
        """Whether the scheme adds scores."""
        return self.overrides("scores")

    def turn(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Rotates queries or keys. By default, they do not change.

        Args:
            x: `[..., n, D]`, queries or keys.
            numbers: int32 `[..., n]`, how many tokens precede the token of each query or key.

        Returns:
            A tensor like `x`.
        """
        return x

    def queries(self, q: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        """The queries for the content of the keys, and the queries for their positions. By default, they are the same.

        Args:
            q: `[H, ..., T, D]`.
            w: `txl_tf.equations.Attention`.

        Returns:
            Two tensors like `q`, scaled.
        """
        q = _times(q, w.scale)
        return q, q

    def scores(self, q: Tensor, places: Any) -> Tensor | None:
        """Scores that are added to the products of queries and keys, or `None`.

        Args:
            q: `[H, ..., T, D]`, the queries for the positions of the keys.
            places: `txl_tf.equations.KeyPositions`.

        Returns:
            `[H, ..., T, K]`; or `[H, T, K]`, the same for all rows of a batch; in the dtype of `q`. For a single query,
            also a list with the scores of each head. `None`: no scores are added.
        """


PositionsClass = TypeVar("PositionsClass", bound=type[Positions])


def _times(x: Tensor, scale: float) -> Any:
    """`x * scale`, without a product if `scale` is 1."""
    return x if scale == 1.0 else x * scale


def register_positions(name: str) -> Callable[[PositionsClass], PositionsClass]:
    """Decorator of a subclass of `Positions`: registers it as `positions=name`, also for flags and `config.json`.

    Raises:
        ParameterError: the name is not text, or the library has a scheme with this name. Or, when the
            decorator is applied, the class is not a subclass of `Positions`.
    """
    if not isinstance(name, str) or name in _BUILT_IN:
        raise ParameterError("name", name, f"text, and none of the library's names: {', '.join(_BUILT_IN)}")

    def register(cls: PositionsClass) -> PositionsClass:
        """Registers the class, and returns it."""
        if not (isinstance(cls, type) and issubclass(cls, Positions)):
            raise ParameterError("cls", cls, "a subclass of txl_tf.layers.Positions")
        cls.known_as = name
        SCHEMES[name] = cls
        REFUSED[name] = cls.refused
        return cls

    return register


def scheme_of(positions: Any) -> Any:
    """A scheme for the argument `positions` of a layer or network: a name, or `None` for no positions.

    An argument that is a scheme already is returned unchanged. Raises ParameterError if there is no such scheme, or its
    class is not registered.
    """
    if isinstance(positions, Positions):
        if type(positions) not in (Positions, SCHEMES.get(positions.known_as)):  # a configuration could not name it
            raise ParameterError("positions", positions, "of a class given to register_positions")
        return positions
    if positions is None:
        return Positions()
    if not isinstance(positions, str) or positions not in SCHEMES:
        raise ParameterError("positions", positions, [*SCHEMES, OWN_SCHEMES])
    scheme: Any = SCHEMES[positions]()
    if isinstance(scheme, keras.Layer):
        scheme.name = "positions"  # files contain this name; Keras would add a number to it
    return scheme


def checked_scheme(positions: Any, owner: Any) -> Any:
    """`scheme_of` the argument `positions` of an `owner`, a network or its `Config`.

    Raises ParameterError also if another argument of the owner does not fit the scheme.
    """
    scheme = scheme_of(positions)
    for name in scheme.refused:
        scheme.check_refused(name, getattr(owner, name))
    scheme.check(owner)
    return scheme


class Relative(Positions):
    """Relative positions: scores by the projected sinusoids of the distance (section 3.3).

    R_(i-j) are the sinusoids of the distance `i - j` from query i back to key j. Their score is

        (q_i + u).k_j + (q_i + v).(R_(i-j) W_(k,R))        times D**-0.5

    u and v are `r_w_bias` and `r_r_bias` of the network, W_(k,R) is the `r_kernel` of the layer.
    """

    known_as = "relative"
    refused = REFUSED["relative"]

    def make_weights(self, owner: Any) -> None:
        """Makes u and v, as `r_w_bias` and `r_r_bias` of the owner: one pair, or with `untie_r` one for each layer."""
        n_layer = [owner.n_layer] if owner.untie_r else []
        for name in ("r_w_bias", "r_r_bias"):
            owner.add_table(name, [*n_layer, owner.n_head, owner.d_head], own_initializer(owner.initializer))

    def table(self, network: Any, klen: Size, zero: Size = 0) -> Any:
        """The sinusoids of the distances to `klen` keys, farthest first: `[1, klen, E]`."""
        dtype = wide_dtype(network.compute_dtype)
        distances: Any = relative_positions(klen, network.clamp_len, dtype)
        distances += tf.cast(zero, dtype)
        return positional_embedding(distances, inverse_frequencies(network.d_model, dtype))

    def enter(self, network: Any, embeddings: Tensor, mem_len: Size, dropout_keys: Any, zero: Size = 0) -> Any:
        """The embeddings with dropout, and the table of distances, `[1, M + T, E]`, with dropout of its own."""
        r = tf.cast(network.position_table(mem_len + shape_of(embeddings)[1], zero), network.compute_dtype)
        # One mask for all layers and rows, as in the original.
        r = dropout(r, network.dropout, dropout_keys[1], row_axis=None)
        return dropout(embeddings, network.dropout, dropout_keys[0]), r

    def of_layer(self, network: Any, i: int, shared: Any) -> tuple[Any, ...]:
        return shared, *network.biases(i)  # r, r_w_bias, r_r_bias

    def queries(self, q: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        """`q + u` for the content of the keys and `q + v` for their distances, scaled."""
        return _times(q + w.u, w.scale), _times(q + w.v, w.scale)

    def scores(self, q: Tensor, places: Any) -> Any:
        """Products of the queries with the projected sinusoids of the distances."""
        return places.scores_by_distance(q)


class Sinusoids(Positions):
    """Absolute positions: adds the sinusoids of the positions `0 ... T - 1` in a segment to its embeddings.

    A memory contains the positions in its own segment. So a key of the memory and a key of the segment can have the
    same position, and the model cannot know which is older. Relative positions solve this.
    """

    known_as = "sinusoids"
    cached_by = "window"
    refused = REFUSED["sinusoids"]

    def table(self, network: Any, length: Size, zero: Size = 0) -> Any:
        """Rows for the positions `0 ... length - 1`: `[1, length, E]`."""
        dtype = wide_dtype(network.compute_dtype)
        positions: Any = tf.range(tf.cast(length, dtype))
        positions += tf.cast(zero, dtype)
        return positional_embedding(positions, inverse_frequencies(network.d_model, dtype))

    def enter(self, network: Any, embeddings: Tensor, mem_len: Size, dropout_keys: Any, zero: Size = 0) -> Any:
        """The embeddings plus the rows of their positions, with dropout. Layers share no information: `None`."""
        rows = tf.cast(network.position_table(shape_of(embeddings)[1], zero), network.compute_dtype)
        return dropout(embeddings + rows, network.dropout, dropout_keys[0]), None


class Learned(Sinusoids):
    """Learned absolute positions: adds a row of `pos_table`, `[W, E]`, for each of the positions `0 ... T - 1`.

    W is the network's `context_len`, the maximum number of tokens in a segment.
    """

    known_as = "learned"

    @staticmethod
    def checked_segment(network: Any, length: Size) -> Size:
        """`checked_length` of the tokens of a segment: at most `context_len`."""
        allowed = f"at most context_len={network.context_len} tokens, the number of learned positions"
        return checked_length("tokens", length, network.context_len, allowed, f"a segment must have {allowed}")

    def make_weights(self, owner: Any) -> None:
        """Makes the learned table, as `pos_table` of the owner."""
        owner.add_table("pos_table", [owner.context_len, owner.d_model], own_initializer(owner.initializer))

    def table(self, network: Any, length: Size, zero: Size = 0) -> Any:
        """The first `length` rows of the learned table, `[1, length, E]`.

        Raises ParameterError if there are fewer. If `length` is a tensor, the graph checks it, see `checked_length`.
        `zero` is not used. It keeps XLA from writing a computed table into its program, see `unknown_zero`, and this
        table is a weight.
        """
        length = self.checked_segment(network, length)
        return at_least_float32(tf.convert_to_tensor(network.pos_table)[None, :length])


class Alibi(Positions):
    """Attention with linear biases: scores `q_i.k_j * D**-0.5 - slope * (i - j)`, with a slope for every head."""

    known_as = "alibi"

    def scores(self, q: Tensor, places: Any) -> Any:
        """`-slope * distance` for every head: `[H, T, K]`, whatever the values of the queries `q` are."""
        distances: Any = tf.cast(places.distances(q), wide_dtype(q))  # [T, K]
        slopes: Any = tf.constant(alibi_slopes(q.shape[0]), distances.dtype)
        return tf.cast(-slopes[:, None, None] * distances, q.dtype)  # [H, T, K]


def alibi_slopes(n_head: int) -> list[float]:
    """The slopes of Press et al. (`get_slopes` of their program): `2^(-8 / n), 2^(-16 / n), ...` for n heads.

    If n is not a power of 2, they are the slopes for the next lower power, followed by every other slope for the next
    higher power.

    Returns:
        List of `n_head` floats.
    """
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes if power == n_head else slopes + alibi_slopes(2 * power)[::2][: n_head - power]


class Rotary(Positions):
    """Rotary positions: rotates dimensions d and `d + D / 2` of token n by the angle `n * 10000^(-2d / D)`.

    Queries and keys are rotated, so that their product depends only on their distance.
    """

    known_as = "rotary"

    def check(self, owner: Any) -> None:
        """Raises ParameterError if `d_head` is odd."""
        if owner.d_head % 2:
            allowed = "even with positions='rotary', which rotates pairs of dimensions"
            raise ParameterError("d_head", owner.d_head, allowed)

    def turn(self, x: Tensor, numbers: Tensor) -> Any:
        return rotate(x, numbers)


_BUILT_IN: dict[str, type[Positions]] = {cls.known_as: cls for cls in (Relative, Sinusoids, Learned, Alibi, Rotary)}
SCHEMES.update(_BUILT_IN)
