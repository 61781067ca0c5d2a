"""A run that goes on tells Prometheus what its last step was and what its engines do."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml

from tests.toy import ROLLOUT, make_toy, toy_run
from verl.board.prometheus import with_job
from verl.config.serving import PrometheusConfig
from verl.experimental.agent_loop.prometheus_utils import update_prometheus_config
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.exposition import Family, Seconds, exposition, metric_name

ENABLE = f"{ROLLOUT}.prometheus.enable=true"


def test_the_text_is_what_prometheus_reads():
    gauge = Family(name="verl_x", kind="gauge", meaning='one\n"two"')
    gauge.add(1.5, engine='a"b\\c')
    gauge.add(float("nan"))
    seconds, family = Seconds(), Family(name="s", kind="histogram", meaning="Time")
    for value in (0.2, 2.0, 5000.0):
        seconds.add(value)
    seconds.put(family)
    lines = exposition([gauge, family]).splitlines()
    assert lines[:4] == [
        '# HELP verl_x one\\n"two"',
        "# TYPE verl_x gauge",
        'verl_x{engine="a\\"b\\\\c"} 1.5',
        "verl_x NaN",
    ]
    assert 's_bucket{le="0.1"} 0.0' in lines
    assert 's_bucket{le="0.3"} 1.0' in lines
    assert 's_bucket{le="3.0"} 2.0' in lines
    assert lines[-3:] == ['s_bucket{le="+Inf"} 3.0', "s_sum 5002.2", "s_count 3.0"]
    assert metric_name("val-core/openai/gsm8k/acc@8") == "verl_val_core_openai_gsm8k_acc_8"


def test_a_job_takes_the_place_of_the_one_of_its_name():
    config = {"global": {}, "scrape_configs": [{"job_name": "a", "x": 1}, {"job_name": "b"}]}
    found = with_job(config, {"job_name": "a"})
    assert found == {"global": {}, "scrape_configs": [{"job_name": "b"}, {"job_name": "a"}]}


class Reloads(BaseHTTPRequestHandler):
    """A Prometheus that is told to read its configuration again."""

    paths: list[str] = []

    def do_POST(self):
        self.paths.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_): ...


def test_rollout_servers_become_a_job_that_prometheus_reads_at_once(tmp_path):
    file = tmp_path / "metrics" / "prometheus.yml"
    server = HTTPServer(("127.0.0.1", 0), Reloads)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        config = PrometheusConfig(
            enable=True, file=str(file), port=server.server_port, served_model_name="/models/q"
        )
        update_prometheus_config(config, ["10.0.0.1:8000"], "vllm")
        update_prometheus_config(config, ["10.0.0.1:8001", "10.0.0.2:8001"], "vllm")
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
    (job,) = yaml.safe_load(file.read_text())["scrape_configs"]
    assert job["job_name"] == "rollout_vllm"
    assert job["static_configs"] == [
        {"targets": ["10.0.0.1:8001", "10.0.0.2:8001"], "labels": {"model_name": "q"}}
    ]
    assert Reloads.paths == ["/-/reload", "/-/reload"]


def test_servers_are_there_and_a_prometheus_that_is_not_is_named(tmp_path, caplog):
    config = PrometheusConfig(enable=True, file=str(tmp_path / "prometheus.yml"), port=1)
    with pytest.raises(ValueError, match="server_addresses is empty"):
        update_prometheus_config(config, [])
    update_prometheus_config(config, ["a:1"])
    assert "http://127.0.0.1:1/-/reload does not answer" in caplog.text
    assert "rollout" in (tmp_path / "prometheus.yml").read_text()


def fetch(url, token=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def target_of(folder):
    """Address and token, as a Prometheus that was given the file finds them."""
    config = yaml.safe_load((folder / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    with open(job["authorization"]["credentials_file"]) as file:
        return f"http://{job['static_configs'][0]['targets'][0]}/metrics", file.read()


class Scraped(PPOTrainer):
    """Asks for its own metrics after each step, as Prometheus does."""

    texts: list[str]
    refusal = 0

    def finish_step(self, batch, step):
        super().finish_step(batch, step)
        address, token = target_of(self.board._folder)
        Scraped.texts.append(fetch(address, token))
        try:
            fetch(address)
        except urllib.error.HTTPError as error:
            Scraped.refusal = error.code
            error.close()


def test_a_run_tells_its_last_step_and_its_engines(tmp_path, capsys):
    theirs = tmp_path / "theirs.yml"
    theirs.write_text("scrape_configs: [{job_name: other}]\n")
    Scraped.texts = []
    lines, _ = toy_run(
        make_toy(tmp_path / "toy"),
        tmp_path / "run",
        *(ENABLE, f"{ROLLOUT}.prometheus.file={theirs}", f"{ROLLOUT}.prometheus.port=9"),
        "data.val_files=[]",
        trainer_class=Scraped,
    )
    assert Scraped.refusal == 401
    values = dict(line.rsplit(" ", 1) for line in Scraped.texts[-1].splitlines() if line[0] != "#")
    assert values['verl_step{run="verl/run"}'] == "2.0"
    assert float(values["verl_actor_grad_norm"]) == lines[-1]["actor/grad_norm"]
    model = tmp_path / "toy" / "model"
    labels = f'{{model_name="{model}",engine="0"}}'
    assert values[f"vllm:num_requests_running{labels}"] == "0.0"
    assert float(values[f"vllm:generation_tokens_total{labels}"]) > 2 * 16
    ended = [float(v) for name, v in values.items() if name.startswith("vllm:request_success")]
    assert sum(ended) == 2 * 16  # samples of two steps
    assert values[f"vllm:e2e_request_latency_seconds_count{labels}"] == "8.0"  # prompts
    assert values[f"vllm:time_to_first_token_seconds_count{labels}"] == "32.0"  # samples
    first, whole = (
        float(values[f"vllm:{name}_seconds_sum{labels}"]) / count
        for name, count in (("time_to_first_token", 32), ("e2e_request_latency", 8))
    )
    assert 0 < first < whole
    assert values[f"vllm:kv_cache_usage_perc{labels}"] == "0.0"  # all have ended
    stages = [float(v) for name, v in values.items() if name.startswith("verl_stage_seconds")]
    assert sum(stages) > 0
    jobs = [job["job_name"] for job in yaml.safe_load(theirs.read_text())["scrape_configs"]]
    assert jobs == ["other", "verl/run"]
    assert "metrics for Prometheus: http://127.0.0.1:" in capsys.readouterr().err
    assert (tmp_path / "run/checkpoints/prometheus/token").stat().st_mode & 0o777 == 0o600


# ---- the real one --------------------------------------------------------------------------------


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Waiting(PPOTrainer):
    """Starts Prometheus with its first step, and ends when that has seen the second."""

    server = None
    answers: dict

    def finish_step(self, batch, step):
        super().finish_step(batch, step)
        cls, port = Waiting, self.port
        if cls.server is None:
            folder = self.board._folder / "prometheus"
            config = folder / "prometheus.yml"
            subprocess.run(["promtool", "check", "config", str(config)], check=True, timeout=60)
            cls.server = subprocess.Popen(
                ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'db'}"]
                + [f"--web.listen-address=127.0.0.1:{port}"],
                stderr=subprocess.DEVNULL,
            )
        if step.step == 2:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not cls.answers.get("verl_step"):
                threading.Event().wait(1)
                for query in ("verl_step", "verl_actor_grad_norm", "vllm:generation_tokens_total"):
                    cls.answers[query] = asked(port, query)


def asked(port, query):
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        found = json.loads(fetch(address))["data"]["result"]
    except OSError:
        return None
    return [one["value"][1] for one in found if one["value"][1] != "1"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_a_real_prometheus_scrapes_a_run(tmp_path):
    Waiting.port, Waiting.answers, Waiting.server = free_port(), {}, None
    try:
        lines, _ = toy_run(
            make_toy(tmp_path / "toy"), tmp_path / "run", ENABLE, trainer_class=Waiting
        )
    finally:
        if Waiting.server is not None:
            Waiting.server.terminate()
            Waiting.server.wait(timeout=30)
    assert Waiting.answers["verl_step"] == ["2"]
    (norm,) = Waiting.answers["verl_actor_grad_norm"]
    assert float(norm) == lines[-1]["actor/grad_norm"]
    assert Waiting.answers["vllm:generation_tokens_total"]
