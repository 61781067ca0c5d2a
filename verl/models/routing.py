"""Which experts a token goes to: recorded, counted, replayed.

A router of a Hugging Face model computes logits, selects the k largest and weighs them. All of that
stays the architecture's own code. Around it:

    record   `Routing.begin` ... forward pass ... `Routing.selected`: routes (tokens, layers, k)
    replay   the selection is given and only the weights are computed: `topk` inside the block takes
             the given indices and gathers from the dense scores, so that gradients reach the router
             (arXiv:2510.11370, R3; arXiv:2507.18071 replays the routes of the old policy, R2)
    balance  how evenly the experts are used, and the auxiliary loss that evens it out

A training pass sets its replay before it runs and leaves it until the next one: layers that are
computed again in the backward pass take the same routes. Passes of the rollout engine, which may
run on another thread with the same module, see a recorder of their own thread and nothing else.
"""

import re
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LAYER = re.compile(r"\.(\d+)\.")
_generation = threading.local()


class RouteRecorder(Protocol):
    """What keeps the routes of a rollout engine's pass."""

    def keep_routes(self, number: int, routes: Tensor) -> None:
        """Routes (tokens, k) of the sparse layer of that number."""


class LayerRouting:
    """State of one sparse layer: what its router does in the current training pass."""

    def __init__(self, number: int, layer: int, num_experts: int) -> None:
        self.number = number
        """Among the sparse layers."""

        self.layer = layer
        """Among all layers."""

        self.num_experts = num_experts
        self.is_exact = False
        self.group: Any = None
        """`experts.ExpertGroup`, if the experts are spread over ranks that train."""

        self.own_experts: range | None = None
        """This rank's, if ranks that generate together spread the experts; all see all tokens."""

        self.has_sigmoid = False
        """Whether scores are sigmoids of the logits instead of a softmax."""

        self.aux_loss_coef = 0.0
        self.replayed: Tensor | None = None
        self.mismatches: Tensor | None = None
        self.records = False
        self.selected: Tensor | None = None
        self.logits: Tensor | None = None

    def note(self, routes: Tensor) -> None:
        """Called with the routes (tokens, k) of every pass."""
        recorder: RouteRecorder | None = vars(_generation).get("recorder")
        if recorder is not None:
            recorder.keep_routes(self.number, routes)
        elif self.records and not is_generating():
            self.selected = routes.detach()

    def keep_logits(self, router: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook of the router."""
        del router, inputs
        if self.records and not is_generating():
            self.logits = output[0] if isinstance(output, tuple) else output


def is_generating() -> bool:
    """Whether this thread is in a pass of the rollout engine."""
    return bool(vars(_generation).get("is_on"))


class generation_pass:
    """The passes inside belong to the rollout engine; `recorder` gets their routes, if given."""

    def __init__(self, recorder: RouteRecorder | None = None) -> None:
        self.recorder = recorder

    def __enter__(self) -> None:
        vars(_generation).update(is_on=True, recorder=self.recorder)

    def __exit__(self, *_: object) -> None:
        vars(_generation).update(is_on=False, recorder=None)


class RoutedForward:
    """The forward of a block of router and experts; a selection that is given is replayed."""

    def __init__(self, block: nn.Module, routing: LayerRouting) -> None:
        self.own_forward = block.forward
        self.routing = routing

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        routing = self.routing
        if routing.replayed is None or is_generating():
            return self.own_forward(hidden, *args, **kwargs)
        with _GivenSelection(routing.replayed, routing.num_experts) as selection:
            output = self.own_forward(hidden, *args, **kwargs)
        num_tokens = hidden.numel() // hidden.shape[-1]
        if selection.num_selected != num_tokens:
            raise ValueError(
                f"the router of layer {routing.layer} selected experts for "
                f"{selection.num_selected} of {num_tokens} tokens with topk over "
                f"{routing.num_experts} experts; its routes cannot be replayed: set "
                "actor.router_replay.mode=disabled"
            )
        routing.mismatches = torch.cat(selection.mismatches)
        return output


class _GivenSelection(TorchFunctionMode):
    """`topk` over all experts gives these indices, and the values that are there.

    A router may go over its tokens in several calls, in order (exact mode does).
    """

    def __init__(self, routes: Tensor, num_experts: int) -> None:
        super().__init__()
        self.routes = routes
        self.num_experts = num_experts
        self.num_selected = 0
        self.mismatches: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, indices = args[0], result[1]
        if scores.shape[-1] != self.num_experts or indices.shape[-1] != self.routes.shape[-1]:
            return result  # a choice among groups of experts
        routes = self.routes[self.num_selected : self.num_selected + len(indices)]
        self.num_selected += len(indices)
        # A pass may be padded: those tokens go where they like.
        given = torch.cat([routes.to(indices.dtype), indices[len(routes) :]])
        live, kept = indices[: len(routes)].sort(-1)[0], given[: len(routes)].sort(-1)[0]
        self.mismatches.append((live != kept).any(-1))
        return torch.return_types.topk((scores.gather(-1, given), given))


class Routing:
    """The sparse layers of a model, for one training pass at a time."""

    def __init__(self, layers: Sequence[LayerRouting]) -> None:
        self.layers = list(layers)

    @classmethod
    def of(cls, model: nn.Module) -> "Routing | None":
        """None for a model without experts."""
        layers = [
            module.forward.routing
            for module in model.modules()
            if isinstance(module.forward, RoutedForward)
        ]
        return cls(layers) if layers else None

    @property
    def aux_loss_coef(self) -> float:
        """Weight of the auxiliary loss; 0 is none."""
        return self.layers[0].aux_loss_coef

    @property
    def num_experts(self) -> int:
        return max(layer.num_experts for layer in self.layers)

    def begin(self, replayed: Tensor | None = None) -> None:
        """Before a training pass: replay routes (tokens, layers, k), or let the routers choose."""
        for layer in self.layers:
            layer.records, layer.selected, layer.logits = True, None, None
            layer.mismatches = None
            layer.replayed = None if replayed is None else replayed[:, layer.number]

    def end(self) -> None:
        """After a pass: nothing is recorded or held any more; what is replayed stays for layers
        that are computed again."""
        for layer in self.layers:
            layer.records, layer.selected, layer.logits = False, None, None

    def selected(self, num_tokens: int) -> Tensor:
        """Routes of the pass, (tokens, layers, k), without those of padding."""
        routes = []
        for layer in self.layers:
            assert layer.selected is not None, f"layer {layer.layer} has run"
            routes.append(layer.selected[:num_tokens])
        return torch.stack(routes, 1)

    def logits(self, num_tokens: int) -> list[Tensor]:
        """Of each layer, (tokens, experts)."""
        found = []
        for layer in self.layers:
            assert layer.logits is not None, f"the router of layer {layer.layer} has run"
            found.append(layer.logits[:num_tokens])
        return found


def decoder_layer_of(name: str, default: int) -> int:
    """Which layer of the model a module belongs to, by its name."""
    match = LAYER.search(name)
    return default if match is None else int(match.group(1))


def install(block: nn.Module, routing: LayerRouting) -> None:
    """Let `routing` act on a block of router and experts; a second call changes nothing."""
    if isinstance(block.forward, RoutedForward):
        return
    block.forward = RoutedForward(block, routing)
    for router in routers(block):
        router.register_forward_hook(routing.keep_logits)
        routing.has_sigmoid = "e_score_correction_bias" in router._buffers


def routers(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that choose among its experts: one."""
    return [child for child in block.children() if type(child).__name__.endswith("Router")]
