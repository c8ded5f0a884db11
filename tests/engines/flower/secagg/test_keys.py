"""Keys of sites and of sums, shares of secrets, and what is signed and agreed on."""

from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.secagg.keys import (
    Identity,
    agree,
    decrypt,
    digest,
    encrypt,
    mask_key,
    public_bytes,
    read_private_key,
    read_public_key,
)
from fedunfold.engines.flower.secagg.masking import combine, split
from fedunfold.engines.flower.secagg.statements import common_request, own_request, scale_of
from tests.support.secagg_room import INSTRUCTION
from tests.support.site_keys import identity, public_text, site_key


@settings(max_examples=20, deadline=None)
@given(data=st.data(), secret=st.binary(min_size=16, max_size=16), count=st.integers(2, 9))
def test_any_shares_that_are_enough_give_the_secret(data: st.DataObject, secret: bytes, count: int) -> None:
    threshold = data.draw(st.integers(2, count))
    shares = list(enumerate(split(secret, threshold, count)))
    chosen = data.draw(st.permutations(shares))
    assert combine(chosen[:threshold]) == secret
    if threshold > 2:
        assert combine(chosen[: threshold - 1]) != secret


def test_what_is_no_share() -> None:
    with pytest.raises(InputError, match="what is sent as a share is none"):
        combine([(0, b"short"), (1, bytes(16))])


def test_both_have_the_same_in_common() -> None:
    one, other = mask_key(b"1" * 16), mask_key(b"2" * 16)
    assert agree(one, public_bytes(other)) == agree(other, public_bytes(one))
    assert mask_key(b"1" * 16).private_bytes_raw() == one.private_bytes_raw() != other.private_bytes_raw()
    for wrong in (bytes(32), b"short"):
        with pytest.raises(InputError, match="what is sent as a public key is none"):
            agree(X25519PrivateKey.generate(), wrong)


def test_an_encrypted_text_is_about_one_thing() -> None:
    encrypted = encrypt(b"common", b"text", b"list", "a", "b")
    assert decrypt(b"common", encrypted, b"list", "a", "b") == b"text"
    for common, about in ((b"other", ("a", "b")), (b"common", ("b", "a")), (b"common", ("ab", ""))):
        assert decrypt(common, encrypted, b"list", *about) is None
    assert decrypt(b"common", encrypted[:-1], b"list", "a", "b") is None
    assert decrypt(b"common", b"", b"list", "a", "b") is None


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_other_parts_have_another_digest(one: list[str], other: list[str]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_a_signature_is_of_one_site_and_statement() -> None:
    known = identity("a", "ab")
    signature = known.sign("keys", "sum-1", b"key")
    assert known.has_signed("a", signature, "keys", "sum-1", b"key")
    assert not known.has_signed("b", signature, "keys", "sum-1", b"key")
    assert not known.has_signed("x", signature, "keys", "sum-1", b"key")
    assert not known.has_signed("a", signature, "keys", "sum-2", b"key")
    assert not known.has_signed("a", b"", "keys", "sum-1", b"key")


@pytest.mark.parametrize("format", [PrivateFormat.OpenSSH, PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_keys_in_files(tmp_path: Path, format: PrivateFormat) -> None:
    file = tmp_path / "a"
    file.write_bytes(site_key("a").private_bytes(Encoding.PEM, format, NoEncryption()))
    pem = site_key("b").public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    found = Identity.of("a", file, {"a": f"{public_text('a')} somebody@somewhere\n", "b": pem})
    assert found.has_signed("b", identity("b", "b").sign("x"), "x")


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    file, other = tmp_path / "key", rsa.generate_private_key(65537, 2048)
    with pytest.raises(InputError, match=r"cannot read the key .*: No such file"):
        read_private_key(file)
    file.write_text("none")
    with pytest.raises(InputError, match="is no private key without a password; give the SuperNode's own"):
        read_private_key(file)
    file.write_bytes(site_key("a").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))
    with pytest.raises(InputError, match="is no private key without a password"):
        read_private_key(file)
    file.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(InputError, match="is no elliptic-curve key; make one with ssh-keygen -t ecdsa"):
        read_private_key(file)
    for text in ("", "none", "-----BEGIN nothing", "ecdsa-sha2-nistp256 AAAA"):
        with pytest.raises(InputError, match="the roster's key of 'b' cannot be read"):
            read_public_key(text, "b")
    ssh = other.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with pytest.raises(InputError, match="the roster's key of 'b' is no elliptic-curve key"):
        read_public_key(ssh, "b")


def test_sites_keys_may_be_on_another_curve() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    known = Identity(key, {"a": key.public_key(), "b": site_key("b").public_key()})
    assert known.has_signed("a", known.sign("x"), "x")


# --- what members agree on ---------------------------------------------------------------------------------

MODEL = torch.arange(3.0)


def test_what_all_are_sent_alike() -> None:
    """Names, numbers and the model to the last bit; not what is a client's own."""
    common = common_request(INSTRUCTION, {"model": MODEL})
    own = INSTRUCTION.model_copy(update={"epochs": 7, "step_scale": 0.5, "update_scale": 2.0, "trains": False})
    assert common == common_request(own, {"model": MODEL.clone(), "adjoint": MODEL})
    nearly = torch.nextafter(MODEL, MODEL + 1)
    for instruction, arrays in (
        (INSTRUCTION, {"model": nearly}),
        (INSTRUCTION, {"model": MODEL.double()}),
        (INSTRUCTION, {"model": MODEL, "class_weights": MODEL}),
        (INSTRUCTION.model_copy(update={"round": 1}), {"model": MODEL}),
        (INSTRUCTION.model_copy(update={"run": "trial-1"}), {"model": MODEL}),
        (INSTRUCTION.model_copy(update={"lr": 0.2}), {"model": MODEL}),
    ):
        assert common_request(instruction, arrays) != common


def test_what_a_vector_comes_from() -> None:
    arrays = {"model": MODEL, "adjoint": MODEL}
    renamed = INSTRUCTION.model_copy(update={"run": "another", "round": 5})
    assert own_request(INSTRUCTION, arrays) != own_request(renamed, arrays)
    assert own_request(INSTRUCTION, arrays, named=False) == own_request(renamed, arrays, named=False)
    assert own_request(INSTRUCTION, arrays, named=False) != own_request(
        INSTRUCTION, {**arrays, "adjoint": 2 * MODEL}, named=False
    )


def test_by_how_much_a_client_counts() -> None:
    own = INSTRUCTION.model_copy(update={"epochs": 3, "step_scale": 0.5, "update_scale": 4.0})
    arrays = {"model": MODEL, "adjoint": torch.tensor([3.0, 4.0])}
    assert scale_of(own, arrays, "updates", 0.25) == 0.25 * 0.5 * 4 * 3
    assert scale_of(own, arrays, "adjoint", 0.25) == 0.25 * (1 + 0.5 * 4 * 5)
    assert scale_of(own, arrays, "outer_gradient", 0.25) == 0.25
