"""Is this mathematical answer the same as the gold answer?

    grade(r"\\frac{1}{2}", "0.5")      Correct()
    grade("0.51", "0.5")              Wrong("the numbers differ")
    grade(r"\\int x dx", "0.5")        Abstain(r"the command \\int is not known")

Answers are parsed into exact trees (`lexer`, `parser`) and compared by exact rational arithmetic,
then by intervals of rising precision at chosen points (`evaluate`, `equality`, `compare`). No text
is ever run as code, and every grade stays within fixed limits (`nodes`). Finding the answer in a
response is `final_answer`; docs/graders.md has the grammar and the rules.
"""

from verl.utils.reward_score.math_grader.grade import (
    Abstain,
    Correct,
    Verdict,
    Wrong,
    final_answer,
    grade,
    last_boxed,
)

__all__ = ["Abstain", "Correct", "Verdict", "Wrong", "final_answer", "grade", "last_boxed"]
