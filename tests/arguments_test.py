"""Arguments of constructors: stored before the body runs, checked and shown as those of a group, saved once."""

import functools
import inspect

import keras
import pytest
from helpers import SMALL, mentions, raises_naming, raises_parameter

import txl_tf
from txl_tf import layers
from txl_tf.config.checks import RATE, WIDTH, Config, group, option
from txl_tf.errors import CallError, ParameterError, UnknownArgumentError
from txl_tf.nn.arguments import arguments_of, stored, takes
from txl_tf.nn.base import Layer


@group
class SomeConfig(Config):
    """A group of hyper-parameters."""

    n_token: int | None = option("Required by the layer.", WIDTH, default=None)
    width: int = option("Required by the group.", WIDTH, flag=8)
    rate: float = option("A rate.", RATE, default=0.1)


class Scaled(Layer):
    @stored
    def __init__(self, units, rate=0.5, kernel_initializer="zeros", **kwargs):
        super().__init__(**kwargs)
        self.seen = self.units, self.rate
        self.kernel_initializer = keras.initializers.get(kernel_initializer)


class More(Scaled):
    @stored
    def __init__(self, units, *, factor=2, **kwargs):
        super().__init__(units, **kwargs)


class Network(Layer):
    @takes(SomeConfig, required=["n_token"])
    def __init__(self, *, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.given = seed, sorted(kwargs)


def test_arguments_are_attributes_when_the_body_runs():
    assert Scaled(3).seen == (3, 0.5) and Scaled(3, 0.2).seen == Scaled(rate=0.2, units=3).seen == (3, 0.2)


def test_the_configuration_has_those_of_all_classes_as_they_are_now():
    layer = More(3, factor=5, name="more", dtype="float64")
    layer.rate = 0.25
    config = layer.get_config()
    assert {name: config[name] for name in ("units", "rate", "factor", "name")} == {
        "units": 3, "rate": 0.25, "factor": 5, "name": "more",
    }  # fmt: skip
    assert config["kernel_initializer"] == keras.initializers.serialize(keras.initializers.get("zeros"))
    again = More.from_config(config)
    assert again.get_config() == config and again.dtype == "float64"
    assert arguments_of(keras.layers.Dense(3)) == {}


def test_an_own_argument_that_a_file_would_not_have_is_refused():
    class Own(layers.LayerNorm):
        def __init__(self, epsilon=1e-12, power=0.5, **kwargs):
            super().__init__(epsilon, **kwargs)
            self.power = power

    class Saved(Own):
        def get_config(self):
            return {**super().get_config(), "power": self.power}

    class Made(Own):
        @classmethod
        def from_config(cls, config):
            return cls(power=2.0, **config)

    class OwnModel(txl_tf.TransformerXLLM):
        def __init__(self, mem_len=4, power=0.5, **kwargs):
            super().__init__(mem_len=mem_len, **kwargs)

    for make in (Own, functools.partial(OwnModel, **SMALL)):
        assert "power" not in make(power=0.5, name="its_default").get_config()
        with raises_parameter("power"):
            make(power=2.0).get_config()
    assert Own(1e-6).get_config()["epsilon"] == 1e-6
    assert Saved(power=2.0).get_config()["power"] == Saved.from_config(Saved(power=2.0).get_config()).power == 2.0
    assert Made.from_config(Made(power=2.0).get_config()).power == 2.0


def test_the_signature_has_the_fields_of_the_group_with_their_defaults():
    for function in (Network, Network.__init__):
        taken = {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}
        empty = inspect.Parameter.empty
        assert taken == {"seed": None, "n_token": empty, "width": empty, "rate": 0.1, "kwargs": empty}


def test_fields_are_attributes_and_the_body_gets_its_own_arguments_alone():
    network = Network(n_token=9, width=4, seed=7, name="net")
    assert (network.n_token, network.width, network.rate, network.name) == (9, 4, 0.1, "net")
    assert network.given == (7, ["name"])
    again = Network.from_config(network.get_config())
    assert again.get_config() == network.get_config() and again.seed == 7


def test_what_may_be_given_by_position_is_told():
    with raises_parameter("More", [3, 2], error=CallError) as raised:
        More(3, 2)
    assert mentions(str(raised.value), "units")
    assert isinstance(raised.value, TypeError)


@pytest.mark.parametrize(
    "arguments, error, name, value",
    [
        ({"width": 4}, CallError, "Network", []),
        ({"n_token": 9}, CallError, "Network", []),
        ({"n_token": 9, "width": 4, "rates": 0.2}, UnknownArgumentError, "rates", 0.2),
        ({"n_token": 9, "width": 4, "rate": 1.5}, ParameterError, "rate", 1.5),
        ({"n_token": 9, "width": "4"}, ParameterError, "width", "4"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, name, value):
    with raises_parameter(name, value, error=error):
        Network(**arguments)


@pytest.mark.parametrize("missing, given", [("n_token", {"width": 4}), ("width", {"n_token": 9})])
def test_the_message_names_the_missing_argument(missing, given):
    with raises_naming(TypeError, "Network", missing):
        Network(**given)
