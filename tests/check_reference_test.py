"""Parity with the original program, by the golden values in the repository, and the checker of such values."""

import contextlib
import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys

import check_reference
import numpy as np
import pytest
import tensorflow as tf
from check_reference import EXACT, MODEL_KINDS, Difference, Tolerance, difference, differences
from helpers import CASES, GOLDENS

import txl_tf
from txl_tf.convert.pytorch import pytorch_to_run

SLOW = pytest.mark.slow


def cases(names, fast):
    """A parameter for each name; slow but for those that are `fast`."""
    assert set(fast) <= set(names)
    return [name if name in fast else pytest.param(name, marks=SLOW) for name in names]


@pytest.fixture(params=cases(CASES, ["wt103_large"]), scope="module")
def folder(request):
    return GOLDENS / request.param


@pytest.fixture(scope="module")
def golden(folder):
    with np.load(folder / "golden.npz") as file:
        return dict(file)


@contextlib.contextmanager
def eager(name, of=("wt103_large", "transformer_1layer", "default_ff_two")):
    """Trains these cases without a graph: to trace a step takes as long as all else. The other cases are traced."""
    tf.config.run_functions_eagerly(name in of)
    yield
    tf.config.run_functions_eagerly(False)


@functools.cache
def model_arrays(name):
    """What txl_tf computes for a case of the original."""
    with np.load(GOLDENS / name / "golden.npz") as file, eager(name):
        return check_reference.model_arrays(GOLDENS / name, file)


@pytest.fixture(scope="module")
def kinds(folder):
    found = model_arrays(folder.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_reference, "model_arrays", lambda folder, golden: found)
        return check_reference.compare_model(folder)


def test_parity_with_the_original(kinds):
    assert list(kinds) == list(MODEL_KINDS)
    assert [(kind, row) for kind, rows in kinds.items() for row in rows if row.problem] == []


VANILLA = sorted(path.name for path in (GOLDENS.parent / "vanilla").iterdir())


@pytest.mark.parametrize("name", cases(VANILLA, [name for name in VANILLA if not name.startswith("transformer")]))
def test_parity_with_the_documents_transformer(name):
    case = GOLDENS.parent / "vanilla" / name
    with eager(name):
        kinds = check_reference.compare_vanilla(case)
    assert [row for rows in kinds.values() for row in rows if row.problem] == []
    with np.load(case / "golden.npz") as golden:
        expected = {name for name in golden if name.startswith(("out/", "g/"))}
    assert {row.array for rows in kinds.values() for row in rows} == expected
    assert len(VANILLA) == 9


def changed_ffn(tmp_path):
    """A copy of the case `ffn` with another bias."""
    shutil.copytree(GOLDENS.parent / "vanilla" / "ffn", tmp_path / "ffn")
    with np.load(tmp_path / "ffn" / "golden.npz") as file:
        golden = dict(file)
    golden["w/dense1/bias"][3] += 1e-3
    np.savez(tmp_path / "ffn" / "golden.npz", **golden)


def test_a_changed_weight_of_the_documents_transformer_is_noticed(tmp_path):
    changed_ffn(tmp_path)
    kinds = check_reference.compare_vanilla(tmp_path / "ffn")
    assert {row.array for rows in kinds.values() for row in rows if row.problem} >= {"out/output", "g/dense2/kernel"}


TAGGERS = {family: sorted(path.name for path in (GOLDENS.parent / family).iterdir()) for family in ("tener", "flat")}
# Both kinds of attention and of positions, the norm before and after; two and four distances, every residual.
FAST_TENER = ["adatrans_scaled_prenorm", "adatrans_without_key_term", "transformer_fix", "transformer_sin", "spans"]
FAST_FLAT = ["default_ff_two", "fusion_attn", "repaired_residual_ff4"]
WITHOUT_ARRAYS = {"spans", "lexicon"}


@pytest.mark.parametrize("name", cases(TAGGERS["tener"], FAST_TENER))
def test_parity_with_tener_s_program(name):
    assert_agrees(GOLDENS.parent / "tener" / name, check_reference.compare_tener)
    assert len(TAGGERS["tener"]) == 9


