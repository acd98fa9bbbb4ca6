"""A run knows its vocabulary and its text: another one is an error, and nothing in its folder changes."""

import dataclasses
import hashlib
import json
import shutil

import pytest
from helpers import ANY, TEXT, mentions, raises_naming, raises_parameter, train_run

import txl_tf
from txl_config.models import TRAINING_ONLY
from txl_tf.config import EvaluationConfig, TrainingConfig
from txl_tf.data.text import corpus
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.families.record import FAMILIES
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.same_run import check_same_run
from txl_tf.runs.train import RECORDED
from txl_tf.runs.weights import CheckpointGone

pytestmark = pytest.mark.ci

SWAPPED = TEXT.translate(str.maketrans("at", "ta"))  # as many symbols in another order
MORE = {"training": {"train_steps": 15}}
FEW = {"evaluation": {"max_eval_batch": 1}}
CHEAP = {"model": {"dropout": 0.0, "dropatt": 0.0}, **FEW}


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, and of its text, which it knows by another name."""
    run_dir, text = tmp_path / "run", tmp_path / "text.txt"
    shutil.copytree(trained_run[0], run_dir)
    text.write_text(TEXT)
    edit_json(run_dir / "config.json", lambda config: config["data"].update(data_path=str(text)))
    return run_dir, text


def edit_json(path, edit):
    """Changes a file of the run as its owner may, who removes the checksum."""
    values = json.loads(path.read_text())
    edit(values)
    values.pop("checksum", None)
    path.write_text(json.dumps(values))


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def train_refused(run_dir, text, name, value=ANY, allowed=ANY, **changes):
    """Asserts that the training raises a ParameterError with these fields and changes no file; returns the error."""
    before = contents(run_dir)
    with raises_parameter(name, value, allowed) as raised:
        train_run(run_dir, str(text), **{**MORE, **changes})
    assert contents(run_dir) == before
    return raised.value


def train_refused_as(run_dir, text, *facts):
    """Asserts that the training raises an error with these facts, that of a file, and changes no file."""
    before = contents(run_dir)
    with raises_naming(ValueError, *facts):
        train_run(run_dir, str(text), **MORE)
    assert contents(run_dir) == before


def test_a_text_that_grew_into_another_vocabulary_of_the_same_size_names_the_first_difference(run):
    run_dir, text = run
    text.write_text(SWAPPED)
    error = train_refused(run_dir, text, "vocab")
    assert mentions(str(error), run_dir, 14, 1, "'a'", "'t'")
    train_refused(run_dir, text, "vocab", training={**MORE["training"], "allow_other_text": True})
    with raises_parameter("vocab") as raised:
        evaluate_run(run_dir)
    assert mentions(str(raised.value), 1, "'a'", "'t'")


def test_a_text_with_more_or_fewer_symbols_names_the_first_too(run):
    run_dir, text = run
    text.write_text(TEXT + "z")
    assert mentions(str(train_refused(run_dir, text, "vocab")), 14, "'z'")
    text.write_text(TEXT.replace(".", ","))
    error = train_refused(run_dir, text, "vocab")
    assert len(error.value) == 13 and mentions(str(error), 13, 14)


def test_another_setting_of_the_data_is_named_although_it_makes_another_vocabulary(run):
    run_dir, text = run
    data = json.loads((run_dir / "config.json").read_text())["data"]
    error = train_refused(run_dir, text, "model_dir", data={**data, "data_path": str(text), "min_freq": 200})
    assert mentions(str(error), "data.min_freq", 0, 200)


def test_another_text_of_the_same_vocabulary_is_an_error_unless_it_is_asked_for(run, eager):
    run_dir, text = run
    text.write_text(TEXT + TEXT)
    error = train_refused(run_dir, text, "text", ["train", "valid"])
    assert mentions(str(error), run_dir, "train", "valid")
    with raises_parameter("text", ["valid"]):
        evaluate_run(run_dir)
    given = {"dataset": "text", "data_path": str(text)}
    assert evaluate_run(run_dir, data=given, evaluation=EvaluationConfig(max_eval_batch=1))["valid"] > 0
    train_run(run_dir, str(text), training={"allow_other_text": True}, **FEW)  # evaluates, for it is trained
    folder = RunFolder(run_dir)
    best = folder.find_best()  # losses on the text of before are no rivals
    assert best["text"] == folder.read_config()["fingerprints"]["valid"] and best["step"] == 12
    train_run(run_dir, str(text), **FEW)  # which is now the text of the run


@pytest.mark.slow
def test_another_text_of_the_same_vocabulary_is_trained_on_where_it_is_asked_for(run, capsys):
    run_dir, text = run
    text.write_text(TEXT + TEXT)
    assert "--allow_other_text" in str(train_refused(run_dir, text, "text", ["train", "valid"]))
    with raises_parameter("text", ["valid"]):
        evaluate_run(run_dir)
    asked_for = evaluate_run(run_dir, data={"dataset": "text", "data_path": str(text)})["valid"]
    assert (
        asked_for
        == evaluate_run(
            run_dir, evaluation=EvaluationConfig(eval_split="valid"), data={"dataset": "text", "data_path": str(text)}
        )["valid"]
    )
    train_run(run_dir, str(text), training={**MORE["training"], "allow_other_text": True})
    assert f"{run_dir}/ckpt-" in capsys.readouterr().out
    best = RunFolder(run_dir).find_best()  # losses on the text of before are no rivals
    assert best["text"] == RunFolder(run_dir).read_config()["fingerprints"]["valid"] and best["step"] == 15
    train_run(run_dir, str(text), training={"train_steps": 18})  # which is now the text of the run
    assert RunFolder(run_dir).steps()[-1] == 18


@pytest.mark.slow
def test_a_folder_whose_checkpoints_were_deleted_takes_another_text(run):
    run_dir, text = run
    for path in run_dir.glob("ckpt-*"):
        path.unlink()
    shutil.rmtree(run_dir / "best")
    text.write_text(TEXT.replace(".", ","))
    assert (run_dir / "checkpoint").exists()
    train_run(run_dir, str(text), training={"train_steps": 3}, **FEW)
    assert "." not in txl_tf.load_run(run_dir)[1].symbols


def test_checkpoints_of_another_program_are_not_trained_over(run, tmp_path):
    _, text = run
    other = tmp_path / "original"
    other.mkdir()
    (other / "checkpoint").write_text(
        'model_checkpoint_path: "model.ckpt-7"\nall_model_checkpoint_paths: "model.ckpt-7"\n'
    )
    (other / "model.ckpt-7.index").touch()
    error = train_refused(other, text, "model_dir", str(other), "a new folder")
    assert mentions(str(error), f"{other}/model.ckpt-7")


def test_a_run_goes_on_where_its_warm_start_is_gone(run, tmp_path, capsys):
    run_dir, text = run
    gone = {"warm_start_path": str(tmp_path / "gone" / "ckpt-12")}
    train_run(run_dir, str(text), training=gone, **FEW)  # trained already: evaluates
    assert mentions(capsys.readouterr().out, "warm_start_path", gone["warm_start_path"])
    with raises_parameter("checkpoint", error=CheckpointGone):
        train_run(tmp_path / "new", str(text), training=gone)


def test_the_precision_of_products_stays_and_older_runs_have_float32(run):
    run_dir, text = run
    config = RunFolder(run_dir).read_config()
    assert config["training"]["matmul_precision"] == "float32"
    edit_json(run_dir / "config.json", lambda config: config["training"].update(matmul_precision="bfloat16"))
    error = train_refused(run_dir, text, "model_dir")
    assert len(error.differences) == 1
    assert mentions(error.differences, "training.matmul_precision", "'bfloat16'", "'float32'")
    edit_json(run_dir / "config.json", lambda config: config["training"].pop("matmul_precision"))
    error = train_refused(run_dir, text, "model_dir", model={"d_inner": 25})
    assert len(error.differences) == 1 and mentions(error.differences, "model.d_inner", 16, 25)


def test_the_same_text_may_move(run, tmp_path):
    run_dir, text = run
    moved = tmp_path / "elsewhere.txt"
    shutil.move(text, moved)
    train_run(run_dir, str(moved), **FEW)  # evaluates, for it is trained
    assert RunFolder(run_dir).read_config()["data"]["data_path"] == str(moved)


def test_a_prepared_corpus_that_was_replaced_is_noticed(run, tmp_path):
    run_dir, _ = run
    data = {"data": {"data_dir": str(tmp_path / "data"), "dataset": None, "data_path": None}}

    def prepare(text):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        (tmp_path / "text.txt").write_text(text)
        corpus.prepare(tmp_path / "data", "text", tmp_path / "text.txt")

    prepare(TEXT)
    prints = {split: corpus.load_corpus(tmp_path / "data").fingerprint(split) for split in ("train", "valid")}
    edit_json(run_dir / "config.json", lambda config: config["data"].update(data["data"]))
    edit_json(run_dir / "config.json", lambda config: config["fingerprints"].update(prints))  # as if trained on it
    train_run(run_dir, None, **data, **FEW)  # evaluates, for it is trained
    prepare(SWAPPED)
    train_refused(run_dir, None, "vocab", **data)
    prepare(TEXT + TEXT)
    train_refused(run_dir, None, "text", ["train", "valid"], **data)


@pytest.mark.slow
def test_a_prepared_corpus_is_trained_on_again_once_it_is_what_it_was(run_dir, tmp_path):
    data = {"data": {"data_dir": str(tmp_path / "data"), "dataset": None, "data_path": None}}

    def prepare(text):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        (tmp_path / "text.txt").write_text(text)
        corpus.prepare(tmp_path / "data", "text", tmp_path / "text.txt")

    prepare(TEXT)
    train_run(run_dir, None, **data)
    prepare(SWAPPED)
    train_refused(run_dir, None, "vocab", **data)
    prepare(TEXT + TEXT)
    train_refused(run_dir, None, "text", ["train", "valid"], **data)
    prepare(TEXT)
    train_run(run_dir, None, **MORE, **data)


def test_a_run_of_before_has_no_fingerprints_but_its_vocabulary_counts(run):
    run_dir, text = run
    edit_json(run_dir / "config.json", lambda config: config.pop("fingerprints"))
    text.write_text(SWAPPED)
    train_refused(run_dir, text, "vocab")
    text.write_text(TEXT)
    train_run(run_dir, str(text), **FEW)
    assert RunFolder(run_dir).read_config()["fingerprints"].keys() == {"train", "valid", "vocab"}


def test_the_vocabulary_of_a_run_with_checkpoints_is_never_written_again(run):
    run_dir, text = run
    written = (run_dir / "vocab.txt").stat().st_mtime_ns
    train_run(run_dir, str(text), **FEW)
    assert (run_dir / "vocab.txt").stat().st_mtime_ns == written


def test_a_damaged_vocabulary_is_noticed(run):
    run_dir, text = run
    (run_dir / "vocab.txt").write_text((run_dir / "vocab.txt").read_text().replace("a", "x"))
    file = str(run_dir / "vocab.txt")
    with raises_parameter("vocab", file) as raised:
        txl_tf.load_run(run_dir)
    assert mentions(str(raised.value), file, "config.json")
    train_refused(run_dir, text, "vocab", file)


@pytest.mark.parametrize("start", [None, "best/ckpt-12"])
def test_a_new_run_does_not_take_the_place_of_best_weights_whose_checkpoints_are_gone(run, start):
    run_dir, text = run
    for path in run_dir.glob("ckpt-*"):
        path.unlink()
    training = {} if start is None else {"warm_start_path": str(run_dir / start)}
    error = train_refused(run_dir, text, "model_dir", str(run_dir), "another folder", training=training)
    assert mentions(str(error), f"{run_dir}/best/ckpt-12")


@pytest.mark.parametrize("best, logged", [(6, 12), (6, 6), (6, None)])
def test_the_log_shows_that_a_run_had_checkpoints_after_its_best_weights(run, best, logged, eager):
    """Checkpoints are saved after every 6th step: at step 6, the run may have been killed before its first one."""
    run_dir, text = run
    for path in run_dir.glob("ckpt-*"):
        path.unlink()
    for path in (run_dir / "best").glob("ckpt-12.*"):
        path.rename(path.with_name(path.name.replace("12", str(best))))
    edit_json(run_dir / "best" / "best.json", lambda values: values.update(step=best))
    lines = (run_dir / "log.csv").read_text().splitlines(keepends=True)
    steps = [line.split(",")[lines[0].split(",").index("step")] for line in lines[1:]]
    if logged is None:
        (run_dir / "log.csv").unlink()
    else:
        rows = [line for line, step in zip(lines[1:], steps, strict=True) if int(step) <= logged]
        assert rows
        (run_dir / "log.csv").write_text("".join([lines[0], *rows]))
    if logged == 12:
        train_refused(run_dir, text, "model_dir", str(run_dir), "another folder")
    else:
        train_run(run_dir, str(text), training={"train_steps": 1}, optimizer={"warmup_steps": 0}, **FEW)
        assert RunFolder(run_dir).steps() == [1]


def test_a_new_run_does_not_start_from_weights_of_another_vocabulary(run, tmp_path):
    run_dir, text = run
    text.write_text(SWAPPED)
    for start in ("ckpt-12", "best/ckpt-12"):
        with raises_parameter("vocab"):
            train_run(tmp_path / "new", str(text), training={"warm_start_path": str(run_dir / start)})


@pytest.mark.parametrize(
    "part, changes, message",
    [
        ("model", {"dropout": "0.1"}, "model.dropout.*'0.1'"),
        ("model", {"dropout": 1.5}, r"model.dropout.*\[0, 1\).*1.5"),
        ("model", {"cutoffs": None}, r"model.cutoffs.*None"),
        ("model", {"cutoffs": [9, 3]}, r"cutoffs.*0.*n_token=14.*\[9, 3\]"),
        ("model", {"mem_len": 1e9}, "model.mem_len.*1000000000.0"),
        ("model", {"mem_len": 10**9}, "model.mem_len.*1048576.*1000000000"),
        ("model", {"mem_len": None}, "model.mem_len.*None"),
        ("model", {"mem_len": ...}, "model.mem_len"),
        ("model", {"n_token": None}, "model.n_token"),
        ("model", {"n_layer": 0}, "model.n_layer.*1.*0"),
        ("model", {"layers": 3}, "model.layers.*clamp_len.*context_len.*cutoffs"),
        ("training", {"tgt_len": None}, "training.tgt_len.*None"),
        ("training", {"tgt_len": 0}, "training.tgt_len.*1.*0"),
        ("training", {"mixed_precision": "half"}, "training.mixed_precision.*float32.*'half'"),
        (
            "training",
            {"mixed_precision": ["float32"]},
            r"training.mixed_precision.*float32.*\['float",
        ),
        ("training", {"tgt_len": 10**400}, "training.tgt_len.*1000"),
        ("model", {"clamp_len": 10**400}, "model.clamp_len.*1000"),
        ("model", {"init_std": 10**400}, "model.init_std.*1000"),
        ("vocab", {"level": "words"}, "level.*'words'"),
        ("vocab", {"lvl": "word"}, "vocab.lvl"),
        ("vocab", {"special": None}, "vocab.special"),
        ("data", {"data_path": 3}, r"data.data_path.*3"),
        ("fingerprints", {"train": 3}, "fingerprints.*JSON"),
        (
            "extra",
            {},
            "extra.*init_from.*own_parts.*vocab",
        ),
    ],
    ids=str,
)
def test_an_edited_config_names_the_file_the_key_what_was_found_and_what_is_allowed(run, part, changes, message):
    run_dir, text = run

    def edit(config):
        values = {**config.get(part, {}), **changes}
        config[part] = {name: value for name, value in values.items() if value is not ...}

    edit_json(run_dir / "config.json", edit)
    for use in (txl_tf.load_run, evaluate_run):
        with pytest.raises(ValueError, match=f"{run_dir}/config.json: {message}") as error:
            use(run_dir)
        assert len(str(error.value).splitlines()) == 1
    before = contents(run_dir)
    with pytest.raises(ValueError, match=message):
        train_run(run_dir, str(text), **MORE)
    assert contents(run_dir) == before


@pytest.mark.parametrize("changes", [{"n_layer": 9999, "d_inner": 200000}, {"d_embed": 262144}], ids=str)
def test_a_far_larger_model_than_the_checkpoint_is_not_made(run, changes):
    run_dir, _ = run
    edit_json(run_dir / "config.json", lambda config: config["model"].update(changes))
    with raises_parameter("model_dir", str(run_dir)) as raised:
        txl_tf.load_run(run_dir)
    assert mentions(str(raised.value), f"{run_dir}/config.json")


def test_null_stands_for_what_is_not_given(run):
    run_dir, _ = run
    before = evaluate_run(run_dir, evaluation=EvaluationConfig(eval_batch_size=60, max_eval_batch=1))
    edit_json(run_dir / "config.json", lambda config: config["training"].update(eval_batch_size=None))
    edit_json(run_dir / "config.json", lambda config: config["data"].update(data_dir=None))
    assert evaluate_run(run_dir, evaluation=EvaluationConfig(max_eval_batch=1)) == before


def test_bad_changes_of_load_run_are_named(run):
    for name, value in [("n_layer", "2"), ("d_model", None)]:
        with raises_parameter(name, value):
            txl_tf.load_run(run[0], **{name: value})


@pytest.mark.parametrize(
    "name, value, is_named",
    [
        ("positions", "alibi", True),  # its weights also fit "rotary"
        ("pre_lnorm", True, True),
        ("lora_alpha", 3.0, True),
        ("mem_len", 3, True),
        ("dropout", 0.4, False),
        ("init_std", 0.5, False),
    ],
)
def test_a_warm_start_names_what_another_model_computes_otherwise(trained_run, tmp_path, caplog, name, value, is_named):
    source = RunFolder(trained_run[0])
    config = source.read_config()
    before, config["model"][name] = config["model"][name], value
    training = TrainingConfig(warm_start_path=str(trained_run[0] / "ckpt-12"))
    with caplog.at_level("WARNING", "txl_tf"):
        check_same_run(RunFolder(tmp_path / "new"), config, source.load_vocabs(), training, "")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == is_named
    assert all(mentions(message, source.path, name, repr(before), repr(value)) for message in messages)


def test_what_only_training_uses_fits_all_weights():
    groups = [family.config for family in FAMILIES.values()]
    free = {field.name for group in groups for field in dataclasses.fields(group) if field.metadata["free"]}
    assert set(TRAINING_ONLY) <= free


@pytest.mark.slow
def test_a_config_json_above_the_run_of_a_warm_start_is_none_of_its_business(run, tmp_path):
    run_dir, text = run
    (tmp_path / "config.json").write_text('{"name": "my project"}')
    warm = {"warm_start_path": str(run_dir / "ckpt-12"), "train_steps": 1}
    train_run(tmp_path / "new", str(text), training=warm, optimizer={"warmup_steps": 0}, **CHEAP)


@pytest.mark.parametrize(
    "content, facts",
    [
        ("{}", ["step"]),
        ("[]", ["list"]),
        ("", []),
        ('{"step": 12, "val_loss": "2.5"}', ["val_loss", "'2.5'"]),
        ('{"step": 12, "val_loss": NaN}', ["val_loss", "nan"]),
        ('{"step": 12, "val_loss": 1' + "0" * 400 + "}", ["val_loss"]),
        ('{"step": -1, "val_loss": 1}', ["step", -1]),
        ('{"step": "12", "val_loss": 1}', ["step", "'12'"]),
    ],
)
def test_a_damaged_best_json_is_one_clear_error(run, content, facts):
    run_dir, text = run
    (run_dir / "best" / "best.json").write_text(content)
    with raises_naming(ValueError, "best.json", *facts):
        txl_tf.load_run(run_dir, "best")
    train_refused_as(run_dir, text, "best.json", *facts)


# Settings that `config.json` does not record: where a run starts, a permission for one session, and the machine's.
OF_A_SESSION = {"init_from", "warm_start_path", "allow_other_text", "steps_per_execution"}
MEASURED = {"longest_sentence", "usual_sentences", "most_sentences"}  # a run of a tagger records them, too


@pytest.mark.parametrize("family", [*FAMILIES.values()], ids=[*FAMILIES])
def test_a_run_records_every_setting_of_its_training_but_those_of_a_session(family):
    settings = {field.name for field in dataclasses.fields(family.training)}
    assert settings - {*family.batching, *RECORDED, *family.recorded} - MEASURED == OF_A_SESSION
