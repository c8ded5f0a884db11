"""A site's SuperNode: checked before it starts, with Flower's reports to its makers turned off, and stopped with us.

It runs as a process in a session of its own, so that Ctrl-C reaches it once and by us. Its own lines pass through;
those that tell how it stands with the SuperLink are said in plain words too.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from fedunfold.consortium.apply import check_site_file, held_out_file, sums_file
from fedunfold.consortium.recipe import SiteRecipe
from fedunfold.consortium.roster import NEEDS_FLOWER, read_public_key
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.extras import import_extra
from fedunfold.io.atomic import is_plain_file, read_text
from fedunfold.io.limits import KEY_BYTES

PROGRAM = "flower-supernode"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Flower reports to nobody, and installs nothing that an app asks for."""
CONNECTED, WAITING = "SuperNode ID:", "Connection attempt failed"
MARKS = {
    CONNECTED: "",
    WAITING: "",
    "[code: 2004]": (
        "either the coordinator has not registered the site's public key, or the SuperLink still takes the site for "
        "connected, which ends within a minute"
    ),
    "CERTIFICATE_VERIFY_FAILED": "the authority of the root certificate has not signed the SuperLink's certificate",
    "WRONG_VERSION_NUMBER": "the SuperLink there was started without TLS",
    "address already in use": "another program uses the port of its SuperNode; choose another one",
}
"""What the SuperNode's lines say of its connection, and why it ended, where it did."""
SECONDS = 20.0
"""How long a SuperNode may take to stop before it is killed."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class SuperNode:
    """A SuperNode that can be started.

    Attributes:
        site: Whose it is.
        superlink: HOST:PORT of the SuperLink.
        command: The program and its arguments.
    """

    site: str
    superlink: str
    command: tuple[str, ...]

    @classmethod
    def of(
        cls,
        recipe_file: Path,
        data: Path,
        *,
        superlink: str,
        root_certificates: Path,
        private_key: Path,
        host: str = LOOPBACK,
        port: int | None = None,
        secure_aggregation: bool = False,
        node_config: str = "",
    ) -> "SuperNode":
        """Check everything that can be checked beforehand.

        Args:
            recipe_file: The recipe that all have agreed on.
            data: The file that was made of the site's table by it.
            superlink: HOST:PORT of the coordinator's SuperLink.
            root_certificates: The authority that signed the SuperLink's certificate, in PEM.
            private_key: The site's, whose public half is in the roster; it never leaves this machine.
            host: Where the SuperNode's own processes reach it, on this machine.
            port: The same; by default one that is free.
            secure_aggregation: Whether to take part in sums alone, whatever a run requests; the app learns where the
                roster is, the key to sign by and the record of the sums.
            node_config: Other settings of this node for the app, as `name=value name="text"`.

        Raises:
            InputError: A file is missing, of another recipe, or of another site.
        """
        recipe = SiteRecipe.read(recipe_file)
        site = check_site_file(data, recipe, recipe_file)
        _check_address(superlink)
        if "-----BEGIN CERTIFICATE-----" not in _text(root_certificates):
            raise InputError(f"{root_certificates} is no certificate in PEM's format; ask the coordinator for it.")
        if public_key_of(private_key) != recipe.roster.site(site).public_key:
            raise InputError(
                f"{private_key} is not the key of {site} in {recipe_file}: the public key there is another one; give "
                "the private key that belongs to it."
            )
        config = {"client-id": site, "path": str(data.resolve()), "recipe-checksum": recipe.checksum}
        if is_plain_file(held_out_file(data)):
            check_site_file(held_out_file(data), recipe, recipe_file)
            config["held-out"] = str(held_out_file(data).resolve())
        if secure_aggregation:
            if not is_plain_file(record := sums_file(data)):
                raise InputError(
                    f"there is no {record}, where {site} stores which sums its updates have entered; restore it, or "
                    "begin anew by an empty file if there has been none."
                )
            files = {"roster": recipe_file, "signing-key": private_key, "record": record}
            config |= {name: str(file.resolve()) for name, file in files.items()}
        for value in config.values():
            if set('"\\') & set(value):
                raise InputError(f"{value}: Flower takes no quotes or backslashes in the name of a file; rename it.")
        listed = " ".join(f'{name}="{value}"' for name, value in config.items())
        listed += " secure-aggregation=true" if secure_aggregation else ""
        if taken := [name for name in (*config, "secure-aggregation") if re.search(rf"(^|\s){name}=", node_config)]:
            raise InputError(f"`node_config`: {taken[0]} is set by the recipe and the other arguments; leave it out.")
        listed += f" {node_config}" if node_config else ""
        where = ("--host", host, "--port", str(_free_port(host) if port is None else port))
        secure = ("--root-certificates", str(root_certificates), "--auth-supernode-private-key", str(private_key))
        return cls(site, superlink, (_program(), "--superlink", superlink, *secure, *where, "--node-config", listed))

    def run(self, say: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Run it until it ends or is stopped, by Ctrl-C or SIGTERM.

        Args:
            say: Gets a sentence when something happens.
            show: Gets the SuperNode's own lines.

        Raises:
            FederationError: The SuperLink refused it, or it ended by itself.
        """
        found: list[str] = []

        def follow(lines: IO[str]) -> None:
            with lines:
                for line in lines:
                    show(line.rstrip("\n"))
                    found.extend(mark for mark in MARKS if mark in line and mark not in found)
                    note(line)

        def note(line: str) -> None:
            if CONNECTED in line:
                say(f"{self.site} is connected to {self.superlink}; Ctrl-C stops it.")
            elif WAITING in line and found == [WAITING]:
                found.append("")  # said once
                say(f"{self.superlink} does not answer yet; {self.site} tries again until it does. Ctrl-C stops it.")

        environment = os.environ | QUIET | {"PATH": _path_with(Path(self.command[0]).parent)}
        with _ended_by_sigterm():
            process = subprocess.Popen(
                self.command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            assert process.stdout is not None
            reader = threading.Thread(target=follow, args=[process.stdout], daemon=True)
            reader.start()
            try:
                code = process.wait()
            finally:
                _stop(process)
                reader.join(SECONDS)
        reason = next((MARKS[mark] for mark in found if MARKS.get(mark)), f"its SuperNode ended with code {code}")
        raise FederationError(f"{self.site} is not connected to {self.superlink}: {reason}.")


def public_key_of(private_key: Path) -> str:
    """The public half of a private key.

    Args:
        private_key: An EC key in OpenSSH's format, without a passphrase, as a SuperNode takes it.

    Raises:
        InputError: It is none.
    """
    serialization = import_extra("cryptography.hazmat.primitives.serialization", NEEDS_FLOWER)
    exceptions = import_extra("cryptography.exceptions", NEEDS_FLOWER)
    try:
        key = serialization.load_ssh_private_key(_text(private_key).encode(), None)
    except TypeError as error:
        raise InputError(
            f"{private_key} has a passphrase, which a SuperNode cannot ask for; make a key without."
        ) from error
    except (ValueError, exceptions.UnsupportedAlgorithm) as error:
        raise InputError(
            f"{private_key} is no private key in OpenSSH's format; make one with: ssh-keygen -t ecdsa -b 384"
        ) from error
    written = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    try:
        return read_public_key(written.decode())
    except InputError as error:
        raise InputError(f"{private_key}: its public key {error}.") from error


def _text(path: Path) -> str:
    try:
        return read_text(path, KEY_BYTES)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the path.") from error


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise InputError(f"the SuperLink's address is HOST:PORT, such as link.example.org:9092, not {address!r:.80}.")


def _program() -> str:
    """Flower's program that is installed beside this Python, or found in the PATH."""
    beside = Path(sys.executable).parent / PROGRAM
    found = str(beside) if beside.exists() else shutil.which(PROGRAM)
    if found is None:
        raise InputError("running a SuperNode needs Flower; install it with: pip install 'fedunfold[flower]'")
    return found


def _path_with(folder: Path) -> str:
    """The PATH with a folder in it, where the SuperNode finds Flower's other programs."""
    path = os.environ.get("PATH", os.defpath)
    known = any(Path(entry).resolve() == folder.resolve() for entry in path.split(os.pathsep))
    return path if known else f"{folder}{os.pathsep}{path}"


def _free_port(host: str) -> int:
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise InputError(
            f"{host} is no address of this machine ({error.strerror or error}); choose another."
        ) from error


def _stop(process: "subprocess.Popen[str]") -> None:
    """End it and what it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):  # then it is killed
            process.wait(SECONDS)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends us in order, as service managers send it."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
