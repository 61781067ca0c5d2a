"""Score responses generated before: `python -m verl.trainer.main_eval data.path=... key=value ...`

Each response is given to the reward function, and each data source gets its mean score and pass@k.
The table goes to the terminal, the last line of the output is `{"test_score/<data source>": mean}`.
A response that cannot be scored is listed and is in none of the numbers.
"""

import json
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from verl.config import command
from verl.config.effects import idle_notices
from verl.config.faults import ConfigError, Fault
from verl.config.generation import EvaluationConfig
from verl.config.load import Loaded, load_config
from verl.config.validate import validate
from verl.utils.environment import WentWrong
from verl.utils.import_utils import is_ray_available, lazy_attribute

CONFIG_NAME = "evaluation"
CONFIG_DIR = Path(__file__).parent / "config"

# What loads torch is imported when grading starts, not when a mistake is reported.
_LAZY = {
    "evaluate": "verl.trainer.evaluation.run:evaluate",
    "plan_lines": "verl.trainer.evaluation.run:plan_lines",
    "report": "verl.trainer.evaluation.run",
}


class NothingScored(WentWrong, RuntimeError):
    """The file has responses, and not one of them has a score."""


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run(load_config(config, EvaluationConfig, keeps_unknown=True))
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    command.load_and_run(config, EvaluationConfig, run)


def run(loaded: Loaded) -> None:
    """Say what was translated, refuse what is wrong, then grade and report."""
    command.say(loaded.notices)
    config: EvaluationConfig = loaded.config
    faults = validate(config, loaded.user_set, known_faults=loaded.faults)
    if config.grading.controller == "ray" and not is_ray_available():
        text = 'grading.controller is "ray", but Ray is not installed; pip install "verl[ray]"'
        faults.append(Fault(text, ("grading.controller",)))
    missing = [fault for fault in faults if fault.is_about_machine]
    if len(missing) < len(faults) or (faults and not config.trainer.dry_run):
        raise ConfigError([fault for fault in faults if fault not in missing] or faults)
    command.say(idle_notices(config, loaded.user_set))
    output = output_file(config.data.output_path)
    if missing:  # plan here what another machine will grade
        sys.stdout.write(f"plan: grade the responses of {config.data.path}\n")
        sys.stdout.writelines(f"missing on this machine: {fault.text}\n" for fault in missing)
        return
    if config.trainer.dry_run:
        lines = lazy_attribute(__name__, _LAZY, "plan_lines")(config)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    evaluation = lazy_attribute(__name__, _LAZY, "evaluate")(config)
    report = lazy_attribute(__name__, _LAZY, "report")
    if output is not None:
        text = report.as_json(evaluation, config.data.path, config.grading.pass_threshold)
        output.write_text(text)
    report.print_table(evaluation, Console())
    sys.stdout.flush()
    sys.stderr.writelines(f"{line}\n" for line in report.unscored_lines(evaluation.unscored))
    scores = report.test_scores(evaluation)
    if not scores:
        raise NothingScored(f"no response of {config.data.path} has a score")
    sys.stdout.write(f"{json.dumps(scores)}\n")


def output_file(path: str | None) -> Path | None:
    """Where the result goes; that it cannot go there is found out before anything is graded."""
    if path is None:
        return None
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError([Fault(f"data.output_path is {path}, a folder; it must be a file")])
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


if __name__ == "__main__":
    main()
