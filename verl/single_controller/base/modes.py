"""The names of the dispatch and execute modes; users may register more of either.

Only names live here. What a dispatch mode does is in `dispatch` and `mesh_dispatch`, which
functions belong to which mode is in `decorator.DISPATCH_MODE_FN_REGISTRY`.
"""

from typing import ClassVar

from verl.utils.py_functional import DynamicEnum

MAGIC_ATTR = "attrs_3141562937"
"""The attribute of a method that holds what `register` was told."""

PADDING_KEY = "_padding_size_key_x123d"
"""The keyword in which a dispatch function tells how many rows it added; never sent to a worker."""


class Dispatch(DynamicEnum):
    """How arguments are split over the ranks and results are joined."""

    RANK_ZERO: ClassVar["Dispatch"]
    ONE_TO_ALL: ClassVar["Dispatch"]
    ALL_TO_ALL: ClassVar["Dispatch"]
    DP_COMPUTE: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar["Dispatch"]
    DP_COMPUTE_METRIC: ClassVar["Dispatch"]
    DIRECT_ROLLOUT_METHOD: ClassVar["Dispatch"]


class Execute(DynamicEnum):
    """Which ranks run the method."""

    ALL: ClassVar["Execute"]
    RANK_ZERO: ClassVar["Execute"]


for _enumeration in (Dispatch, Execute):
    for _name in _enumeration.__annotations__:
        _enumeration.register(_name)
