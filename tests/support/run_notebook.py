"""Runs a notebook in the kernel of this interpreter: `python run_notebook.py IN OUT`.

In a process of its own, because the sockets to the kernel are closed only when it ends.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient


def main(source: Path, target: Path) -> None:
    notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in a folder only we can read, and not ports.
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        where = {"metadata": {"path": str(target.parent)}}
        NotebookClient(notebook, km=manager, timeout=300, resources=where).execute()
    nbformat.write(notebook, target)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
