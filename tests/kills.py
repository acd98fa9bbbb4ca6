"""Kills a training again and again, and checks that what comes out is what it would have been without.

    python tests/kills.py --kills=20 --setting=one|mirrored|workers|iterator [--steps=200] [--seed=0]
    python tests/kills.py --kills=20 --setting=pairs|pairs_workers|flat|flat_workers [--steps=200] [--seed=0]
    python tests/kills.py --setting=elastic|pairs_elastic|flat_elastic [--steps=30] [--seed=0]

`train.py`, or for pairs `tools/train_seq2seq.py` and for flat `tools/train_ner.py`, trains a small model once in peace,
and once with `kill -9` at random moments, started again each time. At the end all variables of the last checkpoint
(optimizer and memory included), every row and column of `log.csv` but the speed, the best checkpoint and the final
evaluation must be bit for bit the same. A kill comes some steps after the start, at a random moment ("any") or at a
chosen one: amid the writing of a checkpoint, in a validation, between a row of the log and its checkpoint. Of two
workers either both are killed, or one, and the other must end by itself.

With iterator, every start gives the texts anew to `txl_tf.prepare`, and the run reads them as documents in a new order
every epoch.

With elastic, one of four workers is killed for good, and the others must end by themselves. Five are refused, for the
batch of 12 does not divide among them; batches of pairs and of sentences are filled up. Three go on to the end. It must
all be as one process leaves it that nothing happened to, but for the order in which sums over replicas are added:
weights and optimizer to 1e-6, memory, log.csv and the best validation to 1e-5, as between numbers of replicas in
distribution_test.py.
"""

import argparse
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tensorflow as tf
from helpers import LEXICON, ROOT, TEXT, free_ports, log_rows, made_up, read_checkpoint, untimed_rows

import txl_tf
from txl_tf.runs.setup import WorkerGone

CHIEF_MOMENTS = ["any", "step", "write", "written", "rename", "renamed", "row", "best", "validation"]
WORKER_MOMENTS = ["any", "step", "validation"]  # it writes nothing
MODEL = (
    "--n_layer=2 --d_model=16 --d_embed=16 --n_head=2 --d_head=8 --d_inner=16 --dropout=0.1 --dropatt=0.1 --mem_len=8 "
    "--tgt_len=8 --train_batch_size=4 --eval_batch_size=2 --max_eval_batch=5 --learning_rate=1e-2 --warmup_steps=2 "
    "--iterations=7 --save_steps=5 --max_to_keep=2 --sample_tokens=0"
)
PAIRS_MODEL = (
    "--dataset=dates --n_pairs=200 --num_layers=1 --d_model=16 --num_heads=2 --dff=16 --max_len=64 --rate=0.1 "
    "--batch_size=8 --eval_sources=20 --learning_rate=1e-2 --warmup_steps=2 --iterations=7 --save_steps=5 "
    "--max_to_keep=2"
)
FLAT_MODEL = (
    "--model=flat --d_model=16 --n_head=2 --d_inner=16 --dropout=0.1 --embed_dropout=0.1 --token_dropout=0.05 "
    "--output_dropout=0.1 --batch_size=8 --learning_rate=1e-2 --warmup_steps=2 --iterations=7 --save_steps=5 "
    "--max_to_keep=2"
)
STRATEGY = {
    "pairs": "--strategy=one",
    "flat": "--strategy=one",
    "iterator": "--strategy=one --shuffle_documents",
    "one": "--strategy=one",
    "mirrored": "--strategy=mirrored --logical_cpus=2",
    "workers": "--strategy=multi_worker",
    "pairs_workers": "--strategy=multi_worker --batch_tokens=300 --ema=0.5",  # batches of any rows
    "flat_workers": "--strategy=multi_worker --patience=1000",
    # On the workers that TF_CONFIG names, or on one device. Adam would turn rounding errors into steps of full length.
    "elastic": "--train_batch_size=12 --eval_batch_size=12",
    "pairs_elastic": "--batch_tokens=300 --ema=0.5 --optimizer=sgd --learning_rate=0.1",
    "flat_elastic": (
        "--clip=1.0 --optimizer=sgd --momentum=0.5 --learning_rate=0.02 --iterations=6 --steps_per_execution=2"
    ),
}


