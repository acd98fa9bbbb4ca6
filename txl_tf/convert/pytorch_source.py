"""Finds and reads checkpoints of three PyTorch programs, and what their files say of the model.

| kind | files | who says the model's numbers |
|---|---|---|
| Hugging Face | model.safetensors, pytorch_model.bin, or an index of shards | config.json beside them |
| NVIDIA | checkpoint_best.pt, checkpoint_last.pt | `model_config` in it |
| original PyTorch | model.pt, a pickled `MemTransformerLM`; or a bare state_dict | the module's attributes; nobody |
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from txl_tf.convert.pickles import Named, by_text, shown
from txl_tf.convert.tensors import Tensor
from txl_tf.convert.torch_file import members, named_tensors, read_tensors, read_torch_file
from txl_tf.errors import named
from txl_tf.files import read_json
from txl_tf.schema import check_type

HUGGING_FACE, NVIDIA, ORIGINAL = "Hugging Face", "NVIDIA", "original PyTorch"
HF_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_FILES = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "state_dict.pt")
CONFIG_FILE = "config.json"
NORM_EPSILON = 1e-5  # PyTorch's default

MAX_CONFIG = 1_000_000  # bytes of a config.json, which has about a thousand

INTEGERS = "n_token n_layer n_head d_head d_model d_embed d_inner div_val mem_len clamp_len ext_len attn_type".split()
FLAGS = "same_length untie_r pre_lnorm tie_weight proj_share_all_but_first proj_same_dim".split()
NUMBERS = "dropout dropatt layer_norm_epsilon sample_softmax".split()
TYPES = {  # of what a file may say of a model
    **dict.fromkeys(INTEGERS, int),
    **dict.fromkeys(FLAGS, bool),
    **dict.fromkeys(NUMBERS, float),
    "cutoffs": list[int],
    "tie_projs": list[bool],
}


@dataclasses.dataclass
class Source:
    """A checkpoint.

    Attributes:
        path: the file with the tensors, or the index of its shards.
        kind: `HUGGING_FACE`, `NVIDIA` or `ORIGINAL`.
        tensors: by the names that all three programs give them.
        said: numbers of the model, by their names here or, without one, in the original; only those that a file says.
        told_by: what says them.
        vocab: what the file holds of a vocabulary, or `None`.
        dataset: name of the dataset, if the file says it.
        step: of the training, if the file says it.
    """

    path: str
    kind: str
    tensors: dict[str, Tensor]
    said: dict[str, Any]
    told_by: str
    vocab: Any = None
    dataset: str | None = None
    step: int = 0

    def __post_init__(self):
        self.said = checked({name: value for name, value in self.said.items() if name in TYPES}, self.told_by)
        cutoffs = self.said.get("cutoffs")
        if cutoffs and cutoffs[-1] == self.said.get("n_token"):
            self.said["cutoffs"] = cutoffs[:-1]
        self._check_network()
        self.tensors = {name.removeprefix("module."): tensor for name, tensor in self.tensors.items()}
        self.tensors = {name.removeprefix("transformer."): tensor for name, tensor in self.tensors.items()}
        if not any(name.startswith("crit.") for name in self.tensors):
            raise ValueError(
                f"{self.path} has no tensor crit.*: it is no Transformer-XL, or one without a language model's softmax"
            )

    def _check_network(self) -> None:
        """Raises ValueError where the program computes what `TransformerXLLM` does not."""
        refused = {
            "attn_type": (self.said.get("attn_type", 0) != 0, "0 is the attention of Transformer-XL"),
            "pre_lnorm": (self.said.get("pre_lnorm", False), "layer norm comes after every sublayer here"),
            "sample_softmax": (self.said.get("sample_softmax", -1) > 0, "the softmax here is over all words"),
            "ext_len": (self.said.get("ext_len", 0) > 0, "there is no extended context here"),
        }
        for name, (is_other, reason) in refused.items():
            if is_other:
                raise ValueError(
                    f"{self.path} is another network: {self.told_by} says {name}={self.said[name]}; {reason}"
                )


def checked(values: dict[str, Any], who: str) -> dict[str, Any]:
    """The numbers of a model that are not `None`. Raises ValueError where one is not of its type."""
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        check_type(f"{who}: {name}", value, TYPES[name])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def open_source(path: str | os.PathLike) -> Source:
    """Finds and reads a checkpoint: a file, or the folder of one.

    Raises:
        ValueError: it is none of the three kinds, is damaged, or is of a network that is not `TransformerXLLM`.
        OSError: there is none, or it cannot be read.
    """
    path = _file_in(os.fspath(path))
    config_file = os.path.join(os.path.dirname(path), CONFIG_FILE)
    says_hf = path.endswith((".safetensors", ".index.json"))
    if says_hf or (os.path.basename(path) in HF_FILES and os.path.isfile(config_file)):
        return _hugging_face(path, config_file, None)
    found = read_torch_file(path)
    if isinstance(found, dict) and "model_state" in found:
        return _nvidia(path, found)
    if isinstance(found, Named):
        return _module(path, found)
    tensors = named_tensors(found)
    names = [name.removeprefix("module.") for name in tensors]
    if any(name.startswith("transformer.") for name in names):
        return _hugging_face(path, config_file, tensors)
    is_nvidia = any(name.startswith("crit.out_layers_biases.") for name in names)
    return Source(path, NVIDIA if is_nvidia else ORIGINAL, tensors, {}, f"the state_dict {path}")


def _file_in(path: str) -> str:
    """The file with the tensors; `path` may also be its folder."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no file or folder {named(path)!r}: a PyTorch checkpoint must be here, none is fetched"
        )
    if not os.path.isdir(path):
        return path
    files = HF_FILES if os.path.isfile(os.path.join(path, CONFIG_FILE)) else (*OTHER_FILES, *HF_FILES)
    found = [name for name in files if os.path.isfile(os.path.join(path, name))]
    if not found:
        raise FileNotFoundError(f"there is no PyTorch checkpoint in {path}: none of {', '.join(files)}. Name the file")
    return os.path.join(path, found[0])


