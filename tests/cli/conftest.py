"""No test reads the settings of whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.handed_on import TABLE


@pytest.fixture(autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for settings, and none of the variables that the launcher hands on."""
    home = tmp_path_factory.mktemp("xdg")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    for row in TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    return home
