"""Transformer-XL for TensorFlow 2 and Keras 3."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.*)"', (HERE / "txl_tf/__init__.py").read_text()).group(1)

setup(
    name="txl_tf",
    version=VERSION,
    description="Transformer-XL for TensorFlow 2 and Keras 3, faithful to the original",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=["txl_tf"],
    python_requires=">=3.11",
    install_requires=["tensorflow>=2.21,<2.22", "keras>=3.15,<3.16", "numpy", "absl-py", "tensorboard"],
    extras_require={
        "gpu": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "serving": ["tensorflow-serving-api"],
        "plot": ["matplotlib"],
        "test": ["pytest", "pytest-xdist", "ruff", "matplotlib", "tensorflow-serving-api"],
    },
)
