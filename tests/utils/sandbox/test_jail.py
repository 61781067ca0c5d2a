"""Parts of the jail that can be looked at from outside."""

import os
import struct

import pytest

from verl.utils.sandbox.jail.kernel import REFUSED_CALLS, build_filter
from verl.utils.sandbox.jail.namespaces import id_map
from verl.utils.sandbox.jail.supervisor import resident_bytes

WHOLE_MACHINE = "         0          0 4294967295\n"
ROOTLESS = "         0       1000          1\n"


def test_root_becomes_nobody_and_keeps_itself_to_build():
    assert id_map(0, WHOLE_MACHINE) == "0 0 1\n1000 65534 1\n"


def test_others_can_only_become_themselves():
    assert id_map(1234, WHOLE_MACHINE) == "1000 1234 1\n"
    assert id_map(0, ROOTLESS) == "1000 0 1\n"  # root of a container that has no other user


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_refuses_every_call_of_the_table(machine, column):
    steps = list(struct.iter_unpack("=HBBI", build_filter(machine)))
    compared = {value for code, _, _, value in steps if code == 0x15}
    assert {numbers[column] for numbers in REFUSED_CALLS.values()} <= compared
    assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)  # the rest is allowed
    for place, (code, if_true, if_false, _) in enumerate(steps):
        assert code == 0x06 or place + max(if_true, if_false) < len(steps) - 1


def test_a_machine_without_a_table_is_refused():
    with pytest.raises(ValueError, match="no system call table for riscv64"):
        build_filter("riscv64")


def test_memory_of_a_process_that_does_not_exist_is_an_error():
    with pytest.raises(FileNotFoundError):
        resident_bytes(2**22 + os.getpid())
