"""New weights into a running vLLM model, in each of its workers.

vLLM mixes `WeightLoading` into its worker class (`worker_extension_cls`). One update is

    begin_weights    every layer waits for tensors in checkpoint form
    take_weights     once or in parts: a layer that has all of its tensors is fused, cut to the
                     worker's share, packed for its kernels and copied to where graphs expect it
    end_weights      closes the rest, and says what did not come

A layer that shares its weight with another (`lm_head` tied to the embedding) gets no tensor of its
own. Its weight is new, but whatever was packed from it is not, so it is packed again. Experts on a
CPU are packed once, with their kernel, so their kernel is made anew.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


class WeightLoading:
    """What a worker does for `VLLMEngine.load_weights`."""

    vllm_config: Any
    model_runner: Any

    def begin_weights(self) -> None:
        model = self.model_runner.get_model()
        self.names_taken: set[str] | None = set()
        forget_packed_experts(model)
        initialize_layerwise_reload(model)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with set_current_vllm_config(self.vllm_config):
            names = self.model_runner.get_model().load_weights(weights)
        if names is None or self.names_taken is None:
            self.names_taken = None  # this model does not tell
        else:
            self.names_taken |= names

    def end_weights(self) -> list[str]:
        """Close the update; names of parameters (vLLM's own names) that did not get all of it."""
        model = self.model_runner.get_model()
        partial = list(partly_loaded(model))
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            for layer in tied_layers(model):
                layer.quant_method.process_weights_after_loading(layer)
        return sorted({*partial, *self._absent(model)})

    def _absent(self, model: nn.Module) -> set[str]:
        if self.names_taken is None or self.vllm_config.model_config.quantization is not None:
            return set()  # quantized layers have other parameters than the checkpoint has tensors
        own = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        return own - self.names_taken


def tied_layers(model: nn.Module) -> Iterator[Any]:
    """Layers whose weight is another layer's, except the first of each such family."""
    owners: dict[int, nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), layer) is not layer:
            yield layer


def forget_packed_experts(model: nn.Module) -> None:
    """On a CPU; elsewhere kernels read the weights themselves, and graphs hold the kernels."""
    if current_platform.is_cpu():
        for layer in model.modules():
            if isinstance(layer, RoutedExperts):
                experts: Any = layer.quant_method
                experts.moe_kernel = None


def partly_loaded(model: nn.Module) -> Iterator[str]:
    """Layers that got some of their tensors, say queries but no keys. An embedding may have more
    rows than the checkpoint, so only layers of which every element is sent are checked."""
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase | RoutedExperts):
            state = get_layerwise_info(layer)
            if 0 < state.load_numel < (state.load_numel_total or 0):
                yield name