def _hugging_face(path: str, config_file: str, tensors: dict | None) -> Source:
    if not os.path.isfile(config_file):
        raise FileNotFoundError(f"{path} is Hugging Face's, which needs its {config_file} beside it")
    if os.path.getsize(config_file) > MAX_CONFIG:
        raise ValueError(f"{config_file} has {os.path.getsize(config_file):,} bytes, a configuration about 1,000")
    config = read_json(config_file, _check_model_type)
    said = {
        **config,
        "n_token": config.get("vocab_size", config.get("n_token")),
        "tie_weight": config.get("tie_word_embeddings", config.get("tie_weight")),
    }
    shares = said.pop("proj_share_all_but_first", True)  # before transformers 2.3
    if "tie_projs" not in said and type(config.get("cutoffs")) is list:
        said["tie_projs"] = [False] + [shares is True] * len(config["cutoffs"])
    tensors = read_tensors(path) if tensors is None else tensors
    return Source(path, HUGGING_FACE, tensors, said, config_file)


def _check_model_type(config: dict) -> None:
    """Raises ValueError where a config.json is another model's; very old ones do not name theirs."""
    if config.get("model_type", "transfo-xl") != "transfo-xl":
        raise ValueError(f"model_type must be transfo-xl, got {shown(config['model_type'])}")


def _nvidia(path: str, found: dict) -> Source:
    config, args = found.get("model_config"), found.get("args")
    if not isinstance(found["model_state"], dict) or not isinstance(config, dict):
        raise ValueError(f"{path} is no checkpoint of NVIDIA: model_state and model_config must be dictionaries")
    dataset, step = args.attributes.get("dataset") if isinstance(args, Named) else None, found.get("train_step")
    dataset, step = dataset if type(dataset) is str else None, step if type(step) is int and step > 0 else 0
    tensors, told_by = named_tensors(found["model_state"]), f"model_config of {path}"
    return Source(path, NVIDIA, tensors, by_text(config), told_by, found.get("vocab"), dataset, step)


def _module(path: str, module: Named) -> Source:
    """A pickled network, perhaps in a `DataParallel`."""
    inner = members(module, "_modules").get("module")
    module = inner if isinstance(inner, Named) else module
    if module.name != "MemTransformerLM":
        raise ValueError(f"{path} holds a {shown(module.name)}, not a MemTransformerLM")
    said = {
        **module.attributes,
        "div_val": _attribute(module, "word_emb", "div_val"),
        "cutoffs": _attribute(module, "word_emb", "cutoffs"),
        "pre_lnorm": _attribute(module, "layers.0.dec_attn", "pre_lnorm"),
        "layer_norm_epsilon": _attribute(module, "layers.0.pos_ff.layer_norm", "eps"),
        "dropout": _attribute(module, "drop", "p"),
        "dropatt": _attribute(module, "layers.0.dec_attn.dropatt", "p"),
    }
    return Source(path, ORIGINAL, named_tensors(module), said, f"the {module.name} in {path}")


def _attribute(module: Any, part: str, name: str) -> Any:
    """An attribute of a module below another, as `layers.0.dec_attn`; `None` if it is not there."""
    for step in part.split("."):
        module = members(module, "_modules").get(step) if isinstance(module, Named) else None
    return module.attributes.get(name) if isinstance(module, Named) else None
