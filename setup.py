"""Transformer-XL for TensorFlow 2 and Keras 3."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# A user of the wheel needs these; the benchmark and what checks the library itself are for a clone.
PROGRAMS = (
    "train train-ner train-seq2seq prepare-data generate score translate tag plot plot-ner average-checkpoints "
    "convert-checkpoint export-saved-model demo"
)
HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.*)"', (HERE / "txl_tf/__init__.py").read_text()).group(1)

setup(
    name="txl_tf",
    version=VERSION,
    description="Transformer-XL for TensorFlow 2 and Keras 3, faithful to the original",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="transformer-xl transformer language-model tensorflow keras",
    project_urls={
        "Paper": "https://arxiv.org/abs/1901.02860",
        "Original program": "https://github.com/kimiyoung/transformer-xl",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    entry_points={"console_scripts": [f"txl-{name} = txl_programs:main" for name in PROGRAMS.split()]},
    packages=find_packages(include=["txl_config", "txl_tf", "txl_tf.*", "txl_programs", "txl_programs.*"]),
    package_data={"txl_config": ["py.typed"], "txl_tf": ["py.typed"]},
    python_requires=">=3.11,<3.14",
    install_requires=["tensorflow>=2.21,<2.22", "keras>=3.15,<3.16", "numpy", "absl-py", "tensorboard"],
    extras_require={
        "gpu": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "serving": ["tensorflow-serving-api"],
        "plot": ["matplotlib"],
        "seq2seq": ["sacrebleu"],
        "ner": ["jieba==0.42.1"],
        "subword": ["sentencepiece>=0.2", "tensorflow-text>=2.21,<2.22"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow"],
        "notebook": ["matplotlib", "nbclient", "ipykernel"],
        "cluster": ["ray[data,default,train]>=2.50,<3"],
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.7,<10",
            "mkdocstrings-python>=2,<3",
            "black",  # it formats signatures
            "jieba==0.42.1",  # finds the words of the Chinese page
            "selenium",  # for the site's tests in a browser
        ],
        "demo": ["gradio>=6.31,<7"],
        "tpu-check": ["jax[tpu]>=0.10.2,<0.11"],
        "test": [
            "pytest",
            "pytest-xdist",
            "ruff",
            "matplotlib",
            "nbclient",
            "ipykernel",
            "sacrebleu",
            "tensorflow-serving-api",
            "jieba==0.42.1",
            "sentencepiece>=0.2",
            "tensorflow-text>=2.21,<2.22",
            "wandb",
            "mlflow-skinny",  # mlflow without its server and user interface; with the next two for its local store
            "sqlalchemy",
            "alembic",
            "pandas",  # of mlflow's Keras callback
            "ray[data,default,train]>=2.50,<3",
            "pyyaml",
            "gradio>=6.31,<7",
            "selenium",  # with Chromium from the system, for tests of the page
        ],
    },
)
