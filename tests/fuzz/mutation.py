"""Valid data made wrong: in their bytes, in their values, or in the parts of an archive."""

import copy
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, -(2**31), 10**9, 2**53 + 1, 2**63 - 1, 2**63, 10**12, 10**30, -(10**30))
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    " ",
    "a\nb",
    "\x1b[2J",
    "é漢\u202e",
    "[/bold]",
    "../../outside",
    "/dev/zero",
    "~nobody/x",
    "x" * 5000,
    "a\0b",
)
WORDS = [
    *(str(number).encode() for number in NUMBERS),
    *(
        b"nan",
        b"inf",
        b"-inf",
        b"1e999",
        b"0x" + b"f" * 5000,
        b"9" * 5000,
        b"true",
        b"null",
        b"''",
        b'""',
        b"[]",
        b"{}",
    ),
    *(b"[" * 5000, b"a." * 3000, b"\x00", b"\xff\xfe", b"\x1b[2J", b"\n", b"(1000000000000,)", b"'|O'", b"'<U1000000'"),
]


def of_bytes(data: bytes, rng: Random) -> bytes:
    """One to four changes anywhere."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(result) + 1)
        to = min(len(result), at + rng.choice((1, 1, 2, 4, 8, 64)))
        match rng.randrange(7):
            case 0 if result:
                result[min(at, len(result) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                result[at:to] = rng.randbytes(to - at)
            case 2:
                del result[at:to]
            case 3:
                result[at:at] = rng.choice(WORDS)
            case 4:
                result[at:to] = rng.choice(WORDS)
            case 5:
                result[at:to] = rng.choice(NUMBERS[:11]).to_bytes(8, "little", signed=True)[: to - at]
            case 6:
                del result[at:]
    return bytes(result)


def of_tree(tree: Any, rng: Random) -> Any:
    """A value, entry or name of a tree of lists and tables, replaced, left out or said twice."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 3))):
        places = list(_places(tree))
        if not places:
            return _value(rng)
        home, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del home[key]
            case 1 if isinstance(home, dict):
                home[rng.choice(TEXTS)] = home.pop(key)
            case 1 | 2 if isinstance(home, list):
                home.insert(rng.randrange(len(home) + 1), home[key])
            case 3:
                other_home, other = rng.choice(places)
                if other_home is not home and not _inside(home, other_home, other):
                    home[key] = copy.deepcopy(other_home[other])
            case _:
                home[key] = _value(rng)
    return tree


def of_json(data: bytes, rng: Random) -> bytes:
    """A JSON document's values, or its bytes."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return of_bytes(data, rng)
    return of_bytes(data, rng) if rng.random() < 0.3 else json.dumps(of_tree(tree, rng)).encode()


def of_archive(data: bytes, rng: Random, inner: Mapping[str, Mutate]) -> bytes:
    """A member of a zip archive, put back so that its checksum is right; `inner` has the mutation for an ending."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # an archive that an earlier change has spoilt
        members = []
    if not members or rng.random() < 0.2:
        return of_bytes(data, rng)
    number = rng.randrange(len(members))
    name, content = members[number]
    match rng.randrange(8):
        case 0:
            del members[number]
        case 1:
            members[number] = (rng.choice(members)[0], content)
        case 2:
            members[number] = (rng.choice((*TEXTS[:7], "x_.npy", "name.npy", "settings.json")) or "-", content)
        case _:
            mutate = next((mutate for ending, mutate in inner.items() if name.endswith(ending)), of_bytes)
            members[number] = (name, mutate(content, rng))
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    return zipped(members, method)


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive without a date, so that the same members give the same bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            if name not in archive.namelist():
                archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def of_numpy(data: bytes, rng: Random) -> bytes:
    """Mostly the header of a numpy file, whose length is kept right."""
    if rng.random() < 0.3 or len(data) < 11:
        return of_bytes(data, rng)
    length = int.from_bytes(data[8:10], "little")
    header = of_bytes(data[10 : 10 + length], rng)[:60000]
    return data[:8] + len(header).to_bytes(2, "little") + header + data[10 + length :]


def of_safetensors(data: bytes, rng: Random) -> bytes:
    """Mostly the header, whose length is kept right, and the JSON inside its metadata."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or rng.random() < 0.2:
        return of_bytes(data, rng)
    about = header.get("__metadata__")
    if isinstance(about, dict) and about and rng.random() < 0.5:
        name = rng.choice(sorted(about))
        about[name] = of_json(str(about[name]).encode(), rng).decode(errors="replace")
    else:
        header = of_tree(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _value(rng: Random) -> Any:
    nested: Any = []
    for _ in range(rng.choice((1, 10, 400))):
        nested = [nested]
    plain: tuple[Any, ...] = (None, True, False, [], {}, [0], nested)
    return rng.choice((rng.choice(NUMBERS), rng.choice(FLOATS), rng.choice(TEXTS), rng.choice(plain)))


def _places(tree: Any) -> Any:
    """(home, key) of every entry below a list or table."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key
        yield from _places(value)


def _inside(home: Any, other_home: Any, other: Any) -> bool:
    """Whether an entry holds the place it would be put in, which would make a circle."""
    return any(place is home for place, _ in _places(other_home[other])) or other_home[other] is home
