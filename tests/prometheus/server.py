"""A Prometheus on this machine, and what it answers; of Python, the standard library alone."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

_ANSWER_SECONDS, _START_SECONDS, _END_SECONDS = 30.0, 60.0, 20.0


class Refused(Exception):
    """Prometheus refused a question, or did not start."""


@dataclass(frozen=True)
class Series:
    """A series: its labels, and its values by their times in seconds."""

    labels: Mapping[str, str]
    values: Sequence[tuple[float, float]]


class Prometheus:
    """A Prometheus at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> Sequence[Series]:
        """What an expression is now. Raises Refused."""
        found = self._ask("query", query=expression)
        if found["resultType"] == "scalar":
            return [Series({}, [_sample(found["result"])])]
        return [Series(one["metric"], [_sample(one["value"])]) for one in found["result"]]

    def query_range(
        self, expression: str, start: float, end: float, step: float
    ) -> Sequence[Series]:
        """What an expression was from `start` to `end`, each `step` seconds. Raises Refused."""
        found = self._ask("query_range", query=expression, start=start, end=end, step=step)
        return [
            Series(one["metric"], [_sample(value) for value in one["values"]])
            for one in found["result"]
        ]

    def targets(self) -> Sequence[Mapping[str, Any]]:
        """What is scraped, as Prometheus has it: `labels`, `health`, `lastError`, `scrapeUrl`."""
        return list(self._ask("targets", state="active")["activeTargets"])

    def alerts(self) -> Sequence[Mapping[str, Any]]:
        """The rules of alerts, as Prometheus has them: `name`, `query`, `state`, `lastError`."""
        groups = self._ask("rules", type="alert")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _ask(self, what: str, **parameters: object) -> Any:
        url = f"{self.url}/api/v1/{what}?{urlencode(parameters)}"
        try:
            with urlopen(url, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except HTTPError as error:
            raise Refused(error.read().decode(errors="replace")) from None
        except OSError as error:
            raise Refused(f"{self.url} does not answer: {error}") from None


def _sample(pair: Sequence[Any]) -> tuple[float, float]:
    seconds, value = pair
    return float(seconds), float(value)


@contextmanager
def running(program: Path, folder: Path, configuration: Mapping[str, Any]) -> Iterator[Prometheus]:
    """A Prometheus on loopback with a configuration, its storage in a folder; ended afterwards.

    Raises Refused where it does not start.
    """
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    # YAML has all of JSON in it. It may have a token.
    file.touch(mode=0o600)
    file.write_text(json.dumps(configuration, indent=2))
    address = f"127.0.0.1:{free_port()}"
    words = [str(program), f"--config.file={file}", f"--web.listen-address={address}"]
    words.append(f"--storage.tsdb.path={folder / 'storage'}")
    with log.open("w") as output:
        # In a session of its own: a terminal's Ctrl-C, after which it is still asked, would end it.
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            made = Prometheus(f"http://{address}")
            until = time.monotonic() + _START_SECONDS
            while not _is_ready(made):
                if process.poll() is not None or time.monotonic() > until:
                    raise Refused(f"{program} does not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield made
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(prometheus: Prometheus) -> bool:
    try:
        with urlopen(f"{prometheus.url}/-/ready", timeout=1):  # noqa: S310
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port of loopback at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
