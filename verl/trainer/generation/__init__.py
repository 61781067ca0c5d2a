"""Responses for a file of prompts, in batches that survive a kill.

prompts    rows of a parquet file -> token ids, or the reason why a row has none
engines    the engines that generate, in this process or in processes of their own
run        from a configuration to the output file; batches in flight on a fleet
output     the output file, finished batches until all are there, the identity of a run
plan       rules between options, the plan before and the summary after
"""
