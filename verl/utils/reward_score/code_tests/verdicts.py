"""What one test case can give."""

Verdict = bool | int
"""True or False: the answer was right or wrong. Otherwise one of the numbers below."""

SERVICE_ERROR = -1
RUNTIME_ERROR = -2
TIMEOUT = -3
COMPILE_ERROR = -4
