"""Run folders as training leaves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import Records, settings, usual_records


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder from records and changes to run.json."""

    def make(records: Records | None = None, *, tail: str = "", **changes: Any) -> Path:
        folder = tmp_path / "runs" / "folder-name"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(settings(**changes)), encoding="utf-8")
        lines = [json.dumps(record) + "\n" for record in (usual_records() if records is None else records)]
        (folder / "metrics.jsonl").write_text("".join(lines) + tail, encoding="utf-8")
        return folder

    return make
