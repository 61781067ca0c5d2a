"""A server for a model, as a program.

checks     what a configuration must obey
run        engines, server, and the end of both
answers    the prompts of a file, sent to the server
"""
