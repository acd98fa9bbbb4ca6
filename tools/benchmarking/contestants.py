"""The contestants of each mode, and the number of tokens in their work.

"Work" is what a contestant repeats, see work.py. The contestants are in language_models.py, pairs.py and taggers.py.
They import the library only when they are made, so that a process can choose the checkout before.
"""

from typing import Any

from benchmarking import language_models, pairs, taggers
from benchmarking.shapes import EVALUATION, PROMPT, REFERENCE, WRITING
from benchmarking.taggers import is_tagging


def is_pairs(mode):
    """Whether the contestants of a mode are encoder-decoders."""
    return mode.startswith("seq2seq")


def make_contestants(mode, jit=False, run=None):
    """Returns `{name: function of a shape that returns the work}` of the contestants, the reference first.

    Args:
        mode: the mode.
        jit: whether contestants that train also take part with XLA.
        run: for the mode "scoring", see `language_models.scoring_contestants`.
    """
    if mode == "scoring":
        return language_models.scoring_contestants(run)
    if mode == "writing":
        return language_models.writing_contestants()
    if is_pairs(mode):
        return pairs.contestants(mode, jit)
    return taggers.contestants(mode) if is_tagging(mode) else language_models.contestants(mode, jit)


def check_shape(mode, shape):
    """Raises ValueError unless the library can make the network of a shape. To find out, it makes the network.

    A shape of a mode without a network, such as "preparation", passes.
    """
    import txl_tf

    if is_tagging(mode):
        taggers.library_network(mode.startswith("flat"), shape)
    elif is_pairs(mode):
        arguments: Any = pairs.arguments_of(shape)
        txl_tf.Transformer(**arguments)
    elif "div_val" in shape:
        txl_tf.TransformerXL(**language_models.model_arguments(shape))


def tokens_of_work(mode, name, shape):
    """The number of tokens that a contestant computes in its work once, without padding: its speed is in tokens/s.

    For an encoder-decoder, it counts the tokens of the targets; for a long prompt, the tokens of the prompt.
    """
    if mode == "seq2seq_pairs":
        return sum(map(len, pairs.word_pairs(shape["pairs"])[1]))
    if mode == "scoring" and name != EVALUATION:
        return sum(len(line.split()) + 1 for line in language_models.random_lines(shape))
    if mode == "writing":
        options = WRITING.get(name, {})
        return options.get("rows", 1) * (PROMPT if "prompt" in options else shape["tgt_len"])
    if is_tagging(mode):
        return sum(len(sentence.chars) for sentence in taggers.random_sentences(shape))
    return shape["batch_size"] * (1 if mode == "generation" and name == REFERENCE else shape["tgt_len"])
