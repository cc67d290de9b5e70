"""Downloads from a server on this machine that misbehaves in every way."""

import hashlib
import http.server
import socket
import threading

import pytest
from patience import PATIENCE

from utils.data import download as module
from utils.data.download import download, refuse_strange_folder
from utils.errors import UserError

CONTENT = bytes(range(256)) * 4000  # about 1 MB: several blocks
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        body = CONTENT[: len(CONTENT) // 2] if self.path == "/cut" else CONTENT
        if self.path == "/stall":
            self.wfile.write(body[:100])
            self.wfile.flush()
            server.release.wait(PATIENCE)
            return
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.release = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fails(url, path, *reasons, checksum=SHA256):
    with pytest.raises(UserError) as error:
        download(url, path, checksum, hint="see --data_dir")
    message = str(error.value)
    for reason in (*reasons, "see --data_dir"):
        assert reason in message
    assert "\n" not in message
    assert not path.exists()


def test_a_file_is_whole_and_alone(server, tmp_path, capsys):
    path = tmp_path / "new folder" / "fïle.tar.gz"
    download(server.url + "/file", path, SHA256, hint="")
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert capsys.readouterr().err.count("\n") == 1  # no bar where there is no terminal


def test_a_download_that_is_cut_off_is_an_error_and_leaves_nothing(server, tmp_path):
    fails(server.url + "/cut", tmp_path / "file", "cut off after 512,000 of 1,024,000 bytes")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("checksum", "name"), [("0" * 64, "SHA-256"), ("0" * 32, "MD5")])
def test_a_wrong_checksum_leaves_no_file(server, tmp_path, checksum, name):
    reason = f"the {name} of what arrived is not the expected one"
    fails(server.url + "/file", tmp_path / "file", reason, checksum=checksum)
    assert not list(tmp_path.iterdir())


def test_md5_is_told_by_its_length(server, tmp_path):
    download(server.url + "/file", tmp_path / "file", MD5, hint="")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_checksum_of_unknown_length_fails_before_the_transfer(server, tmp_path):
    with pytest.raises(KeyError):
        download(server.url + "/file", tmp_path / "file", SHA256[:40], hint="")
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_an_error_and_leaves_nothing(server, tmp_path):
    fails(server.url + "/missing", tmp_path / "file", "404")
    assert not list(tmp_path.iterdir())


def test_addresses_without_a_server_are_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fails(f"http://127.0.0.1:{port}/file", tmp_path / "file", "refused")
    fails("nonsense://x", tmp_path / "file", "unknown url type")
    fails("no address", tmp_path / "file", "unknown url type")


def test_silence_ends_in_a_time_out(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    fails(server.url + "/stall", tmp_path / "file", "timed out")


def test_a_path_that_cannot_be_written_is_an_error(server, tmp_path):
    (tmp_path / "plain").write_text("a file where a folder should be")
    for below in ("file", "folder/file"):
        with pytest.raises(UserError, match=r"^cannot write .*(File exists|Not a directory); see$"):
            download(server.url + "/file", tmp_path / "plain" / below, SHA256, hint="see")


def test_a_full_disk_is_an_error(server, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    fails(server.url + "/file", tmp_path / "file", "cannot write", "No space left on device")


def test_nothing_is_downloaded_beside_the_users_own_files(tmp_path):
    for name in ("cifar-10-batches-py", "MNIST", "ag_news_csv", "cache", ".gitignore"):
        (tmp_path / name).mkdir()
    refuse_strange_folder(tmp_path, "cifar10")
    refuse_strange_folder(tmp_path / "not there yet", "cifar10")
    (tmp_path / "cats").mkdir()
    with pytest.raises(UserError, match=r"holds other files \(cats\): .*--data_dir.*--dataset"):
        refuse_strange_folder(tmp_path, "cifar10")
