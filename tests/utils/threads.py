"""The threads of this process, those without a Python object too."""

from pathlib import Path


def thread_names() -> list[str]:
    """Their names for the kernel; none where there is no /proc."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
