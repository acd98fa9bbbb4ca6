"""What txl_tf computes for the cases of TENER and FLAT, under the names of their golden arrays.

`tener_arrays(config, golden)` and `flat_arrays(config, golden)` give `(expected, found)`: the golden results and
gradients and what txl_tf computes, both with zeros wherever the originals leave what no result depends on: at padding.
PyTorch's linear weights are `[out, in]`, the transpose of a Keras kernel.
"""

import functools
import re

import numpy as np
import tensorflow as tf
from flat_program import ProgramFlat

import txl_tf
from txl_tf.config import FUSIONS, FlatConfig
from txl_tf.data.tagged.tags import allowed_transitions
from txl_tf.taggers.crf import CRF
from txl_tf.taggers.lattice import distance_table
from txl_tf.taggers.tener_layers import two_way_positions, two_way_scores
from txl_tf.training.optimization import SGD

NAMES = [  # (name of a weight in the goldens, in txl_tf)
    (r"(?:lattice_)?embed\.embedding\.weight", "network/embedding"),
    (r"(?:bigram_embed|bi_embed)\.embedding\.weight", "network/bigram_embedding"),
    (r"(char_proj|lex_proj|in_fc)\.(weight|bias)", r"network/\1/\2"),
    (r"(?:output|out_fc)\.(weight|bias)", r"out_fc/\1"),
    (r"crf\.trans_m", "crf/transitions"),
    (r"crf\.(start_scores|end_scores)", r"crf/\1"),
    (r"transformer\.pos_embed\.weight", "network/pos_table"),
    (r"transformer\.layers\.(\d+)\.self_attn\.qkv_linear\.weight", r"network/stacked/\1/self_attn/qkv_kernel"),
    (r"transformer\.layers\.(\d+)\.self_attn\.(r_r_bias|r_w_bias)", r"network/stacked/\1/self_attn/\2"),
    (r"transformer\.layers\.(\d+)\.self_attn\.fc\.(weight|bias)", r"network/stacked/\1/self_attn/fc/\2"),
    (r"transformer\.layers\.(\d+)\.ffn\.0\.(weight|bias)", r"network/stacked/\1/ffn/dense1/\2"),
    (r"transformer\.layers\.(\d+)\.ffn\.3\.(weight|bias)", r"network/stacked/\1/ffn/dense2/\2"),
    (r"transformer\.layers\.(\d+)\.(norm[12])\.(weight|bias)", r"network/stacked/\1/\2/norm_\3"),
    (r"encoder\.layer_(\d+)\.attn\.(u|v)", r"network/stacked/\1/attn/\2"),
    (r"encoder\.layer_(\d+)\.attn\.(w_\w|ff_final)\.(weight|bias)", r"network/stacked/\1/attn/\2/\3"),
    (r"encoder\.layer_(\d+)\.ff\.w(\d)\.(weight|bias)", r"network/stacked/\1/ff_\2/\3"),
    (
        r"encoder\.layer_(\d+)\.layer_(pre|post)process\.layer_norm\.(weight|bias)",
        r"network/stacked/\1/\2process/layer_norm/norm_\3",
    ),
    (r"encoder\.layer_preprocess\.layer_norm\.(weight|bias)", r"network/last/layer_norm/norm_\1"),
    (r"encoder\.four_pos_fusion_embedding\.(.*)", r"network/fusions/0/\1"),
    (r"encoder\.layer_(\d+)\.four_pos_fusion_embedding\.(.*)", r"network/fusions/\1/\2"),
]
FUSION_NAMES = {
    r"pos_fusion_forward(\.0)?\.": "forward/",
    r"pos_(attn|gate)_score\.(\d)\.": r"score_\2/",
    r"w_r\.": "w_r/",
}


