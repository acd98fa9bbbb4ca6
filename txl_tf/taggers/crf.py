"""The linear-chain conditional random field: scores of paths of tags, the best path, and probabilities of tags.

    score(y) = start[y_0] + sum_t emissions[t, y_t] + sum_t transitions[y_{t-1}, y_t] + end[y_last]
    p(y) = exp(score(y)) / sum over all paths

Sums over paths are loops over time. All functions also work in graphs and under XLA. They compute in float64 if an
argument is float64, else in float32. In the functions, the elements of a row must come before its padding. The call,
`nll` and `decode` of the layer allow padding anywhere. A row without elements has one path, the empty path, with the
score 0.

Shapes:
    B: batch      T: time, at least 1      K: tags
"""

from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError, brief
from txl_tf.kernels.dtypes import at_least_float32, wide_dtype
from txl_tf.kernels.gradients import custom_gradient
from txl_tf.kernels.packing import pack, unpack
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.checks import as_array, as_ids, check_sizes, check_tensors, check_width, checked_sizes, tensor_error
from txl_tf.nn.masks import as_bool, mask_of_call
from txl_tf.nn.settings import remember_graph

FORBIDDEN = -10000.0  # is added to the score of a path for each forbidden transition, as in fastNLP


def crf_nll(
    emissions: Tensor, tags: Tensor, mask: Tensor, transitions: Tensor, start: Any = None, end: Any = None
) -> Tensor:
    """The negative log-likelihood of paths of tags (fastNLP's `ConditionalRandomField.forward`).

    Args:
        emissions: `[B, T, K]`, scores of single tags.
        tags: int `[B, T]`. Tags at padding are ignored.
        mask: bool, or integers 0 and 1, `[B, T]`, true at elements, which come first in every row; `None` without
            padding.
        transitions: `[K, K]`, scores of a tag (row) before another (column).
        start, end: `[K]`, scores of the first and of the last tag; `None` without such scores.

    Returns:
        `[B]` in nats: one number for the path of each row, 0 for a row without elements.
    """
    emissions, transitions, mask = _path_scores(emissions, mask, transitions, start, end)
    # Long sums of scores lose digits, so each element's term is subtracted before the sum.
    return tf.reduce_sum(log_norm(emissions, transitions, mask) - _path_terms(emissions, tags, mask, transitions), 1)


def _bool_mask(emissions: Tensor, mask: Tensor) -> Tensor:
    """The mask of a call as bool `[B, T]`, all true if it is `None`."""
    return tf.fill(tf.shape(emissions)[:2], True) if mask is None else as_bool("mask", mask)


def checked_tags(tags: Tensor, mask: Tensor, n_tag: int) -> Tensor:
    """`tags` as int32, with 0 at padding.

    If the tag of an element is not from 0 to `n_tag - 1`, it raises a ParameterError; in a graph, running the graph
    raises an InvalidArgumentError. Under XLA, nothing is checked.
    """
    tags = tf.where(mask, as_ids("tags", tags, 2), 0)
    extremes = [tf.reduce_min(tags), tf.reduce_max(tags)]
    valid = (extremes[0] >= 0) & (extremes[1] < n_tag)
    message = (
        f"tags must lie between 0 and {n_tag - 1} at every element that is not padding, got as minimum and maximum"
    )
    if tf.executing_eagerly():
        if not valid:
            allowed = f"from 0 to {n_tag - 1} wherever there is an element"
            raise ParameterError("tags", tags, allowed, f"{message} {extremes[0]} and {extremes[1]}")
        return tags
    with tf.control_dependencies([tf.debugging.Assert(valid, [message, *extremes])]):
        return tf.identity(tags)


