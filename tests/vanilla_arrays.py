"""What txl_tf computes for the cases of the vanilla Transformer, under the names of their golden arrays.

`arrays_of(config, golden)` gives a dictionary with the names of `golden` but those of inputs and weights: `out/...`
results, `g/...` gradients. The cases are told apart by the beginning of `config["model"]`.
"""

import re

import keras
import numpy as np
import tensorflow as tf

from txl_tf import layers
from txl_tf.training.schedules import NoamSchedule
from txl_tf.vanilla.encoder_decoder import DecoderLayer, EncoderLayer
from txl_tf.vanilla.transformer import Transformer


def arrays_of(config, golden):
    kind = re.match(r"\w+", config["model"])[0]
    if kind not in CASES:
        raise ValueError(f"config.json: model must begin with one of {', '.join(CASES)}, got {config['model']!r}")
    return {name: np.asarray(array) for name, array in CASES[kind](config, golden).items()}


def variable(owner, name):
    """The weight of a layer or model by its name in the goldens, such as `encoder/layer0/ffn/1/kernel`."""
    name = re.sub(r"ffn/(\d)/", lambda match: f"ffn/dense{int(match[1]) + 1}/", name)
    name = re.sub(r"layer(\d+)/", r"stacked/\1/", name).replace("embedding/embeddings", "embedding/lut")
    for part in name.split("/"):
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    return owner


def set_weights(owner, golden):
    for name in names_of(golden, "w/"):
        variable(owner, name).assign(golden[f"w/{name}"])


def names_of(golden, start):
    return [name.removeprefix(start) for name in golden if name.startswith(start)]


def gradients(tape, loss, owner, inputs, golden):
    """`g/...` of the weights and of the inputs that the case has gradients of."""
    names = names_of(golden, "g/")
    sources = [inputs[name.removeprefix("in/")] if name.startswith("in/") else variable(owner, name) for name in names]
    sources = [getattr(source, "value", source) for source in sources]
    found = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, sources)]
    return {f"g/{name}": gradient for name, gradient in zip(names, found, strict=True)}


def layer_arrays(layer, golden, call):
    """Results and gradients of a layer; `call(inputs)` gives `{result: array}`, of which `output` makes the loss."""
    layer.build((None, None, golden[[name for name in golden if name.startswith("in/")][0]].shape[-1]))
    inputs = {name: tf.constant(golden[f"in/{name}"]) for name in names_of(golden, "in/")}
    set_weights(layer, golden)
    with tf.GradientTape() as tape:
        tape.watch(list(inputs.values()))
        found = call(inputs)
        loss = tf.reduce_sum(found["output"] * inputs["loss_weights"])
    results = {f"out/{name}": array for name, array in found.items()}
    return {**results, "out/loss": loss, **gradients(tape, loss, layer, inputs, golden)}


def positional_encoding(config, golden):
    sizes = {name: map(int, name.split("/")[1].split("x")) for name in golden}
    return {name: layers.positional_encoding(*size) for name, size in sizes.items()}


def attention(config, golden):
    inputs = {name: tf.constant(golden[f"in/{name}"]) for name in names_of(golden, "in/")}
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    own = inputs["q_self"], inputs["k_self"], inputs["v_self"]
    ahead, padding = inputs["look_ahead_mask"], inputs["padding_mask"]
    calls = {
        "none": (q, k, v, None),
        "padding": (q, k, v, padding),
        "all_masked_row": (q, k, v, inputs["all_masked_row_mask"]),
        "look_ahead": (*own, ahead),
        "look_ahead_padding": (*own, tf.maximum(ahead, padding)),
    }
    for i, query in enumerate(TUTORIAL_QUERIES):
        calls[f"tutorial{i}"] = (tf.constant([query], tf.float32), inputs["tutorial_k"], inputs["tutorial_v"], None)
    found = {}
    for name in dict.fromkeys(name.split("/")[1] for name in golden if name.startswith("out/")):
        output, weights = layers.scaled_dot_product_attention(*calls[name])
        found |= {f"out/{name}/output": output, f"out/{name}/weights": weights}
    return found


TUTORIAL_QUERIES = [[0, 10, 0], [0, 0, 10], [10, 10, 0]]  # of TensorFlow's tutorial


def multi_head_attention(config, golden):
    layer = layers.MultiHeadAttention(config["d_model"], config["num_heads"])

    def call(x):
        return dict(zip(["output", "weights"], layer(x["v"], x["k"], x["q"], x["mask"]), strict=True))

    return layer_arrays(layer, golden, call)


