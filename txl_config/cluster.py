"""The address of a Ray cluster, and the resources that a program takes from it."""

from __future__ import annotations

from typing import Any

from txl_config.checks import Config, at_least, group, not_empty, option
from txl_config.environment import is_address
from txl_config.errors import ParameterError
from txl_config.schema import added_later


@added_later
def cluster_address(name: str, value: Any) -> None:
    """A check: the address of a Ray cluster must be "auto", "local" or host:port."""
    not_empty(name, value)
    if value not in ("auto", "local") and not is_address(value):
        raise ParameterError(name, value, "auto, local or host:port")


@group
class ClusterConfig(Config):
    """Which Ray cluster a program runs on, and with how many workers, cores and GPUs: see docs/scale.md."""

    ray_address: str | None = option(
        "Ray cluster to run on: auto, host:port, or local, which starts one on this machine.",
        cluster_address,
        default=None,
    )
    ray_workers: int | None = option(
        "Workers to run on, each in its own process. Default: as many as the cluster has resources for.",
        at_least(1),
        default=None,
    )
    ray_cpus: int = option("Processor cores of a worker, as Ray counts them.", at_least(0), default=1)
    ray_gpus: int = option("GPUs of a worker.", at_least(0), default=0)

    @property
    def given(self) -> bool:
        """Whether the options ask for a cluster."""
        return bool(self.ray_address or self.ray_workers)

    @property
    def resources(self) -> dict[str, int]:
        """The resources of a worker, by the names that Ray gives them."""
        return {"CPU": self.ray_cpus, "GPU": self.ray_gpus}


@group
class TrainingClusterConfig(ClusterConfig):
    """A cluster to train on."""

    ray_workers: int | None = option("Workers to train on, each in its own process, on a Ray cluster.", default=None)
    ray_min_workers: int | None = option(
        "Fewest workers to train on when the cluster has no resources for ray_workers. Default: wait for them.",
        at_least(1),
        default=None,
    )
    ray_restarts: int = option("How many times lost workers may be replaced.", at_least(0), default=10)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A worker gets 0, because it starts no workers itself. So `ray_workers` is checked below, not in its `option`.
        if not self.ray_workers:
            if self.given or self.ray_min_workers:
                message = "ray_address and ray_min_workers go with ray_workers, the number of workers to train on"
                raise ParameterError("ray_workers", self.ray_workers, "the number of workers to train on", message)
            return
        at_least(1)("ray_workers", self.ray_workers)
        if self.ray_min_workers and self.ray_min_workers > self.ray_workers:
            raise ParameterError("ray_min_workers", self.ray_min_workers, f"at most ray_workers={self.ray_workers}")
