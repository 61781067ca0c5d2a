"""What a run on Ray has left on the cluster that it shared."""

import time


def assert_given_back(seconds: float = 30.0) -> None:
    """The cluster is still there, and nothing on it is reserved."""
    import ray

    assert ray.is_initialized(), "who has started the cluster ends it"
    total, deadline = ray.cluster_resources()["CPU"], time.monotonic() + seconds
    while ray.available_resources().get("CPU") != total and time.monotonic() < deadline:
        time.sleep(0.2)  # actors take a moment to end
    assert ray.available_resources().get("CPU") == total
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
