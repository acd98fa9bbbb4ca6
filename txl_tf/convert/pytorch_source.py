"""Finds checkpoints of three PyTorch programs, and reads their tensors and the hyper-parameters in their files.

| kind | files | the hyper-parameters are in |
|---|---|---|
| Hugging Face | model.safetensors, pytorch_model.bin, or an index of shards | config.json in the same folder |
| NVIDIA | checkpoint_best.pt, checkpoint_last.pt | `model_config` in the checkpoint |
| original PyTorch | model.pt, a pickled `MemTransformerLM`; or a bare state_dict | the module's attributes; nowhere |
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from txl_tf.convert.pickles import FileError, Named, items_with_text_keys, shown
from txl_tf.convert.tensors import Tensor
from txl_tf.convert.torch_file import members, named_tensors, read_tensors, read_torch_file
from txl_tf.errors import ParameterError, named
from txl_tf.files import read_json
from txl_tf.schema import check_type

HUGGING_FACE, NVIDIA, ORIGINAL = "Hugging Face", "NVIDIA", "original PyTorch"
HF_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_FILES = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "state_dict.pt")
CONFIG_FILE = "config.json"
NORM_EPSILON = 1e-5  # PyTorch's default
# The values that Hugging Face's TransfoXLConfig gives to settings that a config.json leaves out.
HF_DEFAULTS = {"clamp_len": 1000, "same_length": True, "dropout": 0.1, "dropatt": 0.0}

MAX_CONFIG = 1_000_000  # bytes of a config.json, which has about a thousand

INTEGERS = (
    "n_token", "n_layer", "n_head", "d_head", "d_model", "d_embed", "d_inner", "div_val", "mem_len", "clamp_len",
    "ext_len", "attn_type",
)  # fmt: skip
FLAGS = ("same_length", "untie_r", "pre_lnorm", "tie_weight", "proj_share_all_but_first", "proj_same_dim")
NUMBERS = ("dropout", "dropatt", "layer_norm_epsilon", "sample_softmax")
TYPES = {  # the types of the hyper-parameters that a file may contain
    **dict.fromkeys(INTEGERS, int),
    **dict.fromkeys(FLAGS, bool),
    **dict.fromkeys(NUMBERS, float),
    "cutoffs": list[int],
    "tie_projs": list[bool],
}


@dataclasses.dataclass
class Source:
    """A checkpoint of a PyTorch program.

    Attributes:
        path: the file with the tensors, or the index of its shards.
        kind: `HUGGING_FACE`, `NVIDIA` or `ORIGINAL`.
        tensors: tensors, by the names that all three programs give them, without the prefixes of wrappers.
        settings: `{name: value}` of the hyper-parameters in `TYPES` that a file contains. Their names are those of
            arguments of `TransformerXLLM` or, if it has no such argument, of the original program. `cutoffs` do not
            contain the size of the vocabulary.
        settings_from: the file, or its part, that contains the hyper-parameters, for messages.
        vocab: vocabulary in the file, in the program's own form; `None` if the file has none.
        dataset: name of the dataset; `None` if the file does not contain it.
        step: training step, if the file contains it, else 0.

    Raises:
        ParameterError: a hyper-parameter has a wrong type or is of another network, or there is no softmax.
    """

    path: str
    kind: str
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    settings_from: str
    vocab: Any = None
    dataset: str | None = None
    step: int = 0

    def __post_init__(self):
        known = {name: value for name, value in self.settings.items() if name in TYPES}
        self.settings = checked(known, self.settings_from)
        cutoffs = self.settings.get("cutoffs")
        if cutoffs and cutoffs[-1] == self.settings.get("n_token"):
            self.settings["cutoffs"] = cutoffs[:-1]
        self._check_network()
        for prefix in ("module.", "transformer."):
            for name in self.tensors:
                if name.startswith(prefix) and name.removeprefix(prefix) in self.tensors:
                    message = f"{self.path} has {shown(name)}, and {shown(name.removeprefix(prefix))} without {prefix}"
                    raise FileError("path", self.path, "a checkpoint with each tensor once", message)
            self.tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        if not any(name.startswith("crit.") for name in self.tensors):
            message = (
                f"{self.path} has no tensor crit.*: it is no Transformer-XL, or one without a language model's softmax"
            )
            raise FileError("path", self.path, "a Transformer-XL with the softmax of a language model", message)

    def _check_network(self) -> None:
        """Raises ParameterError if the program computes something that `TransformerXLLM` does not."""
        refused = {
            "attn_type": (self.settings.get("attn_type", 0) != 0, "0 is the attention of Transformer-XL"),
            "sample_softmax": (self.settings.get("sample_softmax", -1) > 0, "this library's softmax is over all words"),
            "ext_len": (self.settings.get("ext_len", 0) > 0, "this library has no extended context"),
        }
        for name, (is_other, reason) in refused.items():
            if is_other:
                value = self.settings[name]
                message = f"{self.path} is another network: {self.settings_from} says {name}={value}; {reason}"
                raise ParameterError(name, value, reason, message)


def checked(values: dict[str, Any], who: str) -> dict[str, Any]:
    """Returns the hyper-parameters that are not `None`, with lists in the place of tuples.

    Args:
        values: `{name: value}`, with names in `TYPES`.
        who: the source of the values, for messages.

    Raises:
        ParameterError: a value has another type than in `TYPES`.
    """
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        check_type(f"{who}: {name}", value, TYPES[name])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def open_source(path: str | os.PathLike) -> Source:
    """Finds and reads a checkpoint: a file, or the folder of one.

    Raises:
        ValueError: it is none of the three kinds, is damaged, or is of a network that is not `TransformerXLLM`.
        OSError: there is no checkpoint, or it cannot be read.
    """
    path = _file_in(os.fspath(path))
    config_file = os.path.join(os.path.dirname(path), CONFIG_FILE)
    says_hf = path.endswith((".safetensors", ".index.json"))
    if says_hf or (os.path.basename(path) in HF_FILES and os.path.isfile(config_file)):
        return _hugging_face(path, config_file, None)
    content = read_torch_file(path)
    if isinstance(content, dict) and "model_state" in content:
        return _nvidia(path, content)
    if isinstance(content, Named):
        return _module(path, content)
    tensors = named_tensors(content)
    names = [name.removeprefix("module.") for name in tensors]
    if any(name.startswith("transformer.") for name in names):
        return _hugging_face(path, config_file, tensors)
    is_nvidia = any(name.startswith("crit.out_layers_biases.") for name in names)
    return Source(path, NVIDIA if is_nvidia else ORIGINAL, tensors, {}, f"the state_dict {path}")


def _file_in(path: str) -> str:
    """The checkpoint file at `path`, or in the folder `path`. Raises FileNotFoundError if there is none."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no file or folder {named(path)!r}: a PyTorch checkpoint must be on this machine, because it is "
            "not downloaded"
        )
    if not os.path.isdir(path):
        return path
    files = HF_FILES if os.path.isfile(os.path.join(path, CONFIG_FILE)) else (*OTHER_FILES, *HF_FILES)
    existing = [name for name in files if os.path.isfile(os.path.join(path, name))]
    if not existing:
        message = f"there is no PyTorch checkpoint in {path}: none of {', '.join(files)}. Name the file itself"
        raise FileNotFoundError(message)
    return os.path.join(path, existing[0])


