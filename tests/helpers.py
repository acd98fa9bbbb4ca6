"""What several test files use: a small model's arguments, random weights, programs as modules."""

import importlib.util
from pathlib import Path

import numpy as np
from absl import flags

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT.parent / "shared" / "reference"  # larger than a repository should be; not part of a clone

SMALL = {"n_token": 23, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 12}


def randomise(model, seed=0, scale=0.3):
    """The initial zeros and ones of biases, clusters and layer norms would hide a mistake there."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0, scale, variable.shape))


def program(path):
    """Yields a program as a module, with flags of its own in place of those that other programs define."""
    own, before = flags.FlagValues(), dict(vars(flags.FLAGS))
    vars(flags.FLAGS).update(vars(own))
    flags.DEFINE_integer("verbosity", -1, "absl's own")
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        vars(flags.FLAGS).update(before)
