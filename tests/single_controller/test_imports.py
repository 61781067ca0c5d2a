"""The names that the package exports."""


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
