"""Every hyper-parameter once: type, default, help and check.

Each dataclass below is one group. Flags (`tools/program.py`), networks, `config.json` and the programs' functions take
names, defaults, help texts and checks from here. To add a hyper-parameter, add a line here and use it where it counts.

A group checks itself when it is made, and an error names the argument, what was found and what is allowed:

    TrainingConfig(tgt_len=-3, ...)   # ValueError: tgt_len must be at least 1, got -3
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from txl_tf.schema import brief, check_field

PAIR_DATASETS = ("text", "dates")
DATASETS = ("pydoc", "text", "enwik8", "text8", "ptb", "wt2", "wt103", "lm1b")
LEVELS = ("word", "char", "byte")
PAIR_LEVELS = ("word", "char")
OPTIMIZERS = ("adam", "adamw", "lamb")
SCHEDULES = ("cosine", "noam")
PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
STRATEGIES = ("auto", "one", "mirrored", "multi_worker", "tpu")


# ----------------------------------------------------------------------------------------------------------- checks


def at_least(least: int, most: int | None = None) -> Callable:
    """A check for integers: `least` or more, and not above `most`."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if most is not None and value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")

    return check


# No model comes near these. They keep a wrong number in a file from taking all memory.
_layers, _width, _symbols = at_least(1, 10_000), at_least(1, 1 << 18), at_least(1, (1 << 31) - 1)
_length = at_least(1, 1 << 20)
_memory = at_least(0, 1 << 20)


def one_of(choices: Iterable[str]) -> Callable:
    """A check for strings, whose `choices` a flag takes, too."""

    def check(name: str, value: Any) -> None:
        if value not in list(choices):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {brief(value)}")

    check.choices = list(choices)
    return check


def satisfies(test: Callable, what: str) -> Callable:
    """A check by a `test` of the value. The error says: name must `what`, got value."""

    def check(name: str, value: Any) -> None:
        if not test(value):
            raise ValueError(f"{name} must {what}, got {list(value) if isinstance(value, tuple) else value}")

    return check


_rate = satisfies(lambda value: 0 <= value < 1, "lie in [0, 1)")
_share = satisfies(lambda value: 0 <= value <= 1, "lie in [0, 1]")
_fraction = satisfies(lambda value: 0 < value < 1, "be between 0 and 1, both excluded")
_positive = satisfies(lambda value: value > 0, "be positive")
_even = satisfies(lambda value: value % 2 == 0, "be even (half sines, half cosines)")
_rising = satisfies(
    lambda value: list(value) == sorted(set(value)) and min(value, default=1) >= 1, "be positive and rise"
)


def _even_size(name: str, value: int) -> None:
    _width(name, value)
    _even(name, value)


def check_bins(n_token: int, d_embed: int, cutoffs: Iterable[int], div_val: int) -> None:
    """Raises ValueError unless `cutoffs` and `div_val` give bins of at least one word and one dimension."""
    at_least(1)("n_token", n_token)
    at_least(1)("div_val", div_val)
    if not all(isinstance(cutoff, numbers.Integral) for cutoff in cutoffs):
        raise ValueError(f"cutoffs must be integers, got {list(cutoffs)}")
    ends = [0, *cutoffs, n_token]
    if any(left >= right for left, right in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"cutoffs must increase and lie between 0 and n_token={n_token}, got {list(cutoffs)}")
    last = len(ends) - 2
    if d_embed // div_val**last < 1:
        raise ValueError(
            f"div_val={div_val} divides d_embed={d_embed} down to width 0 in bin {last} of {last + 1}: "
            f"d_embed must be at least {div_val**last}, or div_val smaller"
        )


# ----------------------------------------------------------------------------------------------------------- groups

_REQUIRED = dataclasses.MISSING
_group = dataclasses.dataclass(frozen=True, kw_only=True)


def _option(default: Any = _REQUIRED, help: str = "", check: Callable | None = None, flag: Any = _REQUIRED) -> Any:
    """A hyper-parameter: its default (else it is required), the flag's help text, a check that is called with name and
    value (but not for a default of `None`), and the flag's default where the original program has another.
    """
    flag = (None if default is _REQUIRED else default) if flag is _REQUIRED else flag
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "flag": flag})


def check_fields(group: type[Config], values: Any) -> None:
    """Checks the attributes of `values`, such as a network, that have the names of the hyper-parameters of `group`."""
    for field in dataclasses.fields(group):
        check_field(field, group, getattr(values, field.name), field.name)


