"""Checkpoints of PyTorch programs become runs: the same numbers, or one clear error."""

import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import (
    SMALL,
    assert_variables_equal,
    make_run,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    run_program,
    train_run,
    word_vocab,
)
from pytorch_models import KINDS, module_of, tensors_of, vocab_of, write_case
from torch_files import BFloat16, Instance, Module, write_legacy, write_safetensors, write_shards, write_zip

import txl_tf
from txl_tf.config import EvaluationConfig
from txl_tf.convert.pickles import FileError
from txl_tf.convert.pytorch import pytorch_to_run
from txl_tf.convert.pytorch_mapping import NOBODY
from txl_tf.convert.pytorch_vocab import read_vocabulary, repaired
from txl_tf.data.text.corpus import load_corpus
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.origin import Origin
from txl_tf.runs.weights import weights_by_name

SLOW = pytest.mark.slow
WORDS = word_vocab().symbols
PLAIN = {}
BINS = {"cutoffs": [5, 12], "untie_r": True}
SHARED = {"cutoffs": [5, 12], "d_embed": 6, "proj_share_all_but_first": True}
WIDE = {"cutoffs": [5, 12], "div_val": 2, "proj_share_all_but_first": True, "untie_r": True}
MODELS = {
    "plain": PLAIN,
    "bins": BINS,
    "shared": SHARED,
    "own": {"cutoffs": [5, 12], "d_embed": 6},
    "wide": WIDE,
    "wide_own": {"cutoffs": [5, 12, 20], "div_val": 2, "d_embed": 12},
    "projected": {"d_embed": 6},
    "pre_lnorm": {**WIDE, "pre_lnorm": True},
    "untied": {**WIDE, "tie_weight": False},
    "untied_plain": {**PLAIN, "tie_weight": False},
}


@pytest.fixture
def case(small_lm, tmp_path):
    """Makes a language model and a checkpoint of it: `(lm, path)`."""

    def make(kind="hf", options=WIDE, **changes):
        lm = small_lm(**{"layer_norm_epsilon": 1e-5, "dropout": 0.2, "dropatt": 0.1, **options})
        return lm, write_case(tmp_path / "case", lm, kind, WORDS, **changes)

    return make


def opened(tmp_path, checkpoint, **given):
    """The converted model, its vocabulary and what the conversion says."""
    made = pytorch_to_run(checkpoint, tmp_path / "run", **given)
    return *txl_tf.load_run(tmp_path / "run"), made


def refused(tmp_path, checkpoint, message, **given):
    """One line, and nothing is written."""
    with pytest.raises((ValueError, OSError)) as error:
        pytorch_to_run(checkpoint, tmp_path / "run", **given)
        pytest.fail(f"{checkpoint} is not refused: {message}")
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert not (tmp_path / "run").exists(), message


# ------------------------------------------------------------------------------------------------------- the numbers


FAST_FORMS = ["hf-projected", "hf-wide", "kimi-own", "nv-plain", "nv-wide_own", "nv-pre_lnorm", "kimi-untied"]


@pytest.mark.parametrize(
    "kind, name",
    [
        pytest.param(kind, name, marks=[] if f"{kind}-{name}" in FAST_FORMS else SLOW)
        for kind in KINDS
        for name in MODELS
    ],
)
def test_a_model_comes_back_bit_for_bit(case, tmp_path, kind, name):
    lm, path = case(kind, {**MODELS[name], "same_length": True, "clamp_len": 3})
    found, vocab, made = opened(tmp_path, path)
    of_softmax = {"proj_share_all_but_first", "tie_weight", "label_smoothing", "z_loss"}
    expected = lm.network.get_config() | {name: getattr(lm, name) for name in of_softmax}
    for name in set(made.model) - {"init", "init_std", "init_range", "proj_init_std"}:
        assert made.model[name] == (list(expected[name]) if name == "cutoffs" else expected[name]), name
    arrays = ({name: x.numpy() for name, x in weights_by_name(model).items()} for model in (found, lm))
    assert_variables_equal(*arrays)
    assert vocab.symbols == WORDS and made.n_parameter == lm.count_params()
    assert os.path.basename(made.checkpoint) == ("ckpt-7" if kind == "nv" else "ckpt-0")
    changed = [note for note in made.notes if note.startswith("mem_len 5 became 4")]
    assert len(changed) == (kind != "nv")


