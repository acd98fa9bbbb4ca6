"""A language model as three PyTorch programs write it: the inverse of `txl_tf.convert.pytorch_mapping`."""

import json

import numpy as np
from torch_files import Instance, Module, write_safetensors, write_zip

from txl_tf.runs.weights import weights_by_name

KINDS = ("hf", "kimi", "nv")
LAYER = {
    "dec_attn.qkv_net.weight": "rel_attn/qkv/kernel", "dec_attn.r_net.weight": "rel_attn/r/kernel",
    "dec_attn.o_net.weight": "rel_attn/o/kernel", "dec_attn.layer_norm.weight": "rel_attn/LayerNorm/gamma",
    "dec_attn.layer_norm.bias": "rel_attn/LayerNorm/beta", "pos_ff.CoreNet.0.weight": "ff/layer_1/kernel",
    "pos_ff.CoreNet.0.bias": "ff/layer_1/bias", "pos_ff.CoreNet.3.weight": "ff/layer_2/kernel",
    "pos_ff.CoreNet.3.bias": "ff/layer_2/bias", "pos_ff.layer_norm.weight": "ff/LayerNorm/gamma",
    "pos_ff.layer_norm.bias": "ff/LayerNorm/beta",
}  # fmt: skip


def tensors_of(lm, kind):
    """`{name: array}` of a state_dict, as the program of a kind writes it."""
    weights = {name.removeprefix("transformer/"): variable.numpy() for name, variable in weights_by_name(lm).items()}
    network, tensors = lm.network, {}
    n_bin, n_table = len(network.cutoffs) + 1, len(network.embedding.tables)
    for i in range(n_table):
        scope = f"adaptive_embed/cutoff_{i}/" if n_table > 1 else "adaptive_embed/"
        tensors[f"word_emb.emb_layers.{i}.weight"] = weights[f"{scope}lookup_table"]
        if f"{scope}proj_W" in weights:
            tensors[f"word_emb.emb_projs.{i}"] = weights[f"{scope}proj_W"].T
    for i in range(network.n_layer):
        for name, variable in LAYER.items():
            tensors[f"layers.{i}.{name}"] = weights[f"layer_{i}/{variable}"].T  # of one axis, it is itself
        if network.untie_r or kind == "hf":
            own = weights["r_w_bias"][i] if network.untie_r else weights["r_w_bias"]
            tensors[f"layers.{i}.dec_attn.r_w_bias"] = own
            tensors[f"layers.{i}.dec_attn.r_r_bias"] = (
                weights["r_r_bias"][i] if network.untie_r else weights["r_r_bias"]
            )
    if not network.untie_r:
        tensors |= {name: weights[name] for name in ("r_w_bias", "r_r_bias")}

    if n_bin == 1:
        biases = [weights["adaptive_softmax/bias"]]
    else:
        biases = [weights[f"adaptive_softmax/cutoff_{i}/b"] for i in range(n_bin)]
    biases = biases if n_table > 1 else [np.concatenate(biases)]
    for i, bias in enumerate(biases):
        tensors[f"crit.out_layers_biases.{i}" if kind == "nv" else f"crit.out_layers.{i}.bias"] = bias
        own = "crit.out_layers_weights.{}" if kind == "nv" else "crit.out_layers.{}.weight"
        if not lm.tie_weight:
            scope = f"adaptive_softmax/cutoff_{i}/" if n_table > 1 else "adaptive_softmax/"
            tensors[own.format(i)] = weights[f"{scope}lookup_table"]
        elif kind == "kimi":
            tensors[own.format(i)] = tensors[f"word_emb.emb_layers.{i}.weight"]
    for i, is_tied in enumerate(ties_of(lm)):
        if not is_tied:
            tensors[f"crit.out_projs.{i}"] = weights[f"adaptive_softmax/cutoff_{i}/proj"].T
        elif kind == "kimi":
            tensors[f"crit.out_projs.{i}"] = tensors[f"word_emb.emb_projs.{i if n_table > 1 else 0}"]
    if n_bin > 1:
        order = 1 if kind == "hf" else -1
        tensors["crit.cluster_weight"] = weights["adaptive_softmax/cutoff_0/cluster_W"][::order]
        tensors["crit.cluster_bias"] = weights["adaptive_softmax/cutoff_0/cluster_b"][::order]
    tensors["pos_emb.inv_freq"] = np.ones(network.d_model // 2, np.float32)
    return tensors


def ties_of(lm):
    """Whether each bin's projection is the embedding's; none where nothing is projected."""
    if all(proj is None for proj in lm.network.embedding.projs):
        return []
    return [lm.softmax.shares_projection(i) for i in range(len(lm.network.cutoffs) + 1)]


def numbers_of(lm, kind):
    """What the program's files say of the model."""
    names = "n_layer d_model d_embed n_head d_head d_inner div_val same_length clamp_len dropout dropatt".split()
    numbers = {name: getattr(lm.network, name) for name in names} | {"cutoffs": list(lm.network.cutoffs)}
    one_more = int(lm.network.same_length and kind != "nv")  # positions that the program counts
    numbers |= {"n_token": lm.network.n_token, "mem_len": lm.network.mem_len + one_more}
    ties = {"tie_projs": ties_of(lm)} | ({"tie_weight": lm.tie_weight} if kind == "nv" else {})
    own = {"attn_type": 0, "pre_lnorm": lm.network.pre_lnorm, "sample_softmax": -1, "ext_len": 0}
    return numbers | ties | own


def hf_config(lm):
    """What config.json says."""
    numbers = numbers_of(lm, "hf")
    own = {"model_type": "transfo-xl", "vocab_size": numbers.pop("n_token"), "untie_r": lm.network.untie_r}
    own["tie_word_embeddings"] = lm.tie_weight
    return numbers | own | {"layer_norm_epsilon": lm.network.layer_norm_epsilon}


def module_of(tensors, lm):
    """The network of the original PyTorch program, as `torch.save` pickles it."""
    numbers = numbers_of(lm, "kimi")
    div_val, cutoffs = numbers.pop("div_val"), [*numbers.pop("cutoffs"), lm.network.n_token]
    drops = {name: {"p": numbers.pop(name)} for name in ("dropout", "dropatt")}
    ties, pre_lnorm = numbers.pop("tie_projs"), numbers.pop("pre_lnorm")
    attributes = {
        "": numbers,
        "word_emb": {"div_val": div_val, "cutoffs": cutoffs},
        "drop": drops["dropout"],
        "layers.0.dec_attn": {"pre_lnorm": pre_lnorm, "tie_projs": ties},
        "layers.0.dec_attn.dropatt": drops["dropatt"],
        "layers.0.pos_ff.layer_norm": {"eps": lm.network.layer_norm_epsilon},
    }

    def module(path):
        prefix = f"{path}." if path else ""
        below = [
            name.removeprefix(prefix) for name in [*tensors, *attributes] if name.startswith(prefix) and name != path
        ]
        parts = list(dict.fromkeys(name.split(".")[0] for name in below if name))
        parameters = {part: tensors[prefix + part] for part in parts if prefix + part in tensors}
        modules = {part: module(prefix + part) for part in parts if part not in parameters}
        kind = ("mem_transformer", "MemTransformerLM") if not path else ("torch.nn.modules.container", "Module")
        return Module(*kind, parameters, modules, **attributes.get(path, {}))

    return module("")


def vocab_of(words, **attributes):
    """A pickled vocabulary of the original PyTorch program, and of NVIDIA's."""
    return Instance("utils.vocabulary", "Vocab", idx2sym=list(words), lower_case=False, special=["<eos>"], **attributes)


def write_case(folder, lm, kind, words, tensors=None, **changes):
    """Writes a checkpoint with its vocabulary into a new folder, and returns its file.

    Args:
        tensors: of the checkpoint, by default those of `lm`.
        **changes: what the file says of the model other than the truth; `None` for what it does not say.
    """
    folder.mkdir()
    tensors = tensors_of(lm, kind) if tensors is None else tensors
    if kind == "hf":
        config = {name: value for name, value in (hf_config(lm) | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        write_zip(folder / "vocab.pkl", {"idx2sym": list(words), "lower_case": False})
        prefixed = {
            name if name.startswith("crit.") else f"transformer.{name}": array for name, array in tensors.items()
        }
        return write_safetensors(folder / "model.safetensors", prefixed)
    if kind == "kimi":
        write_zip(folder / "cache.pt", Instance("data_utils", "Corpus", dataset="wt103", vocab=vocab_of(words)))
        return write_zip(folder / "model.pt", module_of(tensors, lm))
    config = {name: value for name, value in (numbers_of(lm, "nv") | changes).items() if value is not None}
    args = Instance("argparse", "Namespace", dataset="wt103", vocab="word")
    tree = {"model_config": config, "model_state": tensors, "vocab": vocab_of(words), "args": args, "train_step": 7}
    return write_zip(folder / "checkpoint_best.pt", tree | {"optimizer_state": {"state": {0: {"step": 7}}}})
