"""What a run needs of a model that Keras's own `fit` trains: to stop after a step, and to go on exactly from there."""

from __future__ import annotations

import keras
import numpy as np


class Resumable:
    """Mixin for Keras models without state between batches; `MemoryModel` has the same of its own.

    Attributes:
        stop_requested: set it, as from a signal handler, to stop `fit` after the step that runs.
    """

    stop_requested = False
    carried_names = ()  # keys of `carried_arrays`

    @property
    def stop_agreed(self) -> bool:
        return self.stop_requested

    @property
    def metric_totals(self) -> np.ndarray:
        """float64 array, the sums that the logs of this epoch are computed from."""
        return np.array([keras.ops.convert_to_numpy(variable) for variable in self._sums], np.float64)

    def set_metric_totals(self, array: np.ndarray) -> None:
        """Goes on with sums from `metric_totals`. Call it once an epoch has begun, from a callback."""
        for variable, value in zip(self._sums, array, strict=True):
            variable.assign(value)

    @property
    def _sums(self) -> list[keras.Variable]:
        return [variable for metric in self.metrics for variable in metric.variables]

    def carried_arrays(self) -> dict[str, np.ndarray]:
        """What goes from batch to batch besides weights and optimizer, for a checkpoint: nothing."""
        return {}

    def set_carried_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Goes on with arrays from `carried_arrays`."""
