"""Makes `TF_CONFIG` from the tasks that Slurm's `srun` started together."""

import collections
import json
import os

import tensorflow as tf

from txl_tf.errors import ParameterError

_SET_BY_SRUN = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURMD_NODENAME",
)
# Ports 10,000 to 29,999 are above those of services, and below those that Linux gives to other programs.
_FIRST_PORT = 10_000
_PORTS_OF_A_STEP = 20  # one for each task of the step on a node


def several_tasks() -> bool:
    """Whether `srun` started this process with others. A batch script, or a shell in an allocation, is one task."""
    return os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def tf_config() -> str:
    """The value of `TF_CONFIG` for this task: every task of the step is a worker, at `node:port`.

    TensorFlow's resolver orders the nodes by name, but Slurm's ranks do not follow that order. So a task finds its
    index from the name of its node and its local id. Each task uses the GPUs that Slurm makes visible to it.

    Raises:
        ParameterError: Slurm's variables are missing, malformed, or contradict each other, or a node has more than 20
            tasks of the step.
    """
    try:
        number_of_step = int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        port = _FIRST_PORT + number_of_step % 1000 * _PORTS_OF_A_STEP  # two training runs may share a node
        # We claim one GPU for each task, so that the resolver does not run nvidia-smi, which fails on nodes without
        # GPUs.
        gpus = {"gpus_per_node": int(os.environ["SLURM_STEP_NUM_TASKS"]), "gpus_per_task": 1, "auto_set_gpu": False}
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(port_base=port, **gpus)
        workers = resolver.cluster_spec().as_dict()["worker"]
        index = workers.index(f"{os.environ['SLURMD_NODENAME']}:{port + int(os.environ['SLURM_LOCALID'])}")
    except (KeyError, RuntimeError, ValueError) as error:
        variables = {name: os.environ.get(name) for name in _SET_BY_SRUN}
        values = " ".join(f"{name}={value}" for name, value in variables.items())
        message = (
            f"Slurm's variables do not name the tasks of srun ({type(error).__name__}: {error}), got {values}; "
            "set TF_CONFIG, or train in this task only, with strategy=one"
        )
        raise ParameterError("SLURM_*", variables, "as srun sets them", message) from error
    tasks_of_node = collections.Counter(address.rpartition(":")[0] for address in workers)
    node, n_tasks = tasks_of_node.most_common(1)[0]
    if n_tasks > _PORTS_OF_A_STEP:  # they would use the ports of the next step
        allowed = f"at most {_PORTS_OF_A_STEP} tasks on a node"
        message = f"srun must start {allowed}, got {n_tasks} on {node}: see --ntasks-per-node"
        raise ParameterError("SLURM_STEP_TASKS_PER_NODE", n_tasks, allowed, message)
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
