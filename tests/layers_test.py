"""What `txl_tf.layers` offers by name."""

import inspect

from txl_tf import layers

# Functions that the original has under these names; its mask is `_create_mask`.
OF_THE_ORIGINAL = {
    "positional_embedding",
    "rel_shift",
    "create_mask",
    "rel_multihead_attn",
    "mask_adaptive_embedding_lookup",
    "mask_adaptive_logsoftmax",
}


def test_all_names_are_there_once_sorted_and_documented():
    assert sorted(set(layers.__all__)) == layers.__all__
    for name in layers.__all__:
        assert inspect.getdoc(getattr(layers, name)), name


def test_nothing_else_is_public():
    public = {name for name, value in vars(layers).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(layers.__all__)


def test_the_original_s_functions_have_its_names():
    assert set(layers.__all__) >= OF_THE_ORIGINAL
    assert all(inspect.isfunction(getattr(layers, name)) for name in OF_THE_ORIGINAL)
