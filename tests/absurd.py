"""Runs one program with absurd values of its flags, each in a fork of this process, and prints what became of it.

    python tests/absurd.py PROGRAM FOLDER [NUMBER]

FOLDER is what `make_folder` makes. NUMBER is how many values each flag gets; 0 is all. A fork has all packages
imported, no graphs, and trains no step: a case takes a fraction of a second. A line of output is a JSON list: the flag,
its value, seconds, status, the standard error, and the files that changed though they should not have.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path

SECONDS = 45  # of a case, on a busy machine
BYTES = 4 << 30  # that a case may take
LONG = "x" * 100_000
INTEGERS = ["nan", "inf", "-1", "0", "1e30", "1000000000000", "-1" + "0" * 30, "", LONG, "é", "true", "1.5"]
NUMBERS = ["nan", "inf", "-inf", "-1", "0", "1e30", "1e-300", "1e999", "", LONG, "é", "true"]
WORDS = ["", LONG, "\x1b[31m\u202eé", "nan", "-1", "true", ",", "a,,b", "\udcff", "a\nb", "*", "://", "gs://a/b", "0"]
# Names in the folder that `absurd_paths` fills; "{}" stands for that folder.
PATHS = ["folder", "pipe", "loop", "none", "dangling", "link", "folder_link", "garbage", "empty", "none/none", "pipe/a",
         "socket", "bracket[1]", "folder/keep.txt/none"]  # fmt: skip
VALUES = {"int": INTEGERS, "float": NUMBERS, "bool": ["", "2", "nan", LONG, "é", "maybe"]}
OF_TEXT = [*WORDS, *(f"{{}}/{name}" for name in PATHS)]

STATUSES = (0, 1, 2, 75)  # 75: to start the program again helps
OPENING = re.compile(r"FATAL Flags parsing error: |txl-[\w-]+: |\w+\.py: ")  # of the line
# What stands beside the line: what TensorFlow writes at its start, and the way to more.
BESIDES = re.compile(r"WARNING: All log|[WIEF]\d{4} |To enable the following|\(--verbosity=|Pass --help")

LM = "--n_layer=1 --d_model=8 --d_embed=8 --n_head=2 --d_head=4 --d_inner=8 --tgt_len=4 --mem_len=4"
PAIRS = "--num_layers=1 --d_model=8 --num_heads=2 --dff=8 --max_len=24 --batch_size=4"
STEPS = "--train_steps=2 --iterations=1 --save_steps=1 --model_dir={out}/run"
# Of every program the flags to which an absurd one is added, in one way or several; a switch of flags that exclude it.
BASES = {
    "train": [
        f"--data_path={{here}}/text.txt {LM} {STEPS} --train_batch_size=2 --eval_batch_size=2 --do_eval",
        f"--data_dir={{here}}/data {LM} {STEPS} --train_batch_size=2 --eval_batch_size=2 --model=transformer",
        "--model_dir={here}/trained --do_train=False --do_eval --data_path={here}/text.txt",
    ],
    "train-ner": [
        f"--dataset=towns --n_sentences=20 --d_model=8 --n_layer=1 --n_head=2 --d_inner=8 {STEPS}",
        f"--train_path={{here}}/tagged.txt --valid_path={{here}}/tagged.txt --model=flat --lexicon={{here}}/words.txt "
        f"--n_layer=1 --n_head=2 --d_model=8 {STEPS}",
    ],
    "train-seq2seq": [
        f"--dataset=dates --n_pairs=20 {PAIRS} {STEPS} --eval_sources=2",
        f"--train_path={{here}}/pairs.tsv --valid_path={{here}}/pairs.tsv {PAIRS} {STEPS} --eval_sources=2",
    ],
    "prepare-data": [
        "--dataset=text --data_path={here}/text.txt --data_dir={out}/data",
        "--data_dir={here}/data --verify",
    ],
    "generate": [
        "--model_dir={here}/lm --prompt=w1 --max_new_tokens=1",
        "--model_dir={here}/lm --input={here}/lines.txt --output={out}/found --max_new_tokens=1",
    ],
    "score": ["--model_dir={here}/lm --input={here}/lines.txt --output={out}/found"],
    "embed": [
        "--model_dir={here}/lm --input={here}/lines.txt --output={out}/found",
        "--model_dir={here}/lm --input={here}/lines.txt --output={out}/found.npy",
    ],
    "translate": [
        "--model_dir={here}/pairs --input={here}/abc.txt --output={out}/found --max_new_tokens=2",
        "--model_dir={here}/pairs --pairs={here}/abc.tsv --output={out}/found --max_new_tokens=2 --beam_size=2",
    ],
    "tag": [
        "--model_dir={here}/flat --input={here}/abc.txt --output={out}/found",
        "--model_dir={here}/flat --tagged={here}/abc.bio --output={out}/found",
    ],
    "estimate": [f"--n_token=50 {LM} --train_batch_size=2"],
    "serve": ["--model_dir={here}/lm --port=0", "--model_dir={here}/flat --port=0"],
    "plot": [
        "--kind=curves --model_dir={here}/trained --output={out}/a.png",
        "--kind=attention --model_dir={here}/lm --text=w1_w2_w3 --output={out}/a.png",
        "--kind=memory --model_dir={here}/lm --text_path={here}/lines.txt --output={out}/a.png --max_tokens=50 "
        "--tgt_len=4",
        "--kind=context --model_dir={here}/lm --text_path={here}/lines.txt --output={out}/a.png --max_tokens=50 "
        "--max_context=8 --context_step=4",
        "--kind=positions --positions=3 --d_model=4 --output={out}/a.png",
        "--kind=masks --output={out}/a.png",
        "--kind=scaling --figures={here}/none.json --output={out}/a.png",
    ],
    "plot-ner": [
        "--kind=direction --model_dir={here}/tener --text_path={here}/abc.txt --output={out}/a.png",
        "--kind=lattice --model_dir={here}/flat --text=abca --output={out}/a.png",
    ],
    "average-checkpoints": [
        "--model_dir={here}/lm --num_last_checkpoints=1 --output_dir={out}/average",
        "--model_dir={here}/lm --checkpoints=ckpt-1 --output_dir={out}/average",
    ],
    "convert-checkpoint": [
        "--tf1_checkpoint={here}/tf1 --corpus={here}/tf1 --mem_len=4 --model_dir={out}/run",
        "--to_tf1 --model_dir={here}/lm --tf1_checkpoint={out}/tf1",
        "--pytorch_checkpoint={here}/absurd/garbage --mem_len=4 --model_dir={out}/run",
    ],
    "export-saved-model": [
        "--model_dir={here}/lm --output={out}/served --nowarmup",
        "--model_dir={here}/pairs --output={out}/served --nowarmup --beam_size=2",
    ],
    "demo": ["--model_dir={here}/lm --port=0"],
}  # fmt: skip


def make_folder(folder):
    """Writes what the bases name: texts and small runs."""
    from helpers import TEXT, make_run, train_run, word_vocab
    from small_runs import make_encoder_decoder, make_flat, make_tagger

    import txl_tf
    from txl_tf.convert.original import run_to_tf1

    texts = {
        "text.txt": TEXT[:900], "lines.txt": "w1 w2 w3\nw4\n" * 9, "abc.txt": "ab\nc\n", "abc.tsv": "ab\tc\nc\tab\n",
        "pairs.tsv": "ab\tba\nac\tca\nbc\tcb\nabc\tcba\n" * 4, "abc.bio": "a B-PER\nb I-PER\n\nc O\n",
        "tagged.txt": "我 O\n在 O\n南 B-LOC\n京 I-LOC\n\n" * 6, "words.txt": "南京\n我在\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    make_run(folder / "lm", word_vocab(), n_layer=1)
    make_encoder_decoder(folder / "pairs")
    make_tagger(folder / "tener")
    make_flat(folder / "flat")
    train_run(folder / "trained", str(folder / "text.txt"), data={"valid_fraction": 0.2})
    run_to_tf1(str(folder / "lm"), str(folder / "tf1"))
    txl_tf.prepare(
        data_dir=str(folder / "data"), dataset="text", data_path=str(folder / "text.txt"), valid_fraction=0.2
    )


def absurd_paths(folder):
    """What must not be used as a file, and `folder` and `watched`, which must not change."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("folder", "watched"):
        (folder / name / "sub").mkdir(parents=True)
        for inside in ("keep.txt", "sub/keep.txt", "1", "ckpt-1.index"):
            (folder / name / inside).write_text(f"keep {inside}")
    os.mkfifo(folder / "pipe")
    links = {"loop": "loop", "dangling": "none", "link": "watched/keep.txt", "folder_link": "watched"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (folder / "garbage").write_bytes(bytes(range(256)) * 9)
    (folder / "empty").write_bytes(b"")
    os.mknod(folder / "socket", 0o140600)


def contents(*folders):
    """`{file: checksum}` of all plain files."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                found[str(path)] = hashlib.md5(path.read_bytes()).hexdigest()
    return found


def flags_of(program):
    """`{flag: kind}` of the flags that --help of a program shows: int, float, bool, or another."""
    from absl import flags
    from helpers import program as opened

    with contextlib.closing(opened(f"txl-{program}")) as loaded:
        module = next(loaded)
        own = flags.FLAGS.get_key_flags_for_module(module.__name__) or flags.FLAGS.get_key_flags_for_module(module)
        own = own or [flags.FLAGS[name] for name in flags.FLAGS]
        from_absl = {"verbosity", "help", "helpfull", "helpshort", "helpxml"}
        return {flag.name: flag.flag_type() for flag in own if flag.name not in from_absl}


def cases(program, number):
    """`(flag, value, base)` of a program: so many values of each flag, chosen by its name; all if `number` is 0."""
    bases = BASES[program]
    for flag, kind in sorted(flags_of(program).items()):
        values = VALUES.get(kind, OF_TEXT)  # of a choice, a list or a text
        start = zlib.crc32(f"{program} {flag}".encode())
        step = max(len(values) // number, 1) if number else 1
        chosen = [(start + i * step) % len(values) for i in range(number or len(values))]
        for i, place in enumerate(chosen):
            for base in bases if not number else [bases[(start + i) % len(bases)]]:
                yield flag, values[place], base


def import_all(programs):
    """Imports what these programs import, so that their forks need not."""
    for program in programs:
        flags_of(program)
    import txl_tf.convert.pytorch
    import txl_tf.runs.evaluate
    import txl_tf.runs.train  # noqa: F401


def stub(training=False):
    """Makes long work short: no steps of a training unless they are wanted, no graphs to serve, no visitors."""
    import tensorflow as tf

    from txl_tf.runs.train import Run

    def save(resources, folder, signatures):
        tf.io.gfile.makedirs(folder)
        Path(folder, "saved_model.pb").write_text("model")

    if not training:
        Run.fit = lambda run, state: None
    tf.saved_model.save = save
    tf.config.run_functions_eagerly(True)
    warnings.filterwarnings("ignore", "Even though the")  # that this is not for `tf.data`
    with contextlib.suppress(ImportError):
        from txl_programs.web.connections import Server

        Server.run = lambda *_, **__: None


def run(program, arguments):
    """Ends this process as the program would, with an error other than a wrong value as a status of 70."""
    import txl_programs

    sys.argv = [f"txl-{program}", *arguments]
    try:
        txl_programs.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int | None) else 1
        return status or 0
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def attempt(program, arguments, scratch):
    """`(seconds, status, standard error)` of a fork; the status is "late" where it was killed."""
    output = scratch / "stderr"
    child = os.fork()
    if not child:
        status = 71
        try:
            os.setsid()
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, -1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for number, path in ((0, "/dev/null"), (1, scratch / "stdout"), (2, output)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdin = open(0, closefd=False)
            sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)
            sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True)
            status = run(program, arguments)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    start, ended, code = time.monotonic(), 0, 0
    while not ended and time.monotonic() - start < SECONDS:
        ended, code = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    status = os.waitstatus_to_exitcode(code) if ended else "late"
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return time.monotonic() - start, status, output.read_text(errors="replace")


def lines_of(errors):
    """The lines of an error, without what TensorFlow writes at its start."""
    return [line for line in errors.splitlines() if line.strip() and not BESIDES.match(line)]


def problems_of(status, errors, changed=(), seconds=0.0):
    """What is wrong with the end of a program."""
    found = [f"changed or lost: {', '.join(changed)}"] if changed else []
    if status not in STATUSES:
        found.append(f"status {status}")
    lines = lines_of(errors)
    places = [i for i, line in enumerate(lines) if OPENING.match(line)]
    message = lines[places[-1] :] if places else lines  # what comes before is information, such as a warning
    if status == 1 and (len(places) != 1 or len(message) > 3):
        found.append(f"{len(places)} errors, of {len(message)} lines")
    if status == 1 and sum(map(len, message)) > 500:
        found.append(f"{sum(map(len, message))} characters")
    if "Traceback" in errors:
        found.append("a traceback")
    if seconds > SECONDS:
        found.append(f"{seconds:.0f} s")
    return found


def main(program, folder, number="3"):
    here, scratch = Path(folder), Path(folder) / "of" / program
    scratch.mkdir(parents=True, exist_ok=True)
    os.environ |= {"RAY_ADDRESS": "127.0.0.1:1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    os.environ["TMPDIR"] = str(scratch)
    chosen = list(cases(program, int(number)))
    import_all([program])
    stub()
    runs = [path for path in here.iterdir() if path.is_dir() and path.name != "of"]
    before = contents(*runs)
    os.chdir(scratch)
    for flag, value, base in chosen:
        absurd, out = scratch / "absurd", scratch / "out"
        absurd_paths(absurd)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        watched = contents(absurd / "folder", absurd / "watched")
        value = value.format(absurd) if value.startswith("{}") else value
        words = [word.replace("_w", " w").format(here=here, out=out) for word in base.split()]
        words = [word for word in words if word.split("=")[0] not in (f"--{flag}", f"--no{flag}")]
        seconds, status, errors = attempt(program, [*words, f"--{flag}={value}"], scratch)
        now = contents(*runs, absurd / "folder", absurd / "watched")
        changed = [path for path, text in {**before, **watched}.items() if now.get(path) != text]
        shown = value if len(value) < 200 else f"{value[:20]}... ({len(value)})"
        print(json.dumps([base, flag, shown, seconds, status, errors[:20_000], len(errors), changed]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
