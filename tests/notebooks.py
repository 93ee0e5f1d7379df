"""Makes colab/*.ipynb from their reviewed sources: `python -m tests.notebooks`."""

import pathlib

import jupytext
import nbformat

COLAB = pathlib.Path(__file__).resolve().parent.parent / "colab"


def sources() -> list[pathlib.Path]:
    return sorted(COLAB.glob("[0-9]*.py"))


def build(source: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook of a percent-format file, without outputs and with stable cell ids."""
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


if __name__ == "__main__":
    for path in sources():
        nbformat.write(build(path), path.with_suffix(".ipynb"))
        print(path.with_suffix(".ipynb").name)
