"""Options of sampling: how the next token of a text is drawn from the probabilities of a language model."""

from __future__ import annotations

import dataclasses

from txl_config.checks import Config, group, option, satisfies
from txl_config.errors import ParameterError

REPETITION_WINDOW = 64  # default number of tokens that `repetition_penalty` looks back at
LONGEST_WINDOW = 2**30 - 1  # the largest `repetition_window`


@group
class SamplingConfig(Config):
    """Options of sampling, see `generate`. With the defaults, the probabilities are those of the model.

    In programs and in `generate`, the default of most options is `None`. Here, `None` becomes the number that has the
    same meaning. The tests of the checks take numbers and tensors. Up to 1e30, the products of log-probabilities with
    these numbers do not overflow in float32.
    """

    temperature: float = option(
        "Sampling temperature. Less than 1: likely tokens become more likely. 0: always take the most likely token.",
        satisfies(lambda x: (x >= 0) & (x <= 1e30), "be 0 or more, at most 1e30"),
        default=1.0,
    )
    top_k: int = option(
        "Sample only from this many most likely tokens.",
        satisfies(lambda x: (x >= 0) & (x <= 2**31 - 1), "be an integer from 1 to 2147483647, or 0 for all"),
        default=0,
        flag=None,
    )
    top_p: float = option(
        "Sample only from the most likely tokens that together have this probability.",
        satisfies(lambda x: (x > 0) & (x <= 1), "lie in (0, 1]"),
        default=1.0,
        flag=None,
    )
    min_p: float = option(
        "Sample only from tokens whose probability is at least min_p times that of the most likely token.",
        satisfies(lambda x: (x >= 0) & (x < 1), "lie in [0, 1)"),
        default=0.0,
        flag=None,
    )
    repetition_penalty: float = option(
        "More than 1: recent tokens of the prompt and of the text become less likely.",
        satisfies(lambda x: (x > 0) & (x <= 1e30), "be positive, at most 1e30"),
        default=1.0,
        flag=None,
    )
    repetition_window: int = option(
        "Number of recent tokens that repetition_penalty applies to.",
        satisfies(lambda x: (x >= 1) & (x <= LONGEST_WINDOW), "be an integer from 1 to 1073741823"),
        default=REPETITION_WINDOW,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.metadata["flag"] is None and getattr(self, field.name) is None:
                object.__setattr__(self, field.name, field.default)  # the class is frozen
        super().__post_init__()

    def check_used(self) -> None:
        """Raises ParameterError if an option of a text has no effect because of another one."""
        if self.repetition_window != REPETITION_WINDOW and self.repetition_penalty == 1:
            allowed = "left out without a repetition_penalty other than 1"
            raise ParameterError("repetition_window", self.repetition_window, allowed)
