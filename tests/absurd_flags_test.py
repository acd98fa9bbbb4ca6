"""Absurd values of every flag of every program: one clear line or a right answer, in bounded time, and nothing lost."""

import collections
import json
import subprocess
import sys

import pytest
from absurd import BASES, INTEGERS, LONG, NUMBERS, absurd_paths, contents, make_folder, problems_of
from helpers import INSTALLED, ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("absurd")
    make_folder(found)
    return found


def test_every_program_has_its_flags_tried():
    assert sorted(BASES) == sorted(INSTALLED)


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(BASES))
def test_absurd_flags(folder, program):
    """In one process, each case in a fork of it: about 1,000 in all."""
    command = [sys.executable, str(ROOT / "tests" / "absurd.py"), program, str(folder), "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    ends, wrong = collections.Counter(), []
    for line in done.stdout.splitlines():
        _, flag, value, seconds, status, errors, _, changed = json.loads(line)
        ends[status] += 1
        wrong += [f"--{flag}={value!r}: {problem}; {errors[-300:]}" for problem in problems_of(status, errors, changed)]
    assert not wrong, "\n".join(wrong)
    assert ends[1] > ends[0] and ends.total() > 10


# Values that no program may take, as real programs: the whole of their standard error is looked at.
ABSURD = [
    *(("train", "learning_rate", value) for value in NUMBERS if value not in ("1e-300", "1e30")),
    *(("train", "n_layer", value) for value in INTEGERS),
    *(("train", name, "") for name in ("data_path", "vocab_path", "init_from", "warm_start_path", "model_dir")),
    *(("train", "data_path", f"{{}}/{name}") for name in ("pipe", "loop", "none", "garbage", "empty", "socket")),
    ("train", "nountie_r", "true"),
    ("train", "init_std", "nan"),
    ("train", "logical_cpus", "1000000000"),
    ("train", "flagfile", "{}/pipe"),
    ("train", "flagfile", "{}/garbage"),
    ("train-seq2seq", "n_pairs", "1000000000"),
    ("train-ner", "n_sentences", "1000000000"),
    ("train-ner", "lexicon", "{}/pipe"),
    ("score", "model_dir", "{}/pipe"),
    ("score", "input", "{}/pipe"),
    ("score", "output", "{}/folder"),
    ("generate", "temperature", "nan"),
    ("generate", "prompt_file", "{}/pipe"),
    ("generate", "ckpt_path", LONG),
    ("translate", "beam_size", "1000000000000"),
    ("tag", "lexicon", "{}/loop"),
    ("plot", "dpi", "inf"),
    ("prepare-data", "data_dir", "{}/pipe"),
    ("prepare-data", "vocab_path", "{}/pipe"),
    ("average-checkpoints", "num_last_checkpoints", "-1"),
    ("average-checkpoints", "output_dir", "{}/pipe"),
    ("convert-checkpoint", "tf1_checkpoint", "{}/loop"),
    ("convert-checkpoint", "corpus", "{}/pipe"),
    ("export-saved-model", "output", "{}/pipe"),
    ("serve", "port", "65536"),
    ("serve", "api_key_file", "{}/loop"),
    ("demo", "port", "65536"),
    ("demo", "model_dir", "{}/loop"),
]


@pytest.mark.slow
@pytest.mark.parametrize("program, flag, value", ABSURD, ids=lambda value: value[:30])
def test_absurd_flags_of_a_program_in_a_process_of_its_own(folder, tmp_path, program, flag, value):
    absurd_paths(tmp_path / "absurd")
    watched = contents(tmp_path / "absurd" / "folder", tmp_path / "absurd" / "watched")
    base = [word.format(here=folder, out=tmp_path / "out") for word in BASES[program][0].split()]
    command = ROOT / ("train.py" if program == "train" else f"tools/{program.replace('-', '_')}.py")
    words = [word for word in base if not word.startswith(f"--{flag}=")]
    words.append(f"--{flag}={value.format(tmp_path / 'absurd') if '{}' in value else value}")
    done = subprocess.run(
        [sys.executable, str(command), *words], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    now = contents(tmp_path / "absurd")
    changed = [path for path, text in watched.items() if now.get(path) != text]
    assert done.returncode == 1 and not problems_of(1, done.stderr, changed), done.stderr[-2000:]
