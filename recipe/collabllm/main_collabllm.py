"""The name that scripts have for `verl.trainer.recipes.collabllm.main_collabllm`."""

from verl.trainer.recipes.collabllm.main_collabllm import main

if __name__ == "__main__":
    main()