def variable(tagger, name):
    """The weight of a tagger by its name in the goldens."""
    for pattern, path in NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            path = match.expand(path)
            break
    else:
        raise ValueError(f"no weight of txl_tf for {name}")
    for old, new in FUSION_NAMES.items():
        path = re.sub(old, new, path)
    path = path.replace("norm_weight", "gamma").replace("norm_bias", "beta")
    owner = tagger
    for part in re.sub(r"/weight$", "/kernel", path).split("/"):
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    return owner


def is_kernel(weight):
    return "kernel" in weight.path.rsplit("/", 1)[1]


def set_weights(tagger, golden):
    for name in golden:
        if name.startswith("w/"):
            weight = variable(tagger, name[2:])
            value = golden[name].T if is_kernel(weight) else golden[name]
            if value.shape != tuple(weight.shape):
                raise ValueError(f"{name} is {value.shape}, txl_tf has {tuple(weight.shape)} ({weight.path})")
            weight.assign(value)


def gradients(tagger, inputs, target, golden):
    """`g/...`, and `out/nll` and `out/loss`."""
    names = [name[2:] for name in golden if name.startswith("g/")]
    weights = [variable(tagger, name) for name in names]
    with tf.GradientTape() as tape:
        nll = tagger.nll(inputs, target)
        loss = tf.reduce_mean(nll)
    found = [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(loss, [w.value for w in weights])]
    found = [array.T if is_kernel(weight) else array for array, weight in zip(found, weights, strict=True)]
    return {"out/nll": nll, "out/loss": loss, **{f"g/{name}": array for name, array in zip(names, found, strict=True)}}


def sgd_losses(tagger, inputs, target, config, rates):
    """Losses on one batch before and after each update."""
    sgd = config["sgd"]
    optimizer = SGD(float(rates[0]), momentum=sgd["momentum"], clip_value=sgd["clip_by_value"])
    tagger.compile(optimizer)
    optimizer.build(tagger.trainable_variables)  # else the step is traced twice
    losses = []
    for rate in rates:
        losses.append(tf.reduce_mean(tagger.nll(inputs, target)))
        optimizer.learning_rate = float(rate)
        tagger.train_on_batch(inputs, target)
    return [*losses, tf.reduce_mean(tagger.nll(inputs, target))]


def batch_first(x):
    """`[H, B, ...]` as `[B, H, ...]`."""
    return np.swapaxes(np.asarray(x), 0, 1)


def compared(golden, found, masks):
    """`(expected, found)` of results and gradients, zero where a mask, by the end of the name, is false."""
    expected = {name: array for name, array in golden.items() if name.startswith(("out/", "g/"))}

    def kept(name, array):
        array = np.asarray(array)
        mask = masks.get(name.rsplit("/", 1)[-1])
        if mask is None or name.startswith("g/") or array.shape[: mask.ndim] != mask.shape and mask.ndim != 4:
            return array
        mask = mask.reshape([*mask.shape, *[1] * (array.ndim - mask.ndim)])
        return np.where(mask, array, 0).astype(array.dtype)

    return tuple({name: kept(name, array) for name, array in arrays.items()} for arrays in (expected, found))


def viterbi(crf, emissions, mask, suffix=""):
    tags, score = crf.decode(emissions, mask)
    return {f"out/viterbi_path{suffix}": np.where(mask, tags, -1), f"out/viterbi_score{suffix}": score}


# ------------------------------------------------------------------------------------------------------------- TENER


def tener_tagger(config):
    network = txl_tf.Tener(
        n_token=config["char_vocab"], n_bigram=config["bigram_vocab"], d_embed=config["char_dim"],
        d_bigram=config["bigram_dim"], n_layer=config["layers"], d_model=config["d_model"], n_head=config["heads"],
        d_inner=config["ff_size"], attn_type=config["attn_type"], pos_embed=config["pos_embed"] or "none",
        scale=config["scale"], after_norm=config["after_norm"],
        key_position_term=config.get("key_position_term", True),
        max_seq_len=max(1, config.get("pos_rows", 1) - 1),
    )  # fmt: skip
    return txl_tf.Tagger(network, config["tags"])


