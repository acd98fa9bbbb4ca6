"""Finds the arguments of the model in a checkpoint of a PyTorch program, and maps its tensors to variables.

The shapes of the tensors define most arguments of the model. They are compared with the arguments that the files
contain. The other arguments (mem_len, same_length, clamp_len, pre_lnorm, the epsilon of layer norm) come from the files
or from the caller, and the rates of dropout from the files. Without either, they get default values: those of
Hugging Face for its checkpoints (`HF_DEFAULTS`), else our own. Only mem_len is required.

"Clusters" are all parts of the adaptive softmax. Cluster 0 has the most frequent words, and one entry for each later
cluster. The weights of these entries are `cluster_W` and `cluster_b`.

The three programs compute what `TransformerXLLM` computes, with four differences that the conversion removes:

    clusters       NVIDIA's and the original PyTorch program store the entries for later clusters in the opposite order
    same_length    in Hugging Face's and the original PyTorch program, a token sees mem_len positions, not mem_len + 1
    projections    any cluster of the softmax may share the embedding's projection; here all but the first do, or none
    layer norm     its epsilon is 1e-5; that of the TensorFlow program is 1e-12
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import ModelConfig, check_bins
from txl_tf.convert.original import count_scopes, div_vals
from txl_tf.convert.pickles import FileError, shown
from txl_tf.convert.pytorch_source import HF_DEFAULTS, HUGGING_FACE, NORM_EPSILON, NVIDIA, Source, checked
from txl_tf.convert.tensors import Tensor
from txl_tf.errors import ParameterError, UnknownArgumentError
from txl_tf.runs.weights import is_finite

# The names of sources of arguments, in `ModelMapping.origins` and in messages. Other sources are files.
TENSORS, COMMAND, NOBODY = "the shapes of its tensors", "the command", "nobody, so assumed"
OF_HUGGING_FACE = "nobody, so the defaults of Hugging Face's TransfoXLConfig"
# Arguments that only the shapes of the tensors decide.
SHAPES = ("n_token", "n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner", "untie_r")
# A model may have at most MAX_COPIES times as many numbers as the file. It may have more numbers than the file, because
# each cluster may get a copy of one projection.
MAX_COPIES = 4
# Arguments that the caller may give.
GIVEN = [
    *SHAPES, "cutoffs", "div_val", "proj_same_dim", "proj_share_all_but_first", "mem_len", "same_length", "clamp_len",
    "layer_norm_epsilon", "pre_lnorm",
]  # fmt: skip
# Names of tensors that are not weights, or copies of other tensors.
IGNORED = r"pos_emb\.inv_freq|crit\.shared_out_projs\.\d+|layers\.\d+\.dec_attn\.r_[wr]_bias"
FLOATS = ("float32", "float16", "bfloat16", "float64")
# Variable in the scope layer_i/ -> tensor in the module layers.i. The variable is the transposed tensor.
LAYER = {
    "rel_attn/qkv/kernel": "dec_attn.qkv_net.weight",
    "rel_attn/r/kernel": "dec_attn.r_net.weight",
    "rel_attn/o/kernel": "dec_attn.o_net.weight",
    "rel_attn/LayerNorm/gamma": "dec_attn.layer_norm.weight",
    "rel_attn/LayerNorm/beta": "dec_attn.layer_norm.bias",
    "ff/layer_1/kernel": "pos_ff.CoreNet.0.weight",
    "ff/layer_1/bias": "pos_ff.CoreNet.0.bias",
    "ff/layer_2/kernel": "pos_ff.CoreNet.3.weight",
    "ff/layer_2/bias": "pos_ff.CoreNet.3.bias",
    "ff/LayerNorm/gamma": "pos_ff.layer_norm.weight",
    "ff/LayerNorm/beta": "pos_ff.layer_norm.bias",
}


class ModelMapping:
    """The arguments of the model in a checkpoint, and the mapping from its tensors to variables.

    Args:
        source: the checkpoint.
        given: `{argument of TransformerXLLM: value}`, arguments in `GIVEN`. `None` counts as not given.

    Attributes:
        model: arguments of `TransformerXLLM`.
        origins: `{source: names}`: the names of the arguments that come from a source, such as a file or "the command".
        notes: sentences about what the conversion changed or assumed.

    Raises:
        ParameterError: the tensors are of another network, `source` or `given` contradicts them or each other, or an
            argument is missing that neither contains.
    """

    def __init__(self, source: Source, given: dict[str, Any]):
        for name, value in given.items():
            if name not in GIVEN:
                message = f"{name} is none of what may be given: {', '.join(GIVEN)}"
                raise UnknownArgumentError(name, value, GIVEN, message)
        self.source = source
        self.given = checked(given, COMMAND)
        self.origins: dict[str, list[str]] = {TENSORS: []}
        self.notes: list[str] = []
        self._used: set[str] = set()
        # Name of a variable without "transformer/" -> its tensors, and the function that makes its value from their
        # arrays.
        self._weights: dict[str, tuple[tuple[Tensor, ...], Callable]] = {}
        # The order matters: each method uses attributes that the methods before it have set.
        self._measure()
        cutoffs = self._cutoffs()
        self.out_tables = self._own_tables()
        self._compare({**{name: getattr(self, name) for name in SHAPES}, "cutoffs": cutoffs})
        self._choose_projections(len(cutoffs) + 1)
        self.model = self._arguments(cutoffs)
        self._map_embedding()
        self._map_layers()
        self._map_softmax()
        self._check_all_used()

    def weights(self) -> dict[str, tf.Tensor]:
        """All weights, by the names that `weights_by_name` gives the variables of the model."""
        return {f"transformer/{name}": self._weight(name) for name in self._weights}

    def _weight(self, name: str) -> tf.Tensor:
        """The value of a variable, in float32. Raises FileError unless it is finite."""
        tensors, convert = self._weights[name]
        with np.errstate(over="ignore"):  # a number of float64 that is too large is refused below
            array = np.ascontiguousarray(convert(*(tensor.array() for tensor in tensors)), np.float32)
        if not is_finite(array):
            names = [key for key, tensor in self.source.tensors.items() if any(tensor is used for used in tensors)]
            message = f"{self.source.path} has numbers that are not finite in float32 in {', '.join(map(shown, names))}"
            raise self._unfit("a checkpoint of finite numbers", message)
        return tf.identity(array)  # `tf.constant` would keep two copies: 817 MB of memory for an array of 400 MB

    # --------------------------------------------------------------------------------------------------- the model

    def _measure(self) -> None:
        """Sets `tables`, `n_table`, `n_later_cluster` and the arguments in `SHAPES`, from names and shapes of tensors.

        `n_later_cluster` is the number of entries for later clusters; 0 if there are none.
        """
        tensors = self.source.tensors
        self.n_layer = max(1, count_scopes(tensors, "layers.{}."))
        self.n_table = max(1, count_scopes(tensors, "word_emb.emb_layers.{}."))
        self.untie_r = "r_w_bias" not in tensors
        bias = self._get("layers.0.dec_attn.r_w_bias" if self.untie_r else "r_w_bias", None, None)
        self.n_head, self.d_head = bias.shape
        _, self.d_model = self._get("layers.0.dec_attn.qkv_net.weight", None, None).shape
        self.d_inner, _ = self._get("layers.0.pos_ff.CoreNet.0.weight", None, None).shape
        self.tables = [self._get(f"word_emb.emb_layers.{i}.weight", None, None) for i in range(self.n_table)]
        self.n_token = sum(table.shape[0] for table in self.tables)
        self.d_embed = self.tables[0].shape[1]
        has_clusters = "crit.cluster_weight" in tensors
        self.n_later_cluster = self._get("crit.cluster_weight", None, None).shape[0] if has_clusters else 0

    def _arguments(self, cutoffs: list[int]) -> dict[str, Any]:
        """All arguments of the model.

        Raises:
            ParameterError: an argument differs from a file or from the given arguments, or is needed and not known.
            FileError: the arguments do not fit each other.
        """
        arguments = {name: getattr(self, name) for name in SHAPES}
        arguments["div_val"] = self._div_val(len(cutoffs) + 1)
        from_shapes: dict[str, Any] = {}
        if cutoffs:
            from_shapes["div_val"] = arguments["div_val"]
        if self.n_table > 1:
            from_shapes["proj_same_dim"] = True
        if self.projected and cutoffs:
            from_shapes["proj_share_all_but_first"] = self.shares
        self._compare(from_shapes)
        arguments["proj_share_all_but_first"] = self.shares
        arguments["tie_weight"] = self.out_tables is self.tables
        self.origins[TENSORS] += arguments
        if self.n_table > 1 or not cutoffs:
            self.origins[TENSORS].append("cutoffs")
        other_arguments = self._memory() | {name: self._setting(name, 0.0) for name in ("dropout", "dropatt")}
        other_arguments["layer_norm_epsilon"] = float(self._setting("layer_norm_epsilon", NORM_EPSILON))
        other_arguments["pre_lnorm"] = self._setting("pre_lnorm", False)
        arguments["cutoffs"] = [self.n_token - 1] if self.splits_last_word else cutoffs
        try:
            check_bins(self.n_token, self.d_embed, arguments["cutoffs"], arguments["div_val"])
            return ModelConfig(**arguments, **other_arguments).to_dict()
        except ValueError as error:
            raise self._unfit("a model of consistent sizes", f"{self.source.path}: {error}") from error

    def _compare(self, from_shapes: dict[str, Any]) -> None:
        """Raises ParameterError if a file or the caller gives an argument another value than `from_shapes`."""
        for who, values in ((self.source.settings_from, self.source.settings), (COMMAND, self.given)):
            wrong = [name for name, value in from_shapes.items() if name in values and values[name] != value]
            if wrong:
                says = ", ".join(f"{name}={shown(values[name])}" for name in wrong)
                has = ", ".join(f"{name}={shown(from_shapes[name])}" for name in wrong)
                message = f"{who} says {says}, but by the shapes of its tensors {self.source.path} has {has}"
                raise ParameterError(wrong[0], values[wrong[0]], [from_shapes[wrong[0]]], message)

    def _setting(self, name: str, default: Any) -> Any:
        """Returns the value of an argument in a file, else the given value, else a default. Adds it to `origins`.

        The default is `default`, or for a checkpoint of Hugging Face the one in `HF_DEFAULTS`.

        Raises:
            ParameterError: the file and the caller give different values.
        """
        in_file = self.source.settings.get(name)
        given = self.given.get(name)
        if in_file is not None and given is not None and in_file != given:
            message = f"{name}={shown(given)} was given, but {self.source.settings_from} says {name}={shown(in_file)}"
            raise ParameterError(name, given, [in_file], message)
        if in_file is not None:
            value, who = in_file, self.source.settings_from
        elif given is not None:
            value, who = given, COMMAND
        elif self.source.kind == HUGGING_FACE and name in HF_DEFAULTS:
            value, who = HF_DEFAULTS[name], OF_HUGGING_FACE
        else:
            value, who = default, NOBODY
        self.origins.setdefault(who, []).append(name)
        return value

    def _cutoffs(self) -> list[int]:
        """The first ids of the later clusters; empty if there are none.

        If there are several tables, their shapes define them. With a single table, a file or the caller gives them.

        Raises:
            ParameterError: the cutoffs are needed and not known, their number is not that of the entries for later
                clusters, or the file and the caller do not agree.
        """
        if self.n_table > 1:
            return list(itertools.accumulate(table.shape[0] for table in self.tables[:-1]))
        if not self.n_later_cluster:
            return []
        cutoffs = self._setting("cutoffs", None)
        if cutoffs is None:
            n_cluster = 1 + self.n_later_cluster
            file = self.source.settings_from
            message = f"cutoffs is needed: {file} does not say where the checkpoint's {n_cluster} clusters begin"
            raise ParameterError("cutoffs", None, f"a list of {self.n_later_cluster}", message)
        if len(cutoffs) != self.n_later_cluster:
            allowed = f"{self.n_later_cluster}, as many as {self.source.path} has clusters after the first"
            message = f"cutoffs must be {allowed}, got {shown(cutoffs)}"
            raise ParameterError("cutoffs", cutoffs, allowed, message)
        return list(cutoffs)

    def _div_val(self, n_cluster: int) -> int:
        """The `div_val` that a file or the caller gives if the shapes allow it, else the simplest that they allow.

        With a single table, it is 1. `_arguments` refuses a value that the shapes do not allow.
        """
        if self.n_table == 1:
            return 1
        possible = div_vals([table.shape[1] for table in self.tables], n_cluster)
        div_val = self.source.settings.get("div_val", self.given.get("div_val"))
        return div_val if div_val in possible else possible[0]

    def _memory(self) -> dict[str, Any]:
        """`mem_len`, `same_length` and `clamp_len`, which only a file or the caller can give.

        If `same_length` is set and the program is not NVIDIA's, `mem_len` becomes 1 less, see the module.

        Raises:
            ParameterError: `mem_len` is not known, the file and the caller do not agree, or tokens would see nothing.
        """
        mem_len = self._setting("mem_len", None)
        if mem_len is None:
            message = (
                f"mem_len is needed: {self.source.settings_from} does not say it. See the command that trained the "
                "model, also for same_length and clamp_len"
            )
            raise ParameterError("mem_len", None, "that of the training", message)
        same_length = self._setting("same_length", False)
        if same_length and self.source.kind != NVIDIA:
            if mem_len == 0:
                message = f"{self.source.path} has mem_len=0 and same_length: its tokens see nothing at all"
                raise ParameterError("mem_len", 0, "at least 1 with same_length", message)
            self.notes.append(
                f"mem_len {mem_len} became {mem_len - 1}: with same_length, the {self.source.kind} program sees "
                "mem_len positions, and this library sees mem_len + 1. The results are the same"
            )
            mem_len -= 1
        return {"mem_len": mem_len, "same_length": same_length, "clamp_len": self._setting("clamp_len", -1)}

    # ------------------------------------------------------------------------------------------------- projections

    def _choose_projections(self, n_cluster: int) -> None:
        """Finds the projections, and chooses the arguments with which `TransformerXLLM` can have them.

        It sets: `projected`, whether there are projections; `emb_projs` and `out_projs`, the projections of the
        embedding and of the clusters of the softmax; `shares`, whether all clusters but the first use the projections
        of the embedding; and `splits_last_word`, whether the last word must become a cluster of its own, because
        without cutoffs the softmax of `TransformerXLLM` cannot have a projection of its own.

        Raises:
            FileError: the model has projections that no model here has.
        """
        self.projected = self.n_table > 1 or self.d_embed != self.d_model
        self.splits_last_word = False
        self.shares = False
        self.emb_projs: list[Tensor] = []
        self.out_projs: list[Tensor] = []
        if not self.projected and "word_emb.emb_projs.0" in self.source.tensors:
            message = f"{self.source.path} projects embeddings of the model's own width, which is not supported"
            raise self._unfit("a model that projects only embeddings of another width", message)
        if not self.projected:
            return
        widths = [self.tables[min(i, self.n_table - 1)].shape[1] for i in range(n_cluster)]
        self.emb_projs = [self._get(f"word_emb.emb_projs.{i}", self.d_model, widths[i]) for i in range(self.n_table)]
        shared = [self.emb_projs[min(i, self.n_table - 1)] for i in range(n_cluster)]
        self.out_projs = [self._out_proj(i, shared[i]) for i in range(n_cluster)]
        same = [_same(own, tied) for own, tied in zip(self.out_projs, shared, strict=True)]
        self.splits_last_word = n_cluster == 1 and not same[0]
        self.shares = n_cluster > 1 and all(same[1:])
        if self.splits_last_word:
            self.notes.append(
                "the last word became a cluster with its own projection: without cutoffs, embedding and softmax would "
                "share one in this library"
            )
        elif n_cluster > 1 and not self.shares and any(same):
            tied = ", ".join(str(i) for i, is_same in enumerate(same) if is_same)
            self.notes.append(
                f"the projections of clusters {tied}, shared with the embedding, became copies of their own"
            )

    def _out_proj(self, i: int, shared: Tensor) -> Tensor:
        """The projection of cluster i of the softmax: its own, or `shared`, the one of the cluster's embedding.

        Raises:
            FileError: there is no such tensor; or the file says that cluster i shares the projection of the embedding,
                and the two differ.
        """
        name = f"crit.out_projs.{i}"
        ties = self.source.settings.get("tie_projs")
        own = self._get(name, *shared.shape) if name in self.source.tensors else None
        if ties is None:  # NVIDIA's program stores only what is not tied
            is_tied = own is None and self.source.kind == NVIDIA
        else:
            is_tied = i < len(ties) and bool(ties[i])
        if not is_tied:
            return self._get(name, *shared.shape)
        if own is not None and not _same(own, shared):
            message = f"{self.source.settings_from} says that {name} is the embedding's, but it is not"
            raise self._unfit(f"a checkpoint whose {name} is the embedding's", message)
        return shared

    # ----------------------------------------------------------------------------------------------------- weights

    def _map_embedding(self) -> None:
        """Maps the tables of the embedding and their projections."""
        for i, table in enumerate(self.tables):
            scope = f"adaptive_embed/cutoff_{i}/" if self.n_table > 1 else "adaptive_embed/"
            self._weights[f"{scope}lookup_table"] = (table,), np.asarray
            if self.projected:
                self._weights[f"{scope}proj_W"] = (self.emb_projs[i],), np.transpose

    def _map_layers(self) -> None:
        """Maps the tensors of the layers, and the biases u and v of the attention."""
        heads_width = self.n_head * self.d_head
        width, inner = self.d_model, self.d_inner
        shapes = {
            "dec_attn.qkv_net.weight": (3 * heads_width, width),
            "dec_attn.r_net.weight": (heads_width, width),
            "dec_attn.o_net.weight": (width, heads_width),
            "pos_ff.CoreNet.0.weight": (inner, width),
            "pos_ff.CoreNet.0.bias": (inner,),
            "pos_ff.CoreNet.3.weight": (width, inner),
        }
        for i in range(self.n_layer):
            for variable, name in LAYER.items():
                tensor = self._get(f"layers.{i}.{name}", *shapes.get(name, (width,)))
                self._weights[f"layer_{i}/{variable}"] = (tensor,), np.transpose
        for name in ("r_w_bias", "r_r_bias"):
            names = [f"layers.{i}.dec_attn.{name}" for i in range(self.n_layer)] if self.untie_r else [name]
            biases = tuple(self._get(name, self.n_head, self.d_head) for name in names)
            self._weights[name] = biases, (lambda *arrays: np.stack(arrays)) if self.untie_r else np.asarray

    def _map_softmax(self) -> None:
        """Maps the softmax: its biases, its own tables and projections, and the entries for later clusters.

        If the last word must become a cluster, its row and bias become the entry for this cluster.
        """
        names = "crit.out_layers_biases.{}" if self.source.kind == NVIDIA else "crit.out_layers.{}.bias"
        biases = [self._get(names.format(i), table.shape[0]) for i, table in enumerate(self.tables)]
        if self.out_tables is not self.tables:
            scope = "adaptive_softmax/cutoff_{}/" if self.n_table > 1 else "adaptive_softmax/"
            for i, table in enumerate(self.out_tables):
                self._weights[scope.format(i) + "lookup_table"] = (table,), np.asarray
        cutoffs = self.model["cutoffs"]
        if not cutoffs:
            self._weights["adaptive_softmax/bias"] = (biases[0],), np.asarray
            return
        scope = "adaptive_softmax/cutoff_{}/{}"
        ends = [0, *cutoffs, self.n_token]
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            if self.n_table > 1:
                self._weights[scope.format(i, "b")] = (biases[i],), np.asarray
            else:  # a single tensor has the biases of all words
                self._weights[scope.format(i, "b")] = (biases[0],), _rows(start, end)
            if self.projected and not (self.shares and i > 0) and i < len(self.out_projs):
                self._weights[scope.format(i, "proj")] = (self.out_projs[i],), np.transpose
        if self.splits_last_word:
            table, bias = self.out_tables[0], biases[0]
            convert = _rows(self.n_token - 1, self.n_token)
            shape = (self.d_embed, self.d_model)
            # The only word of a cluster has probability 1 given its cluster, with any projection.
            self._weights[scope.format(1, "proj")] = (), lambda: np.zeros(shape)
        else:
            table = self._get("crit.cluster_weight", len(cutoffs), self.d_embed)
            bias = self._get("crit.cluster_bias", len(cutoffs))
            convert = np.asarray if self.source.kind == HUGGING_FACE else np.flipud
        self._weights[scope.format(0, "cluster_W")] = (table,), convert
        self._weights[scope.format(0, "cluster_b")] = (bias,), convert

    def _own_tables(self) -> list[Tensor]:
        """The tables of the softmax: `self.tables`, which the embedding has, or a list of its own.

        Raises:
            ParameterError: the file says that the softmax has tables of its own, and one is missing; or the file says
                that the softmax uses the tables of the embedding, and one differs.
        """
        pattern = "crit.out_layers_weights.{}" if self.source.kind == NVIDIA else "crit.out_layers.{}.weight"
        names = [pattern.format(i) for i in range(self.n_table)]
        ties = self.source.settings.get("tie_weight")
        missing = [name for name in names if name not in self.source.tensors]
        if missing and ties is False:
            file = self.source.settings_from
            message = f"{file} says that the softmax has its own weights, but the checkpoint has no {missing[0]}"
            raise ParameterError("tie_weight", False, [True], message)
        own = [
            self._get(name, *table.shape) if name in self.source.tensors else table
            for name, table in zip(names, self.tables, strict=True)
        ]
        differ = [name for name, *both in zip(names, own, self.tables, strict=True) if not _same(*both)]
        if differ and ties:
            message = (
                f"{self.source.path}: {differ[0]} is not the embedding's table, which the softmax uses by "
                f"{self.source.settings_from}"
            )
            raise self._unfit("a checkpoint whose softmax uses the tables of the embedding", message)
        return own if differ or ties is False else self.tables

    def _unfit(self, allowed: str, message: str) -> FileError:
        """The error for a checkpoint that cannot be converted; `allowed` is what the checkpoint should be."""
        return FileError("path", self.source.path, allowed, message)

    def _get(self, name: str, *shape: int | None) -> Tensor:
        """Returns a tensor, and records that it is used. `None` in the shape allows any size above 0.

        Raises:
            ParameterError: there is no such tensor, or it has another shape or a dtype that is not in `FLOATS`.
        """
        tensor = self.source.tensors.get(name)
        if tensor is None:
            message = f"{self.source.path} does not fit any model: it has no tensor {name}"
            raise self._unfit(f"a checkpoint with the tensor {name}", message)
        is_fitting = len(tensor.shape) == len(shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(tensor.shape, shape, strict=True)
        )
        if not is_fitting or tensor.dtype not in FLOATS:
            expected = "x".join("any" if size is None else str(size) for size in shape)
            allowed = f"{expected} numbers of {', '.join(FLOATS)}"
            got = f"{'x'.join(map(str, tensor.shape))} of {tensor.dtype}"
            message = f"{self.source.path} does not fit any model: {name} must be {allowed}, got {got}"
            raise ParameterError(name, got, allowed, message)
        self._used.add(name)
        return tensor

    def _check_all_used(self) -> None:
        """Raises FileError if no variable uses a tensor, or if the file has far fewer numbers than the model.

        Adds a note about dtypes other than float32.
        """
        unknown = [name for name in self.source.tensors if name not in self._used and not re.fullmatch(IGNORED, name)]
        if unknown:
            message = f"{self.source.path} is another network: it has {shown(unknown[0])}, which no Transformer-XL has"
            raise self._unfit("a Transformer-XL", message)
        storages = {id(tensor.storage): tensor.storage.numel for tensor in self.source.tensors.values()}
        n_number = sum(tensor.size for tensors, _ in self._weights.values() for tensor in tensors)
        if n_number > MAX_COPIES * sum(storages.values()):  # then many tensors share bytes of the file
            message = f"{self.source.path} makes {n_number} numbers of {sum(storages.values())}"
            raise self._unfit(f"at most {MAX_COPIES} copies of every number", message)
        used = {tensor.dtype for tensors, _ in self._weights.values() for tensor in tensors}
        if used != {"float32"}:
            self.notes.append(f"weights of {', '.join(sorted(used - {'float32'}))} became float32")


def _rows(start: int, end: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that takes the rows from `start` up to `end` of an array."""
    return lambda array: array[start:end]


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers. The numbers are read only if they lie in different bytes."""
    views = [(id(tensor.storage), tensor.offset, tensor.shape, tensor.stride) for tensor in (left, right)]
    return views[0] == views[1] or np.array_equal(left.array(), right.array())
