"""Recipes: algorithms that change stages of the loop, each a module.

A recipe is a `TaskRunner` with a trainer class that overrides stages, and worker classes of its own
where it needs them. `trainer.recipe` names it, so a recipe runs wherever `main_ppo` runs: in one
process, on local ranks, on Ray. Its command, `python -m recipe.<name>.main_<name>`, is `main_ppo`
with a file of defaults (`verl.config.presets`). Recipes that are settings alone need no entry here.
"""

from verl.config.ppo import PPOConfig
from verl.trainer.task_runner import TaskRunner
from verl.utils.registry import Registry

RECIPES = Registry[type[TaskRunner]](
    "recipe",
    online_dpo="verl.trainer.recipes.spin:OnlineDPORunner",
    prime="verl.trainer.recipes.prime:PrimeRunner",
    spin="verl.trainer.recipes.spin:SpinRunner",
    pf_ppo="verl.trainer.recipes.pf_ppo:PFPPORunner",
)
"""The runner of each recipe. Users' code may register more."""


def runner_of(config: PPOConfig) -> type[TaskRunner]:
    """The runner that `trainer.recipe` names, or the usual one."""
    name = config.trainer.recipe
    return TaskRunner if name is None else RECIPES[name]
