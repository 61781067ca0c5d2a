"""Scoring responses that were generated before: read them, grade them, sum up, report.

responses    rows of a file -> one task per response, or the reason why there is none
grading      tasks -> grades, in processes that can be killed
summary      grades -> mean and pass@k of each data source, with confidence intervals
run          all of it, from a configuration to the report
"""
