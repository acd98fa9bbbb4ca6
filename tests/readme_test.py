"""The README's Python runs as it stands there."""

import re
from pathlib import Path

import keras
import numpy as np

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_python_blocks_run_and_what_they_save_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, names)
    assert float(capsys.readouterr().out.split("nats a token:")[1]) < np.log(256)

    loaded = keras.saving.load_model("lm.keras")
    nll, _ = loaded.score(names["tokens"], names["labels"])
    np.testing.assert_allclose(nll, names["nll"], rtol=1e-6)
    assert loaded.optimizer.iterations == names["lm"].optimizer.iterations
    tokens = np.arange(40).reshape(2, 20)
    np.testing.assert_allclose(
        keras.saving.load_model("classifier.keras")(tokens), names["classifier"](tokens), rtol=1e-5
    )