@pytest.mark.parametrize("name", cases(TAGGERS["flat"], FAST_FLAT))
def test_parity_with_flat_s_program(name):
    if name == "lexicon" and importlib.util.find_spec("jieba") is None:
        pytest.skip("the words of this case are jieba's, which is not installed (pip install jieba)")
    assert_agrees(GOLDENS.parent / "flat" / name, check_reference.compare_flat)
    assert len(TAGGERS["flat"]) == 12


def assert_agrees(case, compare):
    """Every result and gradient of a case is compared, and none of them differs."""
    with eager(case.name):
        rows = [row for rows in compare(case).values() for row in rows]
    assert [row for row in rows if row.problem] == []
    if case.name in WITHOUT_ARRAYS:
        assert len(rows) > 3
        return
    with np.load(case / "golden.npz") as golden:
        expected = {name for name in golden if name.startswith(("out/", "g/"))}
    assert {row.array.split("[")[0] for row in rows} - {"out/pe"} == expected


@pytest.mark.parametrize("family, case", [pytest.param("tener", "transformer_sin", marks=SLOW), ("flat", "no_words")])
def test_a_changed_weight_of_a_tagger_is_noticed(tmp_path, family, case):
    shutil.copytree(GOLDENS.parent / family / case, tmp_path / case)
    with np.load(tmp_path / case / "golden.npz") as file:
        golden = dict(file)
    golden["w/crf.trans_m"][1, 2] += 1
    np.savez(tmp_path / case / "golden.npz", **golden)
    kinds = check_reference.COMPARISONS[family](tmp_path / case)
    wrong = {row.array.split("[")[0] for rows in kinds.values() for row in rows if row.problem}
    assert wrong >= {"out/nll", "g/crf.trans_m"} and not wrong & {"out/emissions", "out/layer0/probs"}


PYTORCH = sorted(path.name for path in (GOLDENS.parent / "pytorch").iterdir())


def to_run(checkpoint, model_dir):
    pytorch_to_run(checkpoint, model_dir)


# Of Hugging Face's: `test_a_changed_loss_of_a_pytorch_program_is_noticed`. Of NVIDIA's: `pytorch_test.py`.
@pytest.mark.parametrize("name", cases(PYTORCH, ["kimi_wt103"]))
def test_parity_with_pytorch_programs(name):
    kinds = check_reference.compare_pytorch(
        GOLDENS.parent / "pytorch" / name, convert=to_run, served=name == "hf_wt103"
    )
    assert [row for rows in kinds.values() for row in rows if row.problem] == []
    assert {kind: len(rows) > 0 for kind, rows in kinds.items()} == dict.fromkeys(check_reference.PYTORCH_KINDS, True)
    assert len(PYTORCH) == 4


def test_a_changed_loss_of_a_pytorch_program_is_noticed(tmp_path):
    """And nothing else."""
    shutil.copytree(GOLDENS.parent / "pytorch" / "hf_plain_legacy", tmp_path / "case")
    with np.load(tmp_path / "case" / "golden.npz") as file:
        golden = dict(file)
    golden["nll"][2, 1, 3] += 5e-5
    np.savez(tmp_path / "case" / "golden.npz", **golden)
    kinds = check_reference.compare_pytorch(tmp_path / "case", convert=to_run, served=False)
    wrong = [row.array for rows in kinds.values() for row in rows if row.problem]
    assert wrong == ["pytorch_model.bin: nll", "pytorch_model.bin: nll/cached"]


def test_a_changed_span_is_noticed(tmp_path):
    config = json.loads((GOLDENS.parent / "tener" / "spans" / "config.json").read_text())
    config["encodings"]["bio"]["sequences"][0]["gold"][0] = "B-XYZ"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (rows,) = check_reference.compare_tener(tmp_path).values()
    assert "bio[0]" in {row.array for row in rows if row.problem}


