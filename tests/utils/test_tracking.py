import importlib
import io
import json
import math
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from verl.utils.tracking import (
    ConsoleBackend,
    Tracking,
    TrackingBackend,
    ValidationGenerationsLogger,
    _MlflowLoggingAdapter,
    clean_key,
    tracking_backends,
)
from verl.utils.tracking_backends import (
    flat_parameters,
    markdown_table,
)


class MemoryBackend(TrackingBackend):
    """Keeps what it was given."""

    def __init__(self, project_name, experiment_name, config=None):
        super().__init__(project_name, experiment_name, config)
        self.logged, self.samples, self.is_finished = [], [], False

    def log(self, data, step):
        self.logged.append((step, dict(data)))

    def log_samples(self, samples, step):
        self.samples.append((step, list(samples)))

    def finish(self):
        self.is_finished = True


class BrokenAtTheEnd(MemoryBackend):
    def finish(self):
        raise ConnectionError("the service is gone")


tracking_backends.register("memory")(MemoryBackend)
tracking_backends.register("broken")(BrokenAtTheEnd)


# ---- Tracking ------------------------------------------------------------------------------------


def test_metrics_go_to_every_backend_of_the_run_or_to_those_named():
    with Tracking("project", "run", ["memory", "broken"]) as tracking:
        memory, broken = tracking.logger["memory"], tracking.logger["broken"]
        tracking.log({"a": 1}, step=1)
        tracking.log({"a": 2}, step=2, backend="memory")
        broken.finish = lambda: None
    assert memory.logged == [(1, {"a": 1}), (2, {"a": 2})]
    assert broken.logged == [(1, {"a": 1})]
    assert memory.is_finished


def test_a_backend_that_fails_to_close_does_not_keep_the_others_open():
    tracking = Tracking("project", "closing", ["memory", "broken"])
    memory = tracking.logger["memory"]
    with pytest.raises(ConnectionError, match="the service is gone"):
        tracking.finish()
    assert memory.is_finished
    tracking.finish()  # a second time does nothing


def test_an_unknown_backend_is_refused_with_the_known_ones_before_any_is_opened():
    with pytest.raises(
        ValueError, match=r"unknown tracking backend 'wandbb'.* Did you mean 'wandb'"
    ):
        Tracking("project", "unknown", ["memory", "wandbb"])
    with pytest.raises(ValueError, match="no open 'memory' tracker"):
        ValidationGenerationsLogger("project", "unknown").log(["memory"], [], step=0)


def test_logging_to_a_backend_the_run_does_not_have_is_an_error():
    with (
        Tracking("project", "named", "memory") as tracking,
        pytest.raises(ValueError, match="does not log to 'file', only to: memory"),
    ):
        tracking.log({}, step=0, backend="file")


def test_every_documented_backend_has_a_name():
    documented = (
        "wandb mlflow swanlab vemlp_wandb tensorboard console clearml trackio file tracking"
    )
    assert set(documented.split()) <= set(Tracking.supported_backend)


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("mlflow", r"pip install verl\[track\]"),
        ("wandb", r"pip install verl\[track\]"),
        ("vemlp_wandb", "pip install volcengine-ml-platform"),
        ("swanlab", "pip install swanlab"),
        ("clearml", "pip install clearml"),
        ("trackio", "pip install trackio"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(name, install):
    with pytest.raises(ImportError, match=f"trainer.logger names '{name}'.*{install}"):
        Tracking("project", "missing", [name])


def test_the_old_name_of_wandb_still_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="write `wandb`"), pytest.raises(ImportError):
        Tracking("project", "old", ["tracking"])


def test_validation_samples_reach_the_run_that_tracking_opened():
    with Tracking("project", "samples", ["memory", "console"]) as tracking:
        logger = ValidationGenerationsLogger("project", "samples")
        logger.log(["memory", "console"], [("2+2", "4", 1.0)], step=3)
        ValidationGenerationsLogger().log("memory", [("1+1", "3", 0.0)], step=4)
        memory = tracking.logger["memory"]
    assert memory.samples == [(3, [("2+2", "4", 1.0)]), (4, [("1+1", "3", 0.0)])]
    with pytest.raises(ValueError, match="no open 'memory' tracker for project 'project'"):
        logger.log(["memory"], [], step=5)


# ---- file ----------------------------------------------------------------------------------------


def test_the_file_holds_one_valid_json_object_per_step(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    with Tracking("project", "run", "file") as tracking:
        tracking.log({"loss": torch.tensor(0.5), "n": np.int64(3), "text": "a\nb"}, step=1)
        tracking.log({"loss": math.nan, "up": math.inf, "down": -math.inf}, step=2)
        lines = (tmp_path / "project" / "run.jsonl").read_text().splitlines()  # before it closes
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "data": {"loss": 0.5, "n": 3, "text": "a\nb"}},
        {"step": 2, "data": {"loss": "NaN", "up": "Infinity", "down": "-Infinity"}},
    ]
    assert math.isnan(float(json.loads(lines[1])["data"]["loss"]))


