"""Run as a program: a process that has loaded torch once and forks for every message that a SuperNode answers.

A SuperNode starts `flwr-clientapp` anew for every message, which on few cores takes longer than all the rest. Here a
small program of that name, first in the PATH, hands its arguments to this process. What runs is Flower's own.
"""

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

CALL = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect({address!r})
    there.sendall(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode())
"""


def install(folder: Path) -> Path:
    """Write the small program into a folder; gives the socket that it calls."""
    folder.mkdir()
    address, program = folder / "socket", folder / "flwr-clientapp"
    program.write_text(CALL.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    return address


def serve(address: str) -> None:
    import sklearn.datasets  # noqa: F401  (loaded for the forks)
    from flwr.supernode.cli import flwr_clientapp

    import fedunfold.engines.flower
    import fedunfold.engines.simulation  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        while True:
            caller, _ = server.accept()
            with caller:
                content = b"".join(iter(lambda: caller.recv(65536), b""))  # noqa: B023  (read at once)
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.argv, folder, environment = json.loads(content)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                try:
                    flwr_clientapp()
                finally:
                    os._exit(0)  # at once: taking down all that was loaded would copy it first


if __name__ == "__main__":
    serve(sys.argv[1])
