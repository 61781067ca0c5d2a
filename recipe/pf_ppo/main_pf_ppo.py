"""PF-PPO with a replay buffer: `python -m recipe.pf_ppo.main_pf_ppo ...`"""

from verl.trainer.main_ppo import Command

main = Command.of_recipe("pf_ppo").main

if __name__ == "__main__":
    main()