@pytest.mark.parametrize(
    "name, mistake",
    [
        pytest.param(name, mistake, marks=[] if (name, mistake) == ("hf_wt103", "mem_len") else SLOW)
        for name in ("hf_wt103", "kimi_wt103", "nv_wt103")
        for mistake in ("mem_len", "clusters", "epsilon")
    ],
)
def test_the_golden_numbers_notice_what_is_made_up_for(tmp_path, name, mistake):
    """Each of the three differences between the programs moves the losses by far more than the tolerance."""
    folder = tmp_path / "case"
    shutil.copytree(os.path.join(os.path.dirname(__file__), "goldens", "pytorch", name), folder)
    (checkpoint,) = (
        path for path in folder.iterdir() if path.name in ("model.safetensors", "model.pt", "checkpoint_best.pt")
    )
    lm, _, _ = opened(tmp_path, checkpoint)
    options, weights = lm.get_config() | {"name": "changed"}, txl_tf.tf1_variables(lm)
    if mistake == "mem_len":
        options["mem_len"] += -1 if name == "nv_wt103" else 1
    if mistake == "epsilon":
        options["layer_norm_epsilon"] = 1e-12
    changed = txl_tf.TransformerXLLM.from_config(options)
    if mistake == "clusters":
        for part in ("cluster_W", "cluster_b"):
            key = f"transformer/adaptive_softmax/cutoff_0/{part}"
            weights[key] = weights[key][::-1]
    for key, variable in zip(weights, weights_by_name(changed).values(), strict=True):
        variable.assign(weights[key])
    with np.load(folder / "golden.npz") as golden:
        tokens, labels, tgt_len = golden["tokens"], golden["labels"], int(golden["tgt_len"])
        expected = golden["nll" if "nll" in golden else "nll_zeros"]
    worst = {}
    for model in (lm, changed):
        mems, nlls = None, []
        for i in range(len(expected)):
            part = slice(i * tgt_len, (i + 1) * tgt_len)
            nll, mems = model.score(tokens[:, part], labels[:, part], mems)
            nlls.append(nll)
        worst[model] = np.max(np.abs(np.stack(nlls) - expected))
    assert worst[lm] < 1e-5
    assert worst[changed] > (2e-5 if mistake == "epsilon" else 0.5)


def test_a_softmax_without_bins_may_have_a_projection_of_its_own(case, tmp_path, eager):
    """PyTorch never ties it, `TransformerXLLM` always does: the last word becomes a bin of its own."""
    lm, path = case("hf", {"d_embed": 6})
    tensors = tensors_of(lm, "hf")
    tensors["crit.out_projs.0"] = own = np.random.default_rng(1).normal(0, 0.3, [8, 6]).astype(np.float32)
    shutil.rmtree(os.path.dirname(path))
    lm, path = case("hf", {"d_embed": 6}, tensors=tensors, tie_projs=[False])
    found, _, made = opened(tmp_path, path)
    assert made.model["cutoffs"] == [22] and made.notes[0]
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5)
    hidden, _ = lm.network(tokens)
    logits = (hidden.numpy() @ own) @ tensors["word_emb.emb_layers.0.weight"].T + tensors["crit.out_layers.0.bias"]
    expected = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    np.testing.assert_allclose(found.log_probs(tokens)[0], expected, atol=1e-5)
    np.testing.assert_allclose(found.score(tokens, (tokens + 13) % 23)[0], -np.take_along_axis(
        expected, ((tokens + 13) % 23)[..., None], -1)[..., 0], atol=1e-5)  # fmt: skip


FAST_TIES = {"hf": [True, False, True], "kimi": [False, True, False], "nv": [True, True, True]}


@pytest.mark.parametrize(
    "kind, ties",
    [
        pytest.param(kind, list(ties), marks=[] if FAST_TIES[kind] == list(ties) else SLOW)
        for kind in KINDS
        for ties in ((True, False, True), (False, True, False), (True, True, True), (False, False, True))
    ],
)
def test_any_bin_may_share_the_embeddings_projection(case, tmp_path, kind, ties):
    """Each then has a copy of its own, unless all but the first are shared."""
    lm, path = case(kind, MODELS["own"])
    tensors = tensors_of(lm, kind)
    shared = tensors["word_emb.emb_projs.0"]
    for i, is_tied in enumerate(ties):
        if is_tied and kind == "kimi":
            tensors[f"crit.out_projs.{i}"] = shared
        elif is_tied:
            del tensors[f"crit.out_projs.{i}"]
    shutil.rmtree(os.path.dirname(path))
    _, path = case(kind, MODELS["own"], tensors=tensors, **({} if kind == "kimi" else {"tie_projs": ties}))
    found, _, made = opened(tmp_path, path)
    weights = txl_tf.tf1_variables(found)
    own = txl_tf.tf1_variables(lm)
    assert found.proj_share_all_but_first == all(ties[1:])
    for i, is_tied in enumerate(ties):
        name = f"transformer/adaptive_softmax/cutoff_{i}/proj"
        if i > 0 and all(ties[1:]):
            assert name not in weights
        else:
            np.testing.assert_array_equal(weights[name], shared.T if is_tied else own[name])


@pytest.mark.parametrize("dtype", [*(pytest.param(dtype, marks=SLOW) for dtype in ("float16", "float64")), "bfloat16"])
def test_other_types_become_float32(case, tmp_path, dtype):
    lm, path = case("hf", BINS)
    tensors, expected = {}, txl_tf.tf1_variables(lm)
    for name, array in tensors_of(lm, "hf").items():
        name = name if name.startswith("crit.") else f"transformer.{name}"
        halves = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
        tensors[name] = BFloat16(halves) if dtype == "bfloat16" else array.astype(dtype)
    write_safetensors(path, tensors)
    found, _, made = opened(tmp_path, path)
    assert mentions(made.notes, dtype, "float32")
    for name, array in txl_tf.tf1_variables(found).items():
        if dtype == "bfloat16":
            rounded = (expected[name].view(np.uint32) >> 16 << 16).view(np.float32)
        else:
            rounded = expected[name].astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(array, rounded)


