"""Signatures: what a constructor writes is what its group of hyper-parameters says, and tools can read all of it."""

import inspect
import typing

import keras
import pytest

import txl_tf
from txl_tf import layers
from txl_tf.config import (
    BiLSTMConfig,
    FlatConfig,
    LabelConfig,
    MachineConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    TenerConfig,
    TransformerConfig,
    TransformerLMConfig,
)
from txl_tf.language.generation import generate
from txl_tf.language.sampling import SAMPLING
from txl_tf.nn.arguments import LayerOptions
from txl_tf.training.distribution import make_strategy

EMPTY = inspect.Parameter.empty


def written(function):
    """`{name: (type, default)}` of what a function writes in the source, but for `self` and `**kwargs`."""
    function = inspect.unwrap(function)
    types = typing.get_type_hints(function)
    parameters = list(vars(function).get("__signature__", inspect.signature(function)).parameters.values())
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD and p.name != "self"]
    return {p.name: (types.get(p.name, EMPTY), p.default) for p in named}


def told(group, required=()):
    """The same of a group, whose hyper-parameters `required` have no default, and are not `None`."""
    types = typing.get_type_hints(group)
    found = {name: (types[name], getattr(group, name, EMPTY)) for name in group.names()}
    for name in required:
        given = [kind for kind in typing.get_args(types[name]) if kind is not type(None)]
        found[name] = (given[0] if type(None) in typing.get_args(types[name]) else types[name], EMPTY)
    return found


RECOMPUTE, SEED = {"recompute": (bool, False)}, {"seed": (int | None, None)}


@pytest.mark.parametrize(
    "function, group, required, besides",
    [
        (txl_tf.TransformerXL, NetworkConfig, ["n_token"], {**RECOMPUTE, **SEED}),  # it is made once the text is known
        (txl_tf.TransformerXLLM, ModelConfig, ["n_token", "mem_len"], {**RECOMPUTE, **SEED}),
        (txl_tf.TransformerLM, TransformerLMConfig, ["n_token"], {**RECOMPUTE, **SEED}),
        (txl_tf.Transformer, TransformerConfig, ["input_vocab_size", "target_vocab_size"], SEED),
        (txl_tf.Tener, TenerConfig, ["n_token"], SEED),
        (txl_tf.Flat, FlatConfig, ["n_token"], SEED),
        (txl_tf.BiLSTM, BiLSTMConfig, ["n_token"], SEED),
        (txl_tf.Tagger, LabelConfig, ["labels"], {**SEED, "network": (keras.Layer, EMPTY)}),
        (
            txl_tf.make_optimizer, OptimizerConfig, [],
            {
                "train_steps": (int, 100_000), "gradient_accumulation_steps": (int, 1),
                "product_dtype": (str | None, None),
            },
        ),
    ],
)  # fmt: skip
def test_names_types_and_defaults_are_those_of_the_group(function, group, required, besides):
    constructor = function.__init__ if isinstance(function, type) else function
    assert written(constructor) == {**told(group, required), **besides}


def test_the_options_of_generate_are_those_of_sampling():
    defaults = {name: default for name, (_, default) in written(generate).items() if name in SAMPLING}
    assert defaults == SAMPLING


def test_the_devices_of_a_strategy_are_those_of_the_machine():
    group = told(MachineConfig)
    assert written(make_strategy) == {name: group[name] for name in written(make_strategy)}


CONSTRUCTORS = {
    name: value
    for module in (txl_tf, layers)
    for name in module.__all__
    if isinstance(value := getattr(module, name), type) and issubclass(value, keras.layers.Layer)
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_writes_a_type_for_every_argument(name):
    constructor = CONSTRUCTORS[name].__init__
    untyped = [argument for argument, (kind, _) in written(constructor).items() if kind is EMPTY]
    assert not untyped
    rest = [p for p in inspect.signature(constructor).parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert [p.annotation for p in rest] == [typing.Unpack[LayerOptions]]  # so that a misspelt name is found


def test_the_options_of_a_layer_are_those_of_keras():
    assert {*LayerOptions.__annotations__} == {*written(keras.layers.Layer.__init__)}
