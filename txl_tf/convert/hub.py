"""Runs on the Hugging Face Hub, and the checkpoints that the original authors published.

    lm, vocab = txl_tf.load_run("hf://OWNER/NAME")          # or hf://OWNER/NAME@REVISION
    lm, vocab = txl_tf.load_run("original://wt103")         # enwik8, text8, wt103, lm1b
    txl_tf.push_to_hub("runs/my", "OWNER/NAME")

Every time that an address is opened, the hub is asked for the commit of its revision. The first time, the run of this
commit is written to the cache of this library. Later it is read from there, also if the hub cannot be reached.
A repository may contain a run, as `push_to_hub` writes it, or a Transformer-XL of Hugging Face's transformers, in the
files of transfo-xl-wt103: config.json, a vocabulary, and model.safetensors or pytorch_model.bin. The files of
transformers are converted once. No code of a repository is run: see `pickles.py`.

    ~/.cache/txl_tf/hf/OWNER--NAME/<commit>/        the run; TXL_CACHE names another folder than ~/.cache/txl_tf
    ~/.cache/txl_tf/hf/OWNER--NAME/main.txt         the commit that the revision main had when it was opened last
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import keras

from txl_tf.calls import checked_call
from txl_tf.convert.original import tf1_to_run
from txl_tf.convert.pytorch import pytorch_to_run
from txl_tf.convert.pytorch_source import CONFIG_FILE
from txl_tf.convert.pytorch_vocab import FILES as VOCABULARY_FILES
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError, named
from txl_tf.files import lock, naming_write_errors, remove, write_atomic
from txl_tf.runs.folder import SOURCES, RunFolder
from txl_tf.runs.weights import check_whole

logger = logging.getLogger("txl_tf")

HF = "hf://"
ORIGINAL = "original://"
_REPOSITORY = r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}"
# Names of the files of a run, and of the files with the weights of a model of transformers.
_RUN_FILES = re.compile(r"(config\.json|checkpoint|\w+\.txt|\w+\.model|ckpt-\d+\.(index|data-\d+-of-\d+))")
_WEIGHTS = re.compile(r"(model|pytorch_model)[\w.-]*\.(safetensors|bin|index\.json)")
# The file to read first: the weights, or the index of their shards. If a repository has several, the first one counts.
TOP_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
CARD = "README.md"  # name of the file with the model card


def cache_folder() -> str:
    """The folder of this library's cache: TXL_CACHE, or txl_tf in XDG_CACHE_HOME or in ~/.cache."""
    own = os.environ.get("TXL_CACHE")
    return own or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "txl_tf")


def _hub() -> Any:
    """Imports huggingface_hub, which is slow, and returns it. Raises ParameterError if it is not installed."""
    if not is_installed("huggingface_hub"):
        message = "the Hugging Face Hub needs huggingface_hub: pip install huggingface_hub"
        raise ParameterError("model_dir", HF, "a local folder without huggingface_hub", message)
    import huggingface_hub

    return huggingface_hub


def _api(hub: Any, token: str | None = None) -> Any:
    """The client of the hub at the address in the environment variable `HF_ENDPOINT`, by default Hugging Face's."""
    return hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)


# --------------------------------------------------------------------------------------------------------- hf://