def test_every_golden_array_is_compared(kinds, golden):
    compared = {row.array.split("[")[0] for rows in kinds.values() for row in rows}
    assert compared == golden.keys() - {"inputs", "labels"}
    assert len(kinds["losses"]) == 3 and len(kinds["trajectory"]) == 3 * 8


def test_original_reads_back_what_is_saved(folder, tmp_path):
    lm = check_reference.start_model(folder, json.loads((folder / "config.json").read_text()))
    for variable in lm.trainable_variables:
        variable.assign(-variable)
    txl_tf.save_tf1_checkpoint(lm, str(tmp_path / "model.ckpt-7"))
    # What a tf.train.Saver of the original's graph asks of a file: its variables by name, shape and dtype.
    saved, original = [
        tf.train.load_checkpoint(str(path / f"model.ckpt-{n}")) for path, n in [(tmp_path, 7), (folder, 0)]
    ]
    assert saved.get_variable_to_shape_map() == original.get_variable_to_shape_map()
    assert saved.get_variable_to_dtype_map() == original.get_variable_to_dtype_map()
    for name in original.get_variable_to_shape_map():
        np.testing.assert_array_equal(saved.get_tensor(name), -original.get_tensor(name), err_msg=name)


# The checker notices what is wrong.


def test_tolerances():
    assert MODEL_KINDS == {
        "variables": ("var/", Tolerance(0, 0, 0)),
        "losses": ("loss", Tolerance(rtol=1e-5)),
        "memories": ("mems/", Tolerance(atol=1e-5)),
        "gradients": ("grad/", Tolerance(of_largest=1e-4)),
        "gradient norm": ("grad_norm", Tolerance(rtol=1e-5)),
        "trajectory": (("train/loss", "train/lr", "train/grad_norm"), Tolerance(rtol=1e-5)),
        "final weights": ("train/var/", Tolerance(rtol=1e-5, atol=2e-5)),
    }


TWO_ARRAYS = [  # expected, found, tolerance, relative difference, whether it is within the tolerance
    ([1.0, -4.0], [1.0, -4.0], EXACT, 0, True),
    ([1.0, -4.0], [1.5, -4.0], Tolerance(rtol=0.4), 0.125, False),  # relative to the entry
    ([1.0, -4.0], [1.5, -4.0], Tolerance(rtol=0.5), 0.125, True),
    ([1.0, -4.0], [1.0, -3.5], Tolerance(atol=0.4), 0.125, False),
    ([1.0, -4.0], [1.0, -3.5], Tolerance(atol=0.5), 0.125, True),
    ([1.0, -4.0], [1.5, -4.0], Tolerance(of_largest=0.12), 0.125, False),
    ([1.0, -4.0], [1.5, -4.0], Tolerance(of_largest=0.125), 0.125, True),
    ([1.0, -4.0], [1.5, -4.0], Tolerance(rtol=0.25, atol=0.25), 0.125, True),  # they add up
    ([0.0, 0.0], [0.0, 0.0], Tolerance(of_largest=0.1), 0, True),
    ([0.0, 0.0], [0.0, 1e-9], Tolerance(of_largest=0.1), np.inf, False),
    ([0.0], [-0.0], EXACT, 0, False),  # another bit
    ([1.0, 2.0], [np.nan, 2.0], Tolerance(atol=1), np.nan, False),
    ([np.nan], [np.nan], Tolerance(atol=1), np.nan, False),
    ([np.inf], [np.inf], EXACT, np.nan, False),
    ([1.0, 2.0], [[1.0, 2.0]], Tolerance(atol=1), np.inf, False),
    ([1.0], 1.0, Tolerance(atol=1), np.inf, False),
]


def test_difference_of_two_arrays():
    for case in TWO_ARRAYS:
        expected, found, tolerance, relative, within = case
        row = difference("x", np.float32(expected), np.float32(found), tolerance)
        np.testing.assert_equal(row.relative, relative, err_msg=str(case))
        assert (row.problem == "") == within, case


def test_exact_arrays_have_the_same_type():
    assert difference("x", np.float32([1]), np.float32([1]), EXACT) == Difference("x", 0.0)
    assert difference("x", np.float32([1]), np.float64([1]), EXACT).problem == (
        "relative difference 0.0e+00, tolerance none, bit for bit"
    )