def workers_of(setting):
    """Number of processes that train together."""
    return 2 if setting.endswith("workers") else 1


def train(program, offset, moment, delay, argv):
    """Runs a program in this process, which kills itself at a moment `offset` steps or more after the start."""
    os.chdir(ROOT)
    sys.argv = [program, *argv]

    program = importlib.import_module(program)
    from txl_programs.program import run
    from txl_tf.runs import callbacks, checkpoints, weights

    start = step = None

    def die():
        os.write(1, f"killed at step {step}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after(owner, name, times=1):
        """Dies when the function has been called so many times since the kill was due."""
        function, calls = getattr(owner, name), 0

        def wrapper(*args, **kwargs):
            nonlocal calls
            result = function(*args, **kwargs)
            calls += start is not None and step - start >= offset
            if calls == times:
                die()
            return result

        setattr(owner, name, wrapper)

    count = callbacks.RunState.on_train_batch_end

    def counting(self, batch, logs=None):
        nonlocal start, step
        step = checkpoints.step_of(self.model)
        start = step if start is None else start
        if step - start == offset and moment == "any":
            threading.Timer(delay, die).start()
        if step - start == offset and moment == "told":
            signal.raise_signal(signal.SIGTERM)
        if step - start >= offset and moment == "step":
            die()
        count(self, batch, logs)

    callbacks.RunState.on_train_batch_end = counting
    if moment in ("rename", "renamed"):
        die_after(tf.io.gfile, "rename", times=1 if moment == "rename" else 2)
    elif moment == "write":
        die_after(weights, "remove")
    elif moment == "written":
        die_after(tf.raw_ops, "SaveV2")
    elif moment == "row":
        die_after(callbacks.StepCSVLogger, "on_epoch_end")
    elif moment == "best":
        die_after(checkpoints.RunCheckpoints, "save_best")
    elif moment == "validation":
        die_after(callbacks.StopOnSignal, "on_test_batch_end", times=2)
    folders = [argument.split("=")[1] for argument in argv if argument.startswith("--data_dir=")]
    for folder in folders:
        txl_tf.prepare((f"{i}: {line}" for i, line in enumerate(TEXT.splitlines())), folder)
    run(program.main)


class Session:
    """One start of the program.

    Args:
        folder: of the run.
        kill: `(worker, offset, moment, delay)` or `None`. At the moment "told", it is a SIGTERM instead.
        workers: number of processes that train together.
    """

    def __init__(self, args, text, folder, kill=None, workers=1):
        files = " ".join(f"--{name}={text.parent / name}" for name in ("train_path", "valid_path", "lexicon"))
        programs = {
            "pairs": ("txl_programs.train_seq2seq", PAIRS_MODEL),
            "flat": ("txl_programs.train_ner", f"{FLAT_MODEL} {files}"),
        }
        data = f"--data_dir={folder}.data" if args.setting == "iterator" else f"--data_path={text}"
        program, model = programs.get(args.setting.split("_")[0], ("txl_programs.train", f"{MODEL} {data}"))
        flags = f"{model} {STRATEGY[args.setting]} --train_steps={args.steps} --model_dir={folder}"
        self.folder = folder
        self.processes = []
        cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(workers)]}
        for index in range(workers):
            trap = kill[1:] if kill and kill[0] == index else (0, "never", 0)
            environment = dict(os.environ)
            if workers > 1:
                environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            command = [sys.executable, __file__, f"--trap={json.dumps([program, *trap])}", "--", *flags.split()]
            output = open(f"{folder}.{index}.out", "w+")
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            self.processes.append((process, output))

    def wait(self, kill_all=False, timeout=300):
        """Exit codes and outputs of all processes.

        Args:
            kill_all: kill the others, too, as soon as one is gone.
        """
        codes = {}
        deadline = time.monotonic() + timeout
        while len(codes) < len(self.processes):
            time.sleep(0.05)
            codes = {i: p.poll() for i, (p, _) in enumerate(self.processes) if p.poll() is not None}
            if (codes and kill_all) or time.monotonic() > deadline:
                for process, _ in self.processes:
                    process.kill()
                    process.wait()
        results = []
        for process, output in self.processes:
            output.seek(0)
            results.append((process.returncode, output.read()))
            output.close()
        return results