@pytest.mark.parametrize(
    "form",
    [*(pytest.param(form, marks=SLOW) for form in ("bin", "shards_bin", "legacy")), "shards_safetensors", "prefix"],
)
def test_forms_of_hugging_faces_files(case, tmp_path, form):
    lm, path = case("hf")
    tensors = {n if n.startswith("crit.") else f"transformer.{n}": a for n, a in tensors_of(lm, "hf").items()}
    os.remove(path)
    folder = tmp_path / "case"
    if form == "prefix":
        write_zip(folder / "pytorch_model.bin", {f"module.{name}": array for name, array in tensors.items()})
    elif form.startswith("shards"):
        write_shards(folder, tensors, 3, form.removeprefix("shards_"))
    else:
        (write_legacy if form == "legacy" else write_zip)(folder / "pytorch_model.bin", tensors)
    found, _, _ = opened(tmp_path, folder)
    assert_variables_equal(txl_tf.tf1_variables(found), txl_tf.tf1_variables(lm))


@pytest.mark.parametrize(
    "name", ["legacy", "data_parallel", pytest.param("state_dict", marks=SLOW), "data_parallel_state_dict"]
)
def test_forms_of_the_originals_files(case, tmp_path, name):
    lm, path = case("kimi", SHARED)
    tensors, given = tensors_of(lm, "kimi"), {}
    if name == "legacy":
        write_legacy(path, module_of(tensors, lm))
    elif name == "data_parallel":
        write_zip(path, Module("torch.nn.parallel", "DataParallel", {}, {"module": module_of(tensors, lm)}))
    else:
        prefix = "module." if name.startswith("data") else ""
        write_zip(path, {prefix + key: array for key, array in tensors.items()})
        given = {"mem_len": 4, "cutoffs": [5, 12]}
    found, vocab, made = opened(tmp_path, path, **given)
    assert_variables_equal(txl_tf.tf1_variables(found), txl_tf.tf1_variables(lm))
    assert vocab.symbols == WORDS and found.network.mem_len == 4 and found.network.layer_norm_epsilon == 1e-5
    assumed = ["same_length", "clamp_len", "dropout", "dropatt", "layer_norm_epsilon", "pre_lnorm"]
    assert made.origins.get(NOBODY) == (assumed if given else None)


def test_old_configurations_of_hugging_face(case, tmp_path):
    """Before transformers 2.3: other names, no model_type, no tie_projs."""
    lm, path = case("hf", model_type=None, tie_projs=None, vocab_size=None, n_token=23, layer_norm_epsilon=None)
    found, _, _ = opened(tmp_path, path)
    assert found.proj_share_all_but_first and found.network.layer_norm_epsilon == 1e-5
    assert_variables_equal(txl_tf.tf1_variables(found), txl_tf.tf1_variables(lm))


def test_a_configuration_of_hugging_face_leaves_out_its_own_defaults(case, tmp_path):
    """`TransfoXLConfig` has same_length=True and clamp_len=1000."""
    left_out = dict.fromkeys(("mem_len", "clamp_len", "same_length", "dropout", "dropatt"))
    lm, path = case("hf", {**WIDE, "same_length": True, "clamp_len": 1000}, **left_out)
    found, _, _ = opened(tmp_path, path, mem_len=6)
    network = found.network
    assert (network.mem_len, network.clamp_len, network.same_length) == (5, 1000, True)
    assert (network.dropout, network.dropatt) == (0.1, 0.0)
    assert_variables_equal(txl_tf.tf1_variables(found), txl_tf.tf1_variables(lm))


# --------------------------------------------------------------------------------------------------- what is refused


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


QKV = "layers.1.dec_attn.qkv_net.weight"
DAMAGED = {  # a tensor, what it becomes, and what the message contains
    "a tensor is missing": (QKV, None, f"{QKV}"),
    "a tensor occurs twice": (f"transformer.{QKV}", zeros(24, 8), f"transformer.{QKV}"),
    "not a number": ("crit.cluster_bias", np.array([0, np.nan], np.float32), "crit.cluster_bias"),
    "too large for float32": ("crit.cluster_bias", np.array([0, 1e39]), "crit.cluster_bias"),
    "a part of a layer is missing": (
        "layers.0.pos_ff.CoreNet.3.bias",
        None,
        "layers.0.pos_ff.CoreNet.3.b",
    ),
    "no softmax": ("crit.", None, "crit"),
    "another shape": (QKV, zeros(17, 8), f"{QKV}.*18x8.*17x8.*float32"),
    "integers": (QKV, zeros(18, 8, dtype=np.int64), f"{QKV}.*18x8.*18x8.*int64"),
    "no numbers": ("r_w_bias", zeros(0, 3), "r_w_bias"),
    "an unknown tensor": ("layers.0.adapter.weight", zeros(3), "'layers.0.adapter.weight'"),
    "own words": ("crit.out_layers.1.weight", zeros(7, 4), "out_layers.1.weight"),
    "a projection": ("crit.out_projs.1", zeros(8, 4), "crit.out_projs.1"),
    "widths": ("word_emb.emb_layers.1.weight", zeros(7, 3), "word_emb.emb_projs.1.*8x3.*8x4"),
    "clusters": ("crit.cluster_weight", zeros(1, 8), "crit.cluster_weight.*2x8"),
}


