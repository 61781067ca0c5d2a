import gc
import sys
import warnings

import pytest

from verl.utils.import_utils import (
    deprecated,
    import_external_libs,
    is_available,
    is_megatron_core_available,
    is_msprobe_available,
    is_nvtx_available,
    is_ray_available,
    is_sglang_available,
    is_trl_available,
    is_vllm_available,
    lazy_attribute,
    load_class_from_fqn,
    load_extern_object,
    load_extern_type,
    load_module,
    require,
    uncollected,
)

REWARD = """
from __future__ import annotations
from dataclasses import dataclass, field

COUNT = []
COUNT.append(1)

@dataclass
class Options:
    names: list[str] = field(default_factory=list)

def compute_score(answer):
    return float(answer == "4")
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return path


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_function_is_loaded_from_a_file(reward_file, prefix):
    assert load_extern_object(f"{prefix}{reward_file}", "compute_score")("4") == 1.0


def test_a_relative_path_works_from_the_working_directory(reward_file, monkeypatch):
    monkeypatch.chdir(reward_file.parent)
    assert load_extern_object("my_reward.py", "compute_score")("5") == 0.0


def test_a_file_runs_once_until_it_changes(reward_file):
    first = load_module(str(reward_file))
    assert load_module(f"file://{reward_file}") is first
    reward_file.write_text(REWARD + "\nNEW = 1\n")
    assert load_extern_object(str(reward_file), "NEW") == 1


def test_a_package_is_loaded_by_name():
    assert load_extern_object("pkg://os.path", "join") is sys.modules["os.path"].join
    with pytest.raises(RuntimeError, match=r"cannot import pkg://no\.such\.module") as caught:
        load_module("pkg://no.such.module")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_named_module_can_be_imported_again(reward_file, monkeypatch):
    module = load_module(str(reward_file), "verl_test_reward")
    monkeypatch.delitem(sys.modules, "verl_test_reward", raising=False)
    module = load_module(str(reward_file), "verl_test_reward")
    assert sys.modules["verl_test_reward"] is module
    with pytest.raises(RuntimeError, match="that name belongs to"):
        load_module(str(reward_file), "json")


def test_an_unnamed_module_does_not_enter_the_module_table(reward_file):
    before = set(sys.modules)
    load_module(str(reward_file))
    new = set(sys.modules) - before
    assert [name for name in new if vars(sys.modules[name]).get("__file__")] == []


def test_a_file_called_like_a_standard_module_is_itself(tmp_path):
    path = tmp_path / "math.py"
    path.write_text("import math\nroot = math.sqrt(16)\n")
    assert load_extern_object(str(path), "root") == 4


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no module file 'nowhere/reward\.py'"):
        load_module("nowhere/reward.py")


def test_an_error_in_the_file_is_the_cause(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import math\nmath.sqrt('x')\n")
    with pytest.raises(RuntimeError, match=r"cannot load .*broken\.py.*TypeError") as caught:
        load_module(str(path))
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_file_that_is_not_python_is_refused(tmp_path):
    path = tmp_path / "reward.txt"
    path.write_text("x = 1")
    with pytest.raises(RuntimeError, match=r"must end in \.py"):
        load_module(str(path))


def test_a_missing_object_comes_with_what_there_is(reward_file):
    with pytest.raises(
        AttributeError,
        match=r"not define 'compute_scor'\. Did you mean 'compute_score'\? It defines: COUNT, ",
    ):
        load_extern_object(str(reward_file), "compute_scor")


def test_the_old_name_warns(reward_file):
    with pytest.warns(DeprecationWarning, match="load_extern_type is deprecated; use .*object"):
        assert load_extern_type(str(reward_file), "compute_score")("4") == 1.0


def test_a_class_is_found_by_its_full_name():
    assert load_class_from_fqn("collections.OrderedDict", "sampler").__name__ == "OrderedDict"
    with pytest.raises(ValueError, match=r"sampler 'Sampler' must be a full name"):
        load_class_from_fqn("Sampler", "sampler")
    with pytest.raises(ImportError, match=r"'no_such' for sampler 'no_such\.Sampler'"):
        load_class_from_fqn("no_such.Sampler", "sampler")
    with pytest.raises(AttributeError, match="Did you mean 'OrderedDict'"):
        load_class_from_fqn("collections.OrderDict", "sampler")


def test_a_deprecated_function_and_class_still_work():
    @deprecated("new")
    def old(x: int) -> int:
        return x + 1

    @deprecated("New")
    class Old:
        def __init__(self, x: int) -> None:
            self.x = x

    with pytest.warns(DeprecationWarning, match=r"old is deprecated; use new"):
        assert old(1) == 2
    with pytest.warns(DeprecationWarning, match=r"Old is deprecated; use New"):
        made = Old(3)
    assert isinstance(made, Old)
    assert made.x == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert old.__name__ == "old"  # looking at it is free


def test_availability_is_found_without_importing():
    assert is_available("xml.etree")
    assert not is_available("no_such.part")
    checks = [
        is_vllm_available, is_sglang_available, is_megatron_core_available, is_nvtx_available,
        is_trl_available, is_msprobe_available, is_ray_available,
    ]  # fmt: skip
    before = set(sys.modules)
    assert {type(check()) for check in checks} == {bool}
    assert set(sys.modules) == before


def test_parts_of_packages_are_found_without_importing_these(tmp_path, monkeypatch):
    for folder in ("spread/core", "whole_one/core"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "whole_one" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "single_file.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("spread.core", "whole_one.core", "whole_one.sys", "single_file.sys")
    assert [is_available(name) for name in names] == [True, True, False, False]
    assert not {"spread", "whole_one", "single_file"} & set(sys.modules)


def test_a_missing_package_names_its_extra():
    assert require("json").dumps([1]) == "[1]"
    with pytest.raises(ImportError, match=r"'no_such'.*pip install verl\[ray\]"):
        require("no_such", extra="ray")
    with pytest.raises(ImportError, match="pip install no-such"):
        require("no_such")


def test_external_libraries_are_imported_for_their_effects(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("verl_test_one", "verl_test_two"):
        (tmp_path / f"{name}.py").write_text("")
    import_external_libs(None)
    import_external_libs("verl_test_one")
    import_external_libs(["verl_test_one", "verl_test_two"])
    assert {"verl_test_one", "verl_test_two"} <= set(sys.modules)


def test_large_imports_go_without_the_garbage_collector_and_leave_it_as_it_was():
    with uncollected(), uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_lazy_attribute_is_loaded_from_its_module():
    table = {"join": "os.path:join", "path": "os.path"}
    assert lazy_attribute("here", table, "join") is sys.modules["os.path"].join
    assert lazy_attribute("here", table, "path") is sys.modules["os.path"]
    with pytest.raises(AttributeError, match="module 'here' has no attribute 'nothing'"):
        lazy_attribute("here", table, "nothing")