def final_state(folder, steps):
    """Everything that must be the same: `{name: comparable value}`."""
    arrays = read_checkpoint(folder / f"ckpt-{steps}")
    state = {f"ckpt-{steps}: {key}": array.tobytes() for key, array in arrays.items()}
    state |= {f"log.csv row {i}": row for i, row in enumerate(untimed_rows(folder))}
    state["best"] = (folder / "best" / "best.json").read_text()
    return state


def last_evaluation(output):
    """The lines after the training, without the speed of the evaluation and the folder."""
    lines = re.split(r"\n.*tensorboard", output.split("\nvalid", 1)[1])[0].splitlines()
    return [line.rsplit("|", 1)[0] if "tokens/s" in line else line for line in lines]


def message_of(output):
    """The error that the program ended with."""
    return output.strip().splitlines()[-2 if "verbosity" in output else -1]


def lost_another(result):
    """Whether a program ended as it should that lost another worker."""
    code, output = result
    return code == WorkerGone.status and "Traceback" not in output


def random_kill(rng, setting, steps, kills):
    """`((worker, offset, moment, delay in seconds), whether all workers are killed)`."""
    worker = rng.randrange(workers_of(setting))
    moment = rng.choice(WORKER_MOMENTS if worker else CHIEF_MOMENTS)
    offset = rng.randint(1, max(2, int(1.2 * steps / kills)))
    return (worker, offset, moment, rng.uniform(0, 0.1)), rng.random() < 0.5


def train_with_kills(args, text, folder):
    """Starts the run and kills it, as often as said, then lets it end. Prints a line for each session.

    Returns:
        exit codes and outputs of the last session, the number of kills (fewer than said where the run was over before
        one was due), and whether every session ended as it should.
    """
    rng = random.Random(args.seed)
    workers = workers_of(args.setting)
    fine, kills, over = True, 0, False
    print("kill  worker  moment      at step  resumed from   the others", flush=True)
    while True:
        more = kills < args.kills and not over
        kill, kill_all = random_kill(rng, args.setting, args.steps, args.kills) if more else (None, False)
        results = Session(args, text, folder, kill, workers).wait(kill_all)
        output = results[0][1]
        resumed = re.search(r"/ckpt-(\d+)\n", output)
        resumed = resumed[1] if resumed else "the start"
        if kill is None or all(code == 0 for code, _ in results):  # it was over before the kill was due
            if kill is None:
                fine &= all(code == 0 for code, _ in results)
                print(f"{'end':>4}  {'':6}  {'':10}  {args.steps:>7}  {resumed:12}", flush=True)
                return results, kills, fine
            over = True
            continue
        kills += 1
        worker, _, moment, _ = kill
        code, text_of_killed = results[worker]
        at = re.search(r"killed at step (\d+)", text_of_killed)
        others = ""
        fine &= code == -signal.SIGKILL and at is not None
        if len(results) > 1:
            others = "killed too" if kill_all else message_of(results[1 - worker][1])[:110]
            fine &= kill_all or lost_another(results[1 - worker])
        at = at[1] if at else f"exit code {code}"
        print(f"{kills:>4}  {worker:>6}  {moment:10}  {at:>7}  {resumed:12}  {others}", flush=True)
        if not fine:
            print(*(f"exit code {code}\n{output}" for code, output in results), sep="\n---\n")
            return results, kills, fine


