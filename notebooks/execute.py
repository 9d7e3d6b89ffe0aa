"""Execute every notebook from its paired script: `python notebooks/execute.py [--write]`.

Fails on the first cell that raises, and where the stored .ipynb's cells are not those of its script. --write stores the outputs.
"""

import argparse
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the executed notebooks")
    parser.add_argument("names", nargs="*", help="scripts; none: all")
    options = parser.parse_args()
    scripts = [Path(n) for n in options.names] or sorted(HERE.glob("[0-9]*.py"))
    for script in tqdm(scripts, desc="notebooks"):
        notebook = jupytext.read(script)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        stored = script.with_suffix(".ipynb")
        if not options.write:
            saved = nbformat.read(stored, as_version=4) if stored.exists() else None
            cells = [cell.source for cell in notebook.cells]
            if saved is None or [cell.source for cell in saved.cells] != cells:
                print(f"{stored.name} is not the notebook of {script.name}: run `python notebooks/execute.py --write`")
                return 1
        began = time.perf_counter()
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": HERE}}).execute()
        print(f"{script.name}: {time.perf_counter() - began:.0f} s")
        if options.write:
            for number, cell in enumerate(notebook.cells):  # ids and times that change at every execution stay out
                cell["id"] = f"cell-{number:03d}"
                cell.metadata.pop("execution", None)
                if "outputs" in cell:  # warnings name paths of the machine
                    cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            nbformat.write(notebook, stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())
