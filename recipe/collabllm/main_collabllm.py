"""CollabLLM: `python -m recipe.collabllm.main_collabllm ...` is `main_ppo` with its defaults."""

from verl.trainer.main_ppo import Command

main = Command("collabllm_trainer").main

if __name__ == "__main__":
    main()
