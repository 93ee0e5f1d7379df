"""Every notebook matches its source and runs from top to bottom on a fresh kernel."""

import os

import nbclient
import nbformat
import pytest

from tests import notebooks

SOURCES = notebooks.sources()


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_notebook_matches_its_source(source):
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    built = notebooks.build(source)
    assert [(c.cell_type, c.source) for c in committed.cells] == [
        (c.cell_type, c.source) for c in built.cells
    ], "regenerate with: python -m tests.notebooks"
    assert all(not c.get("outputs") and not c.get("execution_count") for c in committed.cells)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_notebook_runs_from_top_to_bottom(source, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPRIV_FAST", "1")
    monkeypatch.setenv(
        "PYTHONPATH", f"{notebooks.COLAB.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    client = nbclient.NotebookClient(
        notebooks.build(source),
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
