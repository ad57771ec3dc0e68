"""The addresses where a started server listens, seen on its sockets, and its needs before it listens beyond this
machine."""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from halfeven.models.errors import BadSetting, DamagedFile
from halfeven.models.store.store import Store
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings

from tests.command_line import run
from tests.patience import PATIENCE_S
from tests.serve.access.authority import Pair
from tests.serve.grpc.theirs import triton
from tests.server_process import announced, serve_command, server_environment

_LISTENING = "0A"  # the state in /proc/net/tcp, proc(5)


@contextmanager
def started(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``halfeven serve`` on a free port: the process and its port."""
    with announced(store, *options) as (process, url):
        yield process, int(url.rpartition(":")[2])


def listened_on(process: subprocess.Popen[str]) -> set[tuple[str, int]]:
    """The (address, port) of every TCP socket on which this process listens. Addresses as the kernel writes them."""
    folder = Path(f"/proc/{process.pid}")
    own = {str(link.readlink()) for link in (folder / "fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for row in (folder / "net" / table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def status_of(port: int, key: str | None = None) -> int:
    sent = {"authorization": f"Bearer {key}"} if key else {}
    try:
        return urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=sent), timeout=PATIENCE_S
        ).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow(seconds=5)
@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in its own byte order")
def test_a_server_listens_on_loopback_alone_unless_it_is_asked_for_more(tmp_path: Path) -> None:
    with started(tmp_path / "store") as (process, port):
        assert listened_on(process) == {("0100007F", port)}
        assert status_of(port) == 200


@pytest.mark.slow
@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in its own byte order")
def test_beyond_loopback_a_server_with_keys_listens_and_answers_nobody_without_one(tmp_path: Path) -> None:
    key, _ = KeyFile(tmp_path / "store" / "keys.json").add("ci", ["infer"])
    with started(tmp_path / "store", "--host", "0.0.0.0") as (process, port):
        assert listened_on(process) == {("00000000", port)}
        assert [status_of(port), status_of(port, key + "x"), status_of(port, key)] == [401, 401, 200]


@pytest.mark.slow
@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in its own byte order")
def test_grpc_has_a_port_of_its_own_on_loopback_where_it_is_asked_for(tmp_path: Path) -> None:
    with started(tmp_path / "store", "--grpc-port", "0") as (process, port):
        ((address, grpc_port),) = listened_on(process) - {("0100007F", port)}
        assert address in ("0100007F", "0000000000000000FFFF00000100007F"), "also as ::ffff:127.0.0.1"
        with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            assert client.is_server_live() and client.get_server_metadata().name == "halfeven"
        taken = subprocess.run(
            [*serve_command(tmp_path / "other"), "--grpc-port", str(grpc_port)],
            capture_output=True, text=True, timeout=PATIENCE_S, env=server_environment(),
        )  # fmt: skip
        assert taken.returncode == 2 and "--grpc-port" in taken.stderr, taken.stderr


@pytest.mark.slow
def test_an_ipv6_address_is_named_as_a_url_has_it(tmp_path: Path) -> None:
    with announced(tmp_path / "store", "--host", "::1") as (_, url):
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/v2/health/live", timeout=PATIENCE_S).status_code == 200


@pytest.mark.slow
def test_a_server_with_a_certificate_speaks_tls(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    with (
        started(tmp_path / "store", "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)) as (
            _,
            port,
        ),
        httpx.Client(verify=pair.trusting(), timeout=PATIENCE_S) as client,
    ):
        assert client.get(f"https://localhost:{port}/v1/models").status_code == 200


def settings(store: Path, **more: Any) -> Any:
    return read_settings(store=store, **more)


def test_beyond_loopback_needs_a_key_or_the_explicit_word(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    for host in ("0.0.0.0", "::", "10.0.0.1", "models.example.com"):
        with pytest.raises(BadSetting, match="halfeven keys add") as refused:
            settings(tmp_path, host=host)
        assert "--expose-without-auth" in str(refused.value)
        assert not settings(tmp_path, host=host, expose_without_auth=True).needs_keys
    file.add("ci", ["infer"])
    assert settings(tmp_path, host="0.0.0.0").needs_keys
    file.revoke("ci")
    with pytest.raises(BadSetting, match="no key"):
        settings(tmp_path, host="0.0.0.0")
    file.path.write_text("{")
    with pytest.raises(DamagedFile):
        settings(tmp_path, host="0.0.0.0")


def test_the_keys_may_lie_in_a_file_that_a_setting_names(tmp_path: Path) -> None:
    elsewhere = KeyFile(tmp_path / "secrets" / "halfeven")
    elsewhere.add("ci", ["infer"])
    assert settings(tmp_path / "store", host="0.0.0.0", key_file=elsewhere.path).keys.path == elsewhere.path
    with pytest.raises(BadSetting):
        settings(tmp_path / "store", host="0.0.0.0")


def test_a_named_key_file_that_is_not_there_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.serve.server.serve", lambda *_: pytest.fail("it was started"))
    absent = tmp_path / "absent.json"
    code, facts, _ = run("serve", "--store", tmp_path / "store", "--key-file", absent)
    assert code == 2 and f"--key-file {absent}: there is no such file" in facts["error"]
    with pytest.raises(BadSetting, match="halfeven keys add NAME --key-file"):
        build(settings(tmp_path / "store", key_file=absent), Store(tmp_path / "store"))
    assert not settings(tmp_path / "store").access.needed, "the store's own file may be missing"


def test_one_port_for_both_protocols_is_refused_before_anything_listens(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="--port and --grpc-port are both 8123: expected two ports"):
        settings(tmp_path, port=8123, grpc_port=8123)
    assert settings(tmp_path, port=0, grpc_port=0).grpc_port == 0, "two free ones are taken"
