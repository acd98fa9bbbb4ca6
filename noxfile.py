"""The checks of a developer, each in an environment of its own: `pip install nox`, then `nox -s lint`.

Without `-s`, nox runs lint, types, fast and docs. What a session is given after `--` goes to its last command:
`nox -s fast -- tests/crf_test.py`.
"""

import subprocess
import sys

import nox

nox.options.sessions = ["lint", "types", "fast", "docs"]
nox.options.reuse_existing_virtualenvs = True
VERSIONS = ["2.18", "2.19", "2.20", "2.21", "nightly"]


def requirements(*arguments):
    """Requirements from pyproject.toml, without installing the library."""
    command = [sys.executable, ".ci/requirements.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@nox.session
def lint(session):
    """ruff, of the version that pyproject.toml has: rules and format."""
    session.install(*requirements("--only-extras", "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session):
    """pyright on the packages; pyright and mypy on the code of README, docs and examples."""
    session.install("-e", ".[test,types]")
    session.run("pyright")
    session.run("pyright", "-p", "pyrightconfig.strict.json")
    session.run("python", "-m", "pytest", "--numprocesses=0", "tests/type_checkers_test.py", *session.posargs)


@nox.session
def fast(session):
    """The tests that are not slow."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-m", "not slow", *session.posargs)


@nox.session
def ci(session):
    """The tests of `.ci/run`: the fast ones, and those that are marked ci."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "--ci", "-m", "not slow", *session.posargs)


@nox.session
def slow(session):
    """The slow tests, with those that are marked ci, more than 1.5 hours."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-m", "slow", *session.posargs)


@nox.session
def docs(session):
    """The documentation site, and its tests."""
    session.install("-e", ".[test,docs]")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "-m", "pytest", "--numprocesses=0", "tests/site_test.py", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("version", VERSIONS)
def versions(session, version):
    """The tests of `ci` on other versions of TensorFlow and Keras, in environments in build/versions."""
    session.run(".ci/versions", version, *session.posargs, external=True)


@nox.session(venv_backend="none")
def package(session):
    """sdist and wheel, installed with each extra, and every command run once."""
    session.run(".ci/package", *session.posargs, external=True)
