"""Fine-tunes a trained run for text classification: which file, or section of Python's manual, is a passage from?

    python train.py --flagfile=configs/quickstart.cfg
    python examples/classify.py --model_dir=runs/quickstart --output=runs/classifier.keras
    python examples/classify.py --model_dir=runs/my --data_path=austen.txt,bronte.txt

`TransformerXL` is a layer like any other: its hidden states are averaged over the passage, and a dense layer tells the
class. First that layer learns alone, the network frozen; then all of it does. Every class gives as many passages, and
every fifth of them is held out: its label, that is; a run of the manual has read its text. Accuracy on the 128 that
are, of four sections of the manual (a quarter is chance), after a minute or two on two CPU cores:

                                  network frozen    fine-tuned
    the quickstart's run                    0.51          0.84
    random weights (--scratch)              0.59          0.60
"""

from absl import flags

from txl_programs.program import read_flags, run, values
from txl_tf.config import PRECISIONS

SECTIONS = ("specialnames", "compound", "string-methods", "debugger")

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_list("data_path", None, "UTF-8 files, one for each class; default: sections of Python's manual.")
flags.DEFINE_string("output", None, "Write the classifier to this .keras file.")
flags.DEFINE_integer("length", 128, "Tokens of a passage.")
flags.DEFINE_integer("epochs", 6, "Epochs of either phase.")
flags.DEFINE_float("learning_rate", 5e-4, "Learning rate of the second phase; ten times that in the first.")
flags.DEFINE_enum("mixed_precision", "float32", list(PRECISIONS), "Type of the products.")
flags.DEFINE_bool("scratch", False, "Start from random weights instead of the run's, to compare.")
flags.DEFINE_integer("seed", 0, "Seed of the new weights, of shuffling and of dropout.")
flags.mark_flag_as_required("model_dir")

read_flags(__name__)

import keras
import numpy as np
import tensorflow as tf

from txl_tf import TransformerXL, load_run
from txl_tf.data.text_files import read_files


def read_classes(vocab, data_path=None):
    """`{name of a class: ids of its text}`: the files, or else `SECTIONS` of Python's manual."""
    if data_path:
        return {path: vocab.encode(read_files([path], vocab.level), name=path) for path in data_path}
    from pydoc_data.topics import topics

    return {name: vocab.encode(topics[name], name=name) for name in SECTIONS}


def passages(classes, length):
    """Passages of every class, as many of each as the shortest text has; every fifth of them held out.

    Args:
        classes: `{name: int [n]}`.
        length: tokens of a passage.

    Returns:
        (tokens, labels) to learn from and (tokens, labels) held out: int `[passages, length]`, `[passages]`.

    Raises:
        ValueError: there is one class alone, or a text is shorter than five passages.
    """
    if len(classes) < 2:
        raise ValueError(f"data_path must name two files or more, one for each class, got {', '.join(classes)}")
    name, ids = min(classes.items(), key=lambda item: len(item[1]))
    number = len(ids) // length
    if number < 5:
        raise ValueError(f"{name} must hold five passages of {length} tokens or more, got {len(ids)} tokens")
    tokens = np.stack([ids[: number * length].reshape(number, length) for ids in classes.values()])
    labels = np.repeat(np.arange(len(classes))[:, None], number, 1)
    fifth = np.arange(number) % 5 == 4
    return [(tokens[:, part].reshape(-1, length), labels[:, part].ravel()) for part in (~fifth, fifth)]


def batches(tokens, labels, shuffle_seed=None):
    """`tf.data.Dataset` of batches (tokens, labels), in a new order every epoch where there is a seed."""
    dataset = tf.data.Dataset.from_tensor_slices((tokens, labels))
    if shuffle_seed is not None:
        dataset = dataset.shuffle(len(tokens), seed=shuffle_seed)
    return dataset.batch(32)


def make_classifier(network, n_class):
    """A functional Keras model over a `TransformerXL`: int tokens `[batch, length]` to logits `[batch, n_class]`."""
    tokens = keras.Input([None], dtype="int32", name="tokens")
    hidden, _ = network(tokens)
    pooled = keras.layers.GlobalAveragePooling1D(dtype="float32")(hidden)
    return keras.Model(tokens, keras.layers.Dense(n_class, dtype="float32")(pooled))


def fit(classifier, train, held_out, *, epochs, learning_rate):
    """Trains what is not frozen (hence `compile`, which looks). Returns the accuracy on what is held out."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
    return classifier.fit(train, validation_data=held_out, epochs=epochs, verbose=2).history["val_accuracy"][-1]


def fine_tune(network, n_class, train, held_out, *, epochs, learning_rate):
    """A classifier over `network`, trained in two phases, the first with the network frozen."""
    classifier = make_classifier(network, n_class)
    network.trainable = False
    classifier.summary()
    frozen = fit(classifier, train, held_out, epochs=epochs, learning_rate=10 * learning_rate)
    network.trainable = True
    tuned = fit(classifier, train, held_out, epochs=epochs, learning_rate=learning_rate)
    print(f"accuracy on held-out passages: network frozen {frozen:.3f}, fine-tuned {tuned:.3f}")
    return classifier


def classify(model_dir, data_path, output, length, epochs, learning_rate, mixed_precision, scratch, seed):
    keras.utils.set_random_seed(seed)
    lm, vocab = load_run(model_dir, dtype=PRECISIONS[mixed_precision], mem_len=0)
    classes = read_classes(vocab, data_path)
    train, held_out = passages(classes, length)
    network = lm.network
    if scratch:
        network = TransformerXL.from_config(network.get_config())
    classifier = fine_tune(
        network, len(classes), batches(*train, shuffle_seed=seed), batches(*held_out),
        epochs=epochs, learning_rate=learning_rate,
    )  # fmt: skip
    if output:
        classifier.save(output)
        classifier = keras.saving.load_model(output)
    logits = classifier.predict(batches(*held_out), verbose=0)
    for name, i in zip(classes, range(0, len(logits), len(logits) // len(classes)), strict=True):
        print(f"{name}, taken for {list(classes)[logits[i].argmax()]}: {vocab.decode(held_out[0][i])!r}")


def main():
    names = "model_dir data_path output length epochs learning_rate mixed_precision scratch seed"
    classify(**values(names))


if __name__ == "__main__":
    run(main)