class Address(NamedTuple):
    """A repository on the hub, and a revision: a branch, a tag, a commit, or a pull request such as refs/pr/1."""

    repository: str
    revision: str

    @classmethod
    def of(cls, text: str) -> Address:
        """Returns the parts of `hf://OWNER/NAME@REVISION`. Raises ParameterError if `text` has another form."""
        match = re.fullmatch(rf"{HF}({_REPOSITORY})(?:@(\w[\w./-]{{0,99}}?))?/?", text)
        if match is None or ".." in text:
            raise ParameterError("model_dir", text, "hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
        return cls(match[1], match[2] or "main")

    def __str__(self) -> str:
        return HF + self.repository + (f"@{self.revision}" if self.revision != "main" else "")


def fetch_from_hub(text: str) -> str:
    """Returns the local folder of a run on the hub.

    Asks the hub for the commit of the revision. Unless the run of this commit is in the cache, fetches it, and converts
    it if necessary.

    Raises:
        ParameterError: the address is wrong, there is no such repository or revision, it contains no model that this
            library can read, or huggingface_hub is not installed.
        OSError: the hub cannot be reached, and no run of this address is in the cache. Or a file cannot be fetched or
            written, or another process is fetching from this repository.
    """
    address = Address.of(text)
    folder = os.path.join(cache_folder(), "hf", address.repository.replace("/", "--"))
    commit, files = _look_up(address, folder)
    run = os.path.join(folder, commit)
    if not os.path.exists(os.path.join(run, CONFIG_FILE)):
        with naming_write_errors(folder):
            os.makedirs(folder, exist_ok=True)
        with lock(folder, f"another program is fetching {address}"):
            # Another program may have made the run since the check above. (`lock` does not wait: it raises an error.)
            if not os.path.exists(os.path.join(run, CONFIG_FILE)):
                _make_run(address, commit, files, run)
    return run


def _look_up(address: Address, folder: str) -> tuple[str, list[str]]:
    """Returns the commit of a revision, and the names of its files. Writes the commit to a file in `folder`.

    If the hub cannot be reached, returns the commit in that file and an empty list, provided that the run of this
    commit is in the cache.

    Raises:
        ParameterError: the hub has no such repository or revision, or names no commit.
        OSError: the hub cannot be reached, and no run of this revision is in the cache.
    """
    hub = _hub()
    commit_file = os.path.join(folder, f"{quote(address.revision, safe='')}.txt")
    try:
        info = _api(hub).repo_info(address.repository, revision=address.revision)
    except hub.errors.RepositoryNotFoundError as error:
        message = f"there is no repository {address}, or it needs a token (HF_TOKEN, or `hf auth login`)"
        raise ParameterError("model_dir", str(address), "a repository on the hub", message) from error
    except hub.errors.RevisionNotFoundError as error:
        message = f"{HF}{address.repository} has no revision {address.revision}"
        raise ParameterError("model_dir", str(address), "a revision of the repository", message) from error
    except Exception as error:  # huggingface_hub raises errors of several HTTP libraries
        commit = _read_commit(commit_file)
        if commit is None or not os.path.exists(os.path.join(folder, commit, CONFIG_FILE)):
            raise OSError(f"{address} cannot be fetched: {named(error)}") from error
        logger.warning("%s cannot be looked up (%s): the run of commit %s in the cache is used", address,
                       type(error).__name__, commit[:12])  # fmt: skip
        return commit, []
    if not re.fullmatch(r"\w{1,64}", info.sha or ""):
        raise ParameterError("model_dir", str(address), "a repository with a commit")
    with naming_write_errors(folder):
        os.makedirs(folder, exist_ok=True)
    write_atomic(commit_file, info.sha)
    return info.sha, [file.rfilename for file in info.siblings or []]


def _read_commit(path: str) -> str | None:
    """Returns the commit in a file that `_look_up` wrote; `None` if there is no such file, or it is damaged."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        commit = file.read(100)
        return commit if re.fullmatch(r"\w{1,64}", commit) else None
    return None


def _make_run(address: Address, commit: str, files: list[str], run: str) -> None:
    """Fetches the files of a commit that are needed, and makes a run of them.

    Args:
        address: the repository.
        commit: the commit.
        files: the names of all its files.
        run: the folder of the new run. An incomplete run in it is replaced.

    Raises:
        ParameterError: the commit contains neither a run nor a Transformer-XL with weights that can be read, or a file
            is damaged.
        OSError: a file cannot be fetched or written.
    """
    if CONFIG_FILE not in files:
        message = f"{address} has no {CONFIG_FILE}: it contains neither a run of txl_tf nor a Transformer-XL"
        raise ParameterError("model_dir", str(address), f"a repository with {CONFIG_FILE}", message)
    downloaded = f"{run}.{os.getpid()}.tmp"
    remove(downloaded)
    remove(run)  # a process that was killed may have left an incomplete run
    try:
        with _failures_as_oserror(address):
            config = _download(address, commit, [CONFIG_FILE], downloaded)
        is_run = _is_run(os.path.join(config, CONFIG_FILE), address)
        chosen = _files_of_run(files) if is_run else _files_of_checkpoint(address, files)
        with _failures_as_oserror(address):
            _download(address, commit, chosen, downloaded)
        remove(os.path.join(downloaded, ".cache"))  # notes of huggingface_hub
        if is_run:
            _check_run(RunFolder(downloaded), address)
            os.replace(downloaded, run)
            return
        made = pytorch_to_run(downloaded, run)
        logger.info("%s: %s, converted to %s", address, f"{made.n_parameter:,} parameters", run)
        for note in made.notes:
            logger.info("note: %s", note)
    finally:
        remove(downloaded)


def _download(address: Address, commit: str, names: list[str], folder: str) -> str:
    """Fetches the files `names` of a commit into `folder`, and returns `folder`."""
    api = _api(_hub())
    for name in names:
        api.hf_hub_download(address.repository, name, revision=commit, local_dir=folder)
    return folder


@contextlib.contextmanager
def _failures_as_oserror(address: Address, cannot_be: str = "fetched") -> Iterator[None]:
    """In this block, every error becomes an OSError with the message "`address` cannot be `cannot_be`: ..."."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{address} cannot be {cannot_be}: {named(error)}") from error
    except Exception as error:  # huggingface_hub raises errors of several HTTP libraries
        raise OSError(f"{address} cannot be {cannot_be}: {type(error).__name__}: {named(error)}") from error


