"""Keys of SuperNodes."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

SSH = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
PRIVATE = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH


def private_key(curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve or ec.SECP384R1())


def public_text(key: ec.EllipticCurvePublicKey | None = None) -> str:
    """In OpenSSH's format."""
    return (key or private_key().public_key()).public_bytes(*SSH).decode()


def write_keys(folder: Path, name: str) -> None:
    """NAME and NAME.pub, as ssh-keygen writes them."""
    key = private_key()
    (folder / name).write_bytes(key.private_bytes(*PRIVATE, serialization.NoEncryption()))
    (folder / f"{name}.pub").write_text(public_text(key.public_key()) + "\n")
