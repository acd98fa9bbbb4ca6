"""The tasks that Slurm's `srun` started together, in the words of `TF_CONFIG`."""

import json
import os

import tensorflow as tf

_SET_BY_SRUN = (
    "SLURM_JOB_ID SLURM_STEP_ID SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST SLURM_STEP_TASKS_PER_NODE SLURM_PROCID "
    "SLURM_LOCALID SLURMD_NODENAME"
)
_FIRST_PORT, _PORTS_OF_A_STEP = 10_000, 20  # to 29,999: above those of services, below those that Linux gives away


def several_tasks() -> bool:
    """Whether `srun` started this process with others. A batch script, or a shell in an allocation, is one task."""
    return os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def tf_config() -> str:
    """The `TF_CONFIG` of this task: every task of the step is a worker, at `node:port`.

    TensorFlow's resolver orders the nodes by name, Slurm's ranks do not. So a task finds itself by its node and its
    number there. Each task has the GPUs that Slurm lets it see.

    Raises:
        ValueError: Slurm's variables are missing, malformed, or contradict each other.
    """
    try:
        step = int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        port = _FIRST_PORT + step % 1000 * _PORTS_OF_A_STEP  # two trainings may share a node
        # With GPUs counted, the resolver fails where there are none: a number for each task leaves them out of it.
        gpus = {"gpus_per_node": int(os.environ["SLURM_STEP_NUM_TASKS"]), "gpus_per_task": 1, "auto_set_gpu": False}
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(port_base=port, **gpus)
        workers = resolver.cluster_spec().as_dict()["worker"]
        index = workers.index(f"{os.environ['SLURMD_NODENAME']}:{port + int(os.environ['SLURM_LOCALID'])}")
    except (KeyError, RuntimeError, ValueError) as error:
        found = " ".join(f"{name}={os.environ.get(name)}" for name in _SET_BY_SRUN.split())
        raise ValueError(
            f"Slurm's variables do not name the tasks of srun ({type(error).__name__}: {error}), got {found}; "
            "set TF_CONFIG, or train in this task alone, by strategy=one"
        ) from error
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
