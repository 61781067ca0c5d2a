"""Responses for a file of prompts, in batches that survive a kill.

prompts    rows of a parquet file -> token ids, or the reason why a row has none
identity   what must stay the same for a run to go on behind another
parts      finished batches, a file each, until all are there
engines    the processes that generate
sharing    engines take one batch after another; a lost one is started again
run        from a configuration to the output file
output     the input with a column `responses`, written at once
report     what a person reads before and after
"""
