"""A program that trains: here, or with --ray_workers as several workers of a Ray cluster."""

import functools
import sys

from txl_programs.program import FLAGS, config_of, run
from txl_tf.config import TrainingClusterConfig


def run_training(main, rows_to_divide=list):
    """Runs a program, as `run`, on the workers that its flags ask for.

    Args:
        main: what trains, here or on a worker.
        rows_to_divide: function without arguments that gives the numbers of rows that the workers must divide.
    """
    run(functools.partial(_train, main, rows_to_divide))


def _train(main, rows_to_divide):
    if FLAGS.ray_workers == 0:  # this is a worker
        return main()
    cluster = config_of(TrainingClusterConfig)
    if not cluster.given:
        return main()
    if FLAGS.strategy not in ("auto", "multi_worker"):
        raise ValueError(f"strategy must be auto or multi_worker with ray_workers, got {FLAGS.strategy}")
    from txl_tf.cluster.training import run_workers

    rows = rows_to_divide() if cluster.ray_min_workers else []
    status, errors = run_workers([*sys.argv, "--ray_workers=0"], cluster, _write, rows)
    sys.stderr.write(errors)
    return status


def _write(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
