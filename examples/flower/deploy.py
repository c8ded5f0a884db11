"""Run this app on a federation of real processes: a SuperLink and five SuperNodes, with TLS and authenticated nodes.

python examples/flower/deploy.py                                # a quick run on the digits, a SuperNode for each site
python examples/flower/deploy.py 'iterations=5' 'rounds=5'      # any settings of [tool.flwr.app.config]
python examples/flower/deploy.py --full                         # as long as the app runs where nothing is set

It says what it is going to do and about how long that takes, and then how far it is. Certificates and keys are made for
this run and thrown away. All listens on the loopback alone, on free ports, and is stopped in the end.
"""

import argparse
import datetime
import difflib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from simulate import APP, QUIET, free_port, stopped, wait_for

CLIENT_IDS = ("site-a", "site-b", "site-c", "site-d", "site-e")
LOOPBACK = "127.0.0.1"
QUICKLY = {"iterations": "2", "rounds": "2"}
"""Settings of a quick run, where neither these are given nor a full run is asked for."""
PATIENTLY = {"timeout": "600.0", "registration-timeout": "600.0"}
"""Where nothing else is given: all nodes share this machine, which may have other things to do."""
BUNDLED_ROUNDS = 10
"""Rounds of the environment that the app trains where nothing else is said."""
SECONDS = 4.0
"""Of one core, for a node's process to load PyTorch, train on its few samples and end: about, by trying."""


def write_certificates(folder: Path) -> None:
    """An authority (ca.crt), and a certificate signed by it for the loopback (server.crt, server.key)."""
    now, year = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=365)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedunfold example authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])

    def begun(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(now + year)

    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOOPBACK))]
    own = begun(issuer, authority.public_key()).add_extension(x509.BasicConstraints(True, None), critical=True)
    signed = begun(subject, server.public_key()).add_extension(x509.SubjectAlternativeName(names), critical=False)
    for file, builder in (("ca.crt", own), ("server.crt", signed)):
        certificate = builder.sign(authority, hashes.SHA256())
        (folder / file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    write_secret(folder / "server.key", server, serialization.PrivateFormat.PKCS8)


def write_node_key(folder: Path, name: str) -> None:
    """A SuperNode's key pair in OpenSSH's format: NAME and NAME.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / name, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)


def write_secret(file: Path, key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> None:
    """A private key that only its owner can read."""
    file.touch(mode=0o600)
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption()))


class Deployment:
    """A SuperLink and its SuperNodes, as processes of this machine; `folder` holds keys, logs and the link's state."""

    def __init__(self, folder: Path, processes: ExitStack) -> None:
        self.folder, self.port, self._processes = folder, free_port(), processes
        self.binaries = Path(sys.executable).parent  # Flower's programs, beside the Python that runs this
        path = f"{self.binaries}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | QUIET | {"FLWR_HOME": str(folder), "PATH": path}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        write_certificates(folder)
        address, authority = f"{LOOPBACK}:{self.port}", folder / "ca.crt"
        (folder / "config.toml").write_text(
            f'[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\naddress = "{address}"\n'
            f'root-certificates = "{authority}"\n'
        )

    def start_link(self) -> None:
        secure = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        command = ["flower-superlink", *secure, "--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        where = ["--host", LOOPBACK, "--port", str(self.port), "--database", "link.db"]
        self.link = self.start("superlink", *command, *where)
        wait_for(self.port, self.link)

    def register(self, name: str) -> None:
        """Let the SuperLink know a node's public key."""
        write_node_key(self.folder, name)
        self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "deployment")

    def start_node(self, name: str, *security: str, data: Path | None = None) -> subprocess.Popen[bytes]:
        """A SuperNode that is the client of that id, with an .npz of its own; other security options replace TLS and
        the node's key."""
        secure = security or ("--root-certificates", "ca.crt", "--auth-supernode-private-key", name)
        where = ["--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", str(free_port())]
        config = f'client-id="{name}"' + (f' path="{data}"' if data else "")
        self.nodes[name] = self.start(name, "flower-supernode", *secure, *where, "--node-config", config)
        return self.nodes[name]

    def run_app(self, settings: list[str], app: Path = APP) -> None:
        chosen = [part for setting in settings for part in ("--run-config", setting)]
        self.flwr("run", str(app), "deployment", "--stream", *chosen)

    def flwr(self, *arguments: str) -> None:
        """A command of Flower's; what it says is shown."""
        subprocess.run([self.binaries / "flwr", *arguments], env=self.environment, check=True)

    def status(self) -> str:
        """How the last run stands, such as "finished:completed"; `flwr run` ends without an error whatever becomes of
        the app."""
        command: list[str | Path] = [self.binaries / "flwr", "list", "deployment", "--limit", "1", "--format", "json"]
        for _ in range(10):  # it is noted a little after the app has ended
            done = subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True)
            (run,) = json.loads(done.stdout)["runs"]
            if str(run["status"]).startswith("finished"):
                break
            time.sleep(1)
        return str(run["status"])

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            command: list[str | Path] = [self.binaries / program, *arguments]
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.enter_context(stopped(process))
        return process