def _hugging_face(path: str, config_file: str, tensors: dict | None) -> Source:
    """A checkpoint of Hugging Face.

    Args:
        path: the file.
        config_file: the path of its config.json, which contains the hyper-parameters.
        tensors: the tensors in the file; `None` to read them.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the config.json or the tensors are of another model, or damaged.
    """
    if not os.path.isfile(config_file):
        raise FileNotFoundError(
            f"{path} is a checkpoint of Hugging Face: it needs its {config_file} in the same folder"
        )
    if os.path.getsize(config_file) > MAX_CONFIG:
        message = f"{config_file} has {os.path.getsize(config_file):,} bytes, a configuration about 1,000"
        raise FileError("path", config_file, f"at most {MAX_CONFIG:,} bytes", message)
    config = read_json(config_file, _check_model_type)
    settings = {
        **config,
        "n_token": config.get("vocab_size", config.get("n_token")),
        "tie_weight": config.get("tie_word_embeddings", config.get("tie_weight", True)),
    }
    # Configurations before transformers 2.3 have one flag in place of `tie_projs`.
    shares = settings.pop("proj_share_all_but_first", True)
    if "tie_projs" not in settings and type(config.get("cutoffs")) is list:
        settings["tie_projs"] = [False, *(shares is True for _ in config["cutoffs"])]
    tensors = read_tensors(path) if tensors is None else tensors
    return Source(path, HUGGING_FACE, tensors, settings, config_file)


