"""Train with online DPO: `python -m recipe.online_dpo.main_online_dpo key=value ...`"""

from verl.trainer.main_ppo import Command

main = Command.of_recipe("online_dpo").main

if __name__ == "__main__":
    main()
