"""The program that prepares a corpus: flags of the original, flags of one's own text, errors."""

import contextlib
import io
import re
import types

import numpy as np
import pytest
from absl import flags
from helpers import mentions, program, run_program, write_splits

from txl_programs import program as programs
from txl_tf.data.text import corpus


@pytest.fixture(
    params=["in this process", pytest.param("in its own", marks=pytest.mark.slow)],
)
def run(request):
    """Runs the program: its status and what it prints."""
    if request.param == "in its own":
        yield lambda *arguments: run_program("tools/prepare_data.py", *arguments)
        return
    with contextlib.closing(program("tools/prepare_data.py")) as loaded:
        main = next(loaded).main

        def run_here(*arguments):
            flags.FLAGS.unparse_flags()
            flags.FLAGS(["prepare_data.py", *arguments])
            output, status = io.StringIO(), 0
            with contextlib.redirect_stdout(output):
                try:
                    programs._run(main, ["tools/prepare_data.py"])
                except SystemExit as end:
                    status = end.code
            errors = status if isinstance(status, str) else ""
            return types.SimpleNamespace(returncode=int(bool(status)), stdout=output.getvalue(), stderr=errors)

        yield run_here


def test_the_originals_command_prepares_a_folder_and_then_finds_it_done(tmp_path, run):
    folder = write_splits(tmp_path, "a b\na\n", "b\n", "a\n")
    flags = [
        f"--data_dir={folder}/", "--dataset=wt103", "--tgt_len=384", "--per_host_train_bsz=128",
        "--per_host_valid_bsz=128", "--num_core_per_host=16", "--num_passes=10", "--use_tpu=True",
    ]  # fmt: skip
    result = run(*flags)
    assert result.returncode == 0, result.stderr
    assert mentions(result.stdout.splitlines()[-1], 3, 5, 2)
    assert corpus.load_corpus(tmp_path).splits["train"].tolist() == [1, 2, 0, 1, 0]
    result = run(*flags[:2], "--per_host_test_bsz=8", "--tgt_len=128", "--num_passes=1", "--use_tpu=False")
    assert result.returncode == 0, result.stderr
    assert mentions(result.stdout.splitlines()[-2], tmp_path)


def test_text_flags_reach_the_library(tmp_path, run):
    for name, text in (("a.txt", "B b c\n"), ("b.txt", "a b\nb b\n")):
        (tmp_path / name).write_text(text)
    result = run(
        f"--data_path={tmp_path}/a.txt,{tmp_path}/b.txt", f"--data_dir={tmp_path}/made", "--dataset=text",
        "--level=word", "--lower_case", "--max_size=2", "--min_freq=1", "--valid_fraction=0.3", "--cutoffs=1,2",
        "--shard_tokens=4",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "oneDNN custom operations" not in result.stderr  # a note of TensorFlow's
    assert result.stdout.count("\n") == 1  # no bar without a terminal
    made = corpus.load_corpus(tmp_path / "made")
    assert made.vocab.symbols == ["<eos>", "<unk>", "b", "c"]
    assert made.cutoffs == [1, 2]
    np.testing.assert_array_equal(made.splits["train"], [2, 2, 3, 0, 1, 2, 0])
    np.testing.assert_array_equal(made.splits["valid"], [2, 2, 0])
    assert len(np.load(tmp_path / "made" / "train-001.npy")) == 3


def test_verify_checks_every_file_and_changes_nothing(tmp_path, run):
    folder = tmp_path / "made"
    corpus.prepare(folder, "pydoc")
    result = run(f"--data_dir={folder}", "--verify")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"{folder}: ")
    data = bytearray((folder / "train.npy").read_bytes())
    data[5000] ^= 1
    (folder / "train.npy").write_bytes(data)
    result = run(f"--data_dir={folder}", "--verify")
    assert result.returncode == 1
    assert mentions(result.stderr, "prepare_data.py", f"{folder}/train.npy")
    assert (folder / "train.npy").read_bytes() == data


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--dataset=wt2 --level=byte", "--level.*--dataset=wt2"),
        ("--dataset=wt2 --valid_fraction=0.4", "--valid_fraction.*--dataset=wt2"),
        ("--dataset=enwik8 --subword_type=bpe", "--subword_type.*--dataset=enwik8"),
        ("--dataset=ptb --nolower_case", "--lower_case.*--dataset=ptb"),
        ("--dataset=text --subword_type=bpe", "--subword_type.*--level=subword.*--level=char"),
        ("--dataset=text --num_shuffle=9", "--num_shuffle.*--dataset=lm1b.*--dataset=text"),
        ("--dataset=wt103 --seed=1", "--seed.*--dataset=lm1b.*--dataset=wt103"),
        ("--dataset=text --download_url=x", "--download_url.*--dataset=text"),
        ("--dataset=wt2 --download_url=http://x", "--download_url.*--download"),
        ("--dataset=pydoc --text_field=body", "--text_field.*--dataset=text"),
        (
            "--dataset=text --level=subword --vocab_path=s.model --subword_type=bpe",
            "--subword_type.*--vocab_path=s.model",
        ),
        ("--verify --dataset=ptb", "--dataset.*--verify"),
        ("--verify --shard_tokens=5 --level=byte", "--shard_tokens.*--verify"),
        ("--verify --ray_workers=2", "--ray_workers.*--verify"),
    ],
)
@pytest.mark.parametrize("run", ["in this process"], indirect=True)
def test_a_flag_without_effect_is_refused(tmp_path, run, arguments, message):
    result = run(f"--data_dir={tmp_path}/made", *arguments.split())
    assert result.returncode == 1 and re.search(f"^prepare_data.py: {message}", result.stderr, re.M)
    assert not (tmp_path / "made").exists()


def test_an_error_is_a_sentence_and_no_traceback(tmp_path, run):
    result = run(f"--data_dir={tmp_path}", "--dataset=wt2")
    assert result.returncode == 1
    assert mentions(result.stderr, "prepare_data.py", f"{tmp_path}/train.txt", "'wt2'")
    assert "Traceback" not in result.stderr