def _is_run(config_file: str, address: Address) -> bool:
    """Whether a config.json belongs to a run of this library, not to transformers: it has a group "model".

    Raises ParameterError if it is not JSON.
    """
    with open(config_file, encoding="utf-8", errors="replace") as file:
        try:
            values = json.loads(file.read(10_000_000))
        except (ValueError, RecursionError) as error:
            allowed = f"a repository whose {CONFIG_FILE} is JSON"
            message = f"{address}: its {CONFIG_FILE} is not JSON: {error}"
            raise ParameterError("model_dir", str(address), allowed, message) from error
    return isinstance(values, dict) and isinstance(values.get("model"), dict)


def _check_run(run: RunFolder, address: Address) -> None:
    """Reads the files of a run as `load_run` does, so that no damaged file gets into the cache.

    Raises ParameterError if a file is missing or damaged. The message begins with the address.
    """
    try:
        run.read_config()
        run.load_vocabs()
        for path in [run.find_checkpoint(), *run.checkpoints()]:
            check_whole(path)
    except (ValueError, OSError) as error:
        message = f"{address} is not a whole run: {error}"
        raise ParameterError("model_dir", str(address), "a repository with all files of a run", message) from error


def _files_of_run(files: list[str]) -> list[str]:
    """The names, among `files`, that belong to a run, without config.json."""
    return [name for name in files if _RUN_FILES.fullmatch(name) and name != CONFIG_FILE]


def _files_of_checkpoint(address: Address, files: list[str]) -> list[str]:
    """The names, among `files`, of the weights in one format and of the vocabularies.

    The format is the first of `TOP_FILES` that exists. Raises ParameterError if none exists.
    """
    top = next((name for name in TOP_FILES if name in files), None)
    if top is None:
        message = f"{address} has no weights that can be read: none of {', '.join(TOP_FILES)}"
        raise ParameterError("model_dir", str(address), f"a repository with one of {', '.join(TOP_FILES)}", message)
    weights = [top]
    if top.endswith(".index.json"):
        kind = ".safetensors" if "safetensors" in top else ".bin"
        weights += [name for name in files if _WEIGHTS.fullmatch(name) and name.endswith(kind)]
    return [*weights, *(name for name in VOCABULARY_FILES if name in files)]


# ---------------------------------------------------------------------------------------------------- original://

ORIGINAL_URL = "http://curtis.ml.cmu.edu/datasets/pretrained_xl"


