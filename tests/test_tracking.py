"""wandb mirrors the files: without a key, without a network, and without stopping anything."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flat_model import FlatModel

import csd_policy.compare
from csd_policy import tracking
from csd_policy.compare import run
from csd_policy.comparison import Comparison, Method
from csd_policy.policies import CSD


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small comparison."""
    folder = tmp_path_factory.mktemp("results") / "small"
    methods = [Method("AR", window=1), Method("CSD .5", CSD(delta=0.5), window=4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csd_policy.compare, "load_model", lambda *_: FlatModel())
        run(Comparison(methods, ["cat", "dog"], output=str(folder), wandb="disabled"))
    return folder


@contextmanager
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """Address of a server in place of wandb's and of every proxy, and what it was sent."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        open_ = threading.Event()

        def listen() -> None:
            while not open_.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                connection.settimeout(1)
                heard.append(connection.recv(100))
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", heard
        finally:
            open_.set()
            thread.join()


def black_hole(patch: pytest.MonkeyPatch, address: str) -> None:
    patch.delenv("WANDB_MODE", raising=False)
    patch.delenv("WANDB_API_KEY", raising=False)
    for name in ("WANDB_BASE_URL", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        patch.setenv(name, address)
    patch.delenv("no_proxy", raising=False)
    patch.delenv("NO_PROXY", raising=False)


def test_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert tracking.choose_mode(None) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert tracking.choose_mode(None) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.choose_mode(None) == "disabled"
    assert tracking.choose_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ValueError, match="'sometimes', expected one of online, offline, disabled"):
        tracking.choose_mode(None)


def test_disabled_starts_nothing(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = sorted(done.rglob("*"))
    tracking.mirror(done, "disabled", "test")
    assert sorted(done.rglob("*")) == before


def test_offline_without_key_terminal_and_network(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with listener() as (address, heard):
        black_hole(monkeypatch, address)
        for _ in range(2):  # a repeated command adds nothing
            begin = time.monotonic()
            tracking.mirror(done, tracking.choose_mode(None), "test")
            assert time.monotonic() - begin < 60
    assert heard == [] and caplog.records == [], (done / "wandb" / "mirror.log").read_text()
    runs = list((done / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    tables = list((done / "wandb").glob("offline-run-*/files/media/table/pictures*.table.json"))
    assert len(tables) == 2
    assert json.loads(tables[0].read_text())["columns"][:3] == ["prompt", "seed", "picture"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".wandb"]
    assert list((done / "wandb" / "artifacts").rglob("*"))


class FakeRun:
    """Records what a run is given."""

    def __init__(self, **given: Any) -> None:
        self.given, self.summary, self.logged = given, dict[str, float](), dict[str, Any]()

    def __enter__(self) -> "FakeRun":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        assert not self.logged.keys() & values.keys()
        self.logged |= values


class FakeTable:
    def __init__(self, columns: list[str]) -> None:
        self.columns, self.rows = columns, list[Any]()

    def add_data(self, *row: Any) -> None:
        self.rows.append(row)


def test_what_a_run_holds(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []
    wandb = ModuleType("wandb")
    fakes = {
        "init": lambda **given: runs.append(FakeRun(**given)) or runs[-1],
        "Settings": lambda **given: given,
        "Table": FakeTable,
        "Image": lambda path: Path(path),
    }
    for name, fake in fakes.items():
        setattr(wandb, name, fake)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracking.log_results(done, "online", "test")
    results = json.loads((done / "results.json").read_text())
    assert [run.given["name"] for run in runs] == ["AR", "CSD .5"]
    assert {run.given["group"] for run in runs} == {"small"}
    assert len({run.given["id"] for run in runs}) == 2
    csd, line = runs[1], results["table"][1]
    assert csd.given["config"]["policy"] == repr(CSD(delta=0.5))
    assert csd.given["config"]["decode"]["window"] == 4
    assert csd.given["settings"]["mode"] == "online" and csd.given["settings"]["finish_timeout"] > 0
    assert csd.summary["accept/compression"] == line["accept/compression"]["mean"]
    assert csd.summary["quality/spent_tv_low"] == line["quality/spent_tv"]["low"]
    assert csd.summary["speed/share_forward"] == line["speed/share_forward"]
    assert all("/" in key for key in csd.summary)
    (table,) = csd.logged.values()
    assert table.columns == ["prompt", "seed", "picture", "passes", "tokens_per_pass", "spent_tv"]
    assert [row[:2] for row in table.rows] == [("cat", 0), ("dog", 0)]
    assert all(row[2].is_file() for row in table.rows)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('no wandb here')", "no wandb here"),
        ("import sys; sys.exit(3)", "status 3"),
        ("import time; time.sleep(60)", "timed out"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "status -9"),
    ],
)
def test_a_failure_is_one_warning(
    code: str,
    said: str,
    done: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "wandb.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begin = time.monotonic()
    tracking.mirror(done, "offline", "test", time_limit=5)
    assert time.monotonic() - begin < 30
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and said in record.getMessage()
    assert str(done) in record.getMessage()


def test_a_failing_tracker_leaves_the_comparison_alone(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text("raise OSError('disk full')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(csd_policy.compare, "load_model", lambda *_: FlatModel())
    plan = Comparison([Method("AR", window=1)], ["cat"], output=str(tmp_path / "o"))
    assert "AR" in run(replace(plan, wandb="offline"))
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert "disk full" in record.getMessage()
    assert (tmp_path / "o" / "results.json").is_file() and os.environ["WANDB_MODE"] == "disabled"


def test_only_one_module_imports_wandb() -> None:
    folder = Path(csd_policy.__file__).parent
    found = [p.name for p in folder.rglob("*.py") if "import wandb" in p.read_text()]
    assert found == ["tracking.py"]
