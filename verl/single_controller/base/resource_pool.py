"""Where ranks may run: how many processes on how many nodes.

A pool only counts. What a process gets there (a GPU, a bundle of a placement group) is the
back-end's business. Ranks are numbered node by node.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar


class ResourcePool:
    """`process_on_nodes=[8, 8]` is two nodes with eight processes each."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        self._store = list(process_on_nodes or [])
        if any(count < 1 for count in self._store):
            raise ValueError(f"each node needs at least one process, got {self._store}")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        self._store.append(process_count)

    def __call__(self) -> list[int]:
        return self._store

    @property
    def store(self) -> list[int]:
        return self._store

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For each rank, how many processes its node has."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node."""
        return [local_rank for count in self._store for local_rank in range(count)]

    def release(self) -> None:
        """Give back what the pool holds; one that only counts holds nothing."""


Pool = TypeVar("Pool", bound=ResourcePool)


@dataclass
class PoolManager(ABC, Generic[Pool]):
    """Named pools, and which role runs in which of them."""

    resource_pool_spec: dict[str, list[int]]
    """Processes per node, for each pool."""

    mapping: dict[Any, str]
    """The pool of each role."""

    resource_pool_dict: dict[str, Pool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create all pools, or raise `ValueError` when the machines are not enough."""
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = self.new_pool(name, process_on_nodes)

    @abstractmethod
    def new_pool(self, name: str, process_on_nodes: list[int]) -> Pool:
        """A pool of so many processes per node."""

    def add_pool(self, name: str, process_on_nodes: list[int]) -> None:
        """Create a further pool while others are in use."""
        self.resource_pool_dict[name] = self.new_pool(name, process_on_nodes)
        self.resource_pool_spec[name] = process_on_nodes

    def remove_pool(self, name: str) -> None:
        """Give back what the pool holds."""
        self.resource_pool_dict.pop(name).release()
        del self.resource_pool_spec[name]

    def get_resource_pool(self, role: Hashable) -> Pool:
        if role not in self.mapping:
            known = ", ".join(str(known) for known in self.mapping)
            raise ValueError(f"role {role} has no resource pool; the mapping has: {known}")
        name = self.mapping[role]
        if name not in self.resource_pool_dict:
            known = ", ".join(self.resource_pool_dict) or "none yet; call create_resource_pool()"
            raise ValueError(f"role {role} is mapped to unknown pool {name!r}; pools: {known}")
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        """Processes (one GPU each, where there are GPUs) of all pools together."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())