def test_arrays_missing_added_or_out_of_order_are_named():
    one, two, any_order = np.ones(1), np.ones(2), Tolerance(rtol=1e-5)
    assert differences({"a": one, "b": two}, {"b": two, "a": one}, any_order) == [("a", 0, ""), ("b", 0, "")]
    assert differences({"a": one, "b": two}, {"b": two, "a": one}, EXACT) == [
        ("a", 0, ""),
        ("b", 0, ""),
        ("b", np.inf, "stands where a should"),
        ("a", np.inf, "stands where b should"),
    ]
    assert differences({"a": one, "b": two}, {"b": two, "c": one}, EXACT) == [
        ("b", 0, ""),
        ("a", np.inf, "not computed by txl_tf"),
        ("c", np.inf, "not among the expected arrays"),
    ]


def copy_with(tmp_path, change):
    """A copy of the case `char_tied` after `change`, a function of the dictionary of its arrays."""
    folder = tmp_path / "char_tied"
    shutil.copytree(GOLDENS / "char_tied", folder)
    with np.load(folder / "golden.npz") as file:
        golden = {name: array.copy() for name, array in file.items()}
    change(golden)
    np.savez(folder / "golden.npz", **golden)
    return folder


def move(name, index, step):
    """Adds `step` to one entry of an array."""

    def change(golden):
        golden[name][index] += step

    return change


KERNEL = "transformer/layer_0/ff/layer_1/kernel"  # gradients up to 0.127


CHANGES = [  # kind, array, change of one entry
    ("variables", f"var/{KERNEL}", move(f"var/{KERNEL}", (31, 47), 1e-7)),
    ("losses", "loss[1]", move("loss", 1, 1e-4)),
    ("memories", "mems/2/1", move("mems/2/1", (5, 2, 31), 2e-5)),
    ("gradients", f"grad/{KERNEL}", move(f"grad/{KERNEL}", (31, 47), 3e-5)),
    ("gradient norm", "grad_norm", move("grad_norm", (), 1e-4)),
    ("trajectory", "train/loss[7]", move("train/loss", 7, 1e-4)),
    ("trajectory", "train/lr[0]", move("train/lr", 0, 1e-9)),  # 0, so that any other number is wrong
    ("trajectory", "train/grad_norm[3]", move("train/grad_norm", 3, np.nan)),
    ("final weights", f"train/var/{KERNEL}", move(f"train/var/{KERNEL}", (31, 47), 6e-5)),
]


@pytest.mark.slow
def test_a_change_of_one_entry_is_found(tmp_path, capsys, computed):
    for i, (kind, array, change) in enumerate(CHANGES):
        copy_with(tmp_path / str(i), change)
        assert check_reference.main([str(tmp_path / str(i))]) == 1, array
        first, *wrong = capsys.readouterr().out.splitlines()
        assert first.startswith("char_tied   variables ") and first.endswith("   FAILED"), array
        assert len(wrong) == 1 and wrong[0].startswith(f"  char_tied: {kind}: {array}: relative difference "), array


@pytest.fixture
def computed(monkeypatch):
    """Replaces what txl_tf computes by that for the case `char_tied`, computed once."""
    found = model_arrays("char_tied")
    monkeypatch.setattr(check_reference, "model_arrays", lambda folder, golden: found)


@pytest.mark.ci
def test_missing_arrays_are_found(tmp_path, capsys, computed):
    copy_with(tmp_path, lambda golden: [golden.pop(name) for name in ("train/loss", f"grad/{KERNEL}")])
    assert check_reference.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  char_tied: gradients: grad/{KERNEL}: not among the expected arrays",
        *[f"  char_tied: trajectory: train/loss[{step}]: not among the expected arrays" for step in range(8)],
    ]


