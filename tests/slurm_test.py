"""Workers by the variables that Slurm's `srun` sets, in environments that stand for it.

tests/deploy_test.py trains with two tasks, by a batch script.
"""

import json
import os

import pytest
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.training import distribution, slurm

STEP = {
    "SLURM_JOB_ID": "1007",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n9",
}
# What a batch script has, and a shell that `salloc` starts where it starts one in a step of its own.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n9"}
SHELL = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n9"}


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of Slurm and TF_CONFIG, and no others of them; takes back what `make_strategy` sets."""
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CONFIG", "")

    def give(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    "nodes, tasks, workers",
    [
        ("n[9-10]", "2,1", ["n10:10180", "n9:10180", "n9:10181"]),
        ("n[9-10],gpu07", "1(x3)", ["gpu07:10180", "n10:10180", "n9:10180"]),
        ("n9", "3", ["n9:10180", "n9:10181", "n9:10182"]),
    ],
)
def test_every_task_finds_the_same_workers_and_itself_among_them(environment, nodes, tasks, workers):
    """Also where their order is not that of the ranks: by name, n10 comes before n9."""
    environment(**{**STEP, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks})
    for index, address in enumerate(workers):
        node, _, port = address.partition(":")
        environment(SLURMD_NODENAME=node, SLURM_LOCALID=str(int(port) - 10180))
        found = json.loads(slurm.tf_config())
        assert found == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}


def test_steps_that_share_a_node_have_other_ports(environment):
    environment(**STEP)
    ports = []
    for job, step in (("1007", "0"), ("1007", "1"), ("1009", "0"), ("2000", "0")):
        environment(SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        ports.append(json.loads(slurm.tf_config())["cluster"]["worker"][0])
    assert ports == ["n10:10140", "n10:10160", "n10:10180", "n10:10000"]


def test_the_tasks_of_a_node_must_fit_the_ports_of_a_step(environment):
    """The next step begins 20 ports later."""
    environment(**{**STEP, "SLURM_STEP_NODELIST": "n9", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    environment(SLURM_STEP_NUM_TASKS="20", SLURM_STEP_TASKS_PER_NODE="20")
    assert json.loads(slurm.tf_config())["cluster"]["worker"][-1] == "n9:10199"
    environment(SLURM_STEP_NUM_TASKS="21", SLURM_STEP_TASKS_PER_NODE="21")
    with raises_parameter("SLURM_STEP_TASKS_PER_NODE", 21, limit="20"):
        slurm.tf_config()


def test_the_gpus_of_a_task_are_those_that_slurm_shows_it(environment):
    environment(**STEP, CUDA_VISIBLE_DEVICES="3")
    slurm.tf_config()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("strategy", ["auto", "multi_worker"])
def test_several_tasks_are_workers_without_tf_config(environment, monkeypatch, strategy):
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda: os.environ["TF_CONFIG"])
    environment(**STEP)
    made = json.loads(distribution.make_strategy(strategy))
    assert made["cluster"] == {"worker": ["n10:10180", "n9:10180", "n9:10181"]} and made["task"]["index"] == 2


@pytest.mark.parametrize("variables", [{}, BATCH, SHELL], ids=["outside", "sbatch", "salloc"])
def test_one_task_trains_on_one_device(environment, variables):
    environment(**variables)
    assert distribution.make_strategy() is tf.distribute.get_strategy()
    with raises_parameter("TF_CONFIG", None):
        distribution.make_strategy("multi_worker")
    assert not os.environ["TF_CONFIG"]


def test_tf_config_and_strategy_one_go_first(environment):
    environment(**STEP)
    assert distribution.make_strategy("one") is tf.distribute.get_strategy() and not os.environ["TF_CONFIG"]
    alone = json.dumps({"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}})
    environment(TF_CONFIG=alone)
    assert distribution.make_strategy() is tf.distribute.get_strategy() and os.environ["TF_CONFIG"] == alone


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("SLURM_STEP_NUM_TASKS", "many", "ValueError: invalid literal.*NUM_TASKS=many"),
        ("SLURM_STEP_NUM_TASKS", "4", "Requested 4 tasks but only 3 were assigned"),
        ("SLURM_STEP_NODELIST", "n[9-", "Invalid hostlist"),
        ("SLURM_STEP_TASKS_PER_NODE", "2;1", "Invalid tasks-per-node"),
        ("SLURM_STEP_TASKS_PER_NODE", None, "RuntimeError: SLURM_STEP_TASKS_PER_NODE not found"),
        ("SLURM_PROCID", None, "SLURM_PROCID not found.*SLURM_PROCID=None"),
        ("SLURM_JOB_ID", None, "KeyError: 'SLURM_JOB_ID'"),
        ("SLURMD_NODENAME", "m1", "'m1:10181' is not in list.*SLURMD_NODENAME=m1"),
        ("SLURM_LOCALID", "2", "'n9:10182' is not in list"),
    ],
)
def test_variables_that_do_not_fit_are_one_clear_error(environment, monkeypatch, variable, value, message):
    environment(**STEP)
    monkeypatch.delenv(variable) if value is None else environment(**{variable: value})
    with pytest.raises(ValueError, match=f"{message}.*strategy=one"):
        distribution.make_strategy()
