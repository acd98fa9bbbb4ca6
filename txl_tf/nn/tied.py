"""Layers that compute with the weights of an embedding, and how a functional model keeps the two together.

A call with tensors gets the embedding as an argument, and the layer does not keep it. A functional model consists of
symbolic calls. Keras saves the tensors of a symbolic call. But if an argument is a layer, Keras saves its configuration
without its weights, so a file or a clone would have another embedding. So a symbolic call removes the embedding from
the arguments and *ties* the layer to it:

| `hidden` comes from a layer that is or contains the embedding | the configuration of the tied layer contains |
|---|---|
| yes | the name of that layer, and which of its embeddings it is |
| no | the configuration of the embedding, which becomes a part of the tied layer |

A layer that is made from such a configuration finds its embedding in its first symbolic call.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from txl_tf.errors import ParameterError
from txl_tf.nn.bases import MixedIntoLayer
from txl_tf.nn.checks import shown
from txl_tf.nn.parts import unlocked


def layers_around(tensor: Any, whole_graph: bool = False) -> list[Any]:
    """The layers from which a symbolic tensor comes, or all layers of its graph. The nearest are first.

    Args:
        tensor: symbolic tensor of Keras.
        whole_graph: also returns the layers that use the outputs of these layers, the layers from which the other
            inputs of those come, and so on.
    """
    operation, index, _ = getattr(tensor, "_keras_history", None) or (None, 0, 0)
    nodes: dict[Any, None] = {} if operation is None else {operation._inbound_nodes[index]: None}
    todo = list(nodes)
    for node in todo:  # the list grows in the loop
        near = dict.fromkeys([*node.parent_nodes, *(node.operation._outbound_nodes if whole_graph else [])])
        new = [other for other in near if other not in nodes]
        nodes.update(dict.fromkeys(new))
        todo.extend(new)
    operations: dict[Any, None] = dict.fromkeys(node.operation for node in nodes)
    return [operation for operation in operations if isinstance(operation, keras.Layer)]


class Tied(MixedIntoLayer):
    """Mixin of layers whose call is `call(hidden, embedding=None)`. It comes before the other base classes.

    Attributes:
        embedding_class: a subclass sets it to the class of the embedding.
        shared_sizes: a subclass sets it to the names of the sizes in which layer and embedding must agree.
        embedding: the embedding that the layer is tied to, or `None`. The layer's list of weights contains its weights.
        location: where the embedding is in an earlier layer: `(name of that layer, index among its embeddings)`. `None`
            if the embedding is a part of this layer.
        saved: the description of the embedding in the configuration of this layer, until the first symbolic call.
    """

    embedding_class: Any = None
    shared_sizes: tuple[str, ...] = ()
    embedding: Any = None
    location: tuple[str, int] | None = None
    saved: dict[str, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A symbolic call ties the layer, and drops the argument `embedding`. `None` is the same as no embedding.

        Keras refuses an embedding by position, because it is no tensor.
        """
        hidden = args[0] if args else kwargs.get("hidden")
        if keras.backend.is_keras_tensor(hidden) and all(value is None for value in args[1:]):
            args = args[:1]
            self.tie(hidden, kwargs.pop("embedding", None))
        return super().__call__(*args, **kwargs)

    def embedding_of_call(self, given: Any) -> Any:
        """The embedding of a call: its argument or, without one, the embedding that the layer is tied to; checked."""
        embedding = self.embedding if given is None else given
        self.check_embedding(embedding)
        return embedding

    def check_embedding(self, embedding: Any) -> None:
        """Raises ParameterError unless it is an embedding with the same sizes. Builds it if it was never called."""
        if not self.fits(embedding):
            sizes = ", ".join(f"{name}={getattr(self, name)}" for name in self.shared_sizes)
            allowed = f"of class {self.embedding_class.__name__} with {sizes}"
            message = f"embedding must be {allowed}, got {shown(embedding)}"
            raise ParameterError("embedding", embedding, allowed, message)
        if not embedding.built:
            embedding.build()

    def fits(self, embedding: Any) -> bool:
        """Whether it is an embedding with the same sizes."""
        return isinstance(embedding, self.embedding_class) and all(
            getattr(embedding, name) == getattr(self, name) for name in self.shared_sizes
        )

    # ------------------------------------------------------------------------------------------------ symbolic calls

    def tie(self, hidden: Any, embedding: Any = None) -> None:
        """Ties the layer to the given embedding or, without one, to the one that its configuration describes.

        Raises:
            ParameterError: there is no such embedding; or it has other sizes; or the layer is tied to another one.
        """
        layers = layers_around(hidden)
        if embedding is None:
            embedding = self._find_embedding(layers)
        self.check_embedding(embedding)
        if self.embedding is None:
            self._tie_to(embedding, hidden, layers)
        elif self.embedding is not embedding:
            allowed = "the same embedding in all symbolic calls of a layer"
            message = (
                f"embedding must be {allowed}: {self.name!r} is tied to {shown(self.embedding)}, but got "
                f"{shown(embedding)}"
            )
            raise ParameterError("embedding", embedding, allowed, message)

    def _find_embedding(self, layers: Sequence[Any]) -> Any:
        """The embedding of a symbolic call without that argument. `hidden` comes from the `layers`."""
        if self.saved is None:
            return self._embedding_at(self.location, layers) or self.embedding
        name, index, config = (self.saved[key] for key in ("layer", "index", "embedding"))
        embedding = self._embedding_at(None if name is None else (name, index), layers)
        if embedding is not None:
            return embedding
        # If no layer upstream has an embedding, this is the last part of a larger model, saved separately, and it gets
        # its own copy of the embedding. If one has, that layer was renamed, and a copy would silently untie the two.
        if name is not None and any(self.fits(part) for layer in layers for part in self._embeddings_in(layer)):
            allowed = f"an embedding of layer {name!r}"
            message = (
                f"embedding of {self.name!r} must be {allowed}, but hidden comes from no layer with this name: "
                "keras.models.clone_model keeps an embedding only if clone_function keeps the names of layers"
            )
            raise ParameterError("embedding", name, allowed, message)
        if config is None:
            allowed = "used by this layer alone, or by a layer that hidden comes from"
            message = (
                f"embedding of {self.name!r} must be {allowed}: keras.models.clone_model and from_config cannot keep "
                "an embedding that other layers use; copy.deepcopy(model) and model.save(file) can"
            )
            raise ParameterError("embedding", name, allowed, message)
        return keras.saving.deserialize_keras_object(config)

    def _tie_to(self, embedding: Any, hidden: Any, layers: Sequence[Any]) -> None:
        """Ties the layer to an embedding. `hidden` comes from the `layers`."""
        embeddings = ((layer.name, self._embeddings_in(layer)) for layer in layers)
        self.location = next(((name, parts.index(embedding)) for name, parts in embeddings if embedding in parts), None)
        if self.location is not None:
            # Keras must not track this attribute. Otherwise, freezing this layer would freeze a part of the other one.
            self.__dict__["embedding"] = embedding
            self.show("embedding", embedding)
        else:
            self._check_holders(embedding, hidden)
            with unlocked(self):  # it may be built already
                self.embedding = embedding
            if not self.trainable:
                embedding.trainable = False
            embedding.owners.add(self)
        self.__dict__["saved"] = None

    def _embeddings_in(self, layer: Any) -> list[Any]:
        """The embeddings in a layer; the layer itself if it is one."""
        return [part for part in layer._flatten_layers() if isinstance(part, self.embedding_class)]

    def _embedding_at(self, location: tuple[str, int] | None, layers: Sequence[Any]) -> Any:
        """The embedding at a `location`, see the attribute; `None` if none of the `layers` has it."""
        name, index = location or (None, 0)
        parts = [part for layer in layers if layer.name == name for part in self._embeddings_in(layer)]
        return parts[index] if index < len(parts) else None

    def _check_holders(self, embedding: Any, hidden: Any) -> None:
        """Raises ParameterError if another layer of the graph, not a tied one, contains the embedding.

        Call it only when no layer that `hidden` comes from contains the embedding (`location` is `None`). In a file, a
        layer elsewhere in the graph would have its own embedding. Tied layers get the same embedding from the file. If
        the embedding was itself called in a functional model, it is saved only once, so nothing is checked.
        """
        for layer in [] if embedding._inbound_nodes else layers_around(hidden, whole_graph=True):
            if layer is not embedding and not isinstance(layer, Tied) and embedding in layer._flatten_layers():
                allowed = "an embedding of a layer that hidden comes from, or of no other layer"
                message = f"embedding must be {allowed}, but hidden does not come from {layer.name!r}, which has it"
                raise ParameterError("embedding", embedding, allowed, message)

    # ----------------------------------------------------------------------------------------------- files and clones

    def get_config(self) -> dict[str, Any]:
        tied_to = self.saved  # the entry of the configuration that this layer was made from
        if self.embedding is not None:
            if self.location is None:
                for node in self._inbound_nodes:  # one for each symbolic call
                    hidden = node.input_tensors[0]
                    self._check_holders(self.embedding, hidden)
            name, index = self.location or (None, None)
            tied_to = {"layer": name, "index": index, "embedding": self._config_of_embedding()}
        config = super().get_config()
        return config if tied_to is None else {**config, "tied_to": tied_to}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        layer: Any = super().from_config({name: value for name, value in config.items() if name != "tied_to"})
        vars(layer)["saved"] = config.get("tied_to")  # so that Keras does not track the dictionary
        return layer

    def _config_of_embedding(self) -> dict[str, Any] | None:
        """The configuration of the embedding; `None` if a copy that is made from it would untie two layers."""
        embedding = self.embedding
        # In the block of `model.save`, Keras marks an object that is serialized for the second time.
        config: Any = keras.saving.serialize_keras_object(embedding)
        serialized: Any = keras.saving.serialize_keras_object(embedding)
        if "shared_object_id" in serialized:  # all owners will get the same object from the file
            return config
        elsewhere = embedding._inbound_nodes or "/" in embedding.path or len(embedding.owners) > 1
        return None if self.location is not None or elsewhere else config

    # -------------------------------------------------------------------------------------------------------- weights

    @property
    def weights(self) -> list[Any]:
        """The weights of the layer, and those of an embedding that is in an earlier layer."""
        return [*super().weights, *([] if self.location is None else self.embedding.weights)]

    @property
    def variables(self) -> list[Any]:
        """As `weights`, but with the variables that are not weights."""
        return [*super().variables, *([] if self.location is None else self.embedding.variables)]


class Shared(MixedIntoLayer):
    """Mixin of embeddings that a layer may be tied to. It comes before the other base classes."""

    @functools.cached_property
    def owners(self) -> weakref.WeakSet[Any]:
        """The tied layers that contain the embedding."""
        return weakref.WeakSet()

    def load_own_variables(self, store: Any) -> None:
        """Keras's method. Raises ParameterError if the file has no weights for the embedding of a tied layer."""
        if self.built and not store.keys():
            message = (
                f"the file must contain the weights of embedding {self.name!r}, which is a part of a tied layer, but "
                "it has none: an earlier version wrote the file, or the embedding belongs to another layer, from which "
                "hidden does not come. If it belongs to another layer, make the model with its code; then "
                "model.load_weights(file) reads all weights"
            )
            raise ParameterError("filepath", self.name, "a file with the weights of the embedding", message)
        super().load_own_variables(store)