def test_a_changed_case_and_a_whole_one(tmp_path, capsys):
    """Nothing replaced."""
    changed_ffn(tmp_path)
    assert check_reference.main([str(tmp_path), str(GOLDENS.parent / "vanilla" / "ffn")]) == 1
    first, *wrong, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ffn   results \d\.\de-0\d   gradients \d\.\de-0\d   FAILED", first)
    assert any(
        re.fullmatch(r"  ffn: results: out/output: relative difference .*, tolerance 1e-05 .*", r) for r in wrong
    )
    assert re.fullmatch(r"ffn   results \S+ +gradients \S+ +ok", second)


@pytest.mark.slow
def test_the_program(tmp_path):
    """Nothing replaced: a changed case and a whole one, as a process."""
    copy_with(tmp_path, move("loss", 1, 1e-3))
    command = [sys.executable, check_reference.__file__, str(tmp_path), str(GOLDENS / "char_tied")]
    done = subprocess.run(command, capture_output=True, text=True)
    first, wrong, second = done.stdout.splitlines()
    assert re.fullmatch(r"char_tied   variables 0  .*losses 2\.\de-04   memories .* final weights \S+   FAILED", first)
    assert re.fullmatch(r"  char_tied: losses: loss\[1\]: relative difference 2\.\de-04, tolerance 1e-05 .*", wrong)
    assert re.fullmatch(r"char_tied   variables 0  .*losses \S+   memories .* final weights \S+   ok", second)
    assert done.returncode == 1


def test_the_exit_status_is_0_where_all_agree(computed):
    assert check_reference.main([str(GOLDENS / "char_tied")]) == 0


def write_case(folder, config, name="config.json", files=("golden.npz",)):
    folder.mkdir()
    (folder / name).write_text(json.dumps(config))
    for file in files:
        (folder / file).touch()


def test_families_that_txl_tf_does_not_have_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(check_reference.COMPARISONS, "pytorch")
    write_case(tmp_path / "a", {}, "case.json", ["golden.npz", "model.safetensors"])
    assert check_reference.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == ["a   pytorch: no such model in txl_tf yet   FAILED"]


TAGGER_CONFIGS = [
    ({"model": "FLAT (V0)", "arrays": {}}, ["golden.npz"], "flat"),
    ({"sentences": []}, [], "flat"),
    ({"model": "TENER", "arrays": {}}, ["golden.npz"], "tener"),
    ({"encodings": {}}, [], "tener"),
]


def test_the_family_of_a_case_of_a_tagger(tmp_path, monkeypatch, capsys):
    for family in ("tener", "flat"):
        monkeypatch.setitem(check_reference.COMPARISONS, family, lambda folder, kind=family: {kind: [SAME]})
    for i, (config, files, family) in enumerate(TAGGER_CONFIGS):
        write_case(tmp_path / f"a{i}", config, files=files)
        assert check_reference.main([str(tmp_path / f"a{i}")]) == 0, config
        assert capsys.readouterr().out.split()[:2] == [f"a{i}", family], config


SAME = Difference("x", 0.0)


def test_folders_without_a_case_are_reported(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    write_case(tmp_path / "unknown", {"n_token": 3}, files=())
    assert check_reference.main([str(tmp_path / name) for name in ("empty", "absent", "unknown")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/empty   no case in it   FAILED",
        f"{tmp_path}/absent   no such folder   FAILED",
        "unknown   no case: its files are of no reference format   FAILED",
    ]


def test_an_incomplete_or_damaged_case_is_reported_and_the_next_one_compared(tmp_path, capsys, computed):
    shutil.copytree(GOLDENS / "char_tied", tmp_path / "a")
    (tmp_path / "a" / "golden.npz").unlink()
    shutil.copytree(GOLDENS / "char_tied", tmp_path / "b")
    (tmp_path / "b" / "golden.npz").write_bytes(b"PK\3\4")
    shutil.copytree(GOLDENS / "char_tied", tmp_path / "c")
    assert check_reference.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a   no case: its files are of no reference format   FAILED"
    assert lines[1] == "b   BadZipFile: File is not a zip file   FAILED"
    assert lines[2].startswith("c   variables 0") and lines[2].endswith("   ok")
