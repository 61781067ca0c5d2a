"""Older import path of `verl.utils.dataset.sampler`."""

from verl.utils.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
