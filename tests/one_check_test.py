"""A value is checked once on its way from the command line, or from a constructor, to the network."""

import pytest
from helpers import SMALL, train_run

import txl_tf
from txl_config import ModelConfig, already_checked, checks


@pytest.fixture
def checked(monkeypatch):
    """The names of the hyper-parameters that are checked, in order."""
    names = []
    check_field = checks.check_field

    def counting(field, group, value, name):
        names.append(name)
        check_field(field, group, value, name)

    monkeypatch.setattr(checks, "check_field", counting)
    return names


def test_a_model_checks_its_arguments_once_and_its_network_none(checked):
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=5, dropatt=0.25)
    assert lm.network.mem_len == 5
    assert sorted(checked) == sorted(ModelConfig.names())


def test_a_model_of_checked_hyper_parameters_checks_none(checked):
    config = ModelConfig(**SMALL, mem_len=5)
    checked.clear()
    with already_checked(ModelConfig, config):
        txl_tf.TransformerXLLM(**config.to_dict())
    assert not checked


def test_another_value_is_checked_all_the_same(checked):
    config = ModelConfig(**SMALL, mem_len=5)
    checked.clear()
    with already_checked(ModelConfig, config):
        with pytest.raises(txl_tf.ParameterError) as raised:
            txl_tf.TransformerXLLM(**{**config.to_dict(), "mem_len": -1})
    assert raised.value.name == "mem_len" and checked == ["mem_len"]
    with pytest.raises(txl_tf.ParameterError):  # and outside of the block, all values
        txl_tf.TransformerXLLM(**{**config.to_dict(), "n_layer": 0})


@pytest.mark.slow
def test_a_training_run_checks_a_value_once_before_the_first_step(checked, run_dir, text_file, monkeypatch):
    before = []
    monkeypatch.setattr("txl_tf.runs.train.Run.train", lambda self, state: before.extend(checked))
    train_run(run_dir, text_file)
    assert before.count("mem_len") == before.count("dropatt") == 1