def test_a_damaged_checkpoint_is_refused(small_lm, tmp_path):
    lms = {untie_r: small_lm(**WIDE | {"untie_r": untie_r}) for untie_r in (False, True)}
    for name, (changed, value, message) in DAMAGED.items():
        lm = lms[changed != "r_w_bias"]
        tensors = tensors_of(lm, "hf")
        if value is None:
            tensors = {name: array for name, array in tensors.items() if not name.startswith(changed)}
        else:
            tensors[changed] = value
        refused(tmp_path, write_case(tmp_path / name, lm, "hf", WORDS, tensors), message)


CONTRADICTING = {
    "n_layer": (3, "config.json.*n_layer=3.*model.safetensors.*n_layer=2"),
    "d_model": (16, "d_model=16.*d_model=8"),
    "vocab_size": (24, "n_token=24.*n_token=23"),
    "cutoffs": ([5, 13], r"cutoffs=\[5.*13\].*cutoffs=\[5.*12\]"),
    "div_val": (3, "div_val=3.*div_val=2"),
    "untie_r": (False, "untie_r=False.*untie_r=True"),
    "attn_type": (2, "config.json.*attn_type=2"),
    "sample_softmax": (20, "sample_softmax=20"),
    "ext_len": (4, "ext_len=4"),
    "tie_word_embeddings": (False, "softmax.*crit"),
    "mem_len": (None, "mem_len.*config.json"),
    "model_type": ("gpt2", "config.json.*model_type.*'gpt2'"),
    "n_head": ("2", "config.json.*n_head.*'2'"),
    "same_length": (1, "config.json.*same_length.*True.*False.*1"),
    "dropout": (1.5, "dropout"),
    "layer_norm_epsilon": (0, "layer_norm_epsilon.*0"),
    "clamp_len": (True, "clamp_len.*True"),
    "tie_projs": ([False, False, True], "crit.out_projs.1"),
}  # fmt: skip


def test_what_a_file_says_is_compared_with_its_tensors(case, tmp_path):
    lm, _ = case()
    for name, (value, message) in CONTRADICTING.items():
        refused(tmp_path, write_case(tmp_path / name, lm, "hf", WORDS, **{name: value}), message)


def test_same_length_without_memory_is_refused(case, tmp_path):
    _, path = case("hf", {**WIDE, "same_length": True}, mem_len=0)
    refused(tmp_path, path, "mem_len=0.*same_length")


def test_what_is_given_is_compared_too(case, tmp_path):
    _, path = case("kimi", SHARED)
    refused(tmp_path, path, "n_layer=3.*n_layer=2", n_layer=3)
    refused(tmp_path, path, "mem_len=9.*MemTransformerLM.*mem_len=4", mem_len=9)
    refused(tmp_path, path, r"cutoffs=\[5.*13\].*cutoffs=\[5.*12\]", cutoffs=[5, 13])
    refused(tmp_path, path, "mem_length.*n_token.*n_layer", mem_length=4)
    refused(tmp_path, path, "mem_len.*'4'", mem_len="4")
    refused(tmp_path, path, "proj_share_all_but_first=False.*=True", proj_share_all_but_first=False)
    opened(tmp_path, path, n_layer=2, mem_len=4, cutoffs=(5, 12), layer_norm_epsilon=1e-5)


def test_a_bare_state_dict_needs_what_it_does_not_say(case, tmp_path):
    lm, path = case("kimi", SHARED)
    write_zip(path, tensors_of(lm, "kimi"))
    refused(tmp_path, path, "cutoffs.*state_dict.*3", mem_len=4)
    refused(tmp_path, path, "cutoffs.*2.*.5.", mem_len=4, cutoffs=[5])
    refused(tmp_path, path, "cutoffs", mem_len=4, cutoffs=[12, 5])
    refused(tmp_path, path, "mem_len.*state_dict", cutoffs=[5, 12])


def test_files_that_are_no_checkpoint(case, tmp_path):
    refused(tmp_path, tmp_path / "absent", "absent'")
    (tmp_path / "empty").mkdir()
    refused(tmp_path, tmp_path / "empty", "empty.*checkpoint_best.pt")
    _, path = case("hf")
    (tmp_path / "page.bin").write_text("<!DOCTYPE html>\n<html>")
    refused(tmp_path, tmp_path / "page.bin", "page.bin.*'<!DOCTYPE html>")
    os.remove(os.path.join(os.path.dirname(path), "config.json"))
    refused(tmp_path, os.path.dirname(path), "config.json")
    refused(tmp_path, path, "config.json")
    refused(tmp_path, write_zip(tmp_path / "model.pt", Module("torch.nn", "Linear")), "'Linear'.*MemTransformerLM")
    refused(tmp_path, write_zip(tmp_path / "list.pt", [1, 2]), ".1.*2.")
    refused(tmp_path, write_zip(tmp_path / "nv.pt", {"model_state": {}, "args": 1}), "model_state.*model_config")


