"""The tagger: a network and a CRF that give every element of a sequence a tag, such as parts of named entities.

    tagger = txl_tf.Tagger(txl_tf.Tener(n_token=3000, n_layer=2, d_model=256, n_head=4, d_inner=512), labels)
    tagger.compile(txl_tf.make_optimizer(...))
    tagger.fit(dataset)                         # batches (inputs of the network, tags [B, T])
    tagger.evaluate(dataset)                    # nll of a sentence, and precision, recall and F1 of entities
    tags, score = tagger.decode(inputs)

Shapes:
    B: batch      T: elements, such as characters      K: labels
"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config import LabelConfig, check_fields
from txl_tf.data.order import first_batches
from txl_tf.data.tagged.tags import NONE, allowed_transitions, continues_table, entity_table, kind_of, unused_labels
from txl_tf.errors import ParameterError, named, shortened
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.packing import pack, unpack
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import CheckedCalls, KerasHabits
from txl_tf.nn.checks import as_array, as_ids, check_tensors, checked_sizes, tensor_error
from txl_tf.nn.dropping import Dropping
from txl_tf.nn.frozen import freeze, with_frozen
from txl_tf.nn.masks import as_bool
from txl_tf.nn.ops import Linear
from txl_tf.nn.settings import FREE_RATE, FREE_SEED, FREE_SWITCH
from txl_tf.schema import keywords_of
from txl_tf.taggers.crf import CRF, checked_tags
from txl_tf.taggers.sentence_network import SentenceNetwork
from txl_tf.training.keras_arguments import refuse_hooks
from txl_tf.training.memoryless_model import Mean, MemorylessModel, OnEveryReplica
from txl_tf.training.weighting import weights_of_labels, weights_of_rows

logger = logging.getLogger("txl_tf")


class SpanScores(OnEveryReplica, keras.metrics.Metric):
    """Precision, recall and F1 of entities, computed from the numbers of right, found and expected entities.

    Args:
        single: whether every element is an entity. Then the metrics are the accuracy and F1, which are equal.
    """

    def __init__(self, single: bool = False, name: str = "spans", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.single = single
        self.counts = self.add_variable((3,), "zeros", dtype=self.dtype, name="counts")  # right, found, expected

    def update_state(self, counts: Any) -> None:
        self.counts.assign_add(counts)

    def result(self) -> dict[str, Tensor]:
        """Precision, recall and F1 of the entities counted so far; with `single`, accuracy and F1."""
        right, predicted, expected = tf.unstack(tf.convert_to_tensor(self.counts))
        precision = tf.math.divide_no_nan(right, predicted)
        recall = tf.math.divide_no_nan(right, expected)
        shares = {"accuracy": recall} if self.single else {"precision": precision, "recall": recall}
        return {**shares, "f1": tf.math.divide_no_nan(2 * right, predicted + expected)}


@keras.saving.register_keras_serializable("txl_tf")
class Tagger(CheckedCalls, KerasHabits, Dropping, MemorylessModel, keras.Model):
    """A network, a linear layer and a CRF.

    Args:
        network: `Tener`, `Flat`, or any Keras layer or model that returns `[batch, time, any]`, or a tuple that begins
            with it, as `TransformerXL` does.
        labels: tags in the order of their ids, such as `["O", "B-PER", "I-PER"]`. `data/tagged/tags.py` describes the
            schemes.
        start_end: whether the CRF has scores for the first and the last tag.
        constraints: whether decoding is limited to paths that the scheme of the labels allows. `fit` warns if the
            training tags often break the scheme: at least 10 times, and more than 5 times for every 100 entities.
        output_dropout: dropout rate of the hidden states before the linear layer.
        seed: int from which dropout derives. `None` draws one.
        scheme: "none" if the labels do not mark entities, such as `["NOUN", "VERB"]`. Then every element counts as an
            entity, any tag may follow any other, and `evaluate` reports the accuracy. `None` finds the scheme in the
            labels.
        token_level: "char" or "word", the tokens of a text for `TextTagger` and export.

    Call arguments:
        inputs: see `Tener` and `Flat`. For another network: int `[batch, time]`, 0 at padding; or a dictionary with
            the network's own inputs and `"mask"`, bool `[batch, time]`. The network gets the mask if its call has an
            argument `padding_mask` or, if the dictionary has only one other input, `mask`. Padding may be anywhere in a
            row, with two exceptions: `Flat` takes lengths, and LSTMs on a GPU need the padding at the end.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        float32 (float64 if the dtype is) `[batch, time, labels]`: the emissions, scores of single tags. Keras's
        `predict` returns the tags of the best paths instead.

    Training: `fit`, `evaluate` and the other methods of Keras take arrays or datasets:
        x, y: inputs as above, and tags, int `[batch, time]`. Tags at padding are ignored.
        sample_weight: `[batch]`, weights of sentences; or `[batch, time]`, weights of elements, whose mean is the
            weight of a sentence. They must be finite and not negative. The loss is the sum over sentences of weight
            times nll, divided by the sum of the weights of all replicas. Training also minimises the network's
            regularizers and the losses of `add_loss`; the reported loss contains only the nll. Precision, recall and F1
            do not depend on weights.
        class_weight: `{id of a tag: weight}`, 1 for the others: weights of elements, in training only.

    Raises:
        ParameterError: an argument is out of its range, `labels` have no common scheme or, with `constraints`, no
            allowed path contains one of them, as I-A of `["O", "I-A"]`.

    Reference:
        `TENER` of fastnlp/TENER, `Lattice_Transformer_SeqLabel` of LeeSureman/Flat-Lattice-Transformer.
    """

    free_settings = {"constraints": FREE_SWITCH, "output_dropout": FREE_RATE, "seed": FREE_SEED}
    fixed_settings = {"kinds": ""}  # follow from labels

    @stored
    def __init__(
        self, network: keras.Layer, labels: Sequence[str], start_end: bool = True, constraints: bool = True,
        output_dropout: float = 0.0, seed: int | None = None, scheme: str | None = None, token_level: str = "char",
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        if not isinstance(network, keras.Layer):
            raise ParameterError("network", network, "a network of the library, or a Keras layer or model")
        if isinstance(labels, str | bytes | set | frozenset | Mapping) or not isinstance(labels, Iterable):
            raise ParameterError("labels", labels, "a list of tags")
        self.labels = list(labels)
        check_fields(LabelConfig, self)
        if len(set(self.labels)) < len(self.labels) or not self.labels:
            allowed = "different tags, at least one"
            raise ParameterError("labels", self.labels, allowed, f"labels must be {allowed}, got {named(self.labels)}")
        if constraints and not isinstance(labels, _SavedLabels):
            self._check_labels()
        self.autocast = False  # float16 cannot represent ids above 2048 exactly
        self.start_keys(seed, always=True, output_dropout=output_dropout)
        self.out_fc = Linear(len(self.labels), dtype=self.dtype_policy, name="out_fc")
        self.crf = CRF(len(self.labels), start_end, self._allowed(), dtype=self.loss_dtype, name="crf")
        # The types of entities, such as "PER", in the order in which the labels first name them.
        kinds = [kind_of(label, scheme) for label in self.labels]
        self.kinds = list(dict.fromkeys(kind for kind, inside in zip(kinds, self._entity, strict=True) if inside))
        self.loss_mean = Mean("loss", dtype=self.metric_dtype)
        self.grad_norm = Mean("grad_norm", dtype=self.metric_dtype)
        self.spans = SpanScores(single=scheme == NONE, dtype=self.metric_dtype)

        # The inputs of the last call, see `_described`. `export` needs them if the network is no `SentenceNetwork`.
        self._called_with: Any = None
        if self.reads_sentences:
            self.build_at_once(self.network.input_shapes)

    def _allowed(self) -> Any:
        """The argument `allowed` of the CRF: the transitions of the scheme; `None` without constraints."""
        return allowed_transitions(self.labels, self.scheme) if self.constraints else None

    def _check_labels(self) -> None:
        """Raises ParameterError if no allowed path contains one of the labels."""
        unused = unused_labels(self.labels, self.scheme)
        if unused:
            message = (
                f"labels must have all tags of their kinds, got {', '.join(self.labels)}: no path in their scheme has "
                f"{', '.join(unused)}. constraints=False allows every path"
            )
            raise ParameterError("labels", self.labels, "tags that paths in their scheme have", message)

    def check_setting(self, name: str, value: Any) -> Any:
        """Checks and returns the value of a setting. With constraints, every label must be on an allowed path."""
        value = super().check_setting(name, value)
        if name == "constraints" and value:
            self._check_labels()
        return value

    def settings_changed(self, names: Iterable[str]) -> None:
        super().settings_changed(names)
        if "constraints" in names:
            self.crf.store("allowed", self.crf.check_setting("allowed", self._allowed()))

    @property
    def reads_sentences(self) -> bool:
        """Whether the network is a `SentenceNetwork`, which knows the mask and the shapes of its inputs."""
        return isinstance(self.network, SentenceNetwork)

    @property
    def reads_lattice(self) -> bool:
        """Whether the network reads words of a lexicon in addition to the characters, as `Flat` does."""
        return self.reads_sentences and self.network.reads_lattice

    def build(self, inputs_shape: Any = None) -> None:
        # A functional model has a list of outputs, and so has a `Sequential` whose input is known. With other networks,
        # the first call builds the layers after the network.
        outputs = getattr(self.network, "outputs", None)
        if self.reads_sentences:
            self.network.build_at_once()
            self._build_rest(self.network.d_model)
        elif isinstance(outputs, list) and outputs:
            self._build_rest(outputs[0].shape[-1])
        self.built = True

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """`keras.Model.load_weights`.

        Raises:
            ParameterError: the tagger has no weights yet, so that Keras would load none.
        """
        if not self.built:
            self.build()
        if not self.has_all_weights:
            message = "load_weights needs the width of the network's output: call the tagger on a batch first"
            raise ParameterError("load_weights", filepath, "called after the tagger was called on a batch", message)
        super().load_weights(filepath, skip_mismatch, **kwargs)

    def get_build_config(self) -> dict[str, Any] | None:
        if not self.out_fc.built:
            return None
        return with_frozen({"width": self.out_fc.kernel.shape[0], "called_with": self._called_with}, self)

    def build_from_config(self, config: Any) -> None:
        self._called_with = config.get("called_with")  # files of older versions do not have it
        self._build_rest(config["width"])  # Keras loads weights only into layers that are built
        if self._called_with is not None and not all(part.built for part in self._flatten_layers()):
            self._build_by_call()
        freeze(self, config.get("frozen"))

    def _build_by_call(self) -> None:
        """Builds the layers that only a call builds. It traces a call with the shapes and dtypes of the last one."""
        specs = {name: tf.TensorSpec(shape, dtype) for name, shape, dtype in self._called_with}
        trace = tf.function(lambda inputs: self(inputs, training=False), autograph=False)
        trace.get_concrete_function(specs.get(None, specs))

    def _build_rest(self, width: int) -> None:
        """Builds the layers after the network, if they are not built. `width` is that of the hidden states before."""
        if not self.out_fc.built:
            self.out_fc.build((None, None, width))
            self.crf.build((None, None, len(self.labels)))
            self.built = True  # because `fit` does not use Keras's call

    # ------------------------------------------------------------------------------------------------------- forward

    def call(self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None) -> Any:
        dropout_key = self.key_of_call(keras.tree.flatten(inputs)[0], training, dropout_key)
        network_key, output_key = split(dropout_key, 2)
        hidden = self._hidden(inputs, training, network_key)
        if not self.reads_sentences:
            self._called_with = _described(inputs)
        self._build_rest(hidden.shape[-1])
        hidden = dropout(hidden, self.output_dropout, output_key)
        return at_least_float32(self.out_fc(tf.cast(hidden, self.compute_dtype)))

    @property
    def output_dtype(self) -> str:
        return keras.backend.result_type(self.compute_dtype, "float32")

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        inputs_shape = self.named_shapes(shapes, named)["inputs"]
        if self.reads_sentences:
            batch, time, _ = self.network.compute_output_shape(inputs_shape)
        else:
            batch, time, *_ = _mask_in(inputs_shape) if isinstance(inputs_shape, dict) else inputs_shape
        return batch, time, len(self.labels)

    def emissions(
        self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(emissions, mask)`: `[B, T, K]` as the call returns them, and bool `[B, T]`, true at elements."""
        inputs = _as_tensors(inputs)
        # `self(...)` and not `self.call(...)`: Keras's `__call__` passes `training` on to all layers of the network.
        return self(inputs, training=training, dropout_key=dropout_key), self._mask_of(inputs)

    def _mask_of(self, inputs: Any) -> Tensor:
        """bool `[batch, time]`, true at elements.

        A `SentenceNetwork` computes it. For other networks, it is the input `mask` of a dictionary. For a single input
        of ids, it is true where the id is not 0.
        """
        if self.reads_sentences:
            return self.network.mask_of(self.network.checked(inputs))
        if isinstance(inputs, dict):
            return as_bool("inputs['mask']", _mask_in(inputs))
        return tf.not_equal(inputs, 0)

    def _hidden(self, inputs: Any, training: bool | None, dropout_key: Tensor | None) -> Tensor:
        """The output of the network, `[batch, time, width]`; of a tuple or list, the first tensor.

        Raises ParameterError if it has another shape or is not float.

        The network gets `training`, `dropout_key` and the mask (as `padding_mask` or `mask`, see the class) only if its
        call has these arguments.
        """
        mask = self._mask_of(inputs)
        options = {"training": training, "dropout_key": dropout_key, "padding_mask": mask}
        if self.reads_sentences:
            inputs = self.network.checked(inputs)
        elif isinstance(inputs, dict):
            inputs = {name: x for name, x in inputs.items() if name != "mask"}
            if len(inputs) == 1:
                (inputs,) = inputs.values()
                options["mask"] = mask
        taken = keywords_of(self.network.call)
        hidden = self.network(inputs, **{name: value for name, value in options.items() if name in taken})
        hidden = hidden[0] if isinstance(hidden, (tuple, list)) else hidden
        sizes = {"batch": mask.shape[0], "time": mask.shape[1]}
        check_tensors(sizes, **{"output of the network": (hidden, "float batch time width")})
        return hidden

    @known_names
    def nll(self, inputs: Any, tags: Tensor, training: bool | None = None, dropout_key: Tensor | None = None) -> Tensor:
        """The negative log-likelihood of sentences.

        Args:
            inputs, training, dropout_key: see the call arguments of the class.
            tags: int `[B, T]`, ids of labels.

        Returns:
            `[B]` in nats, in the dtype of the emissions; 0 for a row that contains only padding.

        Raises:
            ParameterError: the tags have another shape than the mask, or an id is out of its range, see `CRF.nll`.
        """
        emissions, mask, tags = self._emissions_and_tags(inputs, tags, training=training, dropout_key=dropout_key)
        return self.crf.nll(emissions, tags, mask)

    def _emissions_and_tags(self, inputs: Any, tags: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`(emissions, mask, tags)`: results of `emissions`, called with `**options`, and of `_of_one_size`."""
        emissions, mask = self.emissions(inputs, **options)
        return emissions, *_of_one_size(mask, tags)

    def check_batch(self, x: Any, y: Any = None) -> None:
        """See `MemorylessModel`. It looks for ids of the inputs `x` in no table, and for tags `y` that do not fit."""
        if self.reads_sentences:
            inputs = self.network.checked(x)
            if not tf.executing_eagerly():  # otherwise, `checked` has checked the values
                self.network.check_values(inputs)
            mask = self.network.mask_of(inputs)
        else:
            mask = self._mask_of(x)
        if mask.shape.rank not in (2, None):
            allowed = "ids [batch, time], or a dictionary with the mask of the elements"
            raise tensor_error("x", x, allowed)
        if y is None:
            return
        mask, tags = _of_one_size(mask, y)
        checked_tags(tags, mask, len(self.labels))

    def decode(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The best paths: `(tags, score)`, int32 `[B, T]` with 0 at padding, and float `[B]`. See `CRF.decode`."""
        return self.crf.decode(*self.emissions(inputs))

    def entities(self, inputs: Any) -> dict[str, Tensor]:
        """The entities of the best paths, at the positions of their last elements.

        Returns:
            Dictionary of `[B, T]`: int32 `tags`, the path; bool `ends`, true where an entity ends; int32 `starts`, the
            position where it begins; int32 `kinds`, the index of its type in `self.kinds`; and float `probs`, the
            probability among all allowed paths that its elements have exactly these tags. `starts`, `kinds` and `probs`
            have a meaning only where `ends` is true.

        Raises:
            ParameterError: the tagger overrides `decode`, which this method does not use.
        """
        self.refuse_unused("decode")
        emissions, mask = self.emissions(inputs)
        positions = tf.broadcast_to(tf.range(tf.shape(mask)[1]), tf.shape(mask))
        packed, emissions, positions = pack(mask, emissions, positions)
        packed_entities = self.entities_of(emissions, packed)
        # From positions in packed rows to positions in the rows of `inputs`.
        packed_entities["starts"] = tf.gather(positions, packed_entities["starts"], batch_dims=1)
        return {name: unpack(mask, x) for name, x in packed_entities.items()}

    def entities_of(self, emissions: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """`entities` from emissions, `[B, T, K]`, and a mask, bool `[B, T]`. Elements come before padding in a row."""
        tags, _ = self.crf.decode(emissions, mask)
        ends, starts = self.span_ends(tags, mask)
        begin, end = self.crf.piece_log_probs(emissions, tags, mask)
        # Rounding could make the log-probability of a sure entity larger than 0.
        probs = tf.exp(tf.minimum(tf.gather(begin, starts, batch_dims=1) + end, 0.0))
        kinds = tf.gather(tf.constant(self._kind_ids), tags)
        return {"tags": tags, "ends": ends, "starts": starts, "kinds": kinds, "probs": tf.where(ends, probs, 0.0)}

    # ------------------------------------------------------------------------------------------------------ entities

    @functools.cached_property
    def _entity(self) -> Any:
        """bool `[K]`: whether a label is part of an entity."""
        return entity_table(self.labels, self.scheme)

    @functools.cached_property
    def _continues(self) -> Any:
        """bool `[K, K]`: whether a label (column) after another (row) continues its entity."""
        return continues_table(self.labels, self.scheme)

    @functools.cached_property
    def _kind_ids(self) -> np.ndarray:
        """int32 `[K]`: the index in `self.kinds` of the entity type of each label; 0 for "O"."""
        kinds = {kind: i for i, kind in enumerate(self.kinds)}
        return np.array([kinds.get(kind_of(label, self.scheme), 0) for label in self.labels], np.int32)

    def span_ends(self, tags: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of entities, and where these entities begin.

        Args:
            tags: int32 `[B, T]`, any path, also one that the scheme does not allow.
            mask: bool `[B, T]`, true at elements, which come before padding in a row.

        Returns:
            `(ends, starts)`: bool `[B, T]`, true at the last element of an entity, and int32 `[B, T]`, the position of
            its first element. `starts` has a meaning only where `ends` is true.
        """
        pairs = tags[:, :-1] * len(self.labels) + tags[:, 1:]  # [B, T - 1], indices in the flat table of pairs
        joined = tf.gather(tf.constant(self._continues.ravel()), pairs) & mask[:, 1:]  # a GPU has no gather_nd of bool
        inside = tf.gather(tf.constant(self._entity), tags) & mask
        begins = inside & tf.logical_not(tf.pad(joined, [[0, 0], [1, 0]]))
        ends = inside & tf.logical_not(tf.pad(joined, [[0, 0], [0, 1]]))
        # The number of the entity, from 1 on. The entity begins at the first element with this number.
        number = tf.cumsum(tf.cast(begins, tf.int32), 1)
        return ends, tf.searchsorted(number, number)

    def count_spans(self, tags: Tensor, expected: Tensor, mask: Tensor) -> Tensor:
        """The numbers of entities that are right, found and expected: float `[3]`.

        Args:
            tags, expected: int `[B, T]`, the tags that the model found, and the right ones.
            mask: bool `[B, T]`, true at elements, which come before padding in a row.
        """
        kind_ids = tf.constant(self._kind_ids)
        expected = self._in_range(expected)
        ends, starts = self.span_ends(tags, mask)
        expected_ends, expected_starts = self.span_ends(expected, mask)
        same = (starts == expected_starts) & (tf.gather(kind_ids, tags) == tf.gather(kind_ids, expected))
        counts = (ends & expected_ends & same, ends, expected_ends)
        return tf.stack([tf.reduce_sum(tf.cast(count, self.loss_dtype)) for count in counts])

    # ------------------------------------------------------------------------------------------------------ training

    measures = "the nll and the F1 of entities"
    form_of_batches = "as in fit(inputs, tags)"
    unused_methods = {
        "nll": "fit and evaluate compute it from emissions: override compute_loss",
        "decode": "evaluate and entities decode emissions: override predict_step or test_step",
    }

    def refuse_unused(self, *names: str) -> None:
        super().refuse_unused(*names)
        self._refuse_own_call()

    def _refuse_own_call(self) -> None:
        """Raises ParameterError if the CRF is a subclass of `CRF` with a call of its own."""
        if isinstance(self.crf, CRF):
            refuse_hooks(self.crf, {"call": f"{type(self).__name__} does not call it: override nll and decode"})

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_mean, self.spans]

    @property
    def only_in_evaluation(self) -> list[keras.metrics.Metric]:
        return [self.spans]

    @property
    def n_classes(self) -> int:
        return len(self.labels)

    def training_logs(self) -> dict[str, float]:
        """The logs of training, without the metrics of entities, which only evaluation measures."""
        logs = super().training_logs()
        return {name: logs[name] for name in logs if name not in self.spans.result()}

    def _in_range(self, tags: Tensor) -> Tensor:
        """Clips `tags` to the ids of labels. Tags at padding may have any value; `CRF.nll` checks tags of elements."""
        return tf.clip_by_value(as_ids("tags", tags, 2), 0, len(self.labels) - 1)

    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._warn_of_forbidden(x, y)
        return super().fit(x, y, *args, **kwargs)

    fit.__doc__ = MemorylessModel.fit.__doc__

    def _warn_of_forbidden(self, x: Any, y: Any = None) -> None:
        """Warns if the tags in `x` and `y` of `fit` often break the scheme of the labels, see `constraints`.

        It reads only the first sentences, and none if reading could affect the training, see `first_batches`.
        """
        if self.crf.allowed is None:
            return
        counts = np.zeros(2, int)
        try:
            for inputs, tags, *_ in first_batches(x, y):
                counts += self._count_forbidden(np.asarray(self._mask_of(inputs)), np.asarray(tags))
        except (ValueError, TypeError, IndexError, tf.errors.OpError):
            return  # `fit` raises an error that says what is wrong
        forbidden, entities = counts.tolist()
        if forbidden >= 10 and forbidden > 0.05 * entities:
            logger.warning(
                f"in training sentences with {entities:,} entities, {forbidden:,} transitions between tags break the "
                "scheme of the labels, so decoding cannot find all of these entities. Convert the tags, or set "
                "constraints=False"
            )

    def _count_forbidden(self, mask: np.ndarray, tags: np.ndarray) -> np.ndarray:
        """Counts `[transitions that the scheme forbids, entities]` in the tags `[B, T]` where `mask` is true."""
        rows = np.nonzero(mask)[0]
        tags = tags[mask]
        n = len(self.labels)
        allowed = np.array(self.crf.allowed)
        first = np.diff(rows, prepend=-1) > 0  # true at the first tag of every row
        last = np.roll(first, -1)  # true at the last tag of every row
        before = np.where(first, n, np.roll(tags, 1))  # the previous tag; n stands for the start, n + 1 for the end
        continued = np.pad(self._continues, [[0, 2], [0, 2]])[before, tags]
        forbidden = np.sum(~allowed[before, tags]) + np.sum(~allowed[tags[last], n + 1])
        return np.array([forbidden, np.sum(np.array(self._entity)[tags] & ~continued)])

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step of training on one replica's share of a batch. Returns the metrics so far, over all replicas."""
        inputs, tags, weights = self.unpacked(data)
        key = self.step_key(tf.shape(tags)[0])
        weights = self.weights_in_training(self._in_range(tags), weights)
        with tf.GradientTape() as tape:
            emissions, mask, tags = self._emissions_and_tags(inputs, tags, training=True, dropout_key=key)
            nll, weight = self._nll_and_weight(emissions, mask, tags, weights)
            own_loss = self.own_loss(inputs, tags, emissions, weights, training=True)
            mean = tf.math.divide_no_nan(nll, self.over_replicas(weight))
            loss = self.optimizer.scale_loss(self.with_penalties(mean) if own_loss is None else own_loss)
        update_logs = self.apply_gradients_of(loss, tape)
        logs = {**self.log_means(nll, weight, own_loss), **update_logs, **self._measure(emissions, mask, tags, weights)}
        return self.reported(logs, inputs, tags, emissions, weights, training=True)

    def test_step(self, data: Any) -> dict[str, Any]:
        """One step of evaluation on one replica's share of a batch. Returns the metrics so far, over all replicas."""
        inputs, tags, weights = self.unpacked(data)
        emissions, mask, tags = self._emissions_and_tags(inputs, tags)
        packed, path, expected = pack(mask, self.crf.decode(emissions, mask)[0], tags)
        counts = self.count_spans(path, expected, packed)
        self.spans.update_state(self.over_replicas(counts))
        nll, weight = self._nll_and_weight(emissions, mask, tags, weights)
        own_loss = self.own_loss(inputs, tags, emissions, weights, training=False)
        measured = self._measure(emissions, mask, tags, weights)
        logs = {**self.log_means(nll, weight, own_loss), **self.spans.result(), **measured}
        return self.reported(logs, inputs, tags, emissions, weights, training=False)

    def loss_share(self, x: Any, y: Tensor, y_pred: Tensor, sample_weight: Any) -> Tensor:
        """This replica's share of the mean loss of the batch."""
        nll, weight = self._nll_and_weight(y_pred, self._mask_of(x), as_ids("tags", y, 2), sample_weight)
        return tf.math.divide_no_nan(nll, self.over_replicas(weight))

    def _measure(self, emissions: Tensor, mask: Tensor, tags: Tensor, sample_weight: Any) -> dict[str, Any]:
        """Updates the metrics that `compile` was given with the tags of elements, and returns their results as logs."""
        is_element = tf.cast(mask, tf.float32)
        return self.measure(self._in_range(tags), emissions, is_element, weights_of_labels(sample_weight, is_element))

    def predict_step(self, data: Any) -> Tensor:
        self._refuse_own_call()
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.decode(inputs)[0]

    def _nll_and_weight(
        self, emissions: Tensor, mask: Tensor, tags: Tensor, sample_weight: Any
    ) -> tuple[Tensor, Tensor]:
        """`(sum of weight * nll, sum of the weights)` over the sentences of this replica.

        Without `sample_weight`, the weight of a sentence is 1. A sentence without an element has weight 0.
        """
        given = tf.ones_like(emissions[:, 0, 0]) if sample_weight is None else sample_weight
        weights = weights_of_rows(given, tf.cast(mask, emissions.dtype))
        nll = self.crf.nll(emissions, tags, mask)
        return tf.reduce_sum(tf.math.multiply_no_nan(nll, weights)), tf.reduce_sum(weights)

    # --------------------------------------------------------------------------------------------- export and saving

    def input_signature(self) -> Any:
        """The specs of the inputs, for `export`."""
        if self.reads_sentences:
            return _signature([(name, shape, "int32") for name, shape in self.network.input_shapes.items()])
        if self._called_with is not None:
            return _signature(self._called_with)
        if not hasattr(self.network, "inputs"):  # a functional model has them
            message = "export needs to know what network is called with: call the tagger once, on any batch"
            raise ParameterError("export", None, "called after the tagger was called on a batch", message)
        inputs = [(x.name, x.shape, x.dtype) for x in self.network.inputs]
        if len(inputs) == 1 and len(inputs[0][1]) == 2:
            return _signature([(None, [None, None], "int32")])
        return _signature([*inputs, ("mask", [None, None], "bool")])

    @property
    def has_all_weights(self) -> bool:
        return self.out_fc.built

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        network = keras.saving.deserialize_keras_object(config["network"], custom_objects)
        arguments: dict[str, Any] = {**config, "network": network, "labels": _SavedLabels(config["labels"])}
        return cls(**arguments)


class _SavedLabels(list):
    """Labels of a saved model. `_check_labels` does not check them, because earlier versions did not."""


def _of_one_size(mask: Tensor, tags: Any) -> tuple[Tensor, Tensor]:
    """`(mask, tags)`, with tags as int32 `[batch, time]`. Raises ParameterError if the two have different shapes.

    If a graph does not know the shapes, it compares them when it runs.
    """
    tags = as_ids("tags", tags, 2)
    check_tensors({"batch": mask.shape[0], "time": mask.shape[1]}, tags=(tags, "int batch time"))
    mask, tags = checked_sizes(inputs=(mask, "batch time"), tags=(tags, "batch time"))
    return mask, tags


def _mask_in(inputs: dict[str, Any]) -> Any:
    """The mask in the inputs, or in their shapes, of a network that is not a `SentenceNetwork`.

    Raises:
        ParameterError: there is no mask.
    """
    if "mask" not in inputs:
        message = f"inputs must have mask, bool [batch, time], got {shortened(', '.join(inputs), 200)}"
        raise ParameterError("inputs", inputs, "a dictionary with mask, bool [batch, time]", message)
    return inputs["mask"]


def _as_tensors(inputs: Any) -> Any:
    """The inputs, in which lists are tensors: Keras does not take lists by position."""
    if isinstance(inputs, dict):
        return {name: _as_tensors(x) for name, x in inputs.items()}
    return inputs if hasattr(inputs, "shape") else tf.convert_to_tensor(as_array("inputs", inputs, "numbers"))


def _described(inputs: Any) -> tuple:
    """`(name, shape, dtype)` of every input. A single input that is not in a dictionary has no name."""
    named = inputs if isinstance(inputs, dict) else {None: inputs}
    return tuple((name, tuple(x.shape), keras.backend.standardize_dtype(x.dtype)) for name, x in named.items())


def _signature(described: Any) -> Any:
    """A `keras.InputSpec` of each input in a result of `_described`, for batches of any size and length.

    Ids are int32. The result is a dictionary, except for a single input without a name.
    """
    specs = {}
    for name, shape, dtype in described:
        shape = [None if i < 2 else size for i, size in enumerate(shape)]
        dtype = "int32" if "int" in dtype else dtype
        specs[name] = keras.InputSpec(shape=shape, dtype=dtype, name=name or "inputs")
    return specs.get(None, specs)