def train_with_fewer(args, text, folder):
    """Four workers, of which one is killed for good; five, who are refused; three, who go on. Prints a line for each.

    Returns:
        whether every session ended as it should.
    """
    rng = random.Random(args.seed)
    lost = rng.randrange(4)
    four = Session(args, text, folder, (lost, rng.randint(8, args.steps // 2), "step", 0), workers=4).wait()
    code, output = four.pop(lost)
    fine = code == -signal.SIGKILL and all(map(lost_another, four))
    at = re.search(r"killed at step (\d+)", output)
    print(f"4 workers  worker {lost} killed at step {at and at[1]}; the others: {message_of(four[0][1])}", flush=True)
    five = Session(args, text, folder, workers=5).wait() if args.setting == "elastic" else []
    refusal = "train_batch_size must be a multiple of 5, for 5 replicas, got 12"
    fine &= all(code == 1 and message_of(output).endswith(refusal) for code, output in five)
    for _, output in five[:1]:
        print(f"5 workers  {message_of(output)}", flush=True)
    three = Session(args, text, folder, workers=3).wait()
    resumed = re.search(r"/ckpt-(\d+)\n", three[0][1])
    fine &= all(code == 0 for code, _ in three) and resumed is not None
    print(f"3 workers  from step {resumed and resumed[1]} to the end", flush=True)
    if not fine:
        print(*(output for _, output in [*four, *five, *three]), sep="\n---\n")
    return fine


def apart(array, other):
    """The largest difference; where there are numbers above 1, as a share of the largest."""
    return np.abs(array - other).max() / max(1.0, np.abs(array).max())


def compare(runs, steps):
    """How far apart two runs are, in words; ends the program if that is more than another number of replicas makes."""
    whole, other = (read_checkpoint(folder / f"ckpt-{steps}") for folder in runs)
    variables = {name: apart(array, other[name]) for name, array in whole.items()}
    others = {name: variables.pop(name) for name in ("mems",) if name in variables}
    best, other_best = (json.loads((folder / "best" / "best.json").read_text()) for folder in runs)
    others |= {name: apart(value, other_best[name]) for name, value in best.items() if not isinstance(value, str)}
    rows, other_rows = map(log_rows, runs)
    for column in set(rows[0]) - {"tokens_per_second"}:
        pairs = [(row[column], other_row[column]) for row, other_row in zip(rows, other_rows, strict=True)]
        others[column] = max(apart(float(x), float(y)) if x != y else 0.0 for x, y in pairs)  # "NA" has no number
    for found, most in ((variables, 1e-6), (others, 1e-5)):
        worst = max(found, key=found.get)
        if not found[worst] <= most:
            sys.exit(f"FAILED: {worst} is {found[worst]:.1e} apart")
    largest = f"{max(variables.values()):.1e}, memory, log.csv and best within {max(others.values()):.1e}"
    return f"{len(variables)} variables within {largest}"


def write_data(folder):
    """Writes what all settings train on; returns the path of the text."""
    contents = {"text.txt": TEXT, "train_path": made_up(100, 1), "valid_path": made_up(20, 2)}
    for name, content in {**contents, "lexicon": "\n".join(LEXICON)}.items():
        (folder / name).write_text(content)
    return folder / "text.txt"


def main(args):
    with tempfile.TemporaryDirectory() as folder:
        text, whole, killed = write_data(Path(folder)), Path(folder, "whole"), Path(folder, "killed")
        if args.setting.endswith("elastic"):
            if not train_with_fewer(args, text, killed) or Session(args, text, whole).wait()[0][0]:
                sys.exit("FAILED: a session did not end as it should")
            print("four workers, then three:", compare((whole, killed), args.steps))
            return
        reference = Session(args, text, whole, workers=workers_of(args.setting))
        results, kills, fine = train_with_kills(args, text, killed)
        in_peace = reference.wait()
        if not fine or any(code for code, _ in in_peace):
            print(*(f"exit code {code}\n{output}" for code, output in in_peace), sep="\n---\n")
            sys.exit("FAILED: a session did not end as it should")
        states = [final_state(run, args.steps) for run in (whole, killed)]
        for state, (_, output) in zip(states, (in_peace[0], results[0]), strict=True):
            state["final evaluation"] = last_evaluation(output)
    different = [name for name in states[0] | states[1] if states[0].get(name) != states[1].get(name)]
    for name in different:
        print(f"{name}: {states[0].get(name)!s:.200} in peace, {states[1].get(name)!s:.200} with kills")
    if different:
        sys.exit(f"FAILED: {len(different)} of {len(states[0])} things differ")
    print(f"{kills} kills, {args.setting}: all {len(states[0])} variables, rows and results are bit for bit the same")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--setting", choices=STRATEGY, default="one")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trap", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("argv", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trap:
        train(*arguments.trap, arguments.argv)
    else:
        main(arguments)