class Published(NamedTuple):
    """A checkpoint of the original authors, as `tf/sota/download.sh` of the original program fetches it.

    Attributes:
        folder: its folder at `ORIGINAL_URL`.
        step: step of the checkpoint, which is in its name.
        n_parameter: number of parameters. The file of the weights has about 4 bytes for each.
        memory: arguments of the model that no file of the checkpoint contains, with the values of `tf/sota/*.sh`.
    """

    folder: str
    step: int
    n_parameter: int
    memory: dict[str, Any]


_LONG = {"mem_len": 3800, "clamp_len": 1000, "same_length": True}
PUBLISHED = {
    "enwik8": Published("tf_enwiki8", 0, 277_231_820, _LONG),
    "text8": Published("tf_text8", 0, 277_050_395, _LONG),
    "wt103": Published("tf_wt103", 0, 285_205_322, {"mem_len": 1600, "clamp_len": 1000, "same_length": True}),
    "lm1b": Published("tf_lm1b", 1191000, 838_078_062, {"mem_len": 128, "same_length": True}),
}


def fetch_original(text: str) -> str:
    """Returns the local folder of the run of a published checkpoint. The first time, fetches and converts it.

    The authors publish no checksums. TensorFlow's checkpoints contain one for each tensor, which is checked. The
    environment variable TXL_ORIGINAL_URL replaces `ORIGINAL_URL`, the address of the authors' server.

    Args:
        text: the address, such as `original://wt103`.

    Raises:
        ParameterError: there is no such checkpoint, or a file is damaged.
        OSError: a file cannot be fetched or written, or another process is fetching a checkpoint.
    """
    name = text.removeprefix(ORIGINAL).rstrip("/")
    if name not in PUBLISHED:
        addresses = [ORIGINAL + known for known in PUBLISHED]
        raise ParameterError("model_dir", text, addresses)
    published = PUBLISHED[name]
    folder = os.path.join(cache_folder(), "original")
    run = os.path.join(folder, name)
    if os.path.exists(os.path.join(run, CONFIG_FILE)):
        return run
    with naming_write_errors(folder):
        os.makedirs(folder, exist_ok=True)
    with lock(folder, f"another program is fetching {text}"):
        files = os.path.join(folder, f"{name}-files")
        prefix = f"model.ckpt-{published.step}"
        weights = [f"model/{prefix}.{ending}" for ending in ("index", "data-00000-of-00001")]
        logger.info("%s: %s parameters, about %.1f GB to fetch", text, f"{published.n_parameter:,}",
                    4e-9 * published.n_parameter)  # fmt: skip
        for path in ("data/corpus-info.json", "data/cache.pkl", *weights):
            _fetch_file(f"{published.folder}/{path}", os.path.join(files, path))
        data_dir = f"{run}-data"  # the tokens of the data set, for evaluations
        remove(run)
        remove(data_dir)
        checkpoint, corpus = os.path.join(files, "model", prefix), os.path.join(files, "data", "cache.pkl")
        try:
            tf1_to_run(checkpoint, corpus, run, data_dir=data_dir, **published.memory)
        except ValueError as error:  # the user may have put the files there, so they stay
            message = f"{text} cannot be opened: {error}. Remove {files} to fetch its files again"
            raise ParameterError("model_dir", text, "a checkpoint whose files are whole", message) from error
        remove(files)
    return run


def _fetch_file(source: str, path: str) -> None:
    """Fetches the file `source` of the authors' server to the local `path`, unless `path` exists already.

    Raises:
        OSError: it cannot be fetched. The message says where the user can put the file.
    """
    if os.path.exists(path):
        return
    url = f"{(os.environ.get('TXL_ORIGINAL_URL') or ORIGINAL_URL).rstrip('/')}/{source}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    name = os.path.basename(path)
    logs_interactively = keras.config.is_interactive_logging_enabled()
    if not sys.stdout.isatty():  # in a file, the progress bar of get_file would be thousands of lines
        keras.config.disable_interactive_logging()
    try:
        fetched = keras.utils.get_file(
            f"{name}.tmp", origin=url, cache_dir=os.path.dirname(path), cache_subdir="", force_download=True
        )
    except Exception as error:  # get_file raises nothing narrower
        raise OSError(f"cannot fetch {url}: {error}\nput the file at {path} yourself") from error
    finally:
        if logs_interactively:
            keras.config.enable_interactive_logging()
    os.replace(fetched, path)