def test_tensors_in_the_same_bytes_make_no_large_model(small_lm, tmp_path):
    """A layer's tensors over and over: a file of 30 kB would become 100 layers."""
    lm = small_lm(**PLAIN)
    tensors = tensors_of(lm, "hf")
    for name, array in list(tensors.items()):
        if name.startswith("layers.0."):
            tensors |= {name.replace("layers.0.", f"layers.{i}."): array for i in range(1, 100)}
    folder = tmp_path / "case"
    write_case(folder, lm, "hf", WORDS, tensors, n_layer=100)
    os.remove(folder / "model.safetensors")
    write_zip(
        folder / "pytorch_model.bin",
        {f"transformer.{n}".replace("transformer.crit", "crit"): a for n, a in tensors.items()},
    )
    refused(tmp_path, folder, "makes [0-9]+ numbers of [0-9]+")


HOSTILE = {
    "a huge number": ({"layer_norm_epsilon": 10**400}, "layer_norm_epsilon.*10{15,40}"),
    "a huge size": ({"n_layer": 10**30}, "n_layer.*1000000"),
    "many cutoffs": ({"cutoffs": [5] * 50_000}, "cutoffs=.*50000"),
    "a large file": ({"note": "x" * 2_000_000}, "config.json.*2,[0-9,]+.*1,000"),
}


def test_a_hostile_configuration_is_one_short_error(case, tmp_path):
    lm, _ = case()
    for name, (changes, message) in HOSTILE.items():
        refused(tmp_path, write_case(tmp_path / name, lm, "hf", WORDS, **changes), message)


def test_a_hostile_name_is_one_short_error(small_lm, tmp_path):
    lm = small_lm(**PLAIN)
    tensors = tensors_of(lm, "kimi") | {"x\n" * 100_000: zeros(2)}
    (tmp_path / "case").mkdir()
    path = write_zip(tmp_path / "case" / "state_dict.pt", tensors)
    refused(tmp_path, path, "'x.nx.n.*characters", mem_len=4, corpus=tmp_path)


# --------------------------------------------------------------------------------------------------- the vocabulary

FRENCH = ["<eos>", "<unk>", "été", "à", "東京", "the"]
GARBLED = [word.encode().decode("latin1") for word in FRENCH]


def test_words_read_as_latin1_are_repaired_where_that_is_certain():
    assert repaired(GARBLED) == (FRENCH, 3)
    assert repaired(FRENCH) == (FRENCH, 0)  # 東 is no latin1
    assert repaired(["<eos>", "é"]) == (["<eos>", "é"], 0)  # é of latin1 is no UTF-8
    assert repaired([*GARBLED, "é"]) == ([*GARBLED, "é"], 0)
    assert repaired(["a", "b"]) == (["a", "b"], 0)