def _path_scores(
    emissions: Tensor, mask: Tensor, transitions: Tensor, start: Any = None, end: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(emissions, transitions, mask)`: scores in the dtype of the computation, and a bool mask. Args: see `crf_nll`.

    The scores of starts and ends are added to the emissions of the first and last elements. Emissions at padding are 0:
    large ones would overflow in the gradients, and infinity times 0 is NaN.
    """
    mask = _bool_mask(emissions, mask)
    dtype = wide_dtype(emissions, transitions, start, end)
    emissions = tf.where(mask[..., None], tf.cast(emissions, dtype), tf.zeros([], dtype))
    if start is not None:
        emissions = tf.concat([emissions[:, :1] + tf.cast(start, dtype), emissions[:, 1:]], 1)
    if end is not None:
        last = mask & tf.logical_not(tf.pad(mask[:, 1:], [[0, 0], [0, 1]]))
        emissions += tf.where(last[..., None], tf.cast(end, dtype), tf.zeros([], dtype))
    return emissions, tf.cast(transitions, dtype), mask


def _path_terms(emissions: Tensor, tags: Tensor, mask: Tensor, transitions: Tensor) -> Tensor:
    """The contribution of each element to the score of a path: its emission and the transition to it.

    Returns:
        `[B, T]`, 0 at padding.
    """
    tags = tf.where(mask, tf.cast(tags, tf.int32), 0)
    own = tf.gather(emissions, tags, batch_dims=2)
    steps = tf.gather_nd(transitions, tf.stack([tags[:, :-1], tags[:, 1:]], -1))  # [B, T - 1]
    return tf.where(mask, own + tf.pad(steps, [[0, 0], [1, 0]]), 0.0)


@custom_gradient
def log_norm(emissions: Tensor, transitions: Tensor, mask: Tensor) -> Any:
    """The logarithm of the sum over all paths of `exp(score)`, as a sum over elements: `[B, T]`, 0 at padding.

    The arguments are results of `_path_scores`. The gradient is right only for the sum over a row: it needs the same
    upstream gradient at all of its elements.

    The gradients are probabilities of tags and of pairs of tags. They need only one more loop, that of `_betas`.
    TensorFlow's own gradient would keep all arrays of the forward loop, and run it backwards.
    """
    alphas, largest = _alphas(emissions, transitions, mask)
    rest = _logsumexp(alphas[:, -1:], 2)  # [B, 1], of the last element
    terms = tf.concat([largest[:, :1] + rest, largest[:, 1:]], 1)

    def grad(upstream):
        """The gradients of emissions and transitions: probabilities of tags and of pairs of tags, times `upstream`."""
        betas = _betas(emissions, transitions, mask)
        weight: Any = tf.where(mask, upstream, 0.0)
        emissions_grad = _probs(alphas + betas, [2]) * weight[..., None]
        arrive = emissions[:, 1:] + betas[:, 1:]  # [B, T - 1, K]
        pairs = _probs(alphas[:, :-1, :, None] + transitions + arrive[:, :, None], [2, 3])  # [B, T - 1, K, K]
        return emissions_grad, tf.tensordot(weight[:, 1:], pairs, [[0, 1], [0, 1]]), None

    return tf.where(mask, terms, 0.0), grad


def _logsumexp(x: Tensor, axis: Any) -> Tensor:
    """The logarithm of the sum of `exp(x)` over an axis. `x` may contain -inf, everywhere, too, but not +inf."""
    largest = _finite(tf.reduce_max(x, axis, keepdims=True))
    return tf.squeeze(largest, axis) + tf.math.log(tf.reduce_sum(tf.exp(x - largest), axis))


def _finite(x: Tensor) -> Tensor:
    """`x` with a large negative number in place of -inf, because inf - inf is NaN."""
    return tf.maximum(x, x.dtype.min)


def _probs(log_weights: Tensor, axes: list[int]) -> Tensor:
    """Probabilities in proportion to `exp(log_weights)`: their sum over the axes is 1, or 0 if all weights are 0.

    The sum of `_alphas` and `_betas` at a position, for example, gives the probabilities of its tags. As they are
    normalised there, the rounding errors of other positions do not count.
    """
    weights = tf.exp(log_weights - _finite(tf.reduce_max(log_weights, axes, keepdims=True)))
    return tf.math.divide_no_nan(weights, tf.reduce_sum(weights, axes, keepdims=True))


def _alphas(emissions: Tensor, transitions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The forward variables, `[B, T, K]`, without their largest value, and how much it grew at each position, `[B, T]`.

    At position t and tag k, the first is the log of the sum of exp(score) over all paths that begin at position 0 and
    end at t with the tag k, minus the largest such number at t. This largest number is the sum of the second up to t.
    It grows with t. A float32 that contained it would have fewer digits for each position.

    At padding, the first repeats the result of the last element, and the second is 0.
    """

    def step(state, element):
        alpha, _ = state
        emission, is_element = element
        sums = _logsumexp(alpha[:, :, None] + transitions, 1) + emission
        largest = _finite(tf.reduce_max(sums, 1, keepdims=True))
        is_element = is_element[:, None]
        return tf.where(is_element, sums - largest, alpha), tf.where(is_element, largest, 0.0)

    largest = _finite(tf.reduce_max(emissions[:, 0], 1, keepdims=True))
    later = tf.pad(mask[:, 1:], [[0, 0], [1, 0]])  # false at position 0, whose result is the start: no step there
    alphas, growth = _scan(step, (emissions[:, 0] - largest, largest), (emissions, later))
    return alphas, tf.concat([largest, growth[:, 1:, 0]], 1)


def _betas(emissions: Tensor, transitions: Tensor, mask: Tensor) -> Tensor:
    """The backward variables, `[B, T, K]`, without their largest value.

    At position t and tag k: the log of the sum of exp(score) over all continuations, from position t + 1 to the last
    element, of a path with the tag k at t, minus the largest such number at t. They are 0 at the last element and at
    padding.
    """

    def step(beta, element):
        emission, is_element = element
        sums = _logsumexp(transitions + (emission + beta)[:, None], 2)
        sums -= _finite(tf.reduce_max(sums, 1, keepdims=True))
        return tf.where(is_element[:, None], sums, beta)

    # Emissions and mask of the element after each position. The last position has none: there, the mask is false.
    following = tf.concat([emissions[:, 1:], emissions[:, :1]], 1), tf.pad(mask[:, 1:], [[0, 0], [0, 1]])
    return _scan(step, tf.zeros_like(emissions[:, 0]), following, reverse=True)


def _scan(step: Any, first: Any, elements: Any, reverse: bool = False) -> Any:
    """`tf.scan` over time, with the batch first: the T results of `step(previous, element)`, `[B, T, ...]`.

    The elements are `[B, T, ...]`. `first` is the `previous` of the first step, which is at position 0, or at position
    T - 1 with `reverse`. If the first result must be `first` itself, that step must return it unchanged. All T elements
    are scanned, and not T - 1, because TensorFlow cannot scan an empty sequence.
    """
    by_time = tf.nest.map_structure(_swap_batch_and_time, elements)
    return tf.nest.map_structure(_swap_batch_and_time, tf.scan(step, by_time, first, reverse=reverse))


def _swap_batch_and_time(x: Tensor) -> Tensor:
    """Swaps the first two axes: `[B, T, ...]` to `[T, B, ...]`, or back."""
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])


def crf_decode(
    emissions: Tensor, mask: Tensor, transitions: Tensor, start: Any = None, end: Any = None
) -> tuple[Tensor, Tensor]:
    """The best path of every row, found with the Viterbi algorithm, and its score.

    Args: see `crf_nll`.

    Returns:
        `(tags, score)`: int32 `[B, T]`, 0 at padding, and float `[B]`, 0 for a row without elements.
    """
    emissions, transitions, mask = _path_scores(emissions, mask, transitions, start, end)
    stay = tf.range(emissions.shape[-1])  # at padding, the tag before each tag is the tag itself

    def step(state, element):
        """One element: the score of the best path to every tag, and the tag before it on this path."""
        score, _ = state
        emission, is_element = element
        ways = score[:, :, None] + transitions  # [B, K, K]: from the tag before (axis 1) to the tag (axis 2)
        best = tf.reduce_max(ways, 1) + emission
        come_from = tf.argmax(ways, 1, output_type=tf.int32)
        return tf.where(is_element[:, None], best, score), tf.where(is_element[:, None], come_from, stay)

    first = (emissions[:, 0], tf.zeros_like(emissions[:, 0], tf.int32))
    later = tf.pad(mask[:, 1:], [[0, 0], [1, 0]])  # false at position 0, as in `_alphas`
    scores, come_from = _scan(step, first, (emissions, later))  # [B, T, K] each
    last = scores[:, -1]
    tags = tf.argmax(last, 1, output_type=tf.int32)
    # `before[:, t]` is the tag at position t - 1. There is none before position 0, so that column is dropped.
    before = _scan(lambda tag, pointers: tf.gather(pointers, tag, batch_dims=1), tags, come_from, reverse=True)
    tags = tf.concat([before[:, 1:], tags[:, None]], 1)
    return tf.where(mask, tags, 0), tf.where(mask[:, 0], tf.reduce_max(last, 1), 0.0)


def crf_decode_unrolled(
    emissions: Tensor, mask: Tensor, transitions: Tensor, start: Any = None, end: Any = None
) -> tuple[Tensor, Tensor]:
    """`crf_decode` for file formats that have no loops: the graph has separate operations for every position.

    So T, the number of positions, must be in the static shape of `emissions`. Args and results: see `crf_decode`.
    """
    emissions, transitions, mask = _path_scores(emissions, mask, transitions, start, end)
    time = emissions.shape[1]
    stay = tf.range(emissions.shape[-1])
    score = emissions[:, 0]
    come_from = []  # for each position from 1 on, [B, K]
    for t in range(1, time):
        ways = score[:, :, None] + transitions  # [B, K, K], as in `crf_decode`
        is_element = mask[:, t, None]
        come_from.append(tf.where(is_element, tf.argmax(ways, 1, output_type=tf.int32), stay))
        score = tf.where(is_element, tf.reduce_max(ways, 1) + emissions[:, t], score)
    tags = [tf.argmax(score, 1, output_type=tf.int32)]
    for pointers in reversed(come_from):
        tags.append(tf.gather(pointers, tags[-1], batch_dims=1))
    found = tf.stack(tags[::-1], 1)
    return tf.where(mask, found, 0), tf.where(mask[:, 0], tf.reduce_max(score, 1), 0.0)


def crf_marginals(emissions: Tensor, mask: Tensor, transitions: Tensor, start: Any = None, end: Any = None) -> Tensor:
    """The probability of every tag at every position: float `[B, T, K]`, 0 at padding. Args: see `crf_nll`."""
    emissions, transitions, mask = _path_scores(emissions, mask, transitions, start, end)
    alphas, _ = _alphas(emissions, transitions, mask)
    probs = _probs(alphas + _betas(emissions, transitions, mask), [2])
    return tf.where(mask[..., None], probs, 0.0)


def crf_piece_log_probs(
    emissions: Tensor, tags: Tensor, mask: Tensor, transitions: Tensor, start: Any = None, end: Any = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of pieces of a path.

    A piece is the tags from position s to position e. Its probability is the sum of the probabilities of all paths that
    have the same tags there.

    Args: see `crf_nll`, but tags at padding must be ids, too.

    Returns:
        `(begins, ends)`, `[B, T]` each. The piece from s to e, inclusive, has the log-probability
        `begins[s] + ends[e]`. They have no meaning at padding.
    """
    emissions, transitions, mask = _path_scores(emissions, mask, transitions, start, end)
    tags = tf.cast(tags, tf.int32)
    alphas, growth = _alphas(emissions, transitions, mask)
    betas = _betas(emissions, transitions, mask)
    # How much better the best paths up to each position are than the tags up to there. `begins[s] + ends[e]` contains
    # the terms of the tags from s + 1 to e, relative to the growth of alpha, and at e the sum over all tags.
    better = tf.cumsum(growth - _path_terms(emissions, tags, mask, transitions), 1)
    begins = tf.gather(alphas, tags, batch_dims=2) + better
    ends = tf.gather(betas, tags, batch_dims=2) - _logsumexp(alphas + betas, 2) - better
    return begins, ends


@keras.saving.register_keras_serializable("txl_tf")
class CRF(Layer):
    """A linear-chain CRF: a layer with the scores of transitions, and of the first and the last tag.

    ```python
    crf = txl_tf.layers.CRF(n_tag=3)
    emissions, mask = tf.random.normal([2, 4, 3]), tf.constant([[1, 1, 1, 1], [1, 1, 0, 0]])
    tags = crf(emissions, mask=mask)  # [2, 4]
    nll = crf.nll(emissions, tags, mask)  # [2]

    labels = ["B-name", "I-name", "O"]  # no path goes from O to I-name
    crf = txl_tf.layers.CRF(n_tag=3, allowed=txl_tf.allowed_transitions(labels))
    ```

    Args:
        n_tag: number of tags.
        start_end: whether there are scores for the first and the last tag.
        allowed: bool, or numbers 0 and 1, `[n_tag + 2, n_tag + 2]`: whether a tag (row) may come before another
            (column). Row `n_tag` is the start, and column `n_tag + 1` the end; see `txl_tf.allowed_transitions`. A
            forbidden transition lowers the score of a path by 10,000 in the call, `decode` and `piece_log_probs`. `nll`
            counts all paths, as in fastNLP. With `None`, all transitions are allowed.

    Call arguments:
        emissions: `[batch, time, n_tag]`.
        mask: bool, or numbers 0 and 1, `[batch, time]`, true at elements, which may be anywhere in a row. By default,
            the mask that Keras passes on with `emissions`; without any, there is no padding.

    Returns:
        int32 `[batch, time]`, the best paths.

    Raises:
        ParameterError: `n_tag` is not positive; `allowed`, a tensor or the mask has another shape; or `allowed` has
            other elements.

    Reference:
        Lafferty et al. 2001; fastNLP 0.5.5, `ConditionalRandomField`.
    """

    free_settings = {"allowed": lambda name, value: None}  # `check_setting` checks it

    @stored
    def __init__(self, n_tag: int, start_end: bool = True, allowed: Any = None, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        check_sizes(n_tag=n_tag)
        self.allowed = self.check_setting("allowed", allowed)

    def check_setting(self, name: str, value: Any) -> Any:
        """Checks the value of a setting. Returns it as it is stored: `allowed` as lists of bool, which JSON can hold.

        Raises ParameterError if `allowed` has another shape, or elements other than bools and the numbers 0 and 1.
        """
        if name != "allowed" or value is None:
            return super().check_setting(name, value)
        allowed = f"bools or numbers 0 and 1 of the shape [{self.n_tag + 2}, {self.n_tag + 2}] for n_tag={self.n_tag}"
        array = as_array(name, value, allowed)
        if array.shape != (self.n_tag + 2, self.n_tag + 2):
            raise ParameterError(name, value, allowed, f"{name} must be {allowed}, got {list(array.shape)}")
        other = array if array.dtype.kind in "SU" else array[(array != 0) & (array != 1)]
        if other.size:
            raise ParameterError(
                name, value, allowed, f"{name} must be {allowed}, got {brief(other.reshape(-1).tolist()[0])}"
            )
        return array.astype(bool).tolist()

    def build(self, emissions_shape: Any = None, **_: Any) -> None:
        check_width("emissions", emissions_shape, "n_tag", self.n_tag)

        def weight(name, *shape):
            return self.add_weight(name=name, shape=shape, initializer="zeros", autocast=False)

        self.add_table("transitions", (self.n_tag, self.n_tag), "zeros", autocast=False)
        self.start_scores = weight("start_scores", self.n_tag) if self.start_end else None
        self.end_scores = weight("end_scores", self.n_tag) if self.start_end else None

    def call(self, emissions: Tensor, mask: Tensor | None = None) -> Any:
        return self.decode(emissions, mask)[0]

    def elements(self, emissions: Tensor, mask: Tensor, tags: Tensor | None = None) -> Tensor:
        """Checks the arguments of a call. Returns the mask as bool `[B, T]`. Raises ParameterError for wrong shapes."""
        if not self.built:  # `nll` and `decode` do not use Keras's call, which would build the layer
            self.build()
        mask = mask_of_call(emissions, mask)
        tensors = {"emissions": (emissions, "float batch time n_tag"), "mask": (mask, "bool? batch time")}
        check_tensors({"n_tag": self.n_tag}, **tensors, tags=(tags, "int? batch time"))
        given = {"emissions": emissions, "mask": mask, "tags": tags}
        given = {name: (x, "batch time") for name, x in given.items() if x is not None}
        emissions, *others = checked_sizes(**given)
        mask = None if mask is None else others[0]
        if emissions.shape[1] == 0:
            raise tensor_error("emissions", emissions, "float [batch, time, n_tag] of time 1 or more")
        return _bool_mask(emissions, mask)

    def nll(self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None) -> Tensor:
        """The negative log-likelihood of paths, `[batch]`, with the scores of the layer; see `crf_nll`.

        Raises:
            ParameterError: a tensor has another shape, or an element has a tag below 0 or above `n_tag - 1`. In a
                graph, a wrong tag is an `InvalidArgumentError` instead; under XLA, tags are not checked.
        """
        mask = self.elements(emissions, mask, tags)
        tags = checked_tags(tags, mask, self.n_tag)
        mask, emissions, tags = pack(mask, emissions, tags)
        # The scores themselves, not `constrained()`: in training, fastNLP counts forbidden paths, too.
        return crf_nll(emissions, tags, mask, self.transitions, self.start_scores, self.end_scores)

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best allowed paths with the scores of the layer, and their scores; see `crf_decode`.

        If no path of a row is allowed, the result is the best of all its paths, and the score contains `FORBIDDEN` for
        each forbidden transition.
        """
        mask = self.elements(emissions, mask)
        packed, emissions = pack(mask, emissions)
        tags, score = crf_decode(emissions, packed, *self.constrained())
        return unpack(mask, tags), score

    def piece_log_probs(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of pieces of paths among all allowed paths; see `crf_piece_log_probs`.

        Arguments are not checked. The elements of a row must come before its padding.
        """
        return crf_piece_log_probs(emissions, tags, mask, *self.constrained())

    @property
    def output_dtype(self) -> str:
        return "int32"

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return tuple(self.named_shapes(shapes, named)["emissions"][:-1])

    def constrained(self) -> tuple[Tensor, Any, Any]:
        """`(transitions, start, end)`: the scores, plus `FORBIDDEN` at transitions that are not allowed.

        With neither `start_end` nor `allowed`, `start` and `end` are `None`.
        """
        if not tf.executing_eagerly():  # Keras's call would do this, but `decode` does not use it
            remember_graph(self)
        if self.allowed is None:
            return self.transitions, self.start_scores, self.end_scores
        n = self.n_tag
        transitions = at_least_float32(self.transitions)
        added = tf.constant(np.where(self.allowed, 0.0, FORBIDDEN), transitions.dtype)
        start, end = (0.0 if x is None else at_least_float32(x) for x in (self.start_scores, self.end_scores))
        return transitions + added[:n, :n], start + added[n, :n], end + added[:n, n + 1]