def chosen_settings(given: Sequence[str], *, full: bool) -> dict[str, str]:
    """Settings by name, as texts in TOML: those given, and where they are not a patient server's and a quick run's.

    Raises:
        ValueError: One of them is none of the app's, or has a value of another type than there.
    """
    text, known = " ".join(given), app_config()
    pattern = r"""([\w-]+)=("[^"]*"|'[^']*'|\S+)"""
    if left := re.sub(pattern, "", text).split():
        raise ValueError(f"'{left[0]}' is no setting; give a name and a value, such as 'iterations=5'.")
    found = dict(re.findall(pattern, text))
    for name, value in found.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}."
            raise ValueError(f"the app has no setting '{name}'; {meant}")
        kind = type(known[name])
        try:
            (read,) = tomllib.loads(f"it = {value}").values()
        except tomllib.TOMLDecodeError:
            read = None
        if type(read) is not kind and not (kind is float and type(read) is int):
            wanted = {str: f"""a text in quotes, as '{name}="…"'""", bool: "true or false", int: "a whole number"}
            raise ValueError(f"{name} is {wanted.get(kind, 'a number')}, not {value}.")
    return PATIENTLY | ({} if full else QUICKLY) | found


def app_config() -> dict[str, Any]:
    """The app's settings, as they are where nothing is given."""
    found: dict[str, Any] = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    config: dict[str, Any] = found["config"]
    return config


def plan(settings: Mapping[str, str], cores: int) -> str:
    """What a run with these settings does, and about how long it takes."""
    config = app_config() | tomllib.loads("\n".join(f"{name} = {value}" for name, value in settings.items()))
    rounds = config["rounds"] or BUNDLED_ROUNDS
    learns = str(config["method"]).startswith("duw-") or config["method"] == "fedunfold-table"
    steps = config["iterations"] if learns else 0
    runs = 1 if config["method"] == "fedavg" else 2
    # In an outer step all rounds and the final evaluation, and the rounds of every run.
    messages = 1 + steps * (rounds + 1) + runs * rounds
    minutes = messages * len(CLIENT_IDS) * SECONDS / cores / 60
    learned = f"learns weights in {steps} outer steps over {rounds} rounds, then " if learns else ""
    return (
        f"This starts a SuperLink and {len(CLIENT_IDS)} SuperNodes on {LOOPBACK}, with TLS and a key for each node, "
        f"{learned}trains {'with them and with size weights' if runs == 2 else 'with size weights'}, {rounds} "
        f"round{'s' * (rounds != 1)} each, and stops them all.\nEvery node starts a process for each of about "
        f"{messages} messages: roughly {max(1, round(minutes))} min on {cores} cores that have nothing else to do."
    )


def main(settings: Mapping[str, str]) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    print(plan(settings, os.cpu_count() or 1), flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        say("1/4 making certificates")
        deployment = Deployment(Path(folder), processes)
        say("2/4 starting the SuperLink")
        deployment.start_link()
        for number, client_id in enumerate(CLIENT_IDS, start=1):
            say(f"3/4 registering and starting SuperNode {number} of {len(CLIENT_IDS)}, {client_id}")
            deployment.register(client_id)
            deployment.start_node(client_id)
        say("4/4 running the app; what the server says follows")
        deployment.run_app([f"{name}={value}" for name, value in settings.items()])
        status = deployment.status()
        say(f"{status}; stopping all of them")
    if status != "finished:completed":
        sys.exit(f"the run is {status}, not completed; what the server said is above.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Run this app on real processes of this machine: a SuperLink and five SuperNodes, with TLS.",
        epilog="""Example: python examples/flower/deploy.py 'iterations=5' 'rounds=5'. By default a quick run: """
        + " ".join(f"{name}={value}" for name, value in QUICKLY.items()),
    )
    parser.add_argument("settings", nargs="*", help="any of [tool.flwr.app.config], such as 'iterations=5'")
    parser.add_argument("--full", action="store_true", help="as long as the app runs where nothing is set")
    parser.add_argument("--plan", action="store_true", help="only say what would be done, and about how long it takes")
    arguments = parser.parse_args()
    try:
        chosen = chosen_settings(arguments.settings, full=arguments.full)
    except ValueError as error:
        parser.error(str(error))
    if arguments.plan:
        print(plan(chosen, os.cpu_count() or 1))
    else:
        # Whoever ends this program ends what it has started: by default nothing would be stopped then.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            main(chosen)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{Path(error.cmd[0]).name} {error.cmd[1]} ended with {error.returncode}; what it said is above.")
        except KeyboardInterrupt:
            sys.exit("stopped, with all that was started.")
