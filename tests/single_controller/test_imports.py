"""What loading the package costs: no Ray without asking for it."""

import subprocess
import sys

MODULES = (
    "verl.single_controller",
    "verl.single_controller.local",
    "verl.single_controller.controllers",
    "verl.utils.ray_utils",
    "verl.utils.resource_pool_manager",
)


def test_importing_does_not_load_ray():
    code = f"import sys, {', '.join(MODULES)}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_package_exports_its_documented_names():
    import verl
    from verl.single_controller import (
        ClassWithInitArgs,
        ResourcePool,
        Worker,
        WorkerGroup,
        __version__,
    )
    from verl.single_controller.base.worker import Worker as SameWorker
    from verl.single_controller.base.worker_group import ClassWithInitArgs as SameClass

    assert Worker is SameWorker
    assert ClassWithInitArgs is SameClass
    assert __version__ == verl.__version__
    assert ClassWithInitArgs(dict, a=1)() == {"a": 1}
    assert ResourcePool([1]).world_size == 1
    assert WorkerGroup.__name__ == "WorkerGroup"