VOCABULARIES = {
    "vocab.pkl": lambda path: write_zip(path, {"idx2sym": GARBLED, "lower_case": True, "special": ["<eos>"]}),
    "vocab.bin": lambda path: write_legacy(path, {"idx2sym": GARBLED, "lower_case": True, "sym2idx": {"a": 1}}),
    "cache.pt": lambda path: write_zip(path, Instance("data_utils", "Corpus", vocab=vocab_of(GARBLED), dataset="mine")),
    "vocab.txt": lambda path: path.write_text("\n".join(FRENCH) + "\n"),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies(tmp_path, name):
    VOCABULARIES[name](tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        source, notes = read_vocabulary(path)
        assert source.vocab.symbols == FRENCH and source.dataset is None
        assert source.vocab.lower_case == (name in ("vocab.pkl", "vocab.bin"))
        assert [n for n in notes if "3 words" in n and mentions(n, "latin1")] or name == "vocab.txt"
        assert mentions(notes[-1], "<eos>", "<unk>")
        np.testing.assert_array_equal(source.vocab.encode("été nouveau\n"), [2, 1, 0])
    assert read_vocabulary(tmp_path / name, "wt2")[0].dataset == "wt2"


def test_the_rules_of_lm1b_follow_from_its_symbols(tmp_path):
    (tmp_path / "words.txt").write_text("<S>\n<UNK>\nthe\n")
    source, _ = read_vocabulary(tmp_path / "words.txt")
    np.testing.assert_array_equal(source.vocab.encode("the cat\nthe\n"), [0, 2, 1, 0, 0, 2, 0])


def test_the_text_of_a_cache_pt_is_kept(case, tmp_path):
    _, path = case("kimi")
    ids = {split: np.array([1, 2, 3, i]) for i, split in enumerate(("train", "valid", "test"))}
    corpus = Instance("data_utils", "Corpus", dataset="wt103", vocab=vocab_of(WORDS), **ids)
    write_zip(tmp_path / "case" / "cache.pt", corpus)
    pytorch_to_run(path, tmp_path / "run", data_dir=tmp_path / "data")
    made = load_corpus(tmp_path / "data")
    assert {split: list(tokens) for split, tokens in made.splits.items()} == {s: list(a) for s, a in ids.items()}
    assert made.cutoffs == [5, 12] and made.vocab.symbols == WORDS
    assert RunFolder(tmp_path / "run").read_config()["data"]["data_dir"] == str(tmp_path / "data")


def test_tokens_outside_the_vocabulary_are_refused(case, tmp_path):
    _, path = case("kimi")
    for ids, wrong in (([1, 23], 23), ([1, -2], -2), ([2**40, 5], 2**40)):
        corpus = Instance("data_utils", "Corpus", dataset="wt103", vocab=vocab_of(WORDS), train=np.array(ids))
        write_zip(tmp_path / "case" / "cache.pt", corpus)
        message = f"the tokens of train must be ids of its 23 symbols, got {wrong}"
        refused(tmp_path, path, message, data_dir=tmp_path / "data")
        assert not (tmp_path / "data").exists(), ids


def test_the_text_may_go_where_the_cache_is_and_the_model_be_converted_again(case, tmp_path, monkeypatch):
    _, path = case("kimi")
    ids = dict.fromkeys(("train", "valid", "test"), np.array([1, 2, 3]))
    corpus = Instance("data_utils", "Corpus", dataset="wt103", vocab=vocab_of(WORDS), **ids)
    write_zip(tmp_path / "case" / "cache.pt", corpus)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):  # the text counts as not prepared then
        patch.setattr(RunFolder, "create", failing)
        pytorch_to_run(path, tmp_path / "run", data_dir=tmp_path / "case")
    pytorch_to_run(path, tmp_path / "run", data_dir=tmp_path / "case")
    made = pytorch_to_run(path, tmp_path / "again")
    assert made.vocab.symbols == WORDS


def failing(*args, **kwargs):
    raise OSError("the disk is full")


def test_the_text_of_lm1b_is_in_sentences(tmp_path):
    parts = [np.array([0, 1, 0]), np.array([0, 2, 0])]
    tree = Instance(
        "data_utils", "Corpus", dataset="lm1b", vocab=vocab_of(["<S>", "<UNK>", "a"]), train=["f"], valid=parts
    )
    source, _ = read_vocabulary(write_zip(tmp_path / "cache.pt", tree))
    assert {split: list(ids) for split, ids in source.splits.items()} == {"valid": [0, 1, 0, 0, 2, 0]}


@pytest.mark.parametrize(
    "tree, found",
    [
        (
            Instance("utils.vocabulary", "OpenAIVocab", max_size=3),
            "'OpenAIVocab'",
        ),
        ({"idx2sym": [1, 2]}, "idx2sym"),
        ({"idx2sym": ["a", "a"]}, "'a'"),
        ({"idx2sym": ["a", ""]}, "''"),
        ({"idx2sym": ["a", "\ud800"]}, r"\ud800"),
        (
            Instance("data_utils", "Corpus", vocab=vocab_of("abc"), train=np.ones(3)),
            "float64 [3]",
        ),
    ],
    ids=["subwords", "numbers", "twice", "empty", "half a character", "floats"],
)
def test_what_is_no_vocabulary(tmp_path, tree, found):
    path = write_zip(tmp_path / "cache.pt", tree)
    with raises_parameter("path", str(path), error=FileError) as error:
        read_vocabulary(path)
    assert found in str(error.value)


def test_the_vocabulary_must_be_the_models(case, tmp_path):
    _, path = case("nv")
    (tmp_path / "words.txt").write_text("<eos>\n<unk>\n")
    message = "words.txt.*2.*checkpoint_best.pt.*n_token=23"
    refused(tmp_path, path, message, corpus=tmp_path / "words.txt")
    refused(tmp_path, path, "lm1b.*checkpoint_best.pt.*wt103", dataset="lm1b")
    lm, path = case_without_words(tmp_path)
    refused(tmp_path, path, "corpus.*model.safetensors")


def case_without_words(tmp_path):
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=4)
    path = write_case(tmp_path / "without", lm, "hf", WORDS)
    os.remove(tmp_path / "without" / "vocab.pkl")
    return lm, path


def test_a_list_of_words_with_counts_is_not_written_over(case, tmp_path):
    _, path = case("nv")
    counted = tmp_path / "case" / "vocab.txt"
    counted.write_text("".join(f"{word} 3\n" for word in WORDS))
    with raises_parameter(str(counted), None):
        pytorch_to_run(path, counted.parent, corpus=counted)
    assert counted.read_text().startswith(f"{WORDS[0]} 3\n")


# ------------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/convert_checkpoint.py")


@pytest.fixture
def printed(tmp_path, tool, capsys):
    """Calls the program within this process; gives what it prints."""

    def call(*arguments):
        tool.FLAGS.unparse_flags()
        for flag in tool.FLAGS.get_key_flags_for_module(tool):
            flag.unparse()
        tool.FLAGS(["convert_checkpoint.py", f"--model_dir={tmp_path}/run", *arguments])
        tool.main()
        return capsys.readouterr().out

    return call


def as_a_process(*arguments):
    done = run_program("tools/convert_checkpoint.py", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=SLOW)])
