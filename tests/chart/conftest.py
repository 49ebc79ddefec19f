"""Renders the chart, by the helm that deploy/render.py builds."""

import subprocess
from pathlib import Path

import pytest
import yaml
from chart.documented import CHART
from chart.rendering import Refused, Template, Values

from deploy import render


@pytest.fixture(scope="module")
def helm() -> Path:
    return render.ensure_helm()


@pytest.fixture
def template(helm: Path, tmp_path: Path) -> Template:
    def make(values: Values | None = None, release: str = "carver", *apis: str) -> Path:
        given, made = tmp_path / "values.yaml", tmp_path / f"{release}.yaml"
        given.write_text(yaml.safe_dump(values or {}))
        words = [str(helm), "template", release, str(CHART), "--namespace", "storage"]
        words += ["--values", str(given), "--kube-version", render.KUBERNETES_VERSION]
        words += [word for api in apis for word in ("--api-versions", api)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise Refused(ended.stderr)
        made.write_text(ended.stdout)
        return made

    return make
