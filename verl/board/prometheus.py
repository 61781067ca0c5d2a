"""`/metrics` of a run that goes on: its last step, and what its rollout engines do now.

    Prometheus --GET /metrics, Bearer token--> JsonServer on loopback --> last step + fleet

`prometheus.yml` and the token lie beside the checkpoints, so `prometheus --config.file` starts with
them; a configuration that is there already gets one more job. Metrics keep their names with `_`
for what Prometheus does not allow (`verl_critic_score_mean`); those of engines are in `Fleet`.
"""

import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl.board.store import plain_numbers
from verl.config.serving import PrometheusConfig
from verl.utils.exposition import Family, exposition, metric_name
from verl.utils.fs import own_folder
from verl.utils.json_server import JsonServer, Metrics
from verl.utils.metric.declared import SECTIONS
from verl.utils.user_files import read_yaml
from verl.workers.rollout.fleet import Fleet

logger = logging.getLogger(__name__)

SCRAPE_SECONDS = 5
RELOAD_SECONDS = 5.0


class RunMetrics:
    """Serves the metrics of one run from `start` to `stop`."""

    def __init__(
        self, config: PrometheusConfig, folder: Path, name: str, fleet: Callable[[], Fleet | None]
    ) -> None:
        """`folder` takes the configuration for Prometheus, `name` is the run's."""
        self._config, self._folder, self._name, self._fleet = config, folder, name, fleet
        self._lock = threading.Lock()
        self._step = 0
        self._metrics: dict[str, float | str] = {}
        self._seconds: Mapping[str, float] = {}
        self._meanings = {m.name: m.meaning for section in SECTIONS for m in section.metrics}

    def start(self) -> str:
        """Begin to serve; the path of a configuration for Prometheus that scrapes this run."""
        routes = {("GET", "/metrics"): lambda _: Metrics(self.text())}
        self.server = JsonServer(routes, port=self._config.metrics_port).start()
        own_folder(self._folder)
        token = self._folder / "token"
        token.unlink(missing_ok=True)
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.server.token)
        path = self._folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(with_job({}, self._job(token)), sort_keys=False))
        shared = Path(self._config.file).expanduser()
        if shared.is_file():
            add_job(shared, self._job(token), self._config.port)
        return str(path)

    def stop(self) -> None:
        self.server.stop()

    def add_step(
        self, number: int, metrics: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        with self._lock:
            self._step, self._metrics = number, plain_numbers(metrics)
            self._seconds = dict(seconds)

    def text(self) -> str:
        fleet = self._fleet()
        engines = [] if fleet is None else fleet.families(self._config.served_model_name or "")
        return exposition([*self._families(), *engines])

    def _families(self) -> Iterator[Family]:
        with self._lock:
            step, metrics, seconds = self._step, self._metrics, self._seconds
        about = Family(name="verl_step", kind="gauge", meaning="Last step that has ended")
        about.add(step, run=self._name)
        yield about
        stages = Family(
            name="verl_stage_seconds", kind="gauge", meaning="Where the time of that step went"
        )
        for stage, value in seconds.items():
            stages.add(value, stage=stage)
        yield stages
        named = {metric_name(name): name for name in sorted(metrics)}
        for short, name in named.items():
            meaning = self._meanings.get(name, "")
            family = Family(name=short, kind="gauge", meaning=f"{name}: {meaning}".rstrip(": "))
            family.add(float(metrics[name]))
            yield family

    # ---- Prometheus's side -----------------------------------------------------------------------

    def _job(self, token: Path) -> dict[str, Any]:
        return {
            "job_name": self._name,
            "scrape_interval": f"{SCRAPE_SECONDS}s",
            "authorization": {"credentials_file": str(token.resolve())},
            "static_configs": [{"targets": [f"127.0.0.1:{self.server.port}"]}],
        }


def update_prometheus_config(
    config: PrometheusConfig, server_addresses: Sequence[str], rollout_name: str | None = None
) -> None:
    """Have Prometheus scrape these rollout servers, `host:port` each, under `/metrics`.

    They become a job of the configuration `config.file`, which is written if it is not there, and
    the Prometheus on `config.port` reads it again. No page states the parameters: they are those of
    a caller that has the section, the addresses, and the rollout engine's name for the job's.
    """
    if not server_addresses:
        raise ValueError("server_addresses is empty; pass host:port of every rollout server")
    path = Path(config.file).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    static: dict[str, Any] = {"targets": list(server_addresses)}
    if config.served_model_name:
        static["labels"] = {"model_name": Path(config.served_model_name).name}
    job = {
        "job_name": "rollout" if rollout_name is None else f"rollout_{rollout_name}",
        "scrape_interval": f"{SCRAPE_SECONDS}s",
        "static_configs": [static],
    }
    add_job(path, job, config.port)


def add_job(path: Path, job: Mapping[str, Any], port: int) -> None:
    """Add a job to a configuration of Prometheus, and have the one on `port` read it again."""
    config: Any = {}
    if path.is_file():
        if path.stat().st_uid != os.geteuid():
            logger.warning("prometheus.file %s belongs to another user and stays as it is", path)
            return
        config = read_yaml(path) or {}
    if not isinstance(config, dict):
        raise ValueError(f"prometheus.file {path} is no configuration of Prometheus")
    path.write_text(yaml.safe_dump(with_job(config, job), sort_keys=False))
    address = f"http://127.0.0.1:{port}/-/reload"
    request = urllib.request.Request(address, method="POST")
    try:
        urllib.request.urlopen(request, timeout=RELOAD_SECONDS).close()
    except (OSError, urllib.error.URLError) as error:
        logger.warning(
            "%s has the job %s, but %s does not answer (%s): start Prometheus with "
            "--web.enable-lifecycle, or restart it",
            *(path, job["job_name"], address, error),
        )


def with_job(config: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with this job, instead of one of the same name."""
    others = [
        other
        for other in config.get("scrape_configs") or []
        if other.get("job_name") != job["job_name"]
    ]
    return {**config, "scrape_configs": [*others, dict(job)]}
