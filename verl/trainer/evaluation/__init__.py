"""Scoring responses that were generated before: grade them (`grading`), report (`run`)."""
