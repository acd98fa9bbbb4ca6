"""The frame of all programs: flags out of `txl_tf.config`, their values, and how a program ends."""

import ast
import concurrent.futures
import contextlib
import dataclasses
import errno
import importlib.util
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from helpers import INSTALLED, ROOT, mentions, raises_naming, run_here, run_program
from helpers import program as open_program

import txl_programs
from txl_programs import command_line, find_program, flag_values, printing, program, train
from txl_tf import config
from txl_tf.config import (
    Config,
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingConfig,
)

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"


@pytest.fixture
def verbosity(monkeypatch):
    """Sets the flag as one that was given on the command line, or as one that was not."""

    def give(present):
        monkeypatch.setattr(flags.FLAGS["verbosity"], "present", present)

    give(0)
    return give


def run(main, *arguments):
    program._run(main, ["tools/some.py", *arguments])


@pytest.mark.parametrize("error", [ValueError("n must be at least 1,\ngot 0"), FileNotFoundError("there is no file x")])
def test_an_error_is_one_line_and_under_verbosity_itself(verbosity, error):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        run(main)
    assert end.value.code == f"some.py: {error}\n(--verbosity=1 shows where)"
    verbosity(1)
    with pytest.raises(type(error)):
        run(main)


@pytest.mark.parametrize("name", ["score", "tag", "translate", "generate", "export_saved_model"])
def test_messages_of_the_library_are_no_answers(name, monkeypatch, capsys):
    """Of programs whose standard output is for answers."""

    def folder(*arguments):
        logging.getLogger("txl_tf").warning("to know")
        raise ValueError("enough")

    monkeypatch.setattr("txl_tf.runs.folder.RunFolder", folder)
    for tool in open_program(f"tools/{name}.py"):
        with pytest.raises(ValueError, match="enough"):
            run_here(tool, "--model_dir=run", *(["--output=out"] if name == "export_saved_model" else []))
    assert capsys.readouterr() == ("", "to know\n")


@pytest.mark.parametrize("given", [0, 1])
def test_ctrl_c_ends_it_with_130(verbosity, given):
    verbosity(given)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    with pytest.raises(SystemExit) as end, printing.ending():
        run(lambda: signal.raise_signal(signal.SIGINT))
    assert end.value.code == 130


@pytest.mark.parametrize("end, status", [(KeyboardInterrupt(), 130), (SystemExit(75), 75)])
def test_output_that_is_lost_does_not_change_the_status_of_an_error(monkeypatch, capsys, end, status):
    monkeypatch.setattr(printing, "_lost_output", ["No space left on device"])
    with pytest.raises(SystemExit) as ended, printing.ending():
        raise end
    assert ended.value.code == status and "No space left on device" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="No space left on device"), printing.ending():
        pass


@pytest.mark.parametrize("end, number, lost", [
    ("file", errno.EIO, True), ("terminal", errno.EIO, False), ("pipe", errno.EPIPE, False),
    ("terminal", errno.ENOSPC, True), (None, errno.EIO, True),
])  # fmt: skip
def test_output_is_lost_unless_its_reader_is_gone(monkeypatch, tmp_path, end, number, lost):
    lost_output = []
    monkeypatch.setattr(printing, "_lost_output", lost_output)
    if end == "file":
        other, output = None, open(tmp_path / "output", "w")
    elif end is None:
        other, output = None, io.StringIO()
    else:
        other, writer = os.openpty() if end == "terminal" else os.pipe()
        output = os.fdopen(writer, "w")
    if other is not None:
        os.close(other)  # the terminal, or the program behind the pipe, is gone
    with output:
        monkeypatch.setattr(sys, "stdout", output)
        printing.close_stdout(OSError(number, "why"))
    assert lost_output == ["why"] * lost