@_group
class Config:
    """A group of hyper-parameters."""

    def __post_init__(self) -> None:
        check_fields(type(self), self)

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    def to_dict(self) -> dict[str, Any]:
        """`{name: value}`, as `config.json` holds it."""
        return {name: getattr(self, name) for name in self.names()}


@_group
class NetworkConfig(Config):
    """Arguments of `TransformerXL`. Vocabulary and cutoffs are `None` and empty until the text is read."""

    n_token: int | None = _option(None, "Size of the vocabulary.", _symbols)
    cutoffs: list[int] = _option((), "First word of each bin but the first of the adaptive softmax.")
    n_layer: int = _option(flag=6, help="Layers.", check=_layers)
    d_model: int = _option(flag=500, help="Width of the hidden states.", check=_even_size)
    d_embed: int = _option(flag=500, help="Width of the embeddings.", check=_width)
    n_head: int = _option(flag=10, help="Attention heads.", check=_width)
    d_head: int = _option(flag=50, help="Width of a head.", check=_width)
    d_inner: int = _option(flag=1000, help="Width inside the feed-forward layers.", check=_width)
    dropout: float = _option(0.1, "Dropout rate.", _rate)
    dropatt: float = _option(0.0, "Dropout rate of the attention probabilities.", _rate, flag=0.1)
    mem_len: int = _option(0, "Positions of memory.", _memory, flag=70)
    same_length: bool = _option(False, "Let every token attend to mem_len + 1 positions, not to all it can.")
    clamp_len: int = _option(-1, "Treat distances beyond it as clamp_len; -1 for no limit.")
    untie_r: bool = _option(False, "Give every layer its own r_w_bias and r_r_bias.")
    div_val: int = _option(1, "Divide the width of the embeddings by it from bin to bin.", at_least(1))
    proj_same_dim: bool = _option(True, "Project a bin as wide as d_model too.")
    init: str = _option("normal", "How weights are initialised.", one_of(("normal", "uniform")))
    init_std: float = _option(0.02, "Standard deviation where init is normal.")
    proj_init_std: float = _option(0.01, "Standard deviation of the projections where init is normal.")
    init_range: float = _option(0.1, "Range where init is uniform.")


@_group
class ModelConfig(NetworkConfig):
    """Arguments of `TransformerXLLM`."""

    proj_share_all_but_first: bool = _option(False, "Share all projections of embedding and softmax but the first.")


@_group
class TransformerLMConfig(ModelConfig):
    """Arguments of `TransformerLM`: those of `TransformerXLLM`, without the two that are about distances."""

    mem_len: int = _option(0, "Positions of memory; with absolute positions, for comparison only.", _memory)
    context_len: int = _option(512, "Most tokens that generation has in view.", at_least(2, 1 << 20))

    clamp_len: ClassVar[int] = -1  # no fields any more
    untie_r: ClassVar[bool] = False


@_group
class TransformerConfig(Config):
    """Arguments of `Transformer`. The vocabularies are `None` until the text is read."""

    input_vocab_size: int | None = _option(None, "Symbols of the source, padding included.", _symbols)
    target_vocab_size: int | None = _option(None, "Symbols of the target.", _symbols)
    num_layers: int = _option(flag=6, help="Layers of the encoder, and of the decoder.", check=_layers)
    d_model: int = _option(flag=512, help="Width of the hidden states.", check=_even_size)
    num_heads: int = _option(flag=8, help="Attention heads.", check=_width)
    dff: int = _option(flag=2048, help="Width inside the feed-forward nets.", check=_width)
    max_len: int = _option(1000, "Most symbols of a source or of a target.", _length)
    rate: float = _option(0.1, "Dropout rate.", _rate)
    norm_first: bool = _option(False, "Normalise before every sublayer, not after it.")
    share_embeddings: bool = _option(False, "One table for source, target and softmax.")
    label_smoothing: float = _option(0.0, "Share of the probability that the loss gives to all symbols alike.", _rate)
    dropatt: float = _option(0.0, "Dropout rate of the attention weights.", _rate)
    dropact: float = _option(0.0, "Dropout rate after the relu.", _rate)


