"""A site's SuperNode: what is checked before it starts, what is said while it runs, and how it ends."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedunfold.cli import main
from fedunfold.consortium import supernode
from fedunfold.consortium.agree import agree
from fedunfold.consortium.apply import apply
from fedunfold.consortium.describe import describe
from fedunfold.consortium.recipe import SiteRecipe
from fedunfold.consortium.roster import RosterSite, load_public_key
from fedunfold.consortium.supernode import QUIET, SuperNode
from fedunfold.core.errors import FederationError, InputError
from fedunfold.data.importers.csv import CsvTable
from fedunfold.engines.flower.secure_client import _identity
from tests.consortium.keys import write_keys
from tests.data.importers.tables import SITES, Hospitals

Made = Callable[..., SuperNode]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """What the site of basel has, and its SuperNode; arguments replace what it is given."""
    monkeypatch.chdir(tmp_path)
    folder = Hospitals().write(tmp_path / "sites")
    descriptions = []
    for site in SITES:
        write_keys(tmp_path, site)
        named = RosterSite(name=site, public_key=load_public_key(Path(f"{site}.pub")))
        descriptions.append(describe(CsvTable(folder / f"{site}.csv"), named, "diagnosis")[0])
    recipe = agree(descriptions, "diagnosis")[0]
    recipe.write(Path("recipe.json"))
    apply(recipe, CsvTable(folder / "basel.csv"), "basel").write(Path("basel.npz"))
    Path("ca.crt").write_text("-----BEGIN CERTIFICATE-----\n")

    def make(recipe_file: str = "recipe.json", data: str = "basel.npz", **changes: Any) -> SuperNode:
        given = {"superlink": "link:9092", "root_certificates": Path("ca.crt"), "private_key": Path("basel")}
        return SuperNode.of(Path(recipe_file), Path(data), **{**given, **changes})

    return make


def standing_in(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in the place of Flower's, which prints its lines."""
    file = tmp_path / "flower-supernode"
    file.write_text(f"#!{sys.executable}\nimport os, sys, time\n{program}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(supernode, "_program", lambda: str(file))


def test_the_command_has_tls_the_key_and_the_data(node: Made, tmp_path: Path) -> None:
    command = node(host="127.0.0.2", secure_aggregation=True, node_config="min-members=3").command
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert Path(command[0]).name == "flower-supernode"
    assert options["--superlink"] == "link:9092"
    assert options["--root-certificates"] == "ca.crt"
    assert options["--auth-supernode-private-key"] == "basel"
    assert options["--host"] == "127.0.0.2"
    assert "--insecure" not in command
    config = options["--node-config"]
    assert f'client-id="basel" path="{tmp_path / "basel.npz"}"' in config
    assert f'held-out="{tmp_path / "basel.held-out.npz"}"' in config
    assert f'roster="{tmp_path / "recipe.json"}" signing-key="{tmp_path / "basel"}"' in config
    assert f'record="{tmp_path / "basel.sums.json"}" secure-aggregation=true' in config
    assert config.endswith("min-members=3")
    assert "secure-aggregation" not in " ".join(node().command)


def test_sums_need_their_record_which_data_made_again_leave_as_it_is(node: Made) -> None:
    record = Path("basel.sums.json")
    record.write_text("{}")
    Path("basel.npz").unlink()
    recipe, table = SiteRecipe.read(Path("recipe.json")), CsvTable(Path("sites/basel.csv"))
    apply(recipe, table, "basel").write(Path("basel.npz"))
    assert record.read_text() == "{}"
    record.unlink()
    with pytest.raises(InputError, match=r"there is no basel\.sums\.json"):
        node(secure_aggregation=True)
    assert "record=" not in " ".join(node().command)


def test_the_recipe_is_the_roster_of_secure_sums(node: Made) -> None:
    files: dict[str, Any] = {"roster": "recipe.json", "signing-key": "basel", "record": "basel.sums.json"}
    identity = _identity(Context(1, 1, {"secure-aggregation": True, **files}, RecordDict(), {}), "basel", None)
    assert identity is not None
    assert set(identity.roster) == set(SITES)
    written = Path("recipe.json").read_text()
    Path("recipe.json").write_text(written.replace("basel", "basle"))
    with pytest.raises(InputError, match=r"recipe\.json"):
        _identity(Context(1, 1, files, RecordDict(), {}), "basel", None)


def test_what_cannot_work_is_said_before(node: Made) -> None:
    seal = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", "sealed"]
    subprocess.run(seal, check=True)
    Path("other.json").write_text(Path("recipe.json").read_text().replace('"seed": 0', '"seed": 1'))
    Path('with space and ".npz').write_bytes(Path("basel.npz").read_bytes())
    for changes, message in (
        ({"superlink": "link"}, "is HOST:PORT"),
        ({"superlink": "https://link:9092"}, "is HOST:PORT"),
        ({"superlink": "link:99999"}, "is HOST:PORT"),
        ({"root_certificates": Path("basel")}, "basel is no certificate in PEM's format"),
        ({"root_certificates": Path("none.crt")}, "none.crt cannot be read"),
        ({"private_key": Path("zürich")}, "zürich is not the key of basel in recipe.json"),
        ({"private_key": Path("basel.pub")}, "basel.pub is no private key in OpenSSH's format"),
        ({"private_key": Path("sealed")}, "sealed has a passphrase"),
        ({"recipe_file": "other.json"}, "other.json was changed after it was written"),
        ({"recipe_file": "none.json"}, "none.json cannot be read"),
        ({"data": "none.npz"}, "none.npz does not exist"),
        ({"data": 'with space and ".npz'}, "Flower takes no quotes"),
        ({"node_config": 'path="elsewhere.npz"'}, "`node_config`: path is set by the recipe"),
        ({"host": "203.0.113.1"}, "203.0.113.1 is no address of this machine"),
    ):
        with pytest.raises(InputError, match=message):
            node(**changes)


def test_a_refusal_is_said_in_a_sentence(node: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for line, reason in (
        (
            "[code: 2004] Failed to activate SuperNode.",
            "either the coordinator has not registered the site's public key",
        ),
        ("CERTIFICATE_VERIFY_FAILED: unable", "has not signed the SuperLink's certificate"),
        ("[SSL: WRONG_VERSION_NUMBER]", "was started without TLS"),
        ("anything else", "its SuperNode ended with code 3"),
    ):
        standing_in(f"print({line!r}, flush=True); sys.exit(3)", monkeypatch, tmp_path)
        shown: list[str] = []
        with pytest.raises(FederationError, match=f"basel is not connected to link:9092: .*{reason}"):
            node().run(shown.append, shown.append)
        assert shown == [line]


def test_how_it_stands_is_said_once(node: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["Connection attempt failed", "Connection attempt failed", "SuperNode ID: 7", "Connection attempt failed"]
    standing_in(f"print('\\n'.join({lines}), *map(os.environ.get, {[*QUIET]}), flush=True)", monkeypatch, tmp_path)
    said: list[str] = []
    shown: list[str] = []
    with pytest.raises(FederationError):
        node().run(said.append, shown.append)
    assert [line.partition(";")[0] for line in said] == [
        "link:9092 does not answer yet",
        "basel is connected to link:9092",
    ]
    assert shown[-1] == f"{lines[-1]} {' '.join(QUIET.values())}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_it_and_what_it_started(
    node: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, code: int
) -> None:
    """The program starts another one, which would outlive it, and is asked to stop before it is killed."""
    standing_in(
        "import subprocess, signal\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('asked', 'w').close(), sys.exit()))\n"
        "print('SuperNode ID: 7', flush=True)\n"
        "time.sleep(60)",
        monkeypatch,
        tmp_path,
    )
    node()
    options = ["--superlink", "link:9092", "--root-certificates", "ca.crt", "--key", "basel"]
    pid = os.fork()
    if pid == 0:
        ended: object = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            main(["site", "start", "recipe.json", "basel.npz", *options])
        except SystemExit as stop:
            ended = stop.code
        finally:
            os._exit(int(str(ended)))
    deadline = time.monotonic() + 60
    while not (Path("child").exists() and Path("child").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(pid, number)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert Path("asked").exists()
    child = Path("child").read_text()
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True, check=False).stdout
    assert not state.strip() or state.startswith("Z")
