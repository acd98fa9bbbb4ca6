"""Every hyper-parameter once: type, default, help and check.

Each dataclass is one group. Flags, networks, `config.json` and the functions of programs take names, defaults, help
texts and checks from here. To add a hyper-parameter, add a line to its group, add an argument of the same name to the
constructor whose arguments the group describes, and use the argument there.

A group checks its values when it is created. An error names the argument, what was found and what is allowed:

    TrainingConfig(tgt_len=-3, ...)   # ParameterError: tgt_len must be at least 1, got -3
"""

from txl_config.checks import Config, already_checked, at_least, check_bins, check_fields, one_of, satisfies
from txl_config.cluster import ClusterConfig, TrainingClusterConfig
from txl_config.data import (
    COUNTED_LEVELS,
    DATASETS,
    LEVELS,
    MIN_FREQ,
    PAIR_DATASETS,
    PAIR_LEVELS,
    SUBWORD_TYPES,
    TAG_SCHEMES,
    ColumnsConfig,
    PairsConfig,
    TaggedConfig,
    TextConfig,
)
from txl_config.models import (
    ACTIVATIONS,
    ATTN_TYPES,
    FUSIONS,
    GATED_ACTIVATIONS,
    NORMS,
    POS_EMBEDS,
    POSITIONS,
    RESIDUALS,
    SCHEMES,
    TOKEN_LEVELS,
    BiLSTMConfig,
    BiLSTMTaggerConfig,
    DecoderConfig,
    EncoderConfig,
    FlatConfig,
    FlatTaggerConfig,
    LabelConfig,
    ModelConfig,
    NetworkConfig,
    SentenceConfig,
    SoftmaxConfig,
    TenerConfig,
    TenerTaggerConfig,
    TransformerConfig,
    TransformerLMConfig,
    check_position_count,
)
from txl_config.sampling import REPETITION_WINDOW, SamplingConfig
from txl_config.training import (
    AUTO,
    MATMUL_PRECISIONS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    STRATEGIES,
    WEIGHT_TYPES,
    EvaluationConfig,
    MachineConfig,
    OptimizerConfig,
    PairsTrainingConfig,
    RunConfig,
    ScoringConfig,
    SearchConfig,
    TaggerTrainingConfig,
    TrainingConfig,
)

__all__ = [
    "ACTIVATIONS", "ATTN_TYPES", "AUTO", "COUNTED_LEVELS", "DATASETS", "FUSIONS", "GATED_ACTIVATIONS", "LEVELS",
    "MATMUL_PRECISIONS", "MIN_FREQ", "NORMS", "OPTIMIZERS", "PAIR_DATASETS", "PAIR_LEVELS", "POSITIONS", "POS_EMBEDS",
    "PRECISIONS", "REPETITION_WINDOW", "RESIDUALS", "SCHEDULES", "SCHEMES", "STRATEGIES", "SUBWORD_TYPES",
    "TAG_SCHEMES", "TOKEN_LEVELS", "WEIGHT_TYPES",
    "BiLSTMConfig", "BiLSTMTaggerConfig", "ClusterConfig", "ColumnsConfig", "Config", "DecoderConfig", "EncoderConfig",
    "EvaluationConfig", "FlatConfig", "FlatTaggerConfig", "LabelConfig", "MachineConfig", "ModelConfig",
    "NetworkConfig", "OptimizerConfig", "PairsConfig", "PairsTrainingConfig", "RunConfig", "SamplingConfig",
    "ScoringConfig", "SearchConfig", "SentenceConfig", "SoftmaxConfig", "TaggedConfig", "TaggerTrainingConfig",
    "TenerConfig", "TenerTaggerConfig", "TextConfig", "TrainingClusterConfig", "TrainingConfig", "TransformerConfig",
    "TransformerLMConfig", "already_checked", "at_least", "check_bins", "check_fields", "check_position_count",
    "one_of", "satisfies",
]  # fmt: skip