def tener_arrays(config, golden):
    if "w/transformer.pos_embed.weight" in golden:
        config = {**config, "pos_rows": len(golden["w/transformer.pos_embed.weight"])}
    tagger = tener_tagger(config)
    inputs = {name: tf.constant(golden[f"in/{name}"]) for name in ("chars", "bigrams") if f"in/{name}" in golden}
    target, network = tf.constant(golden["in/target"]), tagger.network
    out_fc, mask = tagger.emissions(inputs)  # builds the weights
    set_weights(tagger, golden)
    out_fc, mask = tagger.emissions(inputs)
    emissions = tf.nn.log_softmax(out_fc)
    found = {"out/out_fc": out_fc, "out/emissions": emissions, **gradients(tagger, inputs, target, golden)}
    x = network.embed(inputs)
    if network.pos_embed != "none":
        found["out/abs_pos"] = network.absolute_positions(mask)
        found["out/in_fc"] = x - found["out/abs_pos"]
    else:
        found["out/in_fc"] = x
    for i, layer in enumerate(network.stacked):
        found |= {f"out/layer{i}/{name}": array for name, array in tener_layer(layer, x, mask).items()}
        x = layer(x, mask)
        found[f"out/layer{i}/out"] = x
    found |= viterbi(tagger.crf, emissions, mask)
    free = CRF(len(config["tags"]))
    free.build()
    free.set_weights(tagger.crf.get_weights())
    found |= viterbi(free, emissions, mask, "_unconstrained")
    found["const/allowed"] = allowed_transitions(config["tags"])
    if "sgd" in config:
        found["out/sgd_losses"] = sgd_losses(tagger, inputs, target, config, golden["in/sgd_lr"])
    mask = mask.numpy()
    pairs = np.broadcast_to(
        (mask[:, :, None] & mask[:, None])[:, None], [*mask.shape[:1], config["heads"], *pairs_of(mask)]
    )
    of_items = "in_fc abs_pos attn_out norm1 norm2 ffn out out_fc emissions".split()
    masks = dict.fromkeys(of_items, mask) | dict.fromkeys(["scores", "probs", "BD_shifted", "E_shifted"], pairs)
    return compared(golden, found, masks)


def pairs_of(mask):
    return mask.shape[1], mask.shape[1]


def tener_layer(layer, x, mask):
    """What a layer computes on its way."""
    attention, found = layer.self_attn, {}
    y = x if layer.after_norm else layer.norm1(x)
    q, k, _, position_scores = attention.parts(y)
    scores = tf.matmul(q, k, transpose_b=True)
    if position_scores is not None:
        r = two_way_positions(x.shape[1], q.shape[-1])
        plain = q - attention.r_r_bias[:, None, None]
        found = {"R": r, "BD_shifted": batch_first(two_way_scores(plain + attention.r_w_bias[:, None, None], r))}
        of_keys = batch_first(tf.linalg.matrix_transpose(two_way_scores(k, r)))
        found["E_shifted"] = of_keys * attention.key_position_term
        scores += position_scores
    found |= {
        "scores": batch_first(scores * attention.score_scale),
        "probs": batch_first(attention.attention_probs(y, mask)),
    }
    found["attn_out"] = attention(y, mask)
    if layer.after_norm:
        found["norm1"] = layer.norm1(x + found["attn_out"])
        found["ffn"] = layer.ffn(found["norm1"])
        found["norm2"] = layer.norm2(found["norm1"] + found["ffn"])
    else:
        x += found["attn_out"]
        found |= {"norm1": y, "norm2": layer.norm2(x)}
        found["ffn"] = layer.ffn(found["norm2"])
    return found


# -------------------------------------------------------------------------------------------------------------- FLAT


