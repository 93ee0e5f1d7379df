"""Every notebook matches its source and runs from top to bottom on a fresh kernel."""

import os
import re

import nbclient
import nbformat
import pytest

from tests import notebooks

SOURCES = notebooks.sources()
PICTURE = re.compile(r"plt\.show\(|plots\.\w+\(")


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_notebook_matches_its_source(source):
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    built = notebooks.build(source)
    assert [(c.cell_type, c.source) for c in committed.cells] == [
        (c.cell_type, c.source) for c in built.cells
    ], "regenerate with: python -m tests.notebooks"
    assert all(not c.get("outputs") and not c.get("execution_count") for c in committed.cells)


# What is kept before the training cell of a notebook is run again, and what then holds.
AGAIN = {
    "01_keyboard_lm": (
        "session.train(",
        """
def counted():
    return {name: stated.write(pathlib.Path(c.run_dir)).data["observed"] for name, c in settings.items()}

before = results, logs, counted()
""",
        """
assert logs == before[1] and counted() == before[2]
assert all(seen["num_rounds"] == base.rounds for seen in counted().values())
for name, earlier in before[0].items():
    assert {**results[name], "seconds": 0} == {**earlier, "seconds": 0}
""",
    ),
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_notebook_runs_from_top_to_bottom(source, tmp_path, monkeypatch):
    """A picture's cell that is run first names what is missing and spoils nothing; where a run has a folder, its cell
    run again reads it and releases nothing more (AC60)."""
    monkeypatch.setenv("JAXPRIV_FAST", "1")
    monkeypatch.setenv(
        "PYTHONPATH", f"{notebooks.COLAB.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = notebooks.build(source)
    if source.stem == "03_federated_translation":  # its round can be interrupted and run again
        number = next(i for i, c in enumerate(notebook.cells) if "protocol.make_round(" in c.source)
        begun = notebook.cells[number].source.partition("    print(name, protocol.share(")[0]
        notebook.cells.insert(number, nbformat.v4.new_code_cell(begun))
    if source.stem in AGAIN:
        word, keep, check = AGAIN[source.stem]
        number = next(i for i, c in enumerate(notebook.cells) if word in c.source)
        again = [keep, notebook.cells[number].source, check]
        notebook.cells[number + 1 : number + 1] = map(nbformat.v4.new_code_cell, again)
    picture = next(c for c in notebook.cells if c.cell_type == "code" and PICTURE.search(c.source))
    early = nbformat.v4.new_code_cell(picture.source, metadata={"tags": ["raises-exception"]})
    notebook.cells.insert(0, early)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert early.outputs[-1].get("ename") == "NameError"


def test_running_the_training_cell_again_is_a_new_release_and_is_counted(tmp_path, monkeypatch):
    """A second run draws a new secret, and the budget that is shown counts both (AC60)."""
    monkeypatch.setenv("JAXPRIV_FAST", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", str(notebooks.COLAB.parent))
    notebook = notebooks.build(notebooks.COLAB / "00_quickstart.py")
    training = next(i for i, c in enumerate(notebook.cells) if "num_tree_runs = " in c.source)
    keep = nbformat.v4.new_code_cell("first = {name: np.asarray(m) for name, m in models.items()}")
    check = nbformat.v4.new_code_cell(
        "assert all((first[name] != np.asarray(models[name])).any() for name in first)\n"
        "four = accounting.compose([run] * 4, delta=1e-6).epsilon\n"
        "assert together.epsilon == four, (together.epsilon, four)"
    )
    cells = notebook.cells
    notebook.cells = [*cells[: training + 1], keep, cells[training], *cells[training + 1 :], check]
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