@pytest.mark.parametrize("where", ["read_flags", "program"])
def test_ctrl_c_in_an_import_ends_it_with_130(monkeypatch, tmp_path, where):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["some.py"])
    monkeypatch.setattr(program, "_parsed", [])
    monkeypatch.setattr(program, "parse", list)
    monkeypatch.setattr(program, "_import_tensorflow", interrupted)
    (tmp_path / "some.py").write_text("raise KeyboardInterrupt\n")
    spec = importlib.util.spec_from_file_location("some", tmp_path / "some.py")
    monkeypatch.setattr(txl_programs, "find_program", lambda command: spec)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit) as end:
        program.read_flags("__main__") if where == "read_flags" else txl_programs.main()
    assert end.value.code == 130


def test_what_the_encoding_of_the_output_lacks_is_written_as_an_escape(verbosity, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)
    with printing.ending():
        run(lambda: logging.getLogger("txl_tf").info("é 诗"))
    assert output.buffer.getvalue() == "é \\u8bd7\n".encode("latin-1")


def test_an_argument_that_the_locale_cannot_read_is_named(verbosity, monkeypatch):
    argument = os.fsdecode(b"--data_path=\xff")
    monkeypatch.setattr(sys, "argv", ["some.py", "--level=char", argument])
    with pytest.raises(SystemExit) as end:
        run(lambda: argument.encode())
    assert mentions(end.value.code, "some.py", "--data_path=\\xff", "utf-8", "PYTHONUTF8")


def test_the_notes_of_tensorflow_s_import_are_left_out_and_nothing_else(monkeypatch, capfd):
    notes = (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        "I0000 00:00:1795423401.055763   20069 port.cc:153] oneDNN custom operations are on.\n"
    )

    def import_module(name):
        os.write(2, f"{notes}E0000 an error\nsomething of {name}\n".encode())

    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(program.importlib, "import_module", import_module)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv(ONEDNN, "1")
    program._import_tensorflow()
    assert capfd.readouterr().err == "E0000 an error\nsomething of tensorflow\n"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # all of it
    program._import_tensorflow()
    assert capfd.readouterr().err == f"{notes}E0000 an error\nsomething of tensorflow\n"


@pytest.mark.parametrize("given, used", [(None, "1"), ("0", "0"), ("1", "1")])
def test_programs_compute_with_onednn_unless_the_environment_says_otherwise(monkeypatch, given, used):
    seen = []
    monkeypatch.delitem(sys.modules, "tensorflow")
    # TensorFlow reads the variable when it is imported.
    monkeypatch.setattr(program.importlib, "import_module", lambda name: seen.append(os.environ[ONEDNN]))
    monkeypatch.setenv(ONEDNN, given or "")  # so that the variable is as before after the test
    if given is None:
        monkeypatch.delenv(ONEDNN)
    program._import_tensorflow()
    assert seen == [used]


