"""For tools that look for this file: all metadata is in pyproject.toml."""

from setuptools import setup

setup()
