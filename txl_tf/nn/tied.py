"""Layers that compute with the weights of an embedding, and how a functional model keeps the two together.

A call with tensors gets the embedding as an argument, and the layer does not keep it. A functional model consists of
symbolic calls. Keras saves the tensors of a symbolic call; a layer among its arguments it saves as a configuration
without weights, so that a file or a clone would have another embedding. Therefore a symbolic call takes the embedding
out of the arguments and *ties* the layer to it:

| `hidden` comes from a layer that is or contains the embedding | the configuration of the tied layer contains |
|---|---|
| yes | the name of that layer, and which of its embeddings it is |
| no | the configuration of the embedding, which becomes a part of the tied layer |

A layer that is made from such a configuration looks for its embedding in its first symbolic call.
"""

import functools
import weakref

import keras

from txl_tf.errors import ParameterError
from txl_tf.nn.base import shown


def layers_around(tensor, downstream=False):
    """The layers that a symbolic tensor was computed with, the nearest first.

    Args:
        tensor: symbolic tensor of Keras.
        downstream: also the layers that compute with the outputs of these, and so on: all layers of the graph.
    """
    operation, index, _ = getattr(tensor, "_keras_history", None) or (None, 0, 0)
    nodes = {} if operation is None else {operation._inbound_nodes[index]: None}
    todo = list(nodes)
    for node in todo:  # it grows
        near = dict.fromkeys([*node.parent_nodes, *(node.operation._outbound_nodes if downstream else [])])
        new = [other for other in near if other not in nodes]
        nodes.update(dict.fromkeys(new))
        todo.extend(new)
    operations = dict.fromkeys(node.operation for node in nodes)
    return [operation for operation in operations if isinstance(operation, keras.Layer)]


