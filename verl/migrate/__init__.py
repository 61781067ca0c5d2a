"""Take a run over from another program: `python -m verl.migrate SCRIPT_OR_YAML_OR_PAGE [--gpus N]`

Prints the command of ours, what each setting becomes, what changes its meaning on the way and what
has no equivalent. The file is read as text: nothing in it is run.
"""
