"""A cache on a GPU whose slots keep their addresses when its memory is given back in between."""

from verl.utils.steady_memory import SteadyMemory
from verl.workers.rollout.native.kv_cache import CacheShape, KeysAndValues, KVCache


class SteadyKVCache(KVCache):
    """All slots at once: there, or given back. What they hold after coming back is undefined."""

    def __init__(self, shape: CacheShape, max_slots: int) -> None:
        self.shape = shape
        self.max_slots = max_slots
        self._memory = SteadyMemory(shape.bytes_per_sequence * max_slots, shape.device)
        self._rest = self._memory.as_bytes()
        self.prompt = self._carve(shape.max_prompt_tokens)
        self.response = self._carve(shape.max_response_tokens)
        self._memory.unmap()

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes if self._memory.is_mapped else 0

    def free(self) -> None:
        self._memory.unmap()

    def reserve(self, num_prompt_slots: int, num_slots: int) -> None:
        self._memory.map()

    def _carve(self, num_tokens: int) -> list[KeysAndValues]:
        layers: list[KeysAndValues] = []
        for layer in self.shape.layers:
            pair = []
            for dim in (layer.key_dim, layer.value_dim):
                sizes = (self.max_slots, layer.num_kv_heads, num_tokens, dim)
                num_bytes = self.shape.dtype.itemsize
                for size in sizes:
                    num_bytes *= size
                pair.append(self._rest[:num_bytes].view(self.shape.dtype).view(sizes))
                self._rest = self._rest[num_bytes:]
            layers.append((pair[0], pair[1]))
        return layers
