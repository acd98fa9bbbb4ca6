"""The examples in the docstrings of layers run as they stand, with public names alone, and have the shapes they say."""

import inspect
import re

import keras
import pytest
import tensorflow as tf

import txl_tf
from txl_tf import layers

PUBLIC = {f"layers.{name}": getattr(layers, name) for name in layers.__all__}
PUBLIC |= {name: getattr(txl_tf, name) for name in ("TransformerXL", "Tener", "Flat", "BiLSTM")}
LAYERS = [name for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, keras.layers.Layer)]
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = {name: "".join(FENCE.findall(inspect.getdoc(value))) for name, value in PUBLIC.items()}
SHAPE = re.compile(r"^\(?(\w+)[,)\w ]* = .*  # \[([\d, ]*)\]$")


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_an_example_that_calls_it(name):
    assert name.removeprefix("layers.") in EXAMPLES[name]


@pytest.mark.parametrize("name", [name for name in PUBLIC if EXAMPLES[name]])
def test_examples_run_and_have_the_shapes_they_say(name):
    names = {"keras": keras, "tf": tf, "txl_tf": txl_tf}
    for statement in re.split(r"\n(?=[^\s})])", EXAMPLES[name].strip()):
        exec(statement, names)
        if said := SHAPE.match(statement.strip().replace("\n", " ")):
            found = tf.nest.flatten(names[said[1]])[0]
            assert found.shape == [int(size) for size in said[2].split(", ")], statement


def test_examples_use_public_names_alone():
    for name, example in EXAMPLES.items():
        for module, used in re.findall(r"\b(txl_tf(?:\.layers)?)\.(\w+)", example):
            public = layers.__all__ if module.endswith(".layers") else txl_tf.__all__
            assert used in public, f"{name}: {module}.{used}"
