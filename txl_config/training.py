"""Hyper-parameters of optimizer, training, search, evaluation and machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from txl_config.checks import (
    COUNT_OR_ALL,
    LENGTH,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    SHARE,
    Config,
    at_least,
    check_parallel_parts,
    group,
    not_empty,
    one_of,
    option,
)
from txl_config.errors import ParameterError
from txl_config.schema import check_left_out

OPTIMIZERS = ("adam", "adamw", "lamb", "sgd", "muon")
SCHEDULES = ("cosine", "noam", "linear", "constant")
PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
MATMUL_PRECISIONS = ("float32", "bfloat16")
AUTO = "auto"  # depends on the machine, see `choose_precision`
TRACKERS = ("none", "wandb", "mlflow")
WEIGHT_TYPES = ("float32", "float16", "bfloat16")  # types of the stored weights of a served model
STRATEGIES = ("auto", "one", "mirrored", "multi_worker", "tpu")


@group
class OptimizerConfig(Config):
    """Arguments of `make_optimizer`, without the number of steps."""

    learning_rate: float = option("Highest learning rate.", POSITIVE, default=2.5e-4)
    clip: float | None = option("Largest global norm of the gradients.", default=0.25)
    clip_value: float | None = option("Largest absolute value in the gradients.", default=None)
    schedule: str = option(
        "Learning rate schedule; noam: it falls as 1 over the square root of the step.",
        one_of(SCHEDULES),
        default="cosine",
    )
    min_lr_ratio: float = option(
        "Last learning rate of the cosine schedule as a fraction of the highest.", SHARE, default=0.004
    )
    warmup_steps: int = option("Steps of linear warm-up.", default=0)
    optimizer: str = option("Optimizer; the original has adam.", one_of(OPTIMIZERS), default="adam")
    beta_2: float = option("Momentum of the squared gradients.", RATE, default=0.999)
    momentum: float = option("Momentum of sgd, in PyTorch's form.", RATE, default=0.9)
    weight_decay: float = option("Weight decay of adamw, lamb and muon.", default=0.0)
    ema: float = option(
        "Momentum of the moving average of the weights that is evaluated; 0 for no average.", RATE, default=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        decay = self.weight_decay
        if not 0 <= decay < float("inf") or (decay and self.optimizer in ("adam", "sgd")):
            allowed = "0 or more, and 0 for adam and sgd"
            message = f"weight_decay must be {allowed}, got {decay} for {self.optimizer}"
            raise ParameterError("weight_decay", decay, allowed, message)
        for name, why in self.unused(self.optimizer, self.schedule).items():
            if getattr(self, name) != getattr(OptimizerConfig, name):
                check_left_out({name: getattr(self, name)}, why)

    @staticmethod
    def unused(optimizer: str, schedule: str) -> dict[str, str]:
        """Returns `{name: why}` of the hyper-parameters without effect on this optimizer and this schedule."""
        unused: dict[str, str] = {}
        if optimizer == "sgd":
            unused["beta_2"] = "optimizer=sgd has no squared gradients"
        else:
            unused["momentum"] = f"it is for optimizer=sgd, not {optimizer}"
        if schedule != "cosine":
            unused["min_lr_ratio"] = f"it is for schedule=cosine, not {schedule}"
        return unused


@group
class RunConfig(Config):
    """How a run of any model is trained."""

    train_steps: int = option("Total training steps, including earlier sessions.", at_least(1), default=100000)
    iterations: int = option("Steps between two lines of progress, and of log.csv.", at_least(1), default=500)
    save_steps: int = option(
        "Steps between two checkpoints. A validation follows at the next line of log.csv.", at_least(1), default=10000
    )
    patience: int | None = option(
        "Stop after this many steps without a better validation, of the loss or, of taggers, F1.",
        at_least(1),
        default=None,
    )
    max_to_keep: int = option("Checkpoints to keep.", at_least(1), default=5)
    init_from: str | None = option(
        "Folder of a run whose model, vocabulary and weights the new run takes. Flags change the rest.",
        not_empty,
        default=None,
    )
    extend_vocab: bool = option(
        "With init_from: add the symbols of the new text that its vocabulary lacks to the end of the vocabulary.",
        default=False,
    )
    warm_start_path: str | None = option(
        "Checkpoint of this or the original program to start a new run from.", not_empty, default=None
    )
    allow_other_text: bool = option("Resume even if the text has changed; the vocabulary must match.", default=False)
    steps_per_execution: int | None = option(
        "Steps in one call of the compiled graph. Default: 1; on TPUs at most 20.", at_least(1), default=None
    )
    jit_compile: bool = option("Compile the training step with XLA.", default=False)
    seed: int = option("Seed of the initial weights, of dropout and of random orders.", default=0)
    freeze: Sequence[str] | None = option(
        "Names of layers whose weights stay as they are, or patterns such as layer_*.", default=None
    )
    tracker: str = option(
        "Package that tracks the run, in addition to log.csv and TensorBoard.", one_of(TRACKERS), default="none"
    )
    tracker_project: str | None = option(
        "wandb's project or mlflow's experiment. Default: from their environment variables, or else txl_tf.",
        not_empty,
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extend_vocab and not self.init_from:
            message = "extend_vocab needs init_from: it extends the vocabulary of another run"
            raise ParameterError("extend_vocab", True, "left out without init_from", message)
        together = self.steps_per_execution  # a call of this many steps must not go beyond an interval or the last step
        for name, steps in {"train_steps": self.train_steps, "iterations": self.iterations}.items():
            if together is not None and steps % together:
                message = f"steps_per_execution={together} must divide {name}={steps}"
                raise ParameterError("steps_per_execution", together, f"a divisor of {name}={steps}", message)


@group
class TrainingConfig(RunConfig):
    """How a run of a language model is trained."""

    tgt_len: int = option("Tokens of a segment.", LENGTH, default=70)
    train_batch_size: int = option("Rows of a training batch, over all devices.", at_least(1), default=60)
    sample_tokens: int = option(
        "Tokens of a sample of text that is generated at every validation and at the end.",
        at_least(0, 100_000),
        default=0,
    )
    gradient_accumulation_steps: int = option("Parts of a batch, for gradient accumulation.", at_least(1), default=1)
    parallel_parts: int | None = option(
        "Parts of a batch that are computed at the same time. Default on CPUs: depends on cores and batch.",
        at_least(1),
        default=None,
    )
    shuffle_documents: bool = option(
        "Read the documents of the text in a new order every epoch, which depends on the seed.", default=False
    )
    reset_memory_at_documents: bool = option("Start every document with the memory of a new text.", default=False)
    recompute: bool = option("Gradient checkpointing: recompute layers in the backward pass.", default=False)
    static_shapes: bool | None = option(
        "Fixed shapes; rare words above the capacity of their clusters are not counted. Default: on TPUs.", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parallel_parts(self.parallel_parts, self.static_shapes, self.jit_compile)


@group
class PairsTrainingConfig(RunConfig):
    """How a run of an encoder-decoder is trained."""

    batch_size: int = option("Most pairs of a batch, over all devices.", at_least(1), default=64)
    batch_tokens: int | None = option("Most tokens of a batch, with padding and both sides.", at_least(1), default=None)
    eval_sources: int = option(
        "Sources of valid and of test to translate at the end; -1 for all.", at_least(-1), default=2000
    )


@group
class TaggerTrainingConfig(RunConfig):
    """How a run of a tagger is trained."""

    batch_size: int = option("Sentences of a batch, over all devices.", at_least(1), default=16)


@group
class SearchConfig(Config):
    """Settings of beam search: arguments of `Translator`."""

    beam_size: int = option(
        "Hypotheses of the search; 1 always takes the most likely token.", at_least(1, 1000), default=1
    )
    n_best: int = option("Targets to return for each source, the best first.", at_least(1, 1000), default=1)
    length_penalty: float = option(
        "Scores of a search are divided by ((5 + length) / 6)**length_penalty.", NOT_NEGATIVE, default=0.6
    )
    max_new_tokens: int | None = option(
        "Most tokens of a target; default: depends on the lengths of the training targets.", LENGTH, default=None
    )
    allow_special: bool = option("Let targets contain the symbols <unk> and <s>.", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_best > self.beam_size:
            raise ParameterError("n_best", self.n_best, f"at most beam_size={self.beam_size}")


@group
class EvaluationConfig(Config):
    """How a language model is evaluated.

    If `tgt_len`, `eval_batch_size` or `reset_memory_at_documents` is `None`, the value of the run is used.
    """

    tgt_len: int | None = option("Tokens of a segment.", LENGTH, default=None)
    eval_batch_size: int | None = option(
        "Rows of an evaluation batch; without training: as in the run.",
        at_least(1),
        default=None,
        flag=TrainingConfig.train_batch_size,
    )
    eval_split: str = option("Split to evaluate: train, valid or test.", default="valid")
    eval_path: str | None = option(
        "Text file to evaluate instead of a split, in the vocabulary of the run.", not_empty, default=None
    )
    eval_ckpt_path: str | None = option(
        "Checkpoint to evaluate: a path, a name, best or latest; default: the latest.", not_empty, default=None
    )
    max_eval_batch: int = option("Batches to evaluate; -1 for all.", COUNT_OR_ALL, default=-1)
    sliding_window: int | None = option(
        "Predict every token from a window of this many tokens before it, which is read again for each token.",
        LENGTH,
        default=None,
    )
    sliding_step: int = option("Tokens to predict from each sliding window.", at_least(1), default=1)
    token_nll: str | None = option("File for every token and its nll, row by row.", not_empty, default=None)
    reset_memory_at_documents: bool | None = option(
        "Start every document with the memory of a new text; without training: as in the run.", default=None, flag=False
    )
    parallel_parts: int | None = option(
        "Parts of a batch that are computed at the same time. Default on CPUs: depends on cores and batch.",
        at_least(1),
        default=None,
    )
    do_eval: bool = option("Evaluate eval_split, after the training if there is one.", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is None and self.sliding_step != 1:
            message = f"sliding_step is for a sliding_window, which is not given, got {self.sliding_step}"
            raise ParameterError("sliding_step", self.sliding_step, "left out without sliding_window", message)
        if self.sliding_window is not None and self.sliding_step > self.sliding_window:
            raise ParameterError("sliding_step", self.sliding_step, f"at most sliding_window={self.sliding_window}")


@group
class ScoringConfig(Config):
    """How lines of text are scored: arguments of `Scorer`."""

    start: str | None = option(
        "Text before each line; none: its first token is not scored. Default: the end of a document or of a line.",
        default=None,
    )
    score_end: bool = option("Also score the newline at the end of a line.", default=True)
    carry_memory: bool = option("Read the lines as one text: the memory continues from line to line.", default=False)
    continuations: bool = option(
        "Each line is a context, a tab and a continuation: score the continuation alone.", default=False
    )
    segment: int | None = option(
        "Most tokens to read at a time; default: 512, or context_len for the vanilla language model.",
        LENGTH,
        default=None,
    )
    batch_tokens: int = option("Tokens of a batch of lines, with padding.", at_least(1), default=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.continuations and self.carry_memory:
            raise ParameterError("continuations", True, "left out with carry_memory")
        if self.carry_memory and self.batch_tokens != ScoringConfig.batch_tokens:
            raise ParameterError("batch_tokens", self.batch_tokens, "left out with carry_memory: the text is one row")


@group
class MachineConfig(Config):
    """Devices for training or evaluation: arguments of `make_strategy`, and the type of matrix products."""

    strategy: str = option(
        "Devices to use; auto takes all GPUs of all machines in TF_CONFIG.",
        one_of(STRATEGIES),
        default="auto",
    )
    tpu: str | None = option(
        "Name or grpc:// address of the TPU, or local; with --strategy=tpu.", not_empty, default=None
    )
    tpu_zone: str | None = option("Zone of the TPU, if it is another than this machine's.", not_empty, default=None)
    gcp_project: str | None = option(
        "Project of the TPU, if it is another than this machine's.", not_empty, default=None
    )
    logical_cpus: int | None = option(
        "Logical CPU devices to create, to try several devices without GPUs.", at_least(1, 1024), default=None
    )
    mixed_precision: str = option(
        "Type of matrix products; auto: depends on the machine.", one_of((*PRECISIONS, AUTO)), default="float32"
    )
    matmul_precision: str = option(
        "Round the factors of float32 products to this type; on CPUs with AMX.",
        one_of(MATMUL_PRECISIONS),
        default="float32",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matmul_precision != "float32" and self.mixed_precision != "float32":
            allowed = f"float32 for mixed_precision={self.mixed_precision}"
            raise ParameterError("matmul_precision", self.matmul_precision, allowed)

    @property
    def strategy_arguments(self) -> dict[str, Any]:
        """Arguments of `make_strategy`."""
        return {
            "strategy": self.strategy,
            "tpu": self.tpu,
            "tpu_zone": self.tpu_zone,
            "gcp_project": self.gcp_project,
            "logical_cpus": self.logical_cpus,
        }

    @property
    def type_name(self) -> str:
        """The type of the computation, for messages: that of `mixed_precision`, such as "bfloat16".

        It is "float32, products of bfloat16" if `matmul_precision` rounds the factors of products.
        """
        if self.matmul_precision == "float32":
            return self.mixed_precision
        return f"{self.mixed_precision}, products of {self.matmul_precision}"

    @property
    def dtype_policy(self) -> str:
        """Keras's name for `mixed_precision`, which must not be "auto": see `choose_precision`."""
        return PRECISIONS[self.mixed_precision]
