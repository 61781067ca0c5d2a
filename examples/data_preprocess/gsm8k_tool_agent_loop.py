"""GSM8K for the agent loop `tool_agent`: the rows of `gsm8k_multiturn_w_tool.py`.

python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_dataset_path raw/gsm8k
"""

from gsm8k import SOURCE
from gsm8k_multiturn_w_tool import make_row
from preparation import command_line, prepare

if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k_tool_agent_loop").parse_args(), SOURCE, make_row)
