"""A network that reads, and a CRF that tags: named entities, parts of speech, and whatever is one tag an element.

    tagger = txl_tf.Tagger(txl_tf.Tener(n_token=3000, n_layer=2, d_model=256, n_head=4, d_inner=512), labels)
    tagger.compile(txl_tf.make_optimizer(...))
    tagger.fit(dataset)                         # batches (inputs of the network, tags [B, T])
    tagger.evaluate(dataset)                    # nll of a sentence, and precision, recall and F1 of entities
    tags, score = tagger.decode(inputs)

Shapes:
    B: batch      T: elements, such as characters      K: labels
"""

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import LabelConfig, check_fields
from txl_tf.data.order import first_batches
from txl_tf.data.tagged.tags import NONE, allowed_transitions, continues_table, entity_table, kind_of, unused_labels
from txl_tf.errors import ParameterError, named, shortened
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.packing import pack, unpack
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Dropping, KerasHabits, as_ids, check_tensors
from txl_tf.nn.ops import Linear
from txl_tf.nn.settings import FREE_RATE, FREE_SEED, FREE_SWITCH
from txl_tf.schema import known_names
from txl_tf.taggers.crf import CRF
from txl_tf.taggers.tener import SentenceNetwork
from txl_tf.training.resumable import Mean, OnEveryReplica, Resumable
from txl_tf.training.weighting import weights_of_labels, weights_of_rows

logger = logging.getLogger("txl_tf")


class SpanScores(OnEveryReplica, keras.metrics.Metric):
    """Precision, recall and F1 of entities, from numbers of right, found and expected ones.

    Args:
        single: whether every element counts as one: accuracy then, which is F1.
    """

    def __init__(self, single=False, name="spans", **kwargs):
        super().__init__(name=name, **kwargs)
        self.single = single
        names = "right", "found", "expected"
        self.counts = [self.add_variable((), "zeros", dtype=self.dtype, name=name) for name in names]

    def update_state(self, counts):
        for variable, count in zip(self.counts, tf.unstack(counts), strict=True):
            variable.assign_add(count)

    def result(self):
        right, found, expected = (tf.convert_to_tensor(count) for count in self.counts)
        precision, recall = tf.math.divide_no_nan(right, found), tf.math.divide_no_nan(right, expected)
        shares = {"accuracy": recall} if self.single else {"precision": precision, "recall": recall}
        return {**shares, "f1": tf.math.divide_no_nan(2 * right, found + expected)}

    def reset_state(self):
        for variable in self.counts:
            variable.assign(0.0)