@_group
class TextConfig(Config):
    """What text is read, and how it becomes tokens: arguments of `build_corpus`."""

    dataset: str | None = _option(None, "The text: your own (text), Python's manual (pydoc), ...", one_of(DATASETS))
    data_path: list[str] | str | None = _option(None, "Its UTF-8 file(s), or the folder of a paper's dataset.")
    level: str = _option("char", "What a token of your own text is.", one_of(LEVELS))
    valid_fraction: float = _option(0.05, "Share of your own text, at its end, held out for validation.", _fraction)
    min_freq: int = _option(0, "Symbols of your own text that are rarer become <unk>.")
    max_size: int | None = _option(None, "Most frequent symbols of your own text to keep; others are <unk>.")
    lower_case: bool = _option(False, "Lower-case your own text.")
    cutoffs: list[int] | None = _option(None, "First word of each softmax bin but the first, as 20000,40000.", _rising)
    num_shuffle: int = _option(1, "For lm1b: random orders of the sentences to write.", _positive, flag=4)
    seed: int = _option(123456, "For lm1b: seed of the random orders.")


@_group
class PairsConfig(Config):
    """What pairs of lines are read, and how they become tokens: arguments of `read_pairs`."""

    dataset: str | None = _option(None, "The pairs: your own (text), or made-up dates (dates).", one_of(PAIR_DATASETS))
    train_path: list[str] | str | None = _option(
        None, "A file of source<TAB>target lines, or two files: SOURCE,TARGET."
    )
    valid_path: list[str] | str | None = _option(None, "As train_path, to validate on; default: valid_fraction of it.")
    test_path: list[str] | str | None = _option(None, "As train_path, to test on.")
    valid_fraction: float = _option(0.05, "Share of the sources held out where there is no valid_path.", _fraction)
    source_level: str = _option(
        "char", "What a symbol of a source is: what white space parts, or a character.", one_of(PAIR_LEVELS)
    )
    target_level: str = _option("char", "What a symbol of a target is.", one_of(PAIR_LEVELS))
    source_symbols: str | None = _option(
        None, "File of the source's symbols, one a line; default: those of train_path."
    )
    target_symbols: str | None = _option(None, "File of the target's symbols.")
    share_vocab: bool = _option(False, "One vocabulary for both sides, as share_embeddings needs it.")
    min_freq: int = _option(0, "Symbols that are rarer become <unk>.")
    max_size: int | None = _option(None, "Most frequent symbols of a side to keep; others are <unk>.")
    lower_case: bool = _option(False, "Lower-case the sources, and with share_vocab the targets.")
    n_pairs: int = _option(20000, "For dates: pairs to make for training.", at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = (self.source_level, self.source_symbols), (self.target_level, self.target_symbols)
        if self.share_vocab and sides[0] != sides[1]:
            raise ValueError(
                f"share_vocab needs the same level and symbols on both sides, got {sides[0]} and {sides[1]}"
            )


@_group
class OptimizerConfig(Config):
    """Arguments of `make_optimizer`, but for the number of steps."""

    learning_rate: float = _option(2.5e-4, "Highest learning rate.", _positive)
    clip: float | None = _option(0.25, "Largest global norm of the gradients.")
    schedule: str = _option("cosine", "How the rate falls; noam: with the square root of the step.", one_of(SCHEDULES))
    min_lr_ratio: float = _option(0.004, "Last learning rate of the cosine as a share of the highest.", _share)
    warmup_steps: int = _option(0, "Steps of linear warm-up.")
    optimizer: str = _option("adam", "adam is the original's.", one_of(OPTIMIZERS))
    beta_2: float = _option(0.999, "Momentum of the squared gradients.", _rate)
    weight_decay: float = _option(0.0, "Weight decay of adamw and lamb.")
    ema: float = _option(0.0, "Momentum of a moving average of the weights, which is evaluated; 0 for none.", _rate)

    def __post_init__(self) -> None:
        super().__post_init__()
        decay, optimizer = self.weight_decay, self.optimizer
        if not decay >= 0 or (decay and optimizer == "adam"):
            raise ValueError(f"weight_decay must be 0 or more, and 0 for adam, got {decay} for {optimizer}")


@_group
class RunConfig(Config):
    """How a run of any model is trained."""

    train_steps: int = _option(100000, "Training steps in all, those of earlier sessions included.", at_least(1))
    iterations: int = _option(500, "Steps between two lines of progress, and of log.csv.", at_least(1))
    save_steps: int = _option(10000, "Steps between two checkpoints, each with a validation.", at_least(1))
    max_to_keep: int = _option(5, "Checkpoints to keep.", at_least(1))
    warm_start_path: str | None = _option(None, "Checkpoint, also of the original, to start a new run from.")
    allow_other_text: bool = _option(False, "Go on with a run though its text has changed; not so its vocabulary.")
    steps_per_execution: int = _option(1, "Steps in one call of the compiled graph.", at_least(1))
    jit_compile: bool = _option(False, "Compile the training step with XLA.")
    seed: int = _option(0, "Seed of the initial weights and of dropout.")

    def __post_init__(self) -> None:
        super().__post_init__()
        k = self.steps_per_execution
        for name, steps in {"train_steps": self.train_steps, "iterations": self.iterations}.items():
            if steps % k:
                raise ValueError(f"steps_per_execution={k} must divide {name}={steps}")


@_group
class TrainingConfig(RunConfig):
    """How a run of a language model is trained."""

    tgt_len: int = _option(70, "Tokens of a segment.", _length)
    train_batch_size: int = _option(60, "Rows of a training batch, over all devices.", at_least(1))
    sample_tokens: int = _option(0, "Tokens of text to write in the end of training, to see what it learned.")
    gradient_accumulation_steps: int = _option(1, "Parts of a batch to compute one after the other.", at_least(1))
    recompute: bool = _option(False, "Compute the layers again in the backward pass: less memory, more time.")
    static_shapes: bool | None = _option(
        None, "Fixed shapes; rare words beyond their bins' capacity do not count. Default: on TPUs."
    )


@_group
class PairsTrainingConfig(RunConfig):
    """How a run of an encoder-decoder is trained."""

    batch_size: int = _option(64, "Most pairs of a batch, over all devices.", at_least(1))
    batch_tokens: int | None = _option(None, "Most symbols of a batch, padding and both sides counted.", at_least(1))
    eval_sources: int = _option(2000, "Sources of valid and of test to translate at the end; -1 for all.")


@_group
class SearchConfig(Config):
    """How targets are looked for: arguments of `Translator`."""

    beam_size: int = _option(1, "Hypotheses to follow; 1 takes the likeliest symbol every time.", at_least(1, 1000))
    n_best: int = _option(1, "Targets to return for a source, the best first.", at_least(1, 1000))
    length_penalty: float = _option(0.6, "Scores of a search are divided by ((5 + length) / 6)**length_penalty.")
    max_new_tokens: int | None = _option(
        None, "Most symbols of a target; default: 50 more than its source has.", _length
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_best > self.beam_size:
            raise ValueError(f"n_best must be at most beam_size={self.beam_size}, got {self.n_best}")


@_group
class EvaluationConfig(Config):
    """What is evaluated, and how. `None` stands for what the run was trained with."""

    tgt_len: int | None = _option(None, "Tokens of a segment.", _length)
    eval_batch_size: int | None = _option(
        None, "Rows of an evaluation batch; without training: the run's.", at_least(1), flag=60
    )
    eval_split: str = _option("valid", "Split to evaluate: train, valid or test.")
    eval_path: str | None = _option(None, "Text file to evaluate instead of a split, in the vocabulary of the run.")
    eval_ckpt_path: str | None = _option(None, "Checkpoint to evaluate, rather than the latest: a path, or best.")
    max_eval_batch: int = _option(-1, "Batches to evaluate; -1 for all.")
    sliding_window: int | None = _option(
        None, "Predict every token from a window of so many tokens before it, which is read again for each.", _length
    )
    sliding_step: int = _option(1, "Tokens to predict from each sliding window.", at_least(1))
    token_nll: str | None = _option(None, "File to write every token and its nll to, row by row.")
    do_eval: bool = _option(False, "Evaluate eval_split, after training if that is done too.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.sliding_step > self.sliding_window:
            raise ValueError(
                f"sliding_step must be at most sliding_window={self.sliding_window}, got {self.sliding_step}"
            )


@_group
class MachineConfig(Config):
    """Where a run is trained or evaluated: arguments of `make_strategy`, and the type of the products."""

    strategy: str = _option("auto", "Devices to use; auto takes all GPUs there are.", one_of(STRATEGIES))
    tpu: str | None = _option(None, "Name or grpc:// address of the TPU, or local; with --strategy=tpu.")
    tpu_zone: str | None = _option(None, "Zone of the TPU, if it is another than this machine's.")
    gcp_project: str | None = _option(None, "Project of the TPU, if it is another than this machine's.")
    logical_cpus: int | None = _option(
        None, "Logical CPU devices to create, to try mirrored without GPUs.", at_least(1)
    )
    mixed_precision: str = _option("float32", "Type of the products.", one_of(PRECISIONS))

    @property
    def devices(self) -> tuple:
        """Arguments of `make_strategy`."""
        return self.strategy, self.tpu, self.tpu_zone, self.gcp_project, self.logical_cpus

    @property
    def dtype_policy(self) -> str:
        """Keras's name of `mixed_precision`."""
        return PRECISIONS[self.mixed_precision]
