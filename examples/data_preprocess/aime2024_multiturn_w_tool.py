"""AIME 2024 (30 problems, for evaluation) for a model with a code interpreter.

    python examples/data_preprocess/aime2024_multiturn_w_tool.py --local_dataset_path raw/aime-2024

Raw rows have the form of DAPO-Math-17k, in one split; they are written to `train.parquet`.
"""

from dapo_multiturn_w_tool import make_row
from preparation import Source, command_line, prepare

SOURCE = Source("BytedTsinghua-SIA/AIME-2024", splits={"train": "train"})

if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/aime2024_w_tool").parse_args(), SOURCE, make_row)