def test_the_folder_of_a_run_named_like_the_package_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    with Tracking("verl", "default", ["file"]) as tracking:
        tracking.log({"a": 1}, step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert (tmp_path / "logs" / "verl" / "default.jsonl").exists()


def test_a_line_torn_by_a_crash_does_not_swallow_the_next_one(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {}}\n{"step": 2, "da')
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    with Tracking("project", "torn", "file") as tracking:
        tracking.log({"a": 1}, step=3)
    assert path.read_text().splitlines()[2] == '{"step": 3, "data": {"a": 1}}'


def test_a_closed_file_refuses_further_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    tracking = Tracking("project", "closed", "file")
    file = tracking.logger["file"]
    tracking.finish()
    with pytest.raises(ValueError, match="is closed: log before `finish`"):
        file.log({}, step=1)


# ---- console -------------------------------------------------------------------------------------


def test_a_log_file_gets_one_line_per_step_with_every_metric(capsys):
    with Tracking("project", "line", "console") as tracking:
        long = {f"group{i}/metric": i + 0.123456789 for i in range(40)}
        tracking.log(long, step=7)
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert output.startswith("step:7 - group0/metric:0.123456789 - group1/metric:1.123456789 - ")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def shown(console: Console) -> str:
    text = console.file.getvalue()
    console.file.seek(0)
    console.file.truncate()
    return text


def test_the_terminal_shows_one_line_per_step_with_what_is_looked_at_first():
    console = terminal()
    backend = ConsoleBackend("project", "line", console=console)
    metrics = {"timing_s/step": 2.0834, "actor/lr": 1e-6, "critic/score/mean": 0.28125}
    backend.log({**metrics, "val-core/sums/reward/mean@1": 0.5, "tripwire/equal_rewards": 3.0}, 1)
    assert shown(console).splitlines() == [
        "step 1  score 0.2812  seconds 2.083  val-core/sums/reward/mean@1 0.5"
        "  tripwire/equal_rewards 3.0"
    ]
    backend.log({"actor/lr": 1e-6}, 2)
    assert shown(console) == "step:2 - actor/lr:1e-06\n"


def test_a_number_that_is_not_finite_is_shown_on_the_terminal():
    console = terminal()
    metrics = {"critic/score/mean": 1.0, "variance_proxy/expected_w": math.nan}
    ConsoleBackend("p", "e", console=console).log(metrics, step=1)
    assert "variance_proxy/expected_w nan" in shown(console)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_text_from_a_model_cannot_move_the_cursor_forge_a_line_or_be_markup(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=200, color_system=None)
    hostile = "\x1b[2J[bold]x[/bold]\nstep:99 - critic/score/mean:1"
    ConsoleBackend("p", "e", console=console).log({"a/" + hostile: 1, "a/b": hostile}, step=1)
    text = shown(console)
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text
    assert not any(line.startswith("step:99") for line in text.splitlines())


# ---- tensorboard ---------------------------------------------------------------------------------


def test_tensorboard_event_files_hold_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    with Tracking("project", "run", "tensorboard") as tracking:
        tracking.log({"actor/loss": 0.25, "note": "no number"}, step=1)
        tracking.log({"actor/loss": torch.tensor(0.125)}, step=2)
        ValidationGenerationsLogger("project", "run").log("tensorboard", [("q", "a", 1.0)], step=2)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["actor/loss"]
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(1, 0.25), (2, 0.125)]
    (text,) = events.Tensors("val/generations/text_summary")
    assert b"| q | a | 1.0 |" in text.tensor_proto.string_val[0]


def test_a_sample_cannot_add_html_or_a_column_to_the_table():
    row = markdown_table([("<script>alert(1)</script>", "a | b\n\nc", 0.5)]).splitlines()[2]
    assert row == "| &lt;script&gt;alert(1)&lt;/script&gt; | a &#124; b\\n\\nc | 0.5 |"


# ---- services, with a stand-in for the package ---------------------------------------------------

RECORDER = """
calls = []
class Recorder:
    def __init__(self, path): self.path = path
    def __getattr__(self, name): return Recorder(f"{self.path}.{name}" if self.path else name)
    def __call__(self, *args, **kwargs):
        calls.append((self.path, args, kwargs))
        return Recorder(self.path + "()")
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Recorder(name)
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Makes an importable module that records each call, and returns its list of calls."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir()
        (folder / "__init__.py").write_text(RECORDER)
        made.append(name)
        return importlib.import_module(name).calls

    yield make
    for name in made:
        del sys.modules[name]


def test_wandb_gets_the_metrics_with_their_step_and_a_growing_table(service, monkeypatch):
    calls = service("wandb")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    config = {"trainer": {"wandb_proxy": "http://proxy:1"}, "lr": torch.tensor(0.5)}
    with Tracking("project", "wandb", "wandb", config) as tracking:
        tracking.log({"a": torch.tensor(1.5)}, step=1)
        samples = ValidationGenerationsLogger("project", "wandb")
        samples.log("wandb", [("q1", "a1", 0.0)], step=1)
        samples.log("wandb", [("q2", "a2", 1.0)], step=2)
    assert calls[0] == ("Settings", (), {"https_proxy": "http://proxy:1"})
    assert calls[1][0] == "init"
    assert calls[1][2]["entity"] == "team"
    assert calls[1][2]["config"] == {"trainer": {"wandb_proxy": "http://proxy:1"}, "lr": 0.5}
    assert calls[2] == ("init().log", ({"a": 1.5},), {"step": 1})
    tables = [kwargs["data"] for path, _, kwargs in calls if path == "Table"]
    assert tables == [[[1, "q1", "a1", 0.0]], [[1, "q1", "a1", 0.0], [2, "q2", "a2", 1.0]]]
    assert calls[-1] == ("init().finish", (), {"exit_code": 0})


def test_volcengine_is_logged_into_and_then_speaks_as_wandb_does(service, monkeypatch):
    platform = service("volcengine_ml_platform")
    calls = service("volcengine_ml_platform.wandb")
    monkeypatch.setenv("VOLC_ACCESS_KEY_ID", "key")
    with Tracking("project", "vemlp", "vemlp_wandb") as tracking:
        tracking.log({"a": 1}, step=1)
    assert platform == [("init", (), {"ak": "key", "sk": "", "region": ""})]
    assert [path for path, _, _ in calls] == ["init", "log", "finish"]


def test_mlflow_gets_clean_names_and_flat_parameters(service):
    calls = service("mlflow")
    with Tracking("project", "mlflow", "mlflow", {"trainer": {"logger": ["mlflow"]}}) as tracking:
        tracking.log({"val-core/gsm8k/acc/mean@4": 1.0, "note": "text"}, step=2)
    by_name = {path: (args, kwargs) for path, args, kwargs in calls}
    assert by_name["set_experiment"] == (("project",), {})
    assert by_name["log_params"] == (({"trainer.logger": "['mlflow']"},), {})
    assert by_name["log_metrics"] == (
        (),
        {"metrics": {"val-core/gsm8k/acc/mean_at_4": 1.0}, "step": 2},
    )
    assert calls[-1][0] == "end_run"


def test_swanlab_clearml_and_trackio_each_get_the_step_in_their_own_way(service):
    swanlab, clearml, trackio = service("swanlab"), service("clearml"), service("trackio")
    with Tracking("project", "three", ["swanlab", "clearml", "trackio"]) as tracking:
        tracking.log({"actor/loss/mean": 0.5}, step=1)
        names = ["swanlab", "clearml", "trackio"]
        ValidationGenerationsLogger("project", "three").log(names, [("q", "a", 1.0)], step=1)
    assert ("log", ({"actor/loss/mean": 0.5},), {"step": 1}) in swanlab
    assert swanlab[-1][0] == "finish"
    scalar = {"title": "actor", "series": "loss/mean", "value": 0.5, "iteration": 1}
    assert ("Task.init().get_logger().report_scalar", (), scalar) in clearml
    assert clearml[-1][0] == "Task.init().close"
    assert ("init().log", ({"actor/loss/mean": 0.5},), {"step": 1}) in trackio
    assert trackio[-1][0] == "init().finish"


def test_mlflow_names_keep_the_allowed_characters():
    assert clean_key("val//acc/mean@8") == "val/acc/mean_at_8"
    assert clean_key("a b:c-d.e_f/g") == "a b:c-d.e_f/g"
    assert clean_key("loss(x)=é$") == "loss_x__é_"


def test_two_metrics_that_would_share_an_mlflow_name_are_an_error():
    adapter = _MlflowLoggingAdapter()
    adapter.clean({"a(b": 1.0})
    with pytest.raises(ValueError, match=r"'a\(b' and 'a\)b' have the same MLflow name 'a_b'"):
        adapter.clean({"a)b": 2.0})


def test_long_parameters_are_cut_to_what_mlflow_stores():
    assert flat_parameters({"a": {"b": "x" * 600}}) == {"a.b": "x" * 500}


def test_a_failure_inside_an_installed_package_is_not_called_a_missing_package(
    tmp_path, monkeypatch
):
    (tmp_path / "swanlab.py").write_text("import a_package_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="'swanlab': No module named 'a_package_it_needs'"):
        Tracking("project", "inside", ["swanlab"])
