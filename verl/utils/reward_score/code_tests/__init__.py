"""Test cases for model-written programs: what to run, with which input, and when it is right.

Nothing here runs code. `prime_code` runs the cases in the local sandbox, `sandbox_fusion` sends
them to a service. Both keep to one rule: the program under test gets the input and never the
expected output; whether its answer is right is decided here, in our process, on plain data.
"""

from verl.utils.reward_score.code_tests.cases import Case, read_cases
from verl.utils.reward_score.code_tests.compare import is_right
from verl.utils.reward_score.code_tests.extract import extract_code
from verl.utils.reward_score.code_tests.scores import CONTINUOUS_CASES, score_of
from verl.utils.reward_score.code_tests.verdicts import (
    COMPILE_ERROR,
    RUNTIME_ERROR,
    SERVICE_ERROR,
    TIMEOUT,
    Verdict,
)

__all__ = [
    "COMPILE_ERROR",
    "CONTINUOUS_CASES",
    "RUNTIME_ERROR",
    "SERVICE_ERROR",
    "TIMEOUT",
    "Case",
    "Verdict",
    "extract_code",
    "is_right",
    "read_cases",
    "score_of",
]
