"""Whether two sets of weights are the same, tensor by tensor."""

from typing import NamedTuple

import torch
from tqdm import tqdm

from verl.model_merger.weights import LazyWeights

TOLERANCE = 1e-6


class Difference(NamedTuple):
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


def compare_weights(merged: LazyWeights, reference: LazyWeights) -> list[Difference]:
    """Every tensor that is missing, too many, of another shape, or of other values.

    Values are compared in the number format of the reference, which may be a rounded one.
    """
    found = [
        Difference(name, "is not in the reference")
        for name in sorted(merged.keys() - reference.keys())
    ]
    found += [Difference(name, "is missing") for name in sorted(reference.keys() - merged.keys())]
    shared = sorted(merged.keys() & reference.keys())
    for name in tqdm(shared, desc="comparing", unit="tensor"):
        problem = _problem(merged, reference, name)
        if problem is not None:
            found.append(Difference(name, problem))
    return found


def _problem(merged: LazyWeights, reference: LazyWeights, name: str) -> str | None:
    ours, theirs = merged[name], reference[name]
    if ours.shape != theirs.shape:
        return f"has the shape {list(ours.shape)} and not {list(theirs.shape)}"
    expected = theirs.read()
    distance = (ours.read().to(expected.dtype).double() - expected.double()).abs()
    largest = float(distance.max()) if distance.numel() else 0.0
    if torch.isnan(distance).any() or largest > TOLERANCE:
        return f"differs by up to {largest:.3g}"
    return None
