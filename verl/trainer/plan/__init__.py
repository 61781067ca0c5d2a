"""What a run will do, worked out from its configuration alone and printed before it starts.

`batch_table` counts prompts, sequences and steps, `placement` says what runs where, `memory`
estimates bytes per phase, `render` makes it readable. Nothing here imports torch.
"""
