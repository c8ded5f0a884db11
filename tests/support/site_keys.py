"""Sites' keys for tests, each made once: in memory, and as the files that a node-config names."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedunfold.engines.flower.secagg.keys import Identity


@cache
def site_key(name: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_text(name: str) -> str:
    """As in the .pub file that ssh-keygen writes."""
    return site_key(name).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def identity(name: str, names: Iterable[str]) -> Identity:
    return Identity(site_key(name), {other: site_key(other).public_key() for other in names})


@cache
def _root() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return folder


def fresh_folder() -> Path:
    """One that is deleted when the tests end."""
    return Path(tempfile.mkdtemp(dir=_root()))


def node_configs(folder: Path, names: Iterable[str], **more: Any) -> dict[str, dict[str, Any]]:
    """For every client a node-config that trusts no server, with its files in a folder."""
    names = list(names)
    roster = folder / "roster.json"
    roster.write_text(json.dumps({name: public_text(name) for name in names}))
    found = {}
    for name in names:
        key, record = folder / name, folder / f"{name}-record.json"
        key.write_bytes(site_key(name).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        record.touch()
        files = {"roster": str(roster), "signing-key": str(key), "record": str(record)}
        found[name] = {"client-id": name, "secure-aggregation": True, **files, **more}
    return found
