"""Operations that a GPU does in one pass over memory, written in Triton.

Every module here but `availability` imports triton, which is optional: ask
`can_run_triton` first and import the module inside the branch that uses it.
"""
