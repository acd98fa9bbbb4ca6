"""What a release is made of: versions that agree, commands that the smoke test knows, and old versions by name."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

import keras
import tensorflow as tf
import yaml
from helpers import INSTALLED, PROJECT, ROOT, mentions, raises_naming
from packaging.requirements import Requirement

import txl_tf
from txl_config import environment

WORKFLOWS = ROOT / ".github" / "workflows"


def script(name):
    """A script of .ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_versions_that_are_too_old_are_refused_by_name(monkeypatch):
    environment.check_versions()
    monkeypatch.setattr(tf, "__version__", "2.17.1")
    with raises_naming(ImportError, "tensorflow", "2.18", "2.17.1"):
        environment.check_versions()
    monkeypatch.setattr(importlib.metadata, "version", no_package)  # the module is that of tf-nightly
    with raises_naming(ImportError, "2.17.1"):
        environment.check_versions()
    monkeypatch.undo()
    monkeypatch.setattr(tf, "__version__", "2.23.0-dev20261026")
    monkeypatch.setattr(keras, "__version__", "3.7.0")
    with raises_naming(ImportError, "keras", "3.8", "3.7.0"):
        environment.check_versions()
    monkeypatch.setattr(keras, "__version__", "4.0.0")
    environment.check_versions()


def test_the_oldest_versions_are_those_that_are_installed_and_tested():
    needed = {made.name: str(made.specifier) for made in map(Requirement, PROJECT["dependencies"])}
    oldest = {name: ".".join(map(str, version)) for name, version in environment._OLDEST.items()}
    assert {name: needed[name] for name in oldest} == {name: f">={version}" for name, version in oldest.items()}
    tested = re.findall(r'^    (\S+)\) pinned=\((?:"tensorflow==(.*?)\.\*" "keras==(.*?)\.\*")?', versions(), re.M)
    assert tested[0] == (oldest["tensorflow"], oldest["tensorflow"], oldest["keras"])
    names = [name for name, *_ in tested]
    assert names == re.findall(
        r'"([\w.]+)"', re.search(r"^VERSIONS = (.*)$", (ROOT / "noxfile.py").read_text(), re.M)[1]
    )
    nightly = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert sorted({job["version"] for job in nightly}) == sorted(names)
    table = re.search(r"### Versions\n(.*?)\n###", (ROOT / "docs" / "development.md").read_text(), re.S)[1]
    assert re.findall(r"^\| ([\d.]+|nightly)(?: build)? \| ([\d.]+|nightly)", table, re.M) == [
        (name, keras_version or "nightly") for name, _, keras_version in tested
    ]


def versions():
    return (ROOT / ".ci" / "versions").read_text()


def test_an_unknown_version_is_refused():
    done = subprocess.run([ROOT / ".ci" / "versions", "2.17"], capture_output=True, text=True)
    assert done.returncode == 2 and mentions(done.stderr, "2.18", "2.19", "2.20", "2.21", "2.17")


def test_all_files_have_the_version_of_the_release(capsys):
    release = script("check_release")
    found = release.versions()
    assert found["CITATION.cff"] == found["txl_tf/__init__.py"] == txl_tf.__version__
    assert found["CHANGELOG.md"] == txl_tf.__version__
    assert release.main(f"v{txl_tf.__version__}") is None
    assert capsys.readouterr().out.startswith("The first version.") or txl_tf.__version__ != "0.1.0"
    assert mentions(release.main("v9.9.9"), "CITATION.cff", "9.9.9")


def test_ruff_has_its_version_in_one_place():
    (pinned,) = PROJECT["optional-dependencies"]["lint"]
    assert re.fullmatch(r"ruff==[\d.]+", pinned)
    version = pinned.removeprefix("ruff==")
    paths = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {
        path: (ROOT / path).read_text(errors="ignore") for path in paths if path.endswith((".toml", ".yml", ".yaml"))
    }
    texts |= {path: (ROOT / path).read_text() for path in ("noxfile.py", ".ci/run", ".ci/requirements.py")}
    assert [path for path, text in texts.items() if version in text] == ["pyproject.toml"]


def test_the_requirements_of_extras_are_listed_without_the_library():
    command = [sys.executable, ROOT / ".ci" / "requirements.py", "--only-extras", "lint"]
    assert (
        subprocess.run(command, capture_output=True, text=True).stdout.split()
        == PROJECT["optional-dependencies"]["lint"]
    )
    found = {Requirement(line).name for line in script("requirements").of_extra("test")}
    assert {"pytest", "ruff", "sentencepiece", "ray", "gradio"} <= found and "txl_tf" not in found


def test_the_smoke_test_runs_every_command():
    smoke = script("smoke")
    assert {*(name for name, *_ in smoke.COMMANDS), "demo", "serve"} == {*INSTALLED}