@keras.saving.register_keras_serializable("txl_tf")
class Tagger(KerasHabits, Dropping, Resumable, keras.Model):
    """A network's hidden states, a linear layer and a CRF.

    Args:
        network: `Tener`, `Flat`, or any Keras layer or model that gives `[batch, time, any]`, or a tuple that begins
            with it, as `TransformerXL` does.
        labels: tags in the order of their ids, such as `["O", "B-PER", "I-PER"]`; schemes: `data/tagged/tags.py`.
        start_end: whether the CRF has scores for the first and the last tag.
        constraints: whether decoding takes only paths that the scheme of the labels allows. `fit` warns where more
            than 5% of the tags of entities lie on no such path.
        output_dropout: rate of the hidden states before the linear layer.
        seed: int that dropout derives from; drawn where it is `None`.
        scheme: "none" where the labels mark no entities, such as `["NOUN", "VERB"]`: every element is one by itself,
            any tag may follow any, and `evaluate` gives the accuracy. `None` finds the scheme in the labels.
        token_level: what a token of a text is, "char" or "word", for `TextTagger` and export.

    Call arguments:
        inputs: see `Tener` and `Flat`. For another network: int `[batch, time]`, 0 at padding; or a dictionary with
            the network's own inputs and `"mask"`, bool `[batch, time]`. A network whose call has an argument
            `padding_mask` or, with one input in a dictionary, `mask`, gets the mask. Padding may lie anywhere in a row;
            but `Flat` is told lengths, and LSTMs on a GPU want it at the end.
        training, dropout_key: see `txl_tf.nn.base`.

    Returns:
        float32 (float64 if the dtype is) `[batch, time, labels]`, the emissions: scores of the tags by themselves.

    Training: `fit`, `evaluate` and the rest of Keras take arrays, or datasets of the same:
        x, y: inputs as above, and tags, int `[batch, time]`, anything at padding.
        sample_weight: `[batch]`, of sentences; or `[batch, time]`, of elements, whose mean is the weight of a sentence.
            The loss is the sum over sentences of weight times nll over the sum of the weights of all replicas. The
            network's regularizers, and what its layers give to `add_loss`, are trained for; the figures have nll alone.
            Precision, recall and F1 count every entity as one.
        class_weight: `{id: weight}` of tags, 1 for the others, in training alone: as weights of elements.

    Raises:
        ValueError: an argument is out of its range, or `labels` are of no scheme; the message names it. With
            `constraints`, ParameterError for a label that no allowed path contains, as I-A of `["O", "I-A"]`.

    Reference:
        `TENER` of fastnlp/TENER, `Lattice_Transformer_SeqLabel` of LeeSureman/Flat-Lattice-Transformer.
    """

    free_settings = {"constraints": FREE_SWITCH, "output_dropout": FREE_RATE, "seed": FREE_SEED}

    @stored
    def __init__(
        self, network: keras.Layer, labels: Sequence[str], start_end: bool = True, constraints: bool = True,
        output_dropout: float = 0.0, seed: int | None = None, scheme: str | None = None, token_level: str = "char",
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.labels = list(labels)
        check_fields(LabelConfig, self)
        if len(set(self.labels)) < len(self.labels) or not self.labels:
            raise ValueError(f"labels must be different tags, at least one, got {named(self.labels)}")
        if constraints and not isinstance(labels, _SavedLabels):
            self._check_labels()
        self.autocast = False  # half precision does not hold ids
        self.start_keys(seed, always=True, output_dropout=output_dropout)
        self.out_fc = Linear(len(self.labels), dtype=self.dtype_policy, name="out_fc")
        self.crf = CRF(len(self.labels), start_end, self._allowed(), dtype=self.loss_dtype, name="crf")
        kinds = [kind_of(label, scheme) for label in self.labels]
        self.kinds = list(dict.fromkeys(kind for kind, inside in zip(kinds, self._entity, strict=True) if inside))
        self.loss_mean = Mean("loss", dtype=self.metric_dtype)
        self.grad_norm = Mean("grad_norm", dtype=self.metric_dtype)
        self.spans = SpanScores(single=scheme == NONE, dtype=self.metric_dtype)

        self._called_with = None  # see `_signature`; of networks that do not know it themselves
        if self._knows_mask:
            self.build_at_once(getattr(self.network, "input_shapes", None))

    def _allowed(self):
        if not self.constraints:
            return None
        return allowed_transitions(self.labels, self.scheme)

    def _check_labels(self):
        """Raises ParameterError for labels that no allowed path contains."""
        unused = unused_labels(self.labels, self.scheme)
        if unused:
            found = (
                f"labels must have all tags of their kinds, got {', '.join(self.labels)}: no path in their scheme has "
            )
            message = f"{found}{', '.join(unused)}. constraints=False allows every path"
            raise ParameterError("labels", self.labels, "tags that paths in their scheme have", message)

    def check_setting(self, name, value):
        value = super().check_setting(name, value)
        if name == "constraints" and value:
            self._check_labels()
        return value

    def settings_changed(self, names):
        super().settings_changed(names)
        if "constraints" in names:
            self.crf.store("allowed", self.crf.check_setting("allowed", self._allowed()))

    @property
    def reads_sentences(self):
        """Whether the network is a `SentenceNetwork`, which reads sentences by the ids of their tokens."""
        return isinstance(self.network, SentenceNetwork)

    @property
    def reads_lattice(self):
        """Whether the network reads the words of a lexicon besides the characters, as `Flat` does."""
        return self.reads_sentences and self.network.reads_lattice

    @property
    def _knows_mask(self):
        """Whether the network says where its elements are, as `Tener` and `Flat` do. It knows its sizes, too."""
        return hasattr(self.network, "mask_of")

    @property
    def _width(self):
        """Width of what the network returns; `None` if only a call tells it."""
        if self._knows_mask:
            return self.network.d_model
        outputs = getattr(self.network, "outputs", None)  # of a functional model, or of a `Sequential` with its input
        return outputs[0].shape[-1] if outputs else None

    def build(self, inputs_shape=None):
        if self._knows_mask and not self.network.built:
            getattr(self.network, "build_at_once", self.network.build)()
        if self._width:
            self._build_rest(self._width)
        self.built = True

    def load_weights(self, filepath, **kwargs):
        """`keras.Model.load_weights`. Raises ValueError where there are no weights yet, which Keras would leave out."""
        if not self.built:
            self.build()
        if not self.has_all_weights:
            raise ValueError("load_weights needs the width of what network returns: call the tagger on a batch before")
        super().load_weights(filepath, **kwargs)

    def get_build_config(self):
        if not self.out_fc.built:
            return None
        return {"width": self.out_fc.kernel.shape[0], "called_with": self._called_with}

    def build_from_config(self, config):
        self._called_with = config.get("called_with")  # files of older versions have none
        self._build_rest(config["width"])  # or the weights of a network that knows no sizes would not be loaded
        self.built = True

    def _build_rest(self, width):
        if not self.out_fc.built:
            self.out_fc.build((None, None, width))
            self.crf.build((None, None, len(self.labels)))
            self.built = True  # `fit` comes here without Keras's call

    # ------------------------------------------------------------------------------------------------------- forward

    def call(self, inputs, training=None, dropout_key=None):
        dropout_key = self.key_of_call(keras.tree.flatten(inputs)[0], training, dropout_key)
        network_key, output_key = split(dropout_key, 2)
        hidden = self._hidden(inputs, training, network_key)
        if not self._knows_mask:
            self._called_with = _described(inputs)
        self._build_rest(hidden.shape[-1])
        hidden = dropout(hidden, self.output_dropout, output_key)
        return at_least_float32(self.out_fc(tf.cast(hidden, self.compute_dtype)))

    @property
    def output_dtype(self):
        return keras.backend.result_type(self.compute_dtype, "float32")

    def compute_output_shape(self, *shapes, **named):
        inputs_shape = self.named_shapes(shapes, named)["inputs"]
        if self._knows_mask:
            batch, time, _ = self.network.compute_output_shape(inputs_shape)
        else:
            batch, time, *_ = inputs_shape["mask"] if isinstance(inputs_shape, dict) else inputs_shape
        return batch, time, len(self.labels)

    def emissions(self, inputs, training=None, dropout_key=None):
        """`(emissions, mask)`: `[B, T, K]` as the call returns them, and bool `[B, T]`, true at elements."""
        # by Keras's call, which tells all layers of the network whether this is training
        return self(inputs, training=training, dropout_key=dropout_key), self._mask_of(inputs)

    def _mask_of(self, inputs):
        if self._knows_mask:
            return self.network.mask_of(self.network.checked(inputs))
        if isinstance(inputs, dict):
            if "mask" not in inputs:
                raise ValueError(f"inputs must have mask, bool [batch, time], got {shortened(', '.join(inputs), 200)}")
            return tf.cast(inputs["mask"], tf.bool)
        return tf.not_equal(inputs, 0)

    def _hidden(self, inputs, training, dropout_key):
        takes = self._network_arguments
        options = {"training": training} if "training" in takes else {}
        if "dropout_key" in takes:
            options["dropout_key"] = dropout_key
        mask = self._mask_of(inputs)
        if self._knows_mask:
            inputs = self.network.checked(inputs)
        elif isinstance(inputs, dict):
            inputs = {name: x for name, x in inputs.items() if name != "mask"}
            if len(inputs) == 1:
                (inputs,) = inputs.values()
                options |= {"mask": mask} if "mask" in takes else {}
        if "padding_mask" in takes:
            options["padding_mask"] = mask
        hidden = self.network(inputs, **options)
        return hidden[0] if isinstance(hidden, (tuple, list)) else hidden

    @functools.cached_property
    def _network_arguments(self):
        return inspect.signature(self.network.call).parameters

    @known_names
    def nll(self, inputs, tags, training=None, dropout_key=None):
        """Negative log-likelihood of sentences: `[B]`, nats, like the emissions; 0 where a row is all padding.

        Args:
            inputs: of the call.
            tags: int `[B, T]`, ids of labels.
            training, dropout_key: of the call.
        """
        emissions, mask, tags, _ = self._elements(inputs, tags, training=training, dropout_key=dropout_key)
        return self.crf.nll(emissions, tags, mask)

    def _elements(self, inputs, tags, sample_weight=None, **options):
        """`(emissions, mask, tags)`; and weights of the rows, `[B]` in the dtype of the emissions, or `None`."""
        emissions, mask = self.emissions(inputs, **options)
        if sample_weight is not None:
            sample_weight = weights_of_rows(sample_weight, tf.cast(mask, emissions.dtype))
        tags = as_ids("tags", tags)
        check_tensors({"batch": mask.shape[0], "time": mask.shape[1]}, tags=(tags, "int batch time"))
        return emissions, mask, tags, sample_weight

    def decode(self, inputs):
        """`(tags, score)`: the best path, int32 `[B, T]`, 0 at padding; and its score, `[B]`."""
        return self.crf.decode(*self.emissions(inputs))

    def entities(self, inputs):
        """The entities of the best paths, at their last elements.

        Returns:
            Dictionary of `[B, T]`: int32 `tags`, the path; bool `ends`, where an entity ends; int32 `starts`, where it
            began; int32 `kinds`, index of the entity type in `self.kinds`; and float `probs`, the probability that
            the entity's elements have exactly these tags, among all allowed paths.
        """
        emissions, mask = self.emissions(inputs)
        places = tf.broadcast_to(tf.range(tf.shape(mask)[1]), tf.shape(mask))
        packed, emissions, places = pack(mask, emissions, places)
        found = self.entities_of(emissions, packed)
        found["starts"] = tf.gather(places, found["starts"], batch_dims=1)
        return {name: unpack(mask, x) for name, x in found.items()}

    def entities_of(self, emissions, mask):
        """`entities`, of emissions `[B, T, K]` and a mask with elements first: bool `[B, T]`."""
        tags, _ = self.crf.decode(emissions, mask)
        ends, starts = self.span_ends(tags, mask)
        begin, end = self.crf.piece_log_probs(emissions, tags, mask)
        probs = tf.exp(tf.minimum(tf.gather(begin, starts, batch_dims=1) + end, 0.0))
        kinds = tf.gather(tf.constant(self._kind_of), tags)
        return {"tags": tags, "ends": ends, "starts": starts, "kinds": kinds, "probs": tf.where(ends, probs, 0.0)}

    # ------------------------------------------------------------------------------------------------------ entities

    @functools.cached_property
    def _entity(self):
        return entity_table(self.labels, self.scheme)

    @functools.cached_property
    def _continues(self):
        return continues_table(self.labels, self.scheme)

    @functools.cached_property
    def _kind_of(self):
        """int32 `[K]`: index in `self.kinds` of the entity type of each label; 0 for "O"."""
        kinds = {kind: i for i, kind in enumerate(self.kinds)}
        return np.array([kinds.get(kind_of(label, self.scheme), 0) for label in self.labels], np.int32)

    def span_ends(self, tags, mask):
        """Where entities end, and where the one that an element is part of began.

        Args:
            tags: int32 `[B, T]`, any path, a malformed one too.
            mask: bool `[B, T]`, elements first.

        Returns:
            `(ends, starts)`: bool and int32 `[B, T]`; `starts` counts where `ends` is true.
        """
        pairs = tags[:, :-1] * len(self.labels) + tags[:, 1:]
        joined = tf.gather(tf.constant(self._continues.ravel()), pairs) & mask[:, 1:]  # a GPU has no gather_nd of bool
        inside = tf.gather(tf.constant(self._entity), tags) & mask
        begins = inside & ~tf.pad(joined, [[0, 0], [1, 0]])
        ends = inside & ~tf.pad(joined, [[0, 0], [0, 1]])
        number = tf.cumsum(tf.cast(begins, tf.int32), 1)  # of the entity, from 1 on; it begins where the number is new
        return ends, tf.searchsorted(number, number)

    def count_spans(self, tags, expected, mask):
        """Numbers of entities that are right, found and expected: float `[3]`."""
        kind_of, expected = tf.constant(self._kind_of), self._in_range(expected)
        (ends, starts), (own_ends, own_starts) = self.span_ends(tags, mask), self.span_ends(expected, mask)
        same = (starts == own_starts) & (tf.gather(kind_of, tags) == tf.gather(kind_of, expected))
        counts = ends & own_ends & same, ends, own_ends
        return tf.stack([tf.reduce_sum(tf.cast(count, self.loss_dtype)) for count in counts])

    # ------------------------------------------------------------------------------------------------------ training

    measures = "the nll and the F1 of entities"

    takes = "as in fit(inputs, tags)"

    @property
    def own_metrics(self):
        return [self.loss_mean, self.spans]

    @property
    def only_in_evaluation(self):
        return [self.spans]

    @property
    def n_classes(self):
        return len(self.labels)

    def training_logs(self):
        logs = super().training_logs()
        return {name: logs[name] for name in logs if name not in self.spans.result()}

    def _in_range(self, tags):
        """`tags`, which may be anything at padding, as ids of labels; `CRF.nll` checks those of elements."""
        return tf.clip_by_value(as_ids("tags", tags), 0, len(self.labels) - 1)

    def fit(self, x=None, y=None, *args, **kwargs):
        self._warn_of_forbidden(x, y)
        return super().fit(x, y, *args, **kwargs)

    fit.__doc__ = Resumable.fit.__doc__

    def _warn_of_forbidden(self, x, y=None):
        """Warns where many of the tags in `x` and `y` of `fit` lie on no path that decoding may take.

        Looks at some of the sentences, and only where reading them changes nothing for the training.
        """
        if self.crf.allowed is None:
            return
        steps = np.zeros(2, int)
        try:
            for inputs, tags, *_ in first_batches(x, y):
                steps += self._count_forbidden(np.asarray(self._mask_of(inputs)), np.asarray(tags))
        except (ValueError, TypeError, IndexError, tf.errors.OpError):
            return  # `fit` says what is wrong with them
        forbidden, entities = steps.tolist()
        if forbidden >= 10 and forbidden > 0.05 * entities:
            logger.warning(
                f"{forbidden:,} steps from tag to tag around {entities:,} entities to train on break the scheme of the "
                "labels: no path that decoding may take has them. Convert the tags, or set constraints=False"
            )

    def _count_forbidden(self, mask, tags):
        """`[forbidden steps, entities]` of tags `[B, T]`, where `mask` is true."""
        tags, rows = tags[mask], np.nonzero(mask)[0]
        n, allowed = len(self.labels), np.array(self.crf.allowed)
        first = np.diff(rows, prepend=-1) > 0
        before, last = np.where(first, n, np.roll(tags, 1)), np.roll(first, -1)
        continued = np.pad(self._continues, [[0, 2], [0, 2]])[before, tags]
        forbidden = np.sum(~allowed[before, tags]) + np.sum(~allowed[tags[last], n + 1])
        return np.array([forbidden, np.sum(np.array(self._entity)[tags] & ~continued)])

    def train_step(self, data):
        inputs, tags, weights = self.unpacked(data)
        key, elements = self.step_key(tf.shape(tags)[0]), self.weights_in_training(self._in_range(tags), weights)
        with tf.GradientTape() as tape:
            emissions, mask, tags, of_rows = self._elements(inputs, tags, elements, training=True, dropout_key=key)
            nll, rows = self._nll_and_rows(emissions, mask, tags, of_rows)
            own_loss = self.own_loss(inputs, tags, emissions, elements, training=True)
            loss = own_loss
            if loss is None:
                loss = self.with_penalties(tf.math.divide_no_nan(nll, self.over_replicas(rows)))
            loss = self.optimizer.scale_loss(loss)
        of_update = self.apply_gradients_of(loss, tape)
        logs = {**self._log_loss(nll, rows, own_loss), **of_update, **self._measure(emissions, mask, tags, elements)}
        return self.reported(logs, inputs, tags, emissions, elements, training=True)

    def test_step(self, data):
        inputs, tags, weights = self.unpacked(data)
        emissions, mask, tags, of_rows = self._elements(inputs, tags, weights)
        packed, path, expected = pack(mask, self.crf.decode(emissions, mask)[0], tags)
        counts = self.count_spans(path, expected, packed)
        self.spans.update_state(self.over_replicas(counts))
        nll, rows = self._nll_and_rows(emissions, mask, tags, of_rows)
        own_loss = self.own_loss(inputs, tags, emissions, weights, training=False)
        measured = self._measure(emissions, mask, tags, weights)
        logs = {**self._log_loss(nll, rows, own_loss), **self.spans.result(), **measured}
        return self.reported(logs, inputs, tags, emissions, weights, training=False)

    def loss_share(self, x, y, y_pred, sample_weight):
        mask = self._mask_of(x)
        of_rows = None if sample_weight is None else weights_of_rows(sample_weight, tf.cast(mask, tf.float32))
        nll, rows = self._nll_and_rows(y_pred, mask, as_ids("tags", y), of_rows)
        return tf.math.divide_no_nan(nll, self.over_replicas(rows))

    def _measure(self, emissions, mask, tags, sample_weight):
        """Logs of the metrics that `compile` was given, of the tags at elements."""
        elements = tf.cast(mask, tf.float32)
        return self.measure(self._in_range(tags), emissions, elements, weights_of_labels(sample_weight, elements))

    def predict_step(self, data):
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.decode(inputs)[0]

    def _nll_and_rows(self, emissions, mask, tags, weights):
        """Sums over the sentences here: of their nll, and of their weights or, without any, their number."""
        nll = self.crf.nll(emissions, tags, mask)
        if weights is None:
            return tf.reduce_sum(nll), tf.reduce_sum(tf.cast(tf.reduce_any(mask, 1), nll.dtype))  # with elements
        return tf.reduce_sum(nll * weights), tf.reduce_sum(weights)

    def _log_loss(self, nll, rows, own_loss=None):
        if own_loss is not None:
            nll = own_loss * self.over_replicas(rows)
        nll, rows = tf.unstack(self.over_replicas(tf.stack([nll, rows])))
        self.loss_mean.update_state(tf.math.divide_no_nan(nll, rows), sample_weight=rows)
        return {"loss": self.loss_mean.result()}

    # --------------------------------------------------------------------------------------------- export and saving

    def input_signature(self):
        if self._knows_mask:
            dims = {**self.network.input_dims}
            if not self.network.needs_bigrams:
                del dims["bigrams"]
            return _signature([(name, [None] * len(of_input.split()), "int32") for name, of_input in dims.items()])
        if self._called_with is not None:
            return _signature(self._called_with)
        if not hasattr(self.network, "inputs"):  # but a functional model knows them
            raise ValueError("export needs to know what network is called with: call the tagger once, on any batch")
        inputs = [(x.name, x.shape, x.dtype) for x in self.network.inputs]
        if len(inputs) == 1 and len(inputs[0][1]) == 2:
            return _signature([(None, [None, None], "int32")])
        return _signature([*inputs, ("mask", [None, None], "bool")])

    @property
    def has_all_weights(self):
        return self.out_fc.built

    def get_config(self):
        return {**super().get_config(), "network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config):
        network, labels = keras.saving.deserialize_keras_object(config["network"]), _SavedLabels(config["labels"])
        return cls(**{**config, "network": network, "labels": labels})


class _SavedLabels(list):
    """Labels of a saved model: those that no allowed path contains are no error, as in earlier versions."""


def _described(inputs):
    """`(name, shape, dtype)` of every input; one that is given by itself has no name."""
    named = inputs if isinstance(inputs, dict) else {None: inputs}
    dtypes = {name: keras.backend.standardize_dtype(x.dtype) for name, x in named.items()}
    return tuple((name, tuple(x.shape), dtypes[name]) for name, x in named.items())


def _signature(described):
    """Described inputs as `keras.InputSpec`, for batches of any size and length; ids are int32."""
    specs = {}
    for name, shape, dtype in described:
        shape = [None if i < 2 else size for i, size in enumerate(shape)]
        dtype = "int32" if "int" in dtype else dtype
        specs[name] = keras.InputSpec(shape=shape, dtype=dtype, name=name or "inputs")
    return specs.get(None, specs)