SOURCES[HF] = fetch_from_hub
SOURCES[ORIGINAL] = fetch_original


# ----------------------------------------------------------------------------------------------------- push_to_hub


@checked_call
def push_to_hub(
    model_dir: str | os.PathLike,
    repository: str,
    *,
    ckpt_path: str | os.PathLike | None = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Uploads the model and the vocabularies of a run to the Hugging Face Hub, with a model card.

    The settings of the data are left out, because they contain names of local files. Only the level of the tokens is
    uploaded.

    Args:
        model_dir: folder of the run.
        repository: `OWNER/NAME`. It is created if it does not exist.
        ckpt_path: the checkpoint, see `load_run`.
        license: name of a license for the card, such as "apache-2.0".
        private: whether a new repository is private.
        token: the hub's access token. By default that of `HF_TOKEN` or `hf auth login`.

    Returns:
        The address `hf://OWNER/NAME`.

    Raises:
        ParameterError: the folder contains no run, there is no such checkpoint, `repository` or `license` has another
            form, or huggingface_hub is not installed.
        OSError: the hub refuses the upload, or cannot be reached.
    """
    repository = repository.removeprefix(HF)
    if not re.fullmatch(_REPOSITORY, repository) or ".." in repository:
        raise ParameterError("repository", repository, "OWNER/NAME")
    if license is not None and not re.fullmatch(r"[\w.+-]{1,60}", license):
        raise ParameterError("license", license, "the name of a license, such as apache-2.0")
    hub = _hub()
    folder = RunFolder(model_dir)
    config = folder.read_config()
    vocabs = folder.load_vocabs()
    path = folder.find_checkpoint(ckpt_path)
    model = folder.load_model(path)
    address = Address(repository, "main")
    with tempfile.TemporaryDirectory() as temporary:
        run = os.path.join(temporary, "run")
        data_settings = {name: config["data"][name] for name in ("level",) if name in config["data"]}
        RunFolder(run).create(data_settings, config["model"], vocabs, model, int(path.rpartition("-")[2]))
        card = model_card(folder, config, model, repository, license)
        write_atomic(os.path.join(run, CARD), card)
        with _failures_as_oserror(address, "uploaded"):
            api = _api(hub, token)
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=run, commit_message=f"Upload {folder.name_of(path)}")
    return str(address)


_TAGS = {  # the task of a family -> the name that the hub has for it
    "language_model": "text-generation",
    "encoder_decoder": "translation",
    "tagger": "token-classification",
}


def model_card(folder: RunFolder, config: dict, model: Any, repository: str, license: str | None = None) -> str:
    """The model card of a run, in Markdown.

    Args:
        folder: the run.
        config: its `config.json`.
        model: its model.
        repository: `OWNER/NAME`.
        license: name of a license; `None` to name none.
    """
    family = folder.family
    sizes = ", ".join(
        f"{name} {config['model'][name]}"
        for name in ("n_layer", "num_layers", "d_model", "n_head", "num_heads", "mem_len", "n_token")
        if name in config["model"]
    )
    best = folder.find_best() or {}
    measured = [f"- {name}: {best[name]:.4f}" for name in best if name.startswith("val_")]
    head = ["library_name: txl_tf", f"pipeline_tag: {_TAGS[family.task]}", f"tags: [{family.name}]"]
    head += [f"license: {license}"] if license else []
    address = HF + repository
    lines = [
        "---",
        *head,
        "---",
        f"# {repository.rpartition('/')[2]}",
        "",
        f"{family.described[0].upper()}{family.described[1:]}, trained with txl_tf: {model.count_params():,} weights "
        f"({sizes}).",
        "",
        *(["Best validation in training:", "", *measured, ""] if measured else []),
        "```python",
        "import txl_tf",
        "",
        f'pipe = txl_tf.pipeline("{address}")',
        'print(pipe("..."))',
        "```",
        "",
        "The training data, the limits and the biases of this model are not described yet.",
        "",
    ]
    return "\n".join(lines)
