"""Optimizer, training, search, evaluation and machine."""

from __future__ import annotations

from txl_tf.config.checks import (
    COUNT_OR_ALL,
    LENGTH,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    SHARE,
    Config,
    at_least,
    group,
    not_empty,
    one_of,
    option,
)
from txl_tf.errors import ParameterError

OPTIMIZERS = ("adam", "adamw", "lamb", "sgd")
SCHEDULES = ("cosine", "noam", "linear", "constant")
PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
MATMUL_PRECISIONS = ("float32", "bfloat16")
AUTO = "auto"  # the machine decides, see `choose_precision`
TRACKERS = ("none", "wandb", "mlflow")
WEIGHT_TYPES = ("float32", "float16", "bfloat16")  # that a served model is stored in
REPETITION_WINDOW = 64  # tokens that `repetition_penalty` is for, unless told otherwise
STRATEGIES = ("auto", "one", "mirrored", "multi_worker", "tpu")


@group
class OptimizerConfig(Config):
    """Arguments of `make_optimizer`, but for the number of steps."""

    learning_rate: float = option(2.5e-4, "Highest learning rate.", POSITIVE)
    clip: float | None = option(0.25, "Largest global norm of the gradients.")
    clip_value: float | None = option(None, "Largest absolute value in the gradients.")
    schedule: str = option("cosine", "How the rate falls; noam: with the square root of the step.", one_of(SCHEDULES))
    min_lr_ratio: float = option(0.004, "Last learning rate of the cosine as a share of the highest.", SHARE)
    warmup_steps: int = option(0, "Steps of linear warm-up.")
    optimizer: str = option("adam", "adam is the original's.", one_of(OPTIMIZERS))
    beta_2: float = option(0.999, "Momentum of the squared gradients.", RATE)
    momentum: float = option(0.9, "Momentum of sgd, in PyTorch's form.", RATE)
    weight_decay: float = option(0.0, "Weight decay of adamw and lamb.")
    ema: float = option(0.0, "Momentum of a moving average of the weights, which is evaluated; 0 for none.", RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        decay, optimizer = self.weight_decay, self.optimizer
        if not 0 <= decay < float("inf") or (decay and optimizer in ("adam", "sgd")):
            raise ValueError(f"weight_decay must be 0 or more, and 0 for adam and sgd, got {decay} for {optimizer}")


@group
class RunConfig(Config):
    """How a run of any model is trained."""

    train_steps: int = option(100000, "Training steps in all, earlier sessions included.", at_least(1))
    iterations: int = option(500, "Steps between two lines of progress, and of log.csv.", at_least(1))
    save_steps: int = option(10000, "Steps between two checkpoints, each with a validation.", at_least(1))
    max_to_keep: int = option(5, "Checkpoints to keep.", at_least(1))
    init_from: str | None = option(
        None,
        "Folder of a run to start a new one from: with its model, vocabulary and weights. Flags change the rest.",
        not_empty,
    )
    extend_vocab: bool = option(
        False, "With init_from: give symbols of the new text that its vocabulary lacks rows of their own, at its end."
    )
    warm_start_path: str | None = option(None, "Checkpoint, also of the original, to start a new run from.", not_empty)
    allow_other_text: bool = option(False, "Resume even if the text changed; the vocabulary must match.")
    steps_per_execution: int | None = option(
        None, "Steps in one call of the compiled graph. Default: 1; on TPUs 20 at most.", at_least(1)
    )
    jit_compile: bool = option(False, "Compile the training step with XLA.")
    seed: int = option(0, "Seed of the initial weights and of dropout.")
    tracker: str = option("none", "Package that tracks the run, besides log.csv and TensorBoard.", one_of(TRACKERS))
    tracker_project: str | None = option(
        None,
        "wandb's project or mlflow's experiment. Default: as their environment variables say, or txl_tf.",
        not_empty,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extend_vocab and not self.init_from:
            message = "extend_vocab needs init_from: it extends the vocabulary of another run"
            raise ParameterError("extend_vocab", True, "left out without init_from", message)
        k = self.steps_per_execution
        for name, steps in {"train_steps": self.train_steps, "iterations": self.iterations}.items():
            if k is not None and steps % k:
                raise ValueError(f"steps_per_execution={k} must divide {name}={steps}")


@group
class TrainingConfig(RunConfig):
    """How a run of a language model is trained."""

    tgt_len: int = option(70, "Tokens of a segment.", LENGTH)
    train_batch_size: int = option(60, "Rows of a training batch, over all devices.", at_least(1))
    sample_tokens: int = option(
        0, "Tokens of a sample of text, written at every validation and in the end.", at_least(0, 100_000)
    )
    gradient_accumulation_steps: int = option(1, "Parts of a batch, for gradient accumulation.", at_least(1))
    shuffle_documents: bool = option(False, "Read the documents of the text in a new order every epoch, by the seed.")
    reset_memory_at_documents: bool = option(False, "Start every document with the memory of a new text.")
    recompute: bool = option(False, "Gradient checkpointing: compute layers again in the backward pass.")
    static_shapes: bool | None = option(
        None, "Fixed shapes; rare words beyond the capacity of their clusters do not count. Default: on TPUs."
    )


@group
class PairsTrainingConfig(RunConfig):
    """How a run of an encoder-decoder is trained."""

    batch_size: int = option(64, "Most pairs of a batch, over all devices.", at_least(1))
    batch_tokens: int | None = option(None, "Most tokens of a batch, padding and both sides counted.", at_least(1))
    eval_sources: int = option(2000, "Sources of valid and of test to translate at the end; -1 for all.", at_least(-1))


@group
class TaggerTrainingConfig(RunConfig):
    """How a run of a tagger is trained."""

    batch_size: int = option(16, "Sentences of a batch, over all devices.", at_least(1))
    patience: int | None = option(None, "Stop after so many steps without a better F1.", at_least(1))


@group
class SearchConfig(Config):
    """Settings of beam search: arguments of `Translator`."""

    beam_size: int = option(1, "Hypotheses to follow; 1 takes the likeliest token every time.", at_least(1, 1000))
    n_best: int = option(1, "Targets to return for a source, the best first.", at_least(1, 1000))
    length_penalty: float = option(
        0.6, "Scores of a search are divided by ((5 + length) / 6)**length_penalty.", NOT_NEGATIVE
    )
    max_new_tokens: int | None = option(
        None, "Most tokens of a target; default: by the lengths of the training's targets.", LENGTH
    )
    allow_special: bool = option(False, "Let targets contain the symbols <unk> and <s>.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_best > self.beam_size:
            raise ValueError(f"n_best must be at most beam_size={self.beam_size}, got {self.n_best}")


@group
class EvaluationConfig(Config):
    """Evaluation. `None` stands for what the run was trained with."""

    tgt_len: int | None = option(None, "Tokens of a segment.", LENGTH)
    eval_batch_size: int | None = option(
        None, "Rows of an evaluation batch; without training: the run's.", at_least(1), flag=60
    )
    eval_split: str = option("valid", "Split to evaluate: train, valid or test.")
    eval_path: str | None = option(
        None, "Text file to evaluate instead of a split, in the vocabulary of the run.", not_empty
    )
    eval_ckpt_path: str | None = option(
        None, "Checkpoint to evaluate: a path, a name, best or latest; default: the latest.", not_empty
    )
    max_eval_batch: int = option(-1, "Batches to evaluate; -1 for all.", COUNT_OR_ALL)
    sliding_window: int | None = option(
        None, "Predict every token from a window of so many tokens before it, which is read again for each.", LENGTH
    )
    sliding_step: int = option(1, "Tokens to predict from each sliding window.", at_least(1))
    token_nll: str | None = option(None, "File to write every token and its nll to, row by row.", not_empty)
    reset_memory_at_documents: bool | None = option(
        None, "Start every document with the memory of a new text; without training: as the run.", flag=False
    )
    do_eval: bool = option(False, "Evaluate eval_split, after training if that is done too.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.sliding_step > self.sliding_window:
            raise ValueError(
                f"sliding_step must be at most sliding_window={self.sliding_window}, got {self.sliding_step}"
            )


@group
class ScoringConfig(Config):
    """How lines of text are scored: arguments of `Scorer`."""

    start: str | None = option(
        None,
        "Text before each line; none: its first token is not scored. Default: the end of a document or of a line.",
    )
    score_end: bool = option(True, "Count the newline at the end of a line, too.")
    carry_memory: bool = option(False, "Read the lines as one text, the memory going on from line to line.")
    segment: int | None = option(
        None, "Most tokens to read at a time; default: 512, of the vanilla language model its context_len.", LENGTH
    )
    batch_tokens: int = option(1024, "Tokens of a batch of lines, padding counted.", at_least(1))


@group
class MachineConfig(Config):
    """Where a run is trained or evaluated: arguments of `make_strategy`, and the type of the products."""

    strategy: str = option(
        "auto", "Devices to use; auto takes all GPUs there are, of all machines in TF_CONFIG.", one_of(STRATEGIES)
    )
    tpu: str | None = option(None, "Name or grpc:// address of the TPU, or local; with --strategy=tpu.", not_empty)
    tpu_zone: str | None = option(None, "Zone of the TPU, if it is another than this machine's.", not_empty)
    gcp_project: str | None = option(None, "Project of the TPU, if it is another than this machine's.", not_empty)
    logical_cpus: int | None = option(
        None, "Logical CPU devices to create, to try mirrored without GPUs.", at_least(1, 1024)
    )
    mixed_precision: str = option("float32", "Type of the products; auto: the machine's.", one_of((*PRECISIONS, AUTO)))
    matmul_precision: str = option(
        "float32", "Round the factors of float32 products to this type; on CPUs with AMX.", one_of(MATMUL_PRECISIONS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matmul_precision != "float32" and self.mixed_precision != "float32":
            raise ValueError(
                f"matmul_precision={self.matmul_precision} is for mixed_precision=float32, got {self.mixed_precision}"
            )

    @property
    def devices(self) -> tuple:
        """Arguments of `make_strategy`."""
        return self.strategy, self.tpu, self.tpu_zone, self.gcp_project, self.logical_cpus

    @property
    def type_name(self) -> str:
        """The type of the products, for messages."""
        exact = self.matmul_precision == "float32"
        return self.mixed_precision if exact else f"{self.mixed_precision}, products of {self.matmul_precision}"

    @property
    def dtype_policy(self) -> str:
        """Keras's name of `mixed_precision`, which must not be "auto" any more."""
        return PRECISIONS[self.mixed_precision]
