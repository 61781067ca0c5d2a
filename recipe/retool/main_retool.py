"""ReTool (arXiv:2504.11536): `python -m recipe.retool.main_retool ...`

It is `main_ppo` with its defaults; the commands before it, and the toy, are in README.md.
"""

from verl.trainer.main_ppo import Command

main = Command("retool_trainer").main

if __name__ == "__main__":
    main()
