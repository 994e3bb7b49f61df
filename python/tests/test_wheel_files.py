# SPDX-License-Identifier: Apache-2.0
"""scripts/wheel_files.py, with an index on this machine that wants a password."""

import base64
import hashlib
import http.server
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import unittest
import zipfile
from typing import Dict, Tuple

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "scripts")
USER, SECRET = "someone", "no-one-reads-this"
# Runs wheel_files.py as on a machine whose pip takes other wheels.
PROGRAM = """
import sys
sys.path.insert(0, %r)
import wheel_files
known = wheel_files.get_supported
if %r:
    wheel_files.get_supported = lambda version=None, platforms=None: known(
        version or "314", platforms or ["manylinux_2_28_aarch64", "linux_aarch64"])
sys.exit(wheel_files.main())
"""


def wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some/one.py", "one = 1\n")
        archive.writestr("some/library.so", os.urandom(1 << 20))
    return file.getvalue()


def source() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in (("setup.py", b"raise SystemExit('setup.py was run')\n"), ("some/one.py", b"one = 1\n")):
            member = tarfile.TarInfo("some-1.0/" + name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return file.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    """Files of a folder that is only in memory, whole or in part."""

    files: Dict[str, Tuple[str, bytes]] = {}
    sent = 0

    def do_GET(self) -> None:
        given = base64.b64encode(("%s:%s" % (USER, SECRET)).encode()).decode()
        kind, body = self.files.get(self.path, ("", b""))
        status = 200 if kind else 404
        if self.headers.get("Authorization") != "Basic " + given:
            status, body = 401, b""
        self.send_response(206 if status == 200 and "Range" in self.headers else status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Basic")
        elif "Range" in self.headers:
            first, last = (int(n) for n in self.headers["Range"].partition("=")[2].split("-"))
            self.send_header("Content-Range", "bytes %d-%d/%d" % (first, last, len(body)))
            body = body[first:last + 1]
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        type(self).sent += len(body)

    def log_message(self, *_args: object) -> None:
        pass


@unittest.skipUnless(importlib.util.find_spec("pip"), "no pip")
class WheelFiles(unittest.TestCase):
    """One project, in an index that pip is told of in its own ways."""

    def setUp(self) -> None:
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.folder = tempfile.TemporaryDirectory()
        self.address = "http://%s:%s@127.0.0.1:%d/simple" % (USER, SECRET, self.server.server_port)
        Handler.files, Handler.sent = {}, 0

    def tearDown(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()

    def offer(self, path: str, body: bytes, link: str) -> None:
        """The index has this file."""
        Handler.files[path] = ("application/octet-stream", body)
        Handler.files["/simple/some/"] = ("text/html", ("<!DOCTYPE html><html><body>%s</body></html>" % link).encode())

    def take(self, *argv: str, elsewhere: bool = False, **settings: str) -> "subprocess.CompletedProcess[str]":
        """Runs it; nothing that it says has the password or an address."""
        environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
        environment.update(PIP_CONFIG_FILE=os.devnull, PIP_NO_CACHE_DIR="1", PIP_RETRIES="0", NO_PROXY="127.0.0.1",
                           no_proxy="127.0.0.1", HOME=self.folder.name)
        environment.update(settings or {"PIP_INDEX_URL": self.address})
        done = subprocess.run([sys.executable, "-B", "-c", PROGRAM % (SCRIPTS, elsewhere), *argv], env=environment,
                              capture_output=True, text=True, timeout=60)
        for word in (SECRET, "127.0.0.1"):
            self.assertNotIn(word, done.stdout + done.stderr)
        return done

    def took(self, *argv: str, elsewhere: bool = False, **settings: str) -> None:
        """It finds some/one.py, and takes nothing else."""
        folder = tempfile.mkdtemp(dir=self.folder.name)
        done = self.take(*argv, "some==1.0", folder, "*/one.py", elsewhere=elsewhere, **settings)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual([files for _path, _folders, files in os.walk(folder)], [[], ["one.py"]])

    def test_wheel(self) -> None:
        body = wheel()
        self.offer("/files/some-1.0-py3-none-any.whl", body, '<a href="../../files/some-1.0-py3-none-any.whl">x</a>')
        self.took()
        self.assertLess(Handler.sent, len(body) / 2)

    def test_wheel_of_another_machine(self) -> None:
        name = "some-1.0-cp313-cp313-manylinux_2_28_x86_64.whl"
        self.offer("/files/" + name, wheel(), '<a href="/files/%s">%s</a>' % (name, name))
        self.took(elsewhere=True)

    def test_source(self) -> None:
        """Links as indexes write them, and indexes as pip is told of them."""
        body = source()
        name, digest = "some-1.0.tar.gz", hashlib.sha256(body).hexdigest()
        for path, link in (("/simple/some/" + name, '<a href="%s">%s</a>'),
                           ("/files/" + name, "<a href='/files/%s'>%s</a>"),
                           ("/files/%s?signed=1" % name, '<a href="/files/%s?signed=1">%s</a>')):
            self.offer(path, body, link % (name, name))
            self.took("--source")
        self.offer("/files/" + name, body, '<a href="/files/%s#sha256=%s">%s</a>' % (name, digest, name))
        settings = os.path.join(self.folder.name, "pip.conf")
        with open(settings, "w") as file:
            file.write("[install]\nindex-url = %s\n" % self.address)
        self.took("--source", PIP_CONFIG_FILE=settings)
        self.took("--source", PIP_INDEX_URL="http://127.0.0.1:1/simple", PIP_EXTRA_INDEX_URL=self.address)
        with open(os.path.join(self.folder.name, name), "wb") as file:
            file.write(body)
        self.took("--source", PIP_NO_INDEX="1", PIP_FIND_LINKS=self.folder.name)

    def test_source_with_another_hash(self) -> None:
        link = '<a href="/files/some-1.0.tar.gz#sha256=%s">some-1.0.tar.gz</a>' % ("0" * 64)
        self.offer("/files/some-1.0.tar.gz", source(), link)
        folder = os.path.join(self.folder.name, "files")
        done = self.take("--source", "some==1.0", folder, "*.py")
        self.assertIn("the archive's sha256 is not the one that the index gives", done.stderr)
        self.assertTrue(done.returncode == 1 and not os.path.exists(folder))

    def test_refused(self) -> None:
        """What is not there, an index that wants another password, none at all, and addresses that are none."""
        name = "some-1.0-py3-none-any.whl"
        self.offer("/files/" + name, wheel(), '<a href="/files/%s">%s</a>' % (name, name))
        arguments = ("some==1.0", self.folder.name, "*/one.py")
        self.assertIn("no file two.py", self.take("some==1.0", self.folder.name, "two.py").stderr)
        for address in (self.address.replace(SECRET, "another"), self.address.replace("/simple", "/other"),
                        self.address.replace("127.0.0.1:", "127.0.0.1:x"), self.address.replace(SECRET, "/" + SECRET)):
            done = self.take(*arguments, PIP_INDEX_URL=address)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, r"^wheel_files.py: some==1.0: .+\n$")


if __name__ == "__main__":
    unittest.main()
