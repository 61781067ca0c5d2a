"""Errors that end a run in a way a scheduler can tell apart, after sysexits.h.

65 is data that no run can start with, 70 a run that went wrong by itself. A command that catches
`EndsTheRun` prints the message without a traceback and exits with its code.
"""


class EndsTheRun(Exception):
    """Mixed into an error that a command ends with."""

    exit_code: int = 1


class BadData(EndsTheRun):
    exit_code = 65


class WentWrong(EndsTheRun):
    exit_code = 70