class Tied:
    """Mixin of layers whose call is `call(hidden, embedding=None)`. It comes before the other base classes.

    A subclass sets `embedding_class` and `shared_sizes`, the names of the sizes that layer and embedding have in
    common.

    Attributes:
        embedding: the embedding that the layer is tied to, or `None`. Its weights are among the weights of the layer.
        place: where a layer before this one has the embedding: `(name of that layer, which of its embeddings)`. `None`
            if the embedding is a part of this layer.
        saved: what the configuration of this layer says of the embedding, until the first symbolic call.
    """

    embedding_class, shared_sizes = None, ()
    embedding = place = saved = None

    def __call__(self, *args, **kwargs):
        hidden = args[0] if args else kwargs.get("hidden")
        if keras.backend.is_keras_tensor(hidden) and len(args) < 2:
            self.tie(hidden, kwargs.pop("embedding", None))
        return super().__call__(*args, **kwargs)

    def embedding_of_call(self, given):
        """The embedding that a call gets or, without one, the embedding that the layer is tied to; checked."""
        embedding = self.embedding if given is None else given
        self.check_embedding(embedding)
        return embedding

    def check_embedding(self, embedding):
        """Raises ParameterError unless it is an embedding of the same sizes. Builds it if it was never called."""
        if not self.fits(embedding):
            sizes = ", ".join(f"{name}={getattr(self, name)}" for name in self.shared_sizes)
            allowed = f"of class {self.embedding_class.__name__} with {sizes}"
            message = f"embedding must be {allowed}, got {shown(embedding)}"
            raise ParameterError("embedding", embedding, allowed, message)
        if not embedding.built:
            embedding.build()

    def fits(self, embedding):
        """Whether it is an embedding of the same sizes."""
        return isinstance(embedding, self.embedding_class) and all(
            getattr(embedding, name) == getattr(self, name) for name in self.shared_sizes
        )

    # ------------------------------------------------------------------------------------------------ symbolic calls

    def tie(self, hidden, embedding=None):
        """Ties the layer to the given embedding or, without one, to the one that its configuration describes.

        Raises:
            ParameterError: there is no such embedding, it has other sizes, or the layer is tied to another one.
        """
        layers = layers_around(hidden)
        if embedding is None:
            embedding = self._find(layers)
        self.check_embedding(embedding)
        if self.embedding is None:
            self._keep(embedding, hidden, layers)
        elif self.embedding is not embedding:
            allowed = "the same embedding in all symbolic calls of a layer"
            message = (
                f"embedding must be {allowed}: {self.name!r} is tied to {shown(self.embedding)}, got another one, "
                f"{shown(embedding)}"
            )
            raise ParameterError("embedding", embedding, allowed, message)

    def _find(self, layers):
        """The embedding of a symbolic call that is given none; `layers` are those that `hidden` comes from."""
        if self.saved is None:
            return self._at(self.place, layers) or self.embedding
        name, index, config = (self.saved[key] for key in ("layer", "index", "embedding"))
        found = self._at(None if name is None else (name, index), layers)
        if found is not None:
            return found
        # Without embeddings upstream, this is the last part of a larger model, saved by itself, and has its own copy
        # of the embedding. With some, their layer has got another name: a copy would untie the two in silence.
        if name is not None and any(self.fits(part) for layer in layers for part in self._embeddings_in(layer)):
            allowed = f"an embedding of layer {name!r}"
            message = (
                f"embedding of {self.name!r} must be {allowed}, but hidden comes from no layer of this name: "
                "keras.models.clone_model keeps an embedding only where clone_function keeps the names of layers"
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

    def _keep(self, embedding, hidden, layers):
        places = ((layer.name, self._embeddings_in(layer)) for layer in layers)
        self.place = next(((name, parts.index(embedding)) for name, parts in places if embedding in parts), None)
        if self.place is not None:
            # Not as an attribute that Keras tracks: to freeze this layer would freeze a part of the other one.
            vars(self)["embedding"] = embedding
            self.show("embedding", embedding)
        else:
            self._check_holders(embedding, hidden)
            locked = self._tracker.locked
            self._tracker.unlock()  # this layer may be built already
            self.embedding = embedding
            if locked:
                self._tracker.lock()
            if not self.trainable:
                embedding.trainable = False
            embedding.owners.add(self)
        vars(self)["saved"] = None

    def _embeddings_in(self, layer):
        return [part for part in layer._flatten_layers() if isinstance(part, self.embedding_class)]

    def _at(self, place, layers):
        """The embedding at a place, see the attribute; `None` if there is none."""
        name, index = place or (None, 0)
        parts = [part for layer in layers if layer.name == name for part in self._embeddings_in(layer)]
        return parts[index] if index < len(parts) else None

    def _check_holders(self, embedding, hidden):
        """Raises ParameterError if a layer of the graph that `hidden` does not come from contains the embedding.

        In a file, that layer would have an embedding of its own. An embedding that is itself called in a functional
        model is saved once for all.
        """
        for layer in [] if embedding._inbound_nodes else layers_around(hidden, downstream=True):
            if layer is not embedding and not isinstance(layer, Tied) and embedding in layer._flatten_layers():
                allowed = "an embedding of a layer that hidden comes from, or of no other layer"
                message = f"embedding must be {allowed}, got that of {layer.name!r}, from which hidden does not come"
                raise ParameterError("embedding", embedding, allowed, message)

    # ----------------------------------------------------------------------------------------------- files and clones

    def get_config(self):
        saved = self.saved
        if self.embedding is not None:
            for node in self._inbound_nodes if self.place is None else []:
                self._check_holders(self.embedding, node.input_tensors[0])
            name, index = self.place or (None, None)
            saved = {"layer": name, "index": index, "embedding": self._config_of_embedding()}
        return {**super().get_config(), **({} if saved is None else {"tied_to": saved})}

    @classmethod
    def from_config(cls, config):
        layer = super().from_config({name: value for name, value in config.items() if name != "tied_to"})
        vars(layer)["saved"] = config.get("tied_to")  # not as a dictionary that Keras tracks
        return layer

    def _config_of_embedding(self):
        """The configuration of the embedding; `None` where a copy that is made from it would untie two layers."""
        embedding = self.embedding
        config, again = (keras.saving.serialize_keras_object(embedding) for _ in range(2))
        if "shared_object_id" in again:  # Keras writes a file, where all that share an object get one object again
            return config
        elsewhere = embedding._inbound_nodes or "/" in embedding.path or len(embedding.owners) > 1
        return None if self.place is not None or elsewhere else config

    # -------------------------------------------------------------------------------------------------------- weights

    @property
    def weights(self):
        return [*super().weights, *([] if self.place is None else self.embedding.weights)]

    @property
    def variables(self):
        return [*super().variables, *([] if self.place is None else self.embedding.variables)]


class Shared:
    """Mixin of embeddings that a layer may be tied to. It comes before the other base classes."""

    @functools.cached_property
    def owners(self):
        """The tied layers that the embedding is a part of."""
        return weakref.WeakSet()

    def load_own_variables(self, store):
        if self.built and not store.keys():
            message = (
                f"the file must contain the weights of embedding {self.name!r}, which a tied layer has as a part, and "
                "contains none: an earlier version wrote the file, or the embedding belongs to another layer, from "
                "which hidden does not come. If another layer has it, make the model by its code: then "
                "model.load_weights(file) reads all weights"
            )
            raise ParameterError("filepath", self.name, "a file with the weights of the embedding", message)
        super().load_own_variables(store)
