"""The roster: names and public keys that SuperNodes can have, one of each for every site."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedunfold.consortium.documents import Document
from fedunfold.consortium.roster import Roster, RosterSite, load_public_key, load_roster
from fedunfold.core.errors import InputError
from tests.consortium.keys import SSH, private_key, public_text, write_keys

PEM = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo


class OnlyRoster(Document):
    """A recipe of which there is only the roster."""

    kind = "fedunfold site recipe"
    made_by = "a test"
    roster: Roster


def roster(*names: str) -> Roster:
    return Roster(sites=tuple(RosterSite(name=name, public_key=public_text()) for name in names))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_a_key_is_the_same_in_both_formats_and_without_its_comment(curve: ec.EllipticCurve, tmp_path: Path) -> None:
    key = private_key(curve).public_key()
    for name, content in (("a", public_text(key) + " me@here\n"), ("b", key.public_bytes(*PEM).decode())):
        (tmp_path / name).write_text(content)
        assert load_public_key(tmp_path / name) == public_text(key)
    assert RosterSite(name="a", public_key=public_text(key)).key() == key


def test_other_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_keys(tmp_path, "own")
    for content, message in (
        ((tmp_path / "own").read_text(), "is a private key, which must never leave its site"),
        (ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*SSH).decode(), "is no EC public key"),
        (private_key(ec.SECP256K1()).public_key().public_bytes(*PEM).decode(), "is no EC public key"),
        ("nothing", "is no EC public key"),
        ("x" * 20000, "is more than the 16384 bytes of a key file"),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=message) as refused:
            load_public_key(file)
        assert str(file) in str(refused.value)
    with pytest.raises(InputError, match="cannot be read"):
        load_public_key(tmp_path / "none")


def test_the_roster_is_read_from_the_recipe(tmp_path: Path) -> None:
    file, made = tmp_path / "recipe.json", roster("a", "b")
    OnlyRoster(roster=made).write(file)
    assert load_roster(file) == made
    assert made.names == ("a", "b")
    assert made.site("b").name == "b"
    with pytest.raises(InputError, match="there is no site c among a, b"):
        made.site("c")


def test_two_sites_of_one_name_or_key_are_refused() -> None:
    with pytest.raises(InputError, match="sites a and a have the same name"):
        roster("a", "b", "a")
    key = public_text()
    with pytest.raises(InputError, match="sites a and b have the same public key"):
        Roster(sites=(RosterSite(name="a", public_key=key), RosterSite(name="b", public_key=key)))
    with pytest.raises(InputError, match="letters, digits"):
        roster("a b")


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    OnlyRoster(roster=roster("a", "b")).write(file)
    written = json.loads(file.read_text())
    for change, message in (
        ({"roster": {"sites": written["roster"]["sites"][:1]}}, "was changed after it was written"),
        ({"checksum": "0"}, "was changed after it was written"),
        ({"version": 2}, "was written by another version of fedunfold"),
        ({"kind": "fedunfold site description"}, "is a fedunfold site description and no fedunfold site recipe"),
    ):
        file.write_text(json.dumps(written | change))
        with pytest.raises(InputError, match=message):
            load_roster(file)
    for content in ("[]", "{}", '{"kind": 3}'):
        file.write_text(content)
        with pytest.raises(InputError, match="is something and no fedunfold site recipe"):
            load_roster(file)
    file.write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        load_roster(file)
