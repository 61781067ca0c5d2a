"""What a run will do, computed from its configuration alone and printed before it starts.

`layout` counts prompts, sequences, steps and ranks, `memory` estimates bytes per phase, `render`
makes it readable. Nothing here imports torch.
"""
