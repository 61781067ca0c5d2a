"""Numbers about a step: how parts measured on ranks and micro-batches become one value."""

from verl.utils.metric.utils import AggregationType, Metric, reduce_metrics

__all__ = ["AggregationType", "Metric", "reduce_metrics"]