def test_the_program_says_what_it_found(case, tmp_path, printed, process):
    lm, path = case("hf", {**WIDE, "same_length": True})
    call = as_a_process if process else printed
    lines = call(f"--pytorch_checkpoint={path}", f"--model_dir={tmp_path}/run").splitlines()
    assert mentions(lines[0], path, f"{lm.count_params():,}", 23)
    assert lines[1].endswith(
        ": n_token=23 n_layer=2 d_model=8 d_embed=8 n_head=2 d_head=3 d_inner=12 untie_r=True div_val=2 "
        "proj_share_all_but_first=True tie_weight=True cutoffs=[5, 12]"
    )
    assert lines[2].endswith(
        f"{tmp_path}/case/config.json: mem_len=4 same_length=True clamp_len=-1 dropout=0.2 dropatt=0.1 "
        "layer_norm_epsilon=1e-05 pre_lnorm=False"
    )
    assert mentions(lines[3], "mem_len", 5, 4, "same_length")
    assert lines[-1] == f"{tmp_path}/run/ckpt-0"


def test_the_programs_flags(case, tmp_path, printed):
    lm, path = case("kimi", SHARED)
    write_zip(path, tensors_of(lm, "kimi"))
    command = [f"--pytorch_checkpoint={path}", "--mem_len=4"]
    with raises_parameter("cutoffs", None, "a list of 2"):
        printed(*command)
    assert not (tmp_path / "run").exists()
    out = printed(*command, "--cutoffs=5,12", "--clamp_len=3", "--layer_norm_epsilon=1e-4")
    assert mentions(out, "cutoffs=[5, 12]", "mem_len=4", "clamp_len=3", "layer_norm_epsilon=0.0001")
    assert mentions(out, "same_length=False", "dropout=0.0", "dropatt=0.0")
    assert RunFolder(tmp_path / "run").read_config()["model"]["layer_norm_epsilon"] == 1e-4
    out = printed("--to_tf1", f"--tf1_checkpoint={tmp_path}/b")
    assert mentions(out, "layer_norm_epsilon=0.0001", "1e-12")
    with pytest.raises(flags.IllegalFlagValueError, match="must have a value other than None"):
        printed(*command, f"--tf1_checkpoint={path}")


@pytest.mark.parametrize(
    "arguments, flag, direction",
    [
        (["--to_tf1", "--tf1_checkpoint=b", "--mem_len=9"], "--mem_len", "--to_tf1"),
        (["--to_tf1", "--tf1_checkpoint=b", "--corpus=nowhere"], "--corpus", "--to_tf1"),
        (["--to_tf1", "--pytorch_checkpoint=b"], "--pytorch_checkpoint", "--to_tf1"),
        (["--tf1_checkpoint=b", "--ckpt_path=nowhere"], "--ckpt_path", "--tf1_checkpoint"),
        (["--tf1_checkpoint=b", "--cutoffs=3"], "--cutoffs", "--tf1_checkpoint"),
        (["--pytorch_checkpoint=b", "--ckpt_path=nowhere"], "--ckpt_path", "--pytorch_checkpoint"),
    ],
    ids=str,
)
def test_flags_of_another_direction_are_refused(printed, arguments, flag, direction):
    with raises_naming(ValueError, flag, direction):
        printed(*arguments)


def test_the_way_back_says_what_is_lost_of_resets(tmp_path, printed):
    make_run(tmp_path / "run", word_vocab(), reset_token=3)
    out = printed("--to_tf1", f"--tf1_checkpoint={tmp_path}/b")
    assert mentions(out, "reset_token=3")
    assert "layer_norm_epsilon" not in out


REFUSED = {
    "evil_bin": "posix.system", "evil_legacy": "__builtin__.eval", "beyond_storage": "0.*1280.*32",
    "truncated": "cut off", "missing": "qkv_net.weight",
    "no_softmax": "crit", "config_contradicts": "n_head=4, d_head=2", "gpt2": "model_type",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_reference_files_to_refuse(reference, tmp_path, name):
    refused(tmp_path, reference / "pytorch" / "refuse" / name, REFUSED[name])


@pytest.mark.parametrize("name, option, value", [("pre_lnorm", "pre_lnorm", True), ("not_tied", "tie_weight", False)])
def test_references_that_earlier_versions_refused(reference, tmp_path, name, option, value):
    words = tmp_path / "words.txt"
    words.write_text("\n".join([*WORDS[:20], ""]))
    lm, vocab, made = opened(tmp_path, reference / "pytorch" / "refuse" / name, corpus=words)
    assert getattr(lm, option) is made.model[option] is value and len(vocab) == 20


def test_tables_that_contradict_the_file_are_refused(case, tmp_path):
    lm, _ = case("hf", {**PLAIN, "tie_weight": False})
    path = write_case(tmp_path / "b", lm, "hf", WORDS, tie_word_embeddings=True)
    refused(tmp_path, path, "out_layers.0.weight")


def test_a_bare_state_dict_does_not_tell_where_it_normalises(case, tmp_path):
    lm, _ = case("nv", {**PLAIN, "pre_lnorm": True})
    path = write_zip(tmp_path / "state_dict.pt", tensors_of(lm, "nv"))
    given = {"corpus": tmp_path / "case" / "checkpoint_best.pt", "mem_len": lm.mem_len}
    found, _, made = opened(tmp_path, path, pre_lnorm=True, **given)
    assert found.pre_lnorm and "pre_lnorm" in made.origins["the command"]


def test_the_reference_vocabulary_to_refuse(reference, case, tmp_path):
    _, path = case("hf")
    refused(tmp_path, path, "builtins.exec", corpus=reference / "pytorch" / "refuse" / "evil_vocab" / "vocab.pkl")


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [pytest.param(1e-5, marks=SLOW), 1e-12])
def test_a_new_run_on_other_text_starts_from_a_converted_one(case, tmp_path, capsys, epsilon):
    """Fine-tuning: the text in the vocabulary of the run, the weights by warm start, which tells another epsilon."""
    options = {**WIDE, "n_layer": 1}
    lm, path = case("hf", options)
    pytorch_to_run(path, tmp_path / "run")
    (tmp_path / "text.txt").write_text("w3 w1 w4 new w5\nw2 w20\n" * 60)
    train_run(
        tmp_path / "tuned",
        data={
            "data_path": str(tmp_path / "text.txt"), "level": "word", "vocab_path": str(tmp_path / "run" / "vocab.txt"),
            "cutoffs": [5, 12],
        },
        text=None,
        model={**SMALL, **options, "n_token": None, "cutoffs": (), "mem_len": 4, "layer_norm_epsilon": epsilon},
        optimizer={"learning_rate": 1e-6},
        training={"warm_start_path": str(tmp_path / "run" / "ckpt-0"), "train_steps": 3},
    )  # fmt: skip
    message = f"{tmp_path}/run has layer_norm_epsilon=1e-05; this run has layer_norm_epsilon=1e-12\n"
    assert (message in capsys.readouterr().out) == (epsilon != 1e-5)
    tuned, vocab = txl_tf.load_run(tmp_path / "tuned")
    assert vocab.symbols == WORDS
    expected = txl_tf.tf1_variables(lm)
    for name, array in txl_tf.tf1_variables(tuned).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5)
    assert any(np.any(array != expected[name]) for name, array in txl_tf.tf1_variables(tuned).items())


