"""Checkpoints of the original program become folders of runs, and go back, bit for bit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    CASES,
    GOLDENS,
    SMALL,
    assert_variables_equal,
    make_cache,
    make_run,
    mentions,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    run_program,
    word_vocab,
    write_checkpoint,
)

import txl_tf
from txl_tf.convert.original import find_tf1_checkpoint, model_arguments, run_to_tf1, tf1_to_run
from txl_tf.data.subwords import train_subwords
from txl_tf.data.text import corpus
from txl_tf.data.text.datasets import PAPER_DATASETS
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import load_weights

SLOW = pytest.mark.slow
WORDS = word_vocab().symbols

# Models in which every argument that has an effect shows in the variables.
DETERMINED = [
    {},
    {"untie_r": True, "d_embed": 6},
    {"cutoffs": [5, 12], "d_embed": 6, "proj_share_all_but_first": True},
    {"cutoffs": [5, 12], "d_embed": 6},
    {"cutoffs": [5, 12], "div_val": 2, "proj_share_all_but_first": True},
    {"cutoffs": [5, 12], "div_val": 2, "proj_same_dim": False},
    {"cutoffs": [5, 12, 20], "div_val": 2, "d_embed": 12, "untie_r": True},
    {"cutoffs": [5], "div_val": 2, "d_embed": 16},
]


@pytest.fixture
def vocab_file(tmp_path):
    path = tmp_path / "words" / "vocab.txt"
    path.parent.mkdir()
    path.write_text("".join(f"{word}\n" for word in WORDS))
    return path


def checkpoint_of(lm, path, **more):
    return write_checkpoint(path, {**txl_tf.tf1_variables(lm), **more})


def convert(tmp_path, lm, corpus, **changes):
    arguments = {
        "tf1_checkpoint": checkpoint_of(lm, tmp_path / "model.ckpt-7"),
        "corpus": corpus,
        "model_dir": tmp_path / "run",
        "mem_len": 4,
        "dataset": "wt2",
        **changes,
    }
    return tf1_to_run(**arguments)


# --------------------------------------------------------------------------------------------- what follows


def test_arguments_follow_from_the_shapes(small_lm, tmp_path):
    defaults = {"untie_r": False, "cutoffs": [], "div_val": 1, "proj_same_dim": True, "proj_share_all_but_first": False}
    for options in DETERMINED:
        found = model_arguments(checkpoint_of(small_lm(**options), tmp_path / "model.ckpt"))
        assert found == {**SMALL, **defaults, **options}


@pytest.mark.parametrize("case", CASES)
def test_arguments_of_the_original_programs_models(case):
    folder = GOLDENS / case
    config = json.loads((folder / "config.json").read_text())
    found = model_arguments(str(folder / "model.ckpt-0"))
    for name in set(found) & set(config):
        assert found[name] == config[name], name
    if found["div_val"] > 1:
        assert found["proj_share_all_but_first"] == any(config["tie_projs"])


@pytest.mark.parametrize(
    "options, name, values",
    [
        pytest.param({}, "div_val", [1, 2, 4], marks=SLOW),
        pytest.param({"d_embed": 7, "cutoffs": [5]}, "div_val", [7, 4, 5, 6], marks=SLOW),  # 7 // 4 == ... == 7 // 7
        pytest.param({}, "proj_same_dim", [True, False], marks=SLOW),
        pytest.param({"cutoffs": [5, 12]}, "proj_same_dim", [True, False], marks=SLOW),
        pytest.param({"cutoffs": [5, 12], "d_embed": 6}, "proj_same_dim", [True, False], marks=SLOW),
        pytest.param({"cutoffs": [5, 12], "d_embed": 7, "div_val": 2}, "proj_same_dim", [True, False], marks=SLOW),
        pytest.param({}, "proj_share_all_but_first", [False, True], marks=SLOW),
        pytest.param({"d_embed": 6}, "proj_share_all_but_first", [False, True], marks=SLOW),
        pytest.param({"cutoffs": [5, 12]}, "proj_share_all_but_first", [False, True], marks=SLOW),
        (
            {"cutoffs": [5], "d_embed": 16, "div_val": 2, "proj_same_dim": False},
            "proj_share_all_but_first",
            [False, True],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_follow_has_no_effect_and_may_be_given(
    small_lm, small_batches, tmp_path, options, name, values, eager
):
    tokens, labels = (ids[0] for ids in small_batches())
    lms = [small_lm(**options, **{name: value}) for value in values]
    path = checkpoint_of(lms[0], tmp_path / "model.ckpt")
    assert model_arguments(path)[name] == values[0]
    expected, _ = lms[0].score(tokens, labels)
    for lm, value in zip(lms, values, strict=True):
        txl_tf.load_tf1_checkpoint(lm, path)  # raises unless the variables are the same
        np.testing.assert_array_equal(lm.score(tokens, labels)[0], expected)
        assert model_arguments(path, **{name: value})[name] == value


def test_widths_that_several_div_vals_give_take_the_one_that_divides(small_lm, tmp_path):
    path = checkpoint_of(small_lm(d_embed=9, cutoffs=[5], div_val=4), tmp_path / "model.ckpt")  # 9 // 4 == 2, also
    assert model_arguments(path)["div_val"] == 4
    path = checkpoint_of(small_lm(d_embed=8, cutoffs=[5], div_val=5), tmp_path / "model.ckpt")  # 8 // 5 == 1
    assert model_arguments(path)["div_val"] == 8
    assert model_arguments(path, div_val=5)["div_val"] == 5


CONTRADICTING = [  # options of the model, arguments, what the shapes say of the first argument
    ({}, {"n_head": 3}, 2),
    ({}, {"n_layer": 3, "d_inner": 8}, 2),
    ({}, {"untie_r": True}, False),
    ({"cutoffs": [5]}, {"div_val": 2}, 1),
    ({"cutoffs": [5], "div_val": 2}, {"div_val": 3}, 2),
    ({"cutoffs": [5], "div_val": 2}, {"proj_same_dim": False}, True),
    ({"cutoffs": [5], "div_val": 2}, {"proj_share_all_but_first": True}, False),
]


def test_an_argument_that_contradicts_the_shapes_names_both(small_lm, tmp_path):
    paths = {}
    for options, given, is_so in CONTRADICTING:
        if str(options) not in paths:
            paths[str(options)] = checkpoint_of(small_lm(**options), tmp_path / f"model.ckpt-{len(paths)}")
        path = paths[str(options)]
        name, value = next(iter(given.items()))
        with raises_parameter(name, value, [is_so]) as error:
            model_arguments(path, **given)
            pytest.fail(f"no error: {given} for {options}")
        assert all(named in str(error.value) for named in (path, *given)), error.value


NEEDED = [
    "transformer/r_w_bias",
    "transformer/r_r_bias",
    "transformer/layer_0/ff/layer_1/kernel",
    "transformer/layer_1/rel_attn/LayerNorm/gamma",
    "transformer/adaptive_embed/cutoff_0/lookup_table",
    "transformer/adaptive_embed/cutoff_2/lookup_table",
    "transformer/adaptive_embed/cutoff_1/proj_W",
    "transformer/adaptive_softmax/cutoff_0/b",
    "transformer/adaptive_softmax/cutoff_2/b",
    "transformer/adaptive_softmax/cutoff_0/cluster_W",
    "transformer/adaptive_softmax/cutoff_2/proj",
]


def test_a_missing_variable_is_named_and_nothing_is_written(small_lm, tmp_path, vocab_file):
    lm = small_lm(cutoffs=[5, 12], div_val=2)
    for name in NEEDED:
        arrays = txl_tf.tf1_variables(lm)
        del arrays[name]
        path = write_checkpoint(tmp_path / "missing.ckpt", arrays)
        with raises_naming(ValueError, path, name):
            convert(tmp_path, lm, vocab_file, tf1_checkpoint=path)
            pytest.fail(f"no error: {name} is missing")
        assert not (tmp_path / "run").exists(), name


def test_a_checkpoint_of_something_else_is_an_error(tmp_path):
    path = write_checkpoint(tmp_path / "other.ckpt", {"dense/kernel": np.zeros([2, 2], np.float32)})
    with raises_parameter("tf1_checkpoint", path, "a checkpoint of the original program"):
        model_arguments(path)


# ------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    "options", [one if i == 6 else pytest.param(one, marks=SLOW) for i, one in enumerate(DETERMINED)], ids=str
)
def test_a_converted_model_scores_alike_and_goes_back_bit_for_bit(
    small_lm, small_batches, tmp_path, vocab_file, options, eager
):
    lm = small_lm(**options, same_length=True, clamp_len=3)
    made, vocab, checkpoint = convert(tmp_path, lm, vocab_file, same_length=True, clamp_len=3)
    assert checkpoint == str(tmp_path / "run" / "ckpt-7")
    assert vocab.symbols == RunFolder(tmp_path / "run").load_vocab().symbols == WORDS

    opened, _ = txl_tf.load_run(tmp_path / "run")
    batch = [ids[0] for ids in small_batches()]
    expected, _ = lm.score(*batch)
    for other in (made, opened):
        assert_variables_equal(txl_tf.tf1_variables(other), txl_tf.tf1_variables(lm))
        np.testing.assert_array_equal(other.score(*batch)[0], expected)

    back = run_to_tf1(tmp_path / "run", tmp_path / "back")
    assert back == str(tmp_path / "back" / "model.ckpt-7") == tf.train.latest_checkpoint(str(tmp_path / "back"))
    assert_variables_equal(read_checkpoint(back), txl_tf.tf1_variables(lm))
    info = json.loads((tmp_path / "back" / "corpus-info.json").read_text())
    cutoffs = options.get("cutoffs")
    assert info["cutoffs"] == ([0, *cutoffs, len(WORDS)] if cutoffs else [])  # train_gpu.py takes [1:-1]
    assert (info["vocab_size"], info["dataset"]) == (len(WORDS), "wt2")

    again = tf1_to_run(tmp_path / "back", tmp_path / "back", tmp_path / "again", mem_len=2)
    assert again[1].get_config() == vocab.get_config()


def test_a_run_restores_the_weights_and_does_not_go_on_without_optimizer(small_lm, tmp_path, vocab_file):
    lm, other = small_lm(seed=1), small_lm(seed=2)
    _, _, path = convert(tmp_path, lm, vocab_file)
    other.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=1))
    other.optimizer.build(other.trainable_variables)
    checkpoints = RunCheckpoints(other, RunFolder(tmp_path / "run"))
    assert checkpoints.latest == path
    with raises_parameter("checkpoint", path):
        checkpoints.restore(path)
    load_weights(other, path)
    assert_variables_equal(txl_tf.tf1_variables(other), txl_tf.tf1_variables(lm))


def test_weights_of_the_original_can_be_restored_directly(small_lm, tmp_path):
    lm, other = small_lm(seed=1), small_lm(seed=2)
    load_weights(other, checkpoint_of(lm, tmp_path / "model.ckpt-7"))
    assert_variables_equal(txl_tf.tf1_variables(other), txl_tf.tf1_variables(lm))


def test_the_step_is_that_of_the_checkpoint_and_its_optimizer_is_left(small_lm, tmp_path, vocab_file):
    lm = small_lm()
    slots = {f"{name}/{slot}": array for name, array in txl_tf.tf1_variables(lm).items() for slot in ("Adam", "Adam_1")}
    path = checkpoint_of(lm, tmp_path / "trained.ckpt-8", global_step=np.int64(1191000), **slots)
    _, _, made = convert(tmp_path, lm, vocab_file, tf1_checkpoint=path)
    assert made.endswith("ckpt-1191000")
    assert not [name for name, _ in tf.train.list_variables(made) if "Adam" in name]

    path = checkpoint_of(lm, tmp_path / "averaged")
    _, _, made = convert(tmp_path, lm, vocab_file, tf1_checkpoint=path, model_dir=tmp_path / "other")
    assert made.endswith("ckpt-0")


def test_a_checkpoint_is_found_by_prefix_file_or_folder(small_lm, tmp_path):
    first = tmp_path / "a" / "model.ckpt-1"
    txl_tf.save_tf1_checkpoint(small_lm(), first)
    files = [f"{first}.index", f"{first}.data-00000-of-00001", first.parent, f"{first.parent}/"]
    assert {find_tf1_checkpoint(path) for path in (first, *files)} == {str(first)}

    second = checkpoint_of(small_lm(), first.parent / "model.ckpt-2")
    assert find_tf1_checkpoint(first.parent) == str(first)  # the file named checkpoint says so
    (first.parent / "checkpoint").write_text('model_checkpoint_path: "/home/someone/model.ckpt-2"\n')
    assert find_tf1_checkpoint(first.parent) == second
    (first.parent / "checkpoint").unlink()
    with raises_naming(ValueError, first.parent, "model.ckpt-1", "model.ckpt-2"):
        find_tf1_checkpoint(first.parent)
    with raises_parameter("tf1_checkpoint", f"{first}0", "a checkpoint or its folder"):
        find_tf1_checkpoint(f"{first}0")
    with raises_parameter("tf1_checkpoint", str(tmp_path), "the folder of one checkpoint"):
        find_tf1_checkpoint(tmp_path)


def test_to_tf1_takes_a_prefix_and_an_earlier_checkpoint(small_lm, tmp_path, vocab_file):
    lm = small_lm()
    convert(tmp_path, lm, vocab_file)
    RunFolder(tmp_path / "run").save_weights(small_lm(seed=2), 9)
    path = run_to_tf1(tmp_path / "run", tmp_path / "back" / "my.ckpt-3", "ckpt-7")
    assert path == str(tmp_path / "back" / "my.ckpt-3")
    assert_variables_equal(read_checkpoint(path), txl_tf.tf1_variables(lm))
    latest = run_to_tf1(tmp_path / "run", tmp_path / "back")
    assert latest.endswith("model.ckpt-9")
    shutil.copytree(tmp_path / "run", tmp_path / "twin")  # another run on the same text
    with raises_parameter(f"{tmp_path}/back/corpus-info.json", None):
        run_to_tf1(tmp_path / "twin", tmp_path / "back")
    with raises_parameter("checkpoint", "ckpt-8"):
        run_to_tf1(tmp_path / "run", tmp_path / "back", "ckpt-8")
    with raises_parameter("model_dir", f"{tmp_path}/back"):
        run_to_tf1(tmp_path / "back", tmp_path / "other")


@pytest.mark.parametrize(
    "name, data, field",
    [
        ("config.json", "{}", "tf1_checkpoint"),
        ("vocab.txt", "mine\n", "{}/vocab.txt"),
        ("corpus-info.json", "{}", "{}/corpus-info.json"),
        ("checkpoint", "", "tf1_checkpoint"),
        ("model.ckpt-7.index", "", "tf1_checkpoint"),
    ],
)
def test_to_tf1_writes_over_nothing_else(small_lm, tmp_path, vocab_file, monkeypatch, name, data, field):
    convert(tmp_path, small_lm(), vocab_file)
    monkeypatch.setattr(RunFolder, "load_model", None)  # it is refused before
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / name).write_text(data)
    with raises_parameter(field.format(tmp_path / "back")) as raised:
        run_to_tf1(tmp_path / "run", tmp_path / "back")
    assert mentions(str(raised.value), name)
    assert [file.name for file in (tmp_path / "back").iterdir()] == [name]
    assert (tmp_path / "back" / name).read_text() == data
    with raises_parameter("tf1_checkpoint", ""):
        run_to_tf1(tmp_path / "run", "")


# --------------------------------------------------------------------------------------------- vocabulary and text


@pytest.fixture
def published(small_lm, tmp_path, monkeypatch):
    """A small model as the original's were published: model and data folder."""
    lm = small_lm(n_token=4, cutoffs=[2, 3])
    folder = tmp_path / "published"
    txl_tf.save_tf1_checkpoint(lm, folder / "model" / "model.ckpt-0")
    (folder / "data").mkdir()
    make_cache(folder / "data" / "cache.pkl", monkeypatch)
    info = {"vocab_size": 4, "cutoffs": [0, 2, 3, 4], "dataset": "wt103"}
    (folder / "data" / "corpus-info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize("name", [pytest.param("data/cache.pkl", marks=SLOW), "data/corpus-info.json", "data"])
def test_a_published_model_and_its_text(published, tmp_path, name):
    lm, vocab, path = tf1_to_run(
        published / "model", published / name, tmp_path / "run", mem_len=4, data_dir=tmp_path / "data"
    )
    # A symbol with white space, which Python 2 did not split at, is one that no text has.
    assert vocab.symbols == ["<eos>", "the", "é", r"\u3000x"]
    config = RunFolder(tmp_path / "run").read_config()
    assert config["data"]["data_dir"] == str(tmp_path / "data") and config["data"]["dataset"] == "wt103"
    assert config["model"]["cutoffs"] == [2, 3]
    assert config["vocab"]["eos"] == "<eos>" and config["vocab"]["unk"] == "<unk>" and not config["vocab"]["lower_case"]
    np.testing.assert_array_equal(vocab.encode("é the\nthe\n"), [2, 1, 0, 1, 0])

    made = corpus.load_corpus(tmp_path / "data")
    assert made.vocab.symbols == vocab.symbols and made.cutoffs == [2, 3] and not made.by_character
    assert {split: list(ids) for split, ids in made.splits.items()} == {
        "train": [1, 2, 3, 0, 1],
        "valid": [2, 0],
        "test": [3],
    }

    back = Path(run_to_tf1(tmp_path / "run", tmp_path / "back")).parent / "corpus-info.json"
    assert json.loads(back.read_text())["dataset"] == "wt103"
    (tmp_path / "data" / "corpus-info.json").unlink()
    run_to_tf1(tmp_path / "run", tmp_path / "back")
    assert json.loads(back.read_text())["dataset"] == "wt103"  # the run knows by itself


def test_the_text_may_go_where_the_cache_is_and_counts_as_prepared(published, tmp_path):
    data_dir = published / "data"
    tf1_to_run(published / "model", data_dir, tmp_path / "run", mem_len=4, data_dir=data_dir)
    assert len(corpus.prepare(data_dir, "wt103").splits["train"]) == 5  # and it asks for no train.txt
    with raises_parameter("data_dir", data_dir, "a local folder without a prepared corpus"):
        tf1_to_run(published / "model", data_dir, tmp_path / "other", mem_len=4, data_dir=data_dir)


def test_an_error_leaves_the_files_of_the_original(published, tmp_path, monkeypatch):
    data_dir = published / "data"

    def files():
        return {path.name: path.read_bytes() for path in data_dir.iterdir()}

    def stopped(*arguments):
        raise KeyboardInterrupt

    before = files()
    arguments = {"model_dir": tmp_path / "run", "mem_len": 4, "data_dir": data_dir}
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_weights", stopped)
        with pytest.raises(KeyboardInterrupt):
            tf1_to_run(published / "model", data_dir, **arguments)
    assert files() == before and not (tmp_path / "run").exists()
    words = data_dir / "vocab.txt"
    words.write_text("mine\n")
    with raises_parameter(str(words), None):
        tf1_to_run(published / "model", data_dir, **arguments)
    assert files() == {**before, "vocab.txt": b"mine\n"}


def test_a_corpus_of_characters_keeps_its_level(small_lm, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat\non the mat\n" * 20)
    made = corpus.prepare(tmp_path / "data", "text", text, level="char")
    lm = small_lm(n_token=len(made.vocab))
    _, vocab, _ = convert(tmp_path, lm, tmp_path / "data", dataset=None)
    assert vocab.get_config() == made.vocab.get_config() and vocab.symbols == made.vocab.symbols
    run_to_tf1(tmp_path / "run", tmp_path / "back")
    _, vocab, _ = convert(tmp_path, lm, tmp_path / "back", dataset=None, model_dir=tmp_path / "again")
    assert vocab.decode(vocab.encode("on the\n")) == "on the\n"


def test_a_corpus_of_subwords_goes_there_and_back(tmp_path):
    vocab = train_subwords(["the cat sat on the mat"] * 20, vocab_size=270)
    make_run(tmp_path / "run", vocab)
    for _ in range(2):  # again in the same folder
        back = run_to_tf1(tmp_path / "run", tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").glob("*o*.*[ln]")) == ["corpus-info.json", "vocab.model"]
    _, again, _ = tf1_to_run(back, tmp_path / "back", tmp_path / "again", mem_len=4)
    assert again.fingerprint() == vocab.fingerprint() == RunFolder(tmp_path / "again").load_vocab().fingerprint()


def change_info(**changes):
    def change(folder):
        path = folder / "data" / "corpus-info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def change_file(name, data):
    def change(folder):
        path = folder / "data" / name
        path.unlink() if data is None else path.write_bytes(data)

    return change


@pytest.mark.parametrize(
    "change, arguments, name, allowed",
    [
        (change_info(cutoffs=[0, 1, 3, 4]), {}, "cutoffs", [[2, 3]]),
        (change_info(cutoffs=[]), {}, "cutoffs", [[2, 3]]),
        (change_info(vocab_size=5), {}, "vocab_size", [4]),
        (change_info(dataset="wt2"), {}, "dataset", ["wt103", "wt2"]),
        (None, {"dataset": "ptb"}, "dataset", ["ptb", "wt103"]),
        (None, {"mem_len": None}, "mem_len", "that of the training"),
        (None, {"n_head": 8}, "n_head", [2]),
        (None, {"tf1_checkpoint": "nowhere/model.ckpt"}, "tf1_checkpoint", "a checkpoint or its folder"),
        (change_file("cache.pkl", b"cos\nsystem\n."), {}, "path", "a file of plain data"),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_what_does_not_belong_together_is_one_clear_error(published, tmp_path, change, arguments, name, allowed):
    if change:
        change(published)
    defaults = {"tf1_checkpoint": published / "model", "corpus": published / "data", "mem_len": 4}
    with raises_parameter(name, allowed=allowed):
        tf1_to_run(**{**defaults, **arguments}, model_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, arguments, facts",
    [
        (None, {"corpus": "nowhere"}, ["nowhere"]),
        (change_file("cache.pkl", None), {}, ["data", "cache.pkl"]),
        (change_file("corpus-info.json", b"[1]"), {}, ["corpus-info.json", "list"]),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_a_file_that_is_missing_or_damaged_is_named(published, tmp_path, change, arguments, facts):
    if change:
        change(published)
    defaults = {"tf1_checkpoint": published / "model", "corpus": published / "data", "mem_len": 4}
    with raises_naming((ValueError, FileNotFoundError), *facts):
        tf1_to_run(**{**defaults, **arguments}, model_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_of_another_size_names_both_sizes(small_lm, tmp_path, vocab_file):
    with raises_parameter("corpus", 23, "a vocabulary of 30 symbols"):
        convert(tmp_path, small_lm(n_token=30), vocab_file)


def test_a_plain_vocabulary_needs_the_dataset_and_has_no_text(small_lm, tmp_path, vocab_file):
    with raises_parameter("dataset", None, [*PAPER_DATASETS]):
        convert(tmp_path, small_lm(), vocab_file, dataset=None)
    with raises_parameter("data_dir", tmp_path / "data"):
        convert(tmp_path, small_lm(), vocab_file, data_dir=tmp_path / "data")


def test_the_dataset_of_ones_own_is_replaced_by_one_whose_rules_hold(published, tmp_path, monkeypatch):
    make_cache(published / "data" / "cache.pkl", monkeypatch, dataset="mine")
    change_info(dataset="mine")(published)
    with raises_parameter("dataset", None, [*PAPER_DATASETS]):
        tf1_to_run(published / "model", published / "data", tmp_path / "run", mem_len=4)
    tf1_to_run(published / "model", published / "data", tmp_path / "run", mem_len=4, dataset="wt2")
    assert RunFolder(tmp_path / "run").read_config()["data"]["dataset"] == "wt2"


def test_a_folder_with_a_run_is_kept(small_lm, tmp_path, vocab_file):
    convert(tmp_path, small_lm(), vocab_file)
    with raises_parameter("model_dir", f"{tmp_path}/run"):
        convert(tmp_path, small_lm(), vocab_file)


# ---------------------------------------------------------------------------------------------------- the program


@pytest.mark.slow
def test_the_program_converts_says_what_it_found_and_goes_back(published, tmp_path):
    run = f"--model_dir={tmp_path / 'run'}"
    there = [f"--tf1_checkpoint={published / 'model'}", f"--corpus={published / 'data' / 'cache.pkl'}", run]
    result = run_program("tools/convert_checkpoint.py", *there, "--mem_len=4", "--same_length", "--n_head=2")
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path / 'run' / 'ckpt-0'}: " in result.stdout
    assert "n_layer=2 d_model=8 d_embed=8 n_head=2 d_head=3 d_inner=12 untie_r=False" in result.stdout
    assert mentions(result.stdout, "mem_len=4", "same_length=True", "clamp_len=-1")

    result = run_program("tools/convert_checkpoint.py", "--to_tf1", run, f"--tf1_checkpoint={tmp_path / 'back'}")
    assert result.stdout.strip() == str(tmp_path / "back" / "model.ckpt-0"), result.stderr
    assert_variables_equal(read_checkpoint(result.stdout.strip()), read_checkpoint(f"{published}/model/model.ckpt-0"))

    result = run_program("tools/convert_checkpoint.py", *there)
    assert result.returncode == 1
    assert mentions(result.stderr, "convert_checkpoint.py", "mem_len")
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------------------------------------- the original's own


def nll_of_batch_1(lm, tokens, tgt_len, n_row=64):
    """What `lm.evaluate` gives at batch size 1, sooner: the nll `[n]` of all labels in text order.

    With mem_len == tgt_len, a segment depends on the `n_layer` segments before it. So the text is cut into rows of
    segments that begin so much earlier than they count. Before its beginning, memory stays zero.
    """
    inputs, labels = tokens[:-1].reshape(-1, tgt_len), tokens[1:].reshape(-1, tgt_len)
    n_column, warm_up = -(-len(inputs) // n_row), lm.network.n_layer
    score = tf.function(lm.score, autograph=False)
    mems, nll = lm.initial_mems(n_row), np.zeros([n_row, n_column, tgt_len])
    for column in range(-warm_up, n_column):
        index = np.arange(n_row) * n_column + column
        inside = np.clip(index, 0, len(inputs) - 1)
        row_nll, mems = score(inputs[inside], labels[inside], mems)
        mems = [mem * np.float32(index >= 0)[:, None, None] for mem in mems]
        if column >= 0:
            nll[:, column] = row_nll
    return nll.reshape(-1)[: labels.size]


@pytest.mark.slow
def test_a_model_trained_by_the_original_evaluates_to_its_figures(reference, tmp_path):
    test_text = reference.parent / "data" / "wikitext-2" / "test.txt"
    if not test_text.is_file():
        pytest.skip(f"the text of the original's evaluation is not at {test_text}")
    folder = reference / "pretrained_word"
    expected = json.loads((folder / "expected.json").read_text())
    lm, vocab, _ = tf1_to_run(
        folder, folder / "vocab.txt", tmp_path / "run", mem_len=32, dataset="wt2", **expected["model"]
    )
    assert lm.count_params() == expected["parameters"]
    back = run_to_tf1(tmp_path / "run", tmp_path / "back")
    assert_variables_equal(read_checkpoint(back), read_checkpoint(str(folder / expected["checkpoint"])))

    tokens = vocab.encode(test_text.read_text(encoding="utf-8"))
    for evaluation in expected["evaluations_on_wikitext2_test"]:
        batch, tgt_len = evaluation["batch"], evaluation["tgt_len"]
        assert (len(tokens) // batch - 1) * batch == evaluation["tokens"]
        settings = {name: evaluation[name] for name in ("mem_len", "same_length", "clamp_len")}
        lm = RunFolder(tmp_path / "run").load_model(**settings)
        lm.compile("adam")
        dataset = txl_tf.segments(tokens, batch, tgt_len)
        if batch > 1:
            nll = lm.evaluate(dataset, verbose=0)
        else:
            nlls = nll_of_batch_1(lm, tokens, tgt_len)
            nll = np.mean(nlls)
            beginning = lm.evaluate(dataset.take(200), verbose=0)
            np.testing.assert_allclose(np.mean(nlls[: 200 * tgt_len]), beginning, rtol=1e-6)
        assert abs(nll - evaluation["nll"]) < 1e-4
