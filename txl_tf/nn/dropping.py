"""Where layers get the keys of their dropout from.

Dropout has one rule everywhere. With `training=True`, a layer uses dropout: with the `dropout_key` of the call or,
without one, with a key that it draws from its own `SeedGenerator` or from that of the layer that contains it. With
`training=False`, it never does. A call without `training` uses dropout if it gets a key.
"""

import contextlib
import random
from collections.abc import Callable, Generator, Iterable
from typing import Any

import keras
import tensorflow as tf

from txl_tf.config.checks import RATE
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.checks import check_key
from txl_tf.nn.parts import unlocked
from txl_tf.nn.settings import FREE_SEED, Settings


class Dropping(Settings):
    """Mixin of layers and models with dropout.

    Attributes:
        seed: int from which the keys of the layer's own generator derive. `None` if no seed was given and the layer has
            no generator.
        seed_generator: counts the keys that the layer has drawn. It is saved with the weights.
        rate_names: names of the attributes that are dropout rates.
    """

    seed: int | None = None
    seed_generator: Any = None
    rate_names: tuple[str, ...] = ()
    _draw: Any = None  # draws a key for the rows of a tensor; `None`: nothing is dropped
    _key_source: Callable[[Any], Any] | None = None  # `draw_key` of the layer that this one is a part of
    _always_draws: bool = False

    def start_keys(self, seed: Any, always: bool = False, **rates: float) -> None:
        """Sets where dropout keys come from: the containing layer, a generator of this layer, or nowhere.

        Call it in `__init__`. Making a generator may draw a seed from Python's `random`, from which initial weights
        derive, too. So moving the call before or after the parts are made changes the initial weights for a given seed.

        Args:
            seed: an int; `None` for a random one, which is chosen when the generator is made; or `draw_key` of the
                layer that contains this one.
            always: whether to make a generator even if all rates are 0. It has no effect with a `draw_key`.
            **rates: dropout rates by name.

        Raises:
            ParameterError: a rate is outside `[0, 1)`, or the seed is another value.
        """
        for name, rate in rates.items():
            RATE(name, rate)
        if not callable(seed):
            FREE_SEED("seed", seed)
        self.seed = None if callable(seed) else seed
        self._key_source = seed if callable(seed) else None
        self._always_draws = always
        self.rate_names = tuple(rates)
        self._choose_key_source(any(rates.values()))

    def rates(self) -> list[float]:
        """The current values of the dropout rates."""
        return [getattr(self, name) for name in self.rate_names]

    def _choose_key_source(self, drops: bool) -> None:
        """Chooses the source of keys: the layer that contains this one, or else this layer's own generator.

        If nothing is dropped (`drops` is false), there is no source, except the own generator of a layer that always
        draws.
        """
        if self._key_source is not None:
            self._draw = self._key_source if drops else None
        elif not drops and not self._always_draws:
            self._draw = None
        else:
            self._draw = self.draw_key
            if self.seed_generator is None:
                if self.seed is None:
                    self.store("seed", random.randrange(2**31))
                with unlocked(self):  # it may be built, if its rates were 0 until now
                    self.seed_generator = keras.random.SeedGenerator(self.seed)

    def check_setting(self, name: str, value: Any) -> Any:
        """Checks a new value, see `Settings`. Returns the value, or a random seed for `seed=None`."""
        value = super().check_setting(name, value)
        return random.randrange(2**31) if name == "seed" and value is None else value

    def settings_changed(self, names: Iterable[str]) -> None:
        """Starts or stops drawing keys if the rates have changed. Restarts the generator if the seed has changed."""
        super().settings_changed(names)
        self._choose_key_source(any(self.rates()))
        if "seed" in names and self.seed_generator is not None:
            self.seed_generator.state.assign(keras.random.SeedGenerator(self.seed).state)

    def draw_key(self, x: Tensor) -> Tensor:
        """A new key for the rows of `x`, int32 `[3]`: two numbers from the generator, and the index of the first row.

        The index counts the rows of all replicas as if each replica had as many as this one. If this layer has no
        generator, the layer that contains it draws the key. In a block of `drawing`, the result is the key of the
        block.
        """
        if self._draw != self.draw_key:
            return self._draw(x)
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group
        first_row = tf.cast(replica, tf.int32) * tf.shape(x)[0]
        return tf.concat([tf.cast(self.seed_generator.next(), tf.int32), first_row[None]], 0)

    @contextlib.contextmanager
    def drawing(self, dropout_key: Tensor) -> Generator[None, None, None]:
        """In this block, calls without a key of their own use this one."""
        before = self._draw
        self.store("_draw", lambda x: dropout_key)
        try:
            yield
        finally:
            self.store("_draw", before)

    def key_of_call(self, x: Tensor, training: bool | None, dropout_key: Tensor | None) -> Tensor | None:
        """The dropout key of a call, or `None` if the call uses no dropout.

        Args:
            x: an input with the rows of the batch. A key that is drawn depends on its number of rows.
            training: `True`: the call uses `dropout_key` or, without it, draws a key if the layer has a source of keys.
                `False`: no dropout. `None`: dropout only if a `dropout_key` is given.
            dropout_key: the key that was given to the call.

        Raises:
            ParameterError: `dropout_key` is no key.
        """
        if dropout_key is not None:
            check_key("dropout_key", dropout_key, least=2)
        if training is not None and not training:
            return None
        if dropout_key is None and training and self._draw is not None:
            return self._draw(x)
        return dropout_key

    def save_own_variables(self, store: Any) -> None:
        """Keras's method: also saves the state of the seed generator, if there is one."""
        super().save_own_variables(store)
        if self.seed_generator is not None:
            store["seed_generator"] = self.seed_generator.state.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Keras's method: also restores the seed generator, if the file has its state."""
        store = {name: store[name] for name in store.keys()}
        state = store.pop("seed_generator", None)  # files of older versions do not have it
        if state is not None and self.seed_generator is not None:
            self.seed_generator.state.assign(state)
        super().load_own_variables(store)