@pytest.mark.slow
def test_a_converted_run_is_fine_tuned_on_other_text(case, tmp_path, capsys):
    """By `init_from` alone: its model, its vocabulary, its weights."""
    lm, path = case("hf", {**WIDE, "n_layer": 1})
    pytorch_to_run(path, tmp_path / "run")
    (tmp_path / "text.txt").write_text("w3 w1 w4 new w5\nw2 w20\n" * 60)
    settings = Origin(RunFolder(tmp_path / "tuned"), tmp_path / "run").settings
    assert settings["data"] == {"level": "word", "lower_case": False} and settings["training"] == {}
    train_run(
        tmp_path / "tuned",
        text=str(tmp_path / "text.txt"),
        data=settings["data"],
        model={**settings["model"], "dropout": 0.0, "mem_len": 5},
        optimizer={"learning_rate": 1e-6},
        training={"init_from": str(tmp_path / "run"), "train_steps": 3},
    )
    said = capsys.readouterr().out
    assert mentions(said, "11.11%", "<unk>")  # "new", of five words, two and two ends
    assert mentions(said, f"{tmp_path}/run", 0, "dropout 0.2 -> 0.0", "mem_len 4 -> 5")
    tuned, vocab = txl_tf.load_run(tmp_path / "tuned")
    assert vocab.symbols == WORDS and tuned.network.layer_norm_epsilon == 1e-5
    for name, array in txl_tf.tf1_variables(tuned).items():
        np.testing.assert_allclose(array, txl_tf.tf1_variables(lm)[name], atol=1e-5)


@pytest.mark.slow
def test_a_converted_run_is_evaluated_written_from_and_served(case, tmp_path):
    """By what other runs are: the same mean loss, the same tokens, the same losses of a request."""
    lm, path = case("nv", {**SHARED, "same_length": True})
    pytorch_to_run(path, tmp_path / "run")
    text, run = tmp_path / "text.txt", str(tmp_path / "run")
    text.write_text("w3 w1 w4 new w5\nw2 w20\n" * 10)
    evaluation = EvaluationConfig(eval_path=str(text), tgt_len=5, eval_batch_size=2)
    vocab = RunFolder(run).load_vocab()
    losses, mems = [], None
    for tokens, labels in txl_tf.segments(vocab.encode(text.read_text()), 2, 5):
        nll, mems = lm.score(tokens, labels, mems)
        losses.append(nll)
    (found,) = evaluate_run(run, evaluation=evaluation).values()
    assert found == pytest.approx(np.concatenate(losses, 1).mean(dtype=np.float64), rel=1e-5)

    done = run_program(
        "tools/generate.py", f"--model_dir={run}", "--prompt=w3 w1", "--max_new_tokens=5", "--temperature=0"
    )
    prompt = vocab.encode("w3 w1")[None]
    assert vocab.decode(lm.generate(prompt, 5, temperature=0)[0, 2:]).split() == done.stdout.split()[-5:], done.stderr

    done = run_program("tools/export_saved_model.py", f"--model_dir={run}", f"--output={tmp_path}/served")
    served = tf.saved_model.load(f"{tmp_path}/served/1").signatures
    state = served["initial_state"](batch_size=tf.constant(2))["state"]
    answer = served["score"](tokens=tf.constant(tokens), labels=tf.constant(labels), state=state)
    np.testing.assert_allclose(answer["nll"], lm.score(tokens, labels)[0], atol=1e-5)