def flat_tagger(config):
    """A tagger of the library's `Flat` or, where the case has options that only the program has, of the port's."""
    options = {name: config["ff_activate" if name == "activation" else name] for name in FlatConfig.removed}
    if config["fusion"] in FUSIONS and options == FlatConfig.removed:
        make = functools.partial(txl_tf.Flat, fusion=config["fusion"])
    else:
        make = functools.partial(ProgramFlat, kind=config["fusion"], **options)
    network = make(
        n_token=config["lattice_vocab"], n_bigram=config["bigram_vocab"] if config["use_bigram"] else 0,
        d_embed=config["lattice_dim"], d_bigram=config["bigram_dim"], n_layer=config["layers"],
        d_model=config["hidden"], n_head=config["heads"], d_inner=config["ff_size"],
        residual=config.get("residual", "own"), scale=config["scaled"],
        **{name: config[name] for name in ("fusion_shared", "k_proj", "rel_pos_init", "max_seq_len")},
    )  # fmt: skip
    crf = config["crf"]
    labels = ["O", *(f"B-{i}" for i in range(1, config["labels"]))]
    return txl_tf.Tagger(network, labels, start_end=crf["start_end"], constraints=False)


def flat_arrays(config, golden):
    tagger = flat_tagger(config)
    names = "lattice bigrams seq_len lex_num pos_s pos_e".split()
    inputs, target = {name: tf.constant(golden[f"in/{name}"]) for name in names}, tf.constant(golden["in/target"])
    network = tagger.network
    tagger.emissions(inputs)  # builds the weights
    set_weights(tagger, golden)
    emissions, mask = tagger.emissions(inputs)
    items, x = network.items_of(inputs), network.embed(inputs)
    found = {"out/embedding": x, "out/emissions": emissions, **gradients(tagger, inputs, target, golden)}
    table = distance_table(
        config["max_seq_len"] + 1, config["hidden"], 0 if config["rel_pos_init"] else config["max_seq_len"]
    )
    found["out/pe"] = table
    fused, index = network.positions(inputs)
    of_pairs = [tf.gather(vectors, index) for vectors in fused]
    if config["fusion_shared"]:
        found["out/R"] = of_pairs[0]
    else:
        found |= {f"out/layer{i}/R": r for i, r in enumerate(of_pairs)}
    for i, layer in enumerate(network.stacked):
        r = fused[i % len(fused)]
        found |= {f"out/layer{i}/{name}": array for name, array in flat_layer(layer, x, r, index, items).items()}
        x = layer(x, r, index, items)
        found[f"out/layer{i}/out"] = x
    found["out/encoded"] = network.last(x, x) if hasattr(network, "last") else x
    found |= viterbi(tagger.crf, emissions, mask)
    if "sgd" in config:
        found["out/sgd_losses"] = sgd_losses(tagger, inputs, target, config, golden["in/sgd_lr"])
    mask, items = mask.numpy(), items.numpy()
    pairs = items[:, :, None] & items[:, None]
    by_head = np.broadcast_to(pairs[:, None], [len(items), config["heads"], *pairs.shape[1:]])
    masks = dict.fromkeys("embedding attn_out ff_in ff_out out encoded".split(), items)
    masks |= {"emissions": mask, "R": pairs, "scores": by_head, "probs": by_head}
    return compared({**golden, "out/pe": golden["const/pe"]}, found, masks)


def flat_layer(layer, x, r, index, mask):
    """What a layer computes on its way."""
    preprocess = getattr(layer, "preprocess", lambda y, added: y)  # of the port
    y = preprocess(x, x)
    q, k, _, position_scores = layer.attn.parts(y, r, index)
    scores = (tf.matmul(q, k, transpose_b=True) + position_scores) * layer.attn.score_scale
    found = {"scores": batch_first(scores), "probs": batch_first(layer.attn.attention_probs(y, r, index, mask))}
    found["attn_out"] = y = layer.attn(y, r, index, mask)
    x = layer.postprocess(y, x if layer.residual == "input" else y)
    found["ff_in"] = preprocess(x, x)
    found["ff_out"] = layer.feed_forward(found["ff_in"])
    return found
