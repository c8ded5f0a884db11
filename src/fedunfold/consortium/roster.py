"""The sites of a consortium and the public keys of their SuperNodes, as the recipe lists them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fedunfold.config.fields import Key
from fedunfold.consortium.documents import read_content
from fedunfold.core.errors import InputError
from fedunfold.core.extras import import_extra
from fedunfold.core.settings import Settings, explain
from fedunfold.io.atomic import read_text
from fedunfold.io.limits import CLIENTS, KEY_BYTES

RECIPE, AGREE = "fedunfold site recipe", "`fedunfold site agree`"
NEEDS_FLOWER = "public keys of SuperNodes need the package cryptography; run: pip install 'fedunfold[flower]'"


def read_public_key(text: str) -> str:
    """A public key in OpenSSH's format, on one line and without a comment.

    Args:
        text: An EC key on one of NIST's curves P-256, P-384 or P-521, as OpenSSH or PEM have it.

    Raises:
        InputError: It is none; the message is the end of a sentence.
    """
    serialization = import_extra("cryptography.hazmat.primitives.serialization", NEEDS_FLOWER)
    elliptic = import_extra("cryptography.hazmat.primitives.asymmetric.ec", NEEDS_FLOWER)
    unsupported = import_extra("cryptography.exceptions", NEEDS_FLOWER).UnsupportedAlgorithm
    if "PRIVATE KEY" in text:
        raise InputError("is a private key, which must never leave its site; give the public one")
    pem = text.lstrip().startswith("-----BEGIN")
    load = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
    try:
        key = load(text.strip().encode())
        if isinstance(key, elliptic.EllipticCurvePublicKey):
            formats = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            written: str = key.public_bytes(*formats).decode()
            return written
    except (ValueError, unsupported):
        pass
    raise InputError("is no EC public key in OpenSSH's or PEM's format; make one with: ssh-keygen -t ecdsa -b 384")


PublicKey = Annotated[str, Field(max_length=KEY_BYTES.default), AfterValidator(read_public_key)]


class RosterSite(Settings):
    """A site.

    Attributes:
        name: Its name in the federation.
        public_key: Its SuperNode's, in OpenSSH's format.
    """

    name: Key
    public_key: PublicKey

    def key(self) -> Any:
        """The public key, as `cryptography` has it: an `EllipticCurvePublicKey`."""
        serialization = import_extra("cryptography.hazmat.primitives.serialization", NEEDS_FLOWER)
        return serialization.load_ssh_public_key(self.public_key.encode())


class Roster(Settings):
    """All sites.

    Attributes:
        sites: In the order of their names, each with a name and a key of its own.
    """

    sites: tuple[RosterSite, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> "Roster":
        CLIENTS.check(len(self.sites))
        for what, values in (
            ("name", [site.name for site in self.sites]),
            ("public key", [site.public_key for site in self.sites]),
        ):
            twice = next((i for i, value in enumerate(values) if value in values[:i]), None)
            if twice is not None:
                first = self.sites[values.index(values[twice])].name
                raise InputError(f"sites {first} and {self.sites[twice].name} have the same {what}; each needs its own")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return tuple(site.name for site in self.sites)

    def site(self, name: str) -> RosterSite:
        """The site of that name.

        Raises:
            InputError: There is none.
        """
        found = next((site for site in self.sites if site.name == name), None)
        if found is None:
            raise InputError(f"there is no site {name} among {', '.join(self.names)}; check the name.")
        return found


def load_roster(path: str | Path) -> Roster:
    """The roster that a recipe holds.

    Args:
        path: The file that `fedunfold site agree` wrote.

    Raises:
        InputError: It is no recipe, or was changed.
    """
    path = Path(path)
    content = read_content(path, RECIPE, AGREE)
    try:
        return Roster.model_validate(content.get("roster"))
    except ValidationError as error:
        raise explain(error, f"{path}: roster: ") from error


def load_public_key(path: Path) -> str:
    """The public key in a file.

    Args:
        path: Such as `hospital-a.pub`.

    Raises:
        InputError: It has none that a SuperNode can have.
    """
    try:
        return read_public_key(read_text(path, KEY_BYTES))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path} {error}.") from error
