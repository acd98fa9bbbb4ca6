"""How a program ends, and which flags `values` takes."""

import signal

import pytest
from absl import flags

from txl_tf import program


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


@pytest.mark.parametrize("given", [0, 1])
def test_ctrl_c_ends_it_with_130(verbosity, given):
    verbosity(given)
    with pytest.raises(SystemExit) as end:
        run(lambda: signal.raise_signal(signal.SIGINT))
    assert end.value.code == 130


def test_stray_arguments_are_refused_and_nothing_is_run(verbosity):
    called = []
    with pytest.raises(SystemExit) as end:
        run(lambda: called.append(1), "a", "b")
    assert end.value.code == "some.py: unexpected arguments: a b" and not called
    run(lambda: called.append(1))
    assert called


def test_values_are_those_of_the_flags_named_or_of_those_given(monkeypatch):
    own = flags.FlagValues()
    flags.DEFINE_integer("mem_len", 3, "", flag_values=own)
    flags.DEFINE_list("cutoffs", None, "", flag_values=own)
    flags.DEFINE_bool("greedy", False, "", flag_values=own)
    own(["some.py", "--nogreedy"])
    monkeypatch.setattr(flags, "FLAGS", own)
    assert program.values("mem_len cutoffs greedy") == {"mem_len": 3, "cutoffs": None, "greedy": False}
    assert program.values("mem_len greedy", given_only=True) == {"greedy": False}