def feed_forward(config, golden):
    layer = layers.PositionWiseFFN(config["ffn_num_hiddens"], config["ffn_num_outputs"])
    return layer_arrays(layer, golden, lambda x: {"output": layer(x["x"])})


def encoder_layer(config, golden):
    layer = EncoderLayer(config["d_model"], config["num_heads"], config["dff"])
    return layer_arrays(layer, golden, lambda x: {"output": layer(x["x"], x["mask"])})


def decoder_layer(config, golden):
    layer = DecoderLayer(config["d_model"], config["num_heads"], config["dff"])

    def call(x):
        found = layer(x["x"], x["enc_output"], x["look_ahead_mask"], x["padding_mask"])
        return dict(zip(["output", "weights_block1", "weights_block2"], found, strict=True))

    return layer_arrays(layer, golden, call)


def embeddings(config, golden):
    layer = layers.Embeddings(vocab=config["vocab"], d_model=config["d_model"])
    positions = layers.PositionalEncoding(config["d_model"], config["max_len"], config["dropout"])
    layer.build()
    set_weights(layer, golden)
    with tf.GradientTape() as tape:
        embedded = layer(tf.constant(golden["in/ids"]))
        output = positions(embedded)
        loss = tf.reduce_sum(output * golden["in/loss_weights"])
    results = {"out/embedded": embedded, "out/output": output, "out/pe": positions.pe, "out/loss": loss}
    return {**results, **gradients(tape, loss, layer, {}, golden)}


def transformer(config, golden):
    source, target, labels = (tf.constant(golden[f"in/{name}"]) for name in ("inp", "tar_inp", "tar_real"))
    model = Transformer(
        num_layers=config["num_layers"], d_model=config["d_model"], num_heads=config["num_heads"], dff=config["dff"],
        input_vocab_size=config["input_vocab"], target_vocab_size=config["target_vocab"], rate=0.0,
    )  # fmt: skip
    set_weights(model, golden)
    with tf.GradientTape() as tape:
        nll, _, _, tokens = model.loss_of((source, target), labels)
        loss = nll / tokens
    found = gradients(tape, loss, model, {}, golden)
    masks = layers.create_padding_mask(source), tf.constant(golden["in/combined_mask"])
    enc_output = model.encoder(source, masks[0])
    dec_output, weights = model.decoder(target, enc_output, masks[1], masks[0])
    logits = model((source, target))
    per_token = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    found |= {f"out/attention/{name}": array for name, array in weights.items()}
    found |= {"out/enc_output": enc_output, "out/dec_output": dec_output, "out/logits": logits, "out/loss": loss}
    found["out/loss_per_token"] = per_token * tf.cast(labels != 0, tf.float32)
    steps = tf.constant(golden["in/schedule_steps"])
    adam = config["adam"]
    found["out/schedule_lr"] = NoamSchedule(adam["schedule_d_model"], adam["warmup_steps"])(steps)
    found["out/schedule_lr_d512"] = NoamSchedule(512, adam["warmup_steps"])(steps)
    start = config["start_id"]
    written, _ = model.generate(source.numpy(), start=start, end=None, max_new_tokens=config["greedy_steps"])
    found["out/greedy_ids"] = tf.pad(written, [[0, 0], [1, 0]], constant_values=start)
    found["out/adam_losses"] = adam_losses(model, source, target, labels, adam, len(golden["out/adam_losses"]))
    return found


def adam_losses(model, source, target, labels, adam, number):
    """Losses on one batch before and after each update of `fit`, whose last symbols of targets are labels alone."""
    schedule = NoamSchedule(adam["schedule_d_model"], adam["warmup_steps"])
    betas = {name: adam[name] for name in ("beta_1", "beta_2", "epsilon")}
    model.compile(keras.optimizers.Adam(schedule, **betas))
    model.optimizer.build(model.trainable_variables)  # else the step is traced twice
    losses = []
    whole = tf.concat([target, labels[:, -1:]], 1)
    if not np.array_equal(whole[:, 1:], labels):
        raise ValueError("in/tar_real must be in/tar_inp, one place further")
    for _ in range(number):
        nll, _, _, tokens = model.loss_of((source, target), labels)
        losses.append(nll / tokens)
        model.train_on_batch(source, whole)
    return losses


CASES = {
    "positional_encoding": positional_encoding,
    "scaled_dot_product_attention": attention,
    "MultiHeadAttention": multi_head_attention,
    "PositionWiseFFN": feed_forward,
    "EncoderLayer": encoder_layer,
    "DecoderLayer": decoder_layer,
    "Transformer": transformer,
    "Embeddings": embeddings,
}