def _check_model_type(config: dict) -> None:
    """Raises ParameterError if a config.json belongs to another model. Very old ones do not name the model."""
    if config.get("model_type", "transfo-xl") != "transfo-xl":
        model_type = config["model_type"]
        message = f"model_type must be transfo-xl, got {shown(model_type)}"
        raise ParameterError("model_type", model_type, ["transfo-xl"], message)


def _nvidia(path: str, content: dict) -> Source:
    """A checkpoint of NVIDIA: `content` is a dictionary that contains the hyper-parameters and the vocabulary, too.

    Raises:
        FileError: the weights or the hyper-parameters are no dictionary.
    """
    config = content.get("model_config")
    args = content.get("args")
    if not isinstance(content["model_state"], dict) or not isinstance(config, dict):
        message = f"{path} is no checkpoint of NVIDIA: model_state and model_config must be dictionaries"
        raise FileError("path", path, "a checkpoint of NVIDIA", message)
    dataset = args.attributes.get("dataset") if isinstance(args, Named) else None
    step = content.get("train_step")
    return Source(
        path,
        NVIDIA,
        named_tensors(content["model_state"]),
        items_with_text_keys(config),
        settings_from=f"model_config of {path}",
        vocab=content.get("vocab"),
        dataset=dataset if type(dataset) is str else None,
        step=step if type(step) is int and step > 0 else 0,
    )


def _module(path: str, module: Named) -> Source:
    """A checkpoint of the original PyTorch program: a pickled `MemTransformerLM`, perhaps in a `DataParallel`.

    Raises:
        FileError: the module is of another class.
    """
    inner = members(module, "_modules").get("module")
    module = inner if isinstance(inner, Named) else module
    if module.name != "MemTransformerLM":
        message = f"{path} contains a {shown(module.name)}, not a MemTransformerLM"
        raise FileError("path", path, "a MemTransformerLM", message)
    settings = {
        **module.attributes,
        "div_val": _attribute(module, "word_emb", "div_val"),
        "cutoffs": _attribute(module, "word_emb", "cutoffs"),
        "pre_lnorm": _attribute(module, "layers.0.dec_attn", "pre_lnorm"),
        "layer_norm_epsilon": _attribute(module, "layers.0.pos_ff.layer_norm", "eps"),
        "dropout": _attribute(module, "drop", "p"),
        "dropatt": _attribute(module, "layers.0.dec_attn.dropatt", "p"),
    }
    return Source(path, ORIGINAL, named_tensors(module), settings, f"the {module.name} in {path}")


def _attribute(module: Any, part: str, name: str) -> Any:
    """The attribute `name` of the submodule `part`, such as `layers.0.dec_attn`; `None` if either does not exist."""
    for step in part.split("."):
        module = members(module, "_modules").get(step) if isinstance(module, Named) else None
    return module.attributes.get(name) if isinstance(module, Named) else None