def test_a_hidden_package_is_as_one_that_is_not_installed_and_comes_back(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with program._hidden("colorsys", "json"):
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
        assert importlib.import_module("json") is json  # it was there before
    assert importlib.import_module("colorsys").rgb_to_hls


@pytest.mark.slow
def test_programs_import_neither_ipython_nor_matplotlib_nor_pandas_for_keras():
    names = ("IPython", "matplotlib", "pandas")
    code = ["import sys", "from txl_programs import program", "program._import_tensorflow()", "import keras"]
    code += [f"print([name for name in {names} if name in sys.modules])", *(f"import {name}" for name in names)]
    command = [sys.executable, "-c", "\n".join(code)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------- commands

OF_A_CLONE = [str(path.relative_to(ROOT)) for path in (ROOT / "train.py", *ROOT.glob("tools/*.py"))]
EXAMPLES = [str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*.py")]

# Runs a command. At its end, writes to the standard error, as JSON, the seconds of the processor and the slow packages
# that were imported, and also names in `sys.modules` that stand for a package without being one.
WATCHED = """
import atexit, json, runpy, sys, time
def report():
    slow = sorted({"keras", "numpy", "tensorflow", "txl_tf"} & {*sys.modules})
    absent = [name for name, module in sys.modules.items() if module is None]
    print(json.dumps([time.process_time(), slow + absent]), file=sys.stderr)
atexit.register(report)
command = sys.argv[0] = sys.argv.pop(1)
if command.startswith("txl-"):
    from txl_programs import main
    main()
else:
    sys.path.insert(0, command.rpartition("/")[0] or ".")
    runpy.run_path(command, run_name="__main__")
"""


def ask(command, *arguments):
    """The status of a command, its output and errors, its seconds, and what it imported that is slow."""
    line = [sys.executable, "-c", WATCHED, command, *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    *errors, report = done.stderr.splitlines()
    seconds, imported = json.loads(report)
    return done.returncode, done.stdout, "\n".join(errors), seconds, imported


def test_every_program_is_installed_and_has_its_file_in_a_clone():
    files = (ROOT / "txl_programs").rglob("*.py")
    modules = [path for path in files if '\nif __name__ == "__main__":\n' in path.read_text()]
    assert sorted(path.stem.replace("_", "-") for path in modules) == sorted(INSTALLED)
    for path in modules:
        command = f"txl-{path.stem.replace('_', '-')}"
        in_a_clone = "train.py" if command == "txl-train" else f"tools/{path.name}"
        assert in_a_clone in OF_A_CLONE
        assert find_program(f"/usr/bin/{command}").origin == find_program(in_a_clone).origin == str(path)


COMMANDS = {path: f"txl-{Path(path).stem.replace('_', '-')}" for path in OF_A_CLONE if find_program(path)}
SECONDS = 0.3  # of the processor; an idle machine needs half of it


def test_help_imports_neither_tensorflow_nor_keras_nor_numpy_nor_the_library():
    status, shown, errors, _, imported = ask("txl-score", "--help")
    assert (status, errors, imported) == (0, "", []) and "--model_dir" in shown


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values())
def test_help_of_every_program_takes_less_than_a_third_of_a_second(command):
    seconds = []
    while min(seconds, default=math.inf) > SECONDS and len(seconds) < 5:  # the machine may be busy
        status, _, errors, taken, imported = ask(command, "--help")
        assert (status, errors, imported) == (0, "", [])
        seconds.append(taken)
    assert min(seconds) <= SECONDS


@pytest.mark.slow
def test_help_shows_the_docstring_and_the_flags_and_a_wrong_flag_is_one_line():
    """A program is asked by the name that is installed, if it has one."""
    assert sorted(COMMANDS.values()) == sorted(f"txl-{name}" for name in INSTALLED)
    paths = [*OF_A_CLONE, *EXAMPLES]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        helped = pool.map(ask, [COMMANDS.get(path, path) for path in paths], ["--help"] * len(paths))
        refused = pool.map(ask, paths, ["--no_such_flag"] * len(paths))
    for path, (status, shown, errors, *_) in zip(paths, helped, strict=True):
        opening = ast.get_docstring(ast.parse(Path(getattr(find_program(path), "origin", ROOT / path)).read_text()))
        assert opening.splitlines()[0] in shown and re.search("^  -", shown, re.M), path
        assert not errors and status == 0, (path, errors)
    for path, (status, _, errors, _, imported) in zip(paths, refused, strict=True):
        assert status and "no_such_flag" in errors and "Traceback" not in errors, (path, errors)
        assert "tensorflow" not in imported, path


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("lr", "learning_rate"),
        ("epochs", "train_steps"),
        ("batch_size", "train_batch_size"),
        ("resume", "model_dir"),
        ("seq-len", "tgt_len"),
        ("learning_rat", "learning_rate"),
        ("dropuot", "dropout"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_is_meant(flag, meant):
    with pytest.raises(SystemExit) as end:
        command_line.parse(["train.py", f"--{flag}=1"])
    assert f"--{flag}" in end.value.code and f"--{meant}?" in end.value.code and "\n" not in end.value.code


def test_a_note_about_training_is_for_programs_that_train_and_for_the_flag_that_is_meant(own_flags):
    def answer(word):
        own_flags.unparse_flags()
        with pytest.raises(SystemExit) as end:
            command_line.parse(["some.py", word])
        return end.value.code

    flags.DEFINE_string("model_dir", "", "")
    flags.DEFINE_integer("n_epoch", 1, "")
    without_training = answer("--resume=x")
    assert "--model_dir?" in without_training
    assert "--n_epoch?" in answer("--n_epochs=2") and "steps" not in answer("--n_epochs=2")
    flags.DEFINE_integer("train_steps", 1, "")
    assert "--train_steps?" in answer("--epochs=2") and "steps, " in answer("--epochs=2")
    assert len(answer("--resume=x")) > len(without_training)


def test_all_flags_that_other_names_lead_to_are_flags_of_a_program():
    """Of train.py, whose flags this process has, or of another program, whose --help lists them."""
    known = set()
    for path in COMMANDS:
        text = Path(find_program(path).origin).read_text() + (ROOT / "txl_programs/flag_values.py").read_text()
        known |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', text))
    for group in vars(config).values():
        if isinstance(group, type) and issubclass(group, Config):
            known |= set(group.names())
    assert set(command_line._ALSO_CALLED) <= known


def test_a_wrong_value_is_one_line_in_plain_words(own_flags):
    flags.DEFINE_integer("n_layer", 1, "", lower_bound=1)
    flags.DEFINE_float("rate", 0.1, "")
    flags.DEFINE_bool("untie", False, "")
    flags.DEFINE_enum("kind", "a", ["a", "b"], "")
    flags.DEFINE_list("cutoffs", None, "")
    flag_values.check_integers("cutoffs")
    expected = {
        "--n_layer=x": "--n_layer must be an integer, got 'x'",
        "--n_layer=0": "--n_layer must be a positive integer, got 0",
        "--rate=x": "--rate must be a number, got 'x'",
        "--untie=x": "--untie must be True or False, got 'x'",
        "--kind=c": "--kind must be one of a, b, got 'c'",
        "--cutoffs=1,x": "--cutoffs must be integers, as 20000,40000, got ['1', 'x']",
    }
    for word, message in expected.items():
        own_flags.unparse_flags()
        with pytest.raises(SystemExit) as end:
            command_line.parse(["some.py", word])
        assert end.value.code == f"some.py: {message}"


# ------------------------------------------------------------------------------------------------- errors and output


def test_stray_arguments_are_refused_and_nothing_is_run(verbosity):
    called = []
    with pytest.raises(SystemExit) as end:
        run(lambda: called.append(1), "a", "b")
    assert mentions(end.value.code, "some.py", "a", "b") and not called
    run(lambda: called.append(1))
    assert called
    status, _, errors, *_ = ask("tools/score.py", "--model_dir=a", "b")
    assert status == 1 and mentions(errors, "score.py", "b")


def test_messages_of_the_library_go_to_the_standard_output(verbosity, capsys):
    run(lambda: logging.getLogger("txl_tf").info("step %d", 3))
    run(lambda: logging.getLogger("txl_tf").warning("damaged"))
    assert capsys.readouterr() == ("step 3\ndamaged\n", "")


@pytest.mark.parametrize("error", [ValueError("x" * 10**6 + " way out"), OSError("x" * 10**6 + " way out")])
def test_no_error_is_longer_than_500_characters(verbosity, error):
    error.add_note("y" * 999 + " way out")

    def fail():
        raise error

    with pytest.raises(SystemExit) as end, printing.ending():
        run(fail)
    assert len(end.value.code) <= 500 and "way out\n" in end.value.code


def test_no_line_of_a_message_is_longer_than_500_characters(verbosity, capsys):
    run(lambda: logging.getLogger("txl_tf").warning("%s\nsecond line", "x" * 10**6))
    first, second = capsys.readouterr().out.splitlines()
    assert len(first) == 500 and second == "second line"


def test_no_message_about_flags_is_longer_than_500_characters(own_flags):
    flags.DEFINE_integer("n_layer", 1, "")
    # A name of a million has absl look for similar ones in a gigabyte, which stays the worker's peak.
    for stray in (["x" * 10**6], [f"--{'x' * 10**4}=1"], [f"--n_layer={'1' * 10**6}x"]):
        with pytest.raises(SystemExit) as end, printing.ending():
            command_line.refuse_stray(command_line.parse(["some.py", *stray]))
        assert len(end.value.code) <= 500


def test_control_characters_of_messages_and_errors_are_made_visible(verbosity, capsys):
    evil = "a\x1b[2J\x07\u202e\tb\nc"

    def main():
        logging.getLogger("txl_tf").info("sample: %s", evil)
        raise ValueError(evil)

    with pytest.raises(SystemExit) as end:
        run(main)
    shown = "a\\x1b[2J\\x07\\u202e\tb\nc"
    assert end.value.code.startswith(f"some.py: {shown}\n")
    assert capsys.readouterr().out == f"sample: {shown}\n"


@pytest.mark.parametrize("word, part", [
    ("a\nb=c", "a\nb=c"),  # a file
    ("a\nb=c", "a\nb"),
    ("--input=a\nb", "a\nb"),
    ("--input=a\nb=c\nd", "a\nb=c\nd"),
])  # fmt: skip
def test_newlines_of_the_command_line_are_escapes_in_a_message(monkeypatch, word, part):
    monkeypatch.setattr(sys, "argv", ["some.py", word])
    assert printing.on_one_line(f"found {part}:\n- x") == "found " + part.replace("\n", "\\n") + ":\n- x"


def test_a_newline_as_the_value_of_a_flag_leaves_those_of_a_message(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["some.py", "--stop=\n"])
    assert printing.on_one_line("two problems:\n- a\n- b") == "two problems:\n- a\n- b"


# ----------------------------------------------------------------------------------------------------------- flags


@pytest.fixture
def own_flags():
    """`flags.FLAGS` without what programs have defined."""
    before = dict(vars(flags.FLAGS))
    vars(flags.FLAGS).update(vars(flags.FlagValues()))
    yield flags.FLAGS
    vars(flags.FLAGS).update(before)


def test_values_are_those_of_the_flags_named_or_of_those_given(own_flags):
    flags.DEFINE_integer("mem_len", 3, "")
    flags.DEFINE_list("cutoffs", None, "")
    flags.DEFINE_bool("greedy", False, "")
    own_flags(["some.py", "--nogreedy"])
    assert flag_values.values(("mem_len", "cutoffs", "greedy")) == {"mem_len": 3, "cutoffs": None, "greedy": False}
    assert flag_values.values(("mem_len", "greedy"), given_only=True) == {"greedy": False}


def test_the_hyper_parameters_of_a_class_become_flags_and_values(own_flags):
    flags.DEFINE_string("clip", "mine", "a flag that is there")
    flag_values.define_flags(OptimizerConfig, leave_out=("ema", "warmup_steps"), learning_rate=0.5)
    own_flags(["some.py", "--optimizer=lamb", "--weight_decay=1e-2"])
    assert flag_values.values(OptimizerConfig) == {
        "learning_rate": 0.5,
        "clip": "mine",
        "clip_value": None,
        "schedule": "cosine",
        "beta_2": 0.999,
        "momentum": 0.9,
        "min_lr_ratio": 0.004,
        "optimizer": "lamb",
        "weight_decay": 0.01,
    }
    assert flag_values.values(OptimizerConfig, given_only=True) == {"optimizer": "lamb", "weight_decay": 0.01}
    own_flags.unparse_flags()
    with pytest.raises(flags.IllegalFlagValueError, match="adagrad.*adam.*adamw.*lamb.*sgd"):
        own_flags(["some.py", "--optimizer=adagrad"])


def test_lists_of_numbers_come_as_such(own_flags):
    flag_values.define_flags(TextConfig)
    own_flags(["some.py", "--cutoffs=20000,40000", "--data_path=1,2"])
    given = flag_values.values(TextConfig, given_only=True)
    assert given == {"cutoffs": [20000, 40000], "data_path": ["1", "2"]}
    own_flags.unparse_flags()
    with raises_naming(flags.IllegalFlagValueError, "cutoffs", "20000,40000"):
        own_flags(["some.py", "--cutoffs=20000,x"])


# In the order in which train.py defines them: of two with one name, as tgt_len, the first counts.
GROUPS = [TextConfig, TrainingConfig, EvaluationConfig, OptimizerConfig, ModelConfig, MachineConfig]
WITHOUT_FLAG = {"num_shuffle", "n_token", "reset_token"}  # lm1b is prepared by tools/prepare_data.py; the text's


def hyper_parameters():
    fields = {}
    for group in GROUPS:
        for field in dataclasses.fields(group):
            if field.name not in WITHOUT_FLAG and (group, field.name) != (TextConfig, "seed"):
                fields.setdefault(field.name, field)
    return fields


def test_every_hyper_parameter_is_a_flag_of_train_with_its_help_default_and_choices():
    assert len(hyper_parameters()) > 50
    for name, field in hyper_parameters().items():
        flag, help_text = train.FLAGS[name], field.metadata["help"]
        choices = getattr(field.metadata["check"], "choices", None)
        if name == "positions":  # other tests register schemes of their own, before or after the flags are defined
            assert {"relative", "sinusoids", "learned", "alibi", "rotary"} <= {*choices} & {*flag.parser.enum_values}
            assert flag.help.endswith(f": {help_text}")
            continue
        assert getattr(flag.parser, "enum_values", None) == (list(choices) if choices else None), name
        assert flag.help == (f"<{'|'.join(choices)}>: {help_text}" if choices else help_text), name
        assert help_text.endswith((".", "...")), name
        assert flag.default == field.metadata["flag"], name
        kind = {"int": int, "float": float, "bool": bool}.get(field.type.split(" ")[0], str)
        assert flag.default is None or isinstance(flag.default, kind), name


def test_help_of_train_lists_every_hyper_parameter():
    """As its own flags, which alone --help shows."""
    shown = run_program("train.py", "--help").stdout
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+):", shown, re.MULTILINE))
    assert listed >= {*hyper_parameters(), "model_dir", "data_dir", "do_train"}
    assert not listed & WITHOUT_FLAG
    for name, field in hyper_parameters().items():
        assert " ".join(field.metadata["help"].split()) in " ".join(shown.split()), name


@pytest.mark.parametrize("flag", ["output", "input", "ckpt_path"])
def test_a_flag_that_names_a_file_by_nothing_ends_the_program(flag):
    """As `--output=$OUTPUT` does where the shell has no such variable."""
    with contextlib.closing(open_program("txl-score")) as loaded:
        next(loaded)
        flags.FLAGS(["txl-score", "--model_dir=run", f"--{flag}="])
        with pytest.raises(SystemExit) as end:
            command_line.refuse_empty()
        assert mentions(end.value.code, f"--{flag}")
        flags.FLAGS(["txl-score", "--model_dir=run", f"--{flag}=a"])
        command_line.refuse_empty()


@pytest.mark.parametrize("words", [["--flagfile="], ["-flagfile= "], ["--flagfile", ""], ["--flagfile=", "b.cfg"]])
def test_an_empty_name_of_a_flag_file_ends_the_program(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for line in (words, ["--flagfile=a.cfg"]):
        (tmp_path / "a.cfg").write_text(f"{words[0]}\n")
        with pytest.raises(SystemExit) as end:
            command_line.parse(["train.py", *line])
        assert mentions(end.value.code, "--flagfile") and "\n" not in end.value.code


@pytest.mark.parametrize("data", [b"--tgt_len=5\n--model_dir=caf\xe9\n", b"\xff\xfe-\0-\0", b"\x80\x81"])
def test_a_flag_file_in_another_encoding_is_one_line(tmp_path, monkeypatch, data):
    path = tmp_path / "some.cfg"
    path.write_bytes(data)
    for words in ([f"--flagfile={path}"], ["-flagfile", str(path)]):
        with pytest.raises(SystemExit) as end:
            command_line.parse(["train.py", *words])
        assert str(path) in end.value.code and "\n" not in end.value.code


def test_a_value_of_a_negated_switch_is_one_line():
    with pytest.raises(SystemExit) as end:
        command_line.parse(["train.py", "--nountie_r=true"])
    assert "--nountie_r=true" in end.value.code and "\n" not in end.value.code


@pytest.mark.parametrize("nested", [False, True])
def test_a_pipe_as_a_flag_file_is_one_line(tmp_path, nested):
    pipe, path = tmp_path / "pipe", tmp_path / "some.cfg"
    os.mkfifo(pipe)
    path.write_text(f"--tgt_len=5\n  --flagfile={pipe}\n--flagfile={path}\n")
    for words in ([f"--flagfile={path if nested else pipe}"], ["-flagfile", str(path if nested else pipe)]):
        with pytest.raises(SystemExit) as end:
            command_line.parse(["train.py", *words])
        assert str(pipe) in end.value.code and "\n" not in end.value.code


def test_a_flag_file_in_another_encoding_is_named_where_another_names_it(tmp_path):
    (tmp_path / "b.cfg").write_bytes(b"--model_dir=caf\xe9\n")
    (tmp_path / "a.cfg").write_text(f"--flagfile={tmp_path}/b.cfg\n")
    with pytest.raises(SystemExit) as end:
        command_line.parse(["train.py", f"--flagfile={tmp_path}/a.cfg"])
    assert f"{tmp_path}/b.cfg" in end.value.code and "a.cfg" not in end.value.code and "\n" not in end.value.code


def test_flags_of_a_pipe_of_the_shell_are_read(own_flags):
    """As of `--flagfile=<(command)`."""
    flags.DEFINE_integer("n_layer", 1, "")
    reader, writer = os.pipe()
    os.write(writer, b"--n_layer=3\n")
    os.close(writer)
    command_line.parse(["some.py", f"--flagfile=/dev/fd/{reader}"])
    os.close(reader)
    assert flags.FLAGS.n_layer == 3


def test_flags_of_files_and_of_the_run_are_not_newly_given(tmp_path, monkeypatch):
    (tmp_path / "all.cfg").write_text("--init_std=0.5\n--init_range=0.25\n")
    command = [
        "train.py",
        "--model_dir=x",
        f"--flagfile={tmp_path / 'all.cfg'}",
        "--init_range=0.3",
        "--proj_init_std=0.125",
    ]
    names = ["init", "init_std", "init_range", "proj_init_std"]
    for argv, recorded, expected in (
        (command, {}, ["init_range", "proj_init_std"]),
        (command, {"proj_init_std": 0.125}, ["init_range"]),
        (["train.py", "--model_dir=x", "--init_std=0.5", "--init=normal"], {}, ["init_std"]),  # normal is the default
        (["train.py", "--model_dir=x", "--init_std=0.5"], {"init_std": 0.5}, []),
    ):
        for opened in open_program("train.py"):
            monkeypatch.setattr(sys, "argv", argv)
            opened.FLAGS(argv)
            assert opened.newly_given(names, recorded) == expected
