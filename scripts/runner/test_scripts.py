# SPDX-License-Identifier: Apache-2.0
"""Scripts that a newcomer meets: the commit-msg hook, what CMake says when a header is missing; what wheels need."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))


class CommitMessages(unittest.TestCase):
    def hook(self, message):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(message)
            file.flush()
            hook = os.path.join(ROOT, "scripts/githooks/commit-msg")
            done = subprocess.run([hook, file.name], capture_output=True, text=True)
        return done.returncode, done.stderr

    def refused(self, message, words):
        status, text = self.hook(message)
        self.assertEqual(status, 1)
        self.assertIn(words, text)

    def test_good_ones_pass(self):
        for subject in ("net/ofi: close the endpoint first", "proxy, net: rename post to descriptor",
                        "README: show the output"):
            self.assertEqual(self.hook(subject + "\n\nBecause.\n"), (0, ""))
        self.assertEqual(self.hook("fixup! anything\n")[0], 0)

    def test_the_area_is_asked_for(self):
        self.refused("close the endpoint first\n\nBecause.\n", 'expected "area: imperative"')

    def test_the_imperative_is_asked_for(self):
        self.refused("net: closed the endpoint\n\nBecause.\n", "expected an imperative")
        self.refused("net: closing the endpoint\n\nBecause.\n", "expected an imperative")

    def test_long_subjects_are_refused(self):
        self.assertEqual(self.hook("net: " + "x" * 67 + "\n\nBecause.\n")[0], 0)
        self.refused("net: " + "x" * 68 + "\n\nBecause.\n", "expected at most 72")

    def test_a_body_is_asked_for(self):
        self.refused("net: close it\n", "expected a body")
        self.refused("net: close it\n\nSigned-off-by: A <a@b>\n# comment\n", "expected a body")
        self.refused("net: close it\nBecause.\n", "expected an empty line")


class Packages(unittest.TestCase):
    """scripts/deps.sh on a machine that this test plays: root, all there but cmake, until apt-get brings it."""

    STUBS = {
        "id": "echo 0",
        # More than a pipe holds behind the line that is looked for.
        "ldconfig": "echo libsodium.so.23; for a in 1 2 3 4 5 6 7 8 9; do echo $(seq 5000); done",
        "apt-get": """echo "$*" >>"$STUBS/calls"
case "$*" in
*--assume-no*) echo "0 upgraded, 3 newly installed, 0 to remove"
    echo "Need to get 12.3 MB of archives."
    echo "After this operation, 45.6 MB of additional disk space will be used." && exit 1 ;;
*" -y "*) printf '#!/bin/sh\n' >"$STUBS/cmake" && chmod +x "$STUBS/cmake" ;;
esac""",
    }

    def deps(self, *arguments):
        with tempfile.TemporaryDirectory() as stubs:
            for name in ("bash", "sh", "sed", "sort", "awk", "mktemp", "cat", "rm", "seq", "chmod"):
                os.symlink(shutil.which(name), os.path.join(stubs, name))
            for name in ("cc", "make", "pkg-config", "python3", "mpirun", "mpicc", *self.STUBS):
                path = os.path.join(stubs, name)
                with open(path, "w") as file:
                    file.write("#!/bin/sh\n" + self.STUBS.get(name, "") + "\n")
                os.chmod(path, 0o755)
            done = subprocess.run([os.path.join(ROOT, "scripts/deps.sh"), *arguments], capture_output=True, text=True,
                                  env={"PATH": stubs, "STUBS": stubs})
            asked = []
            if os.path.exists(os.path.join(stubs, "calls")):
                with open(os.path.join(stubs, "calls")) as file:
                    asked = file.read().splitlines()
        return done, asked

    def test_make_names_what_is_missing_and_stops(self):
        done, asked = self.deps("build")
        self.assertEqual((done.returncode, done.stdout, asked), (1, "", []))
        self.assertEqual(done.stderr, "EPX needs these packages (Debian's names):\n"
                                      "  cmake                    the build\n"
                                      "Install them, for example: sudo apt-get install cmake\n")

    def test_what_is_installed_is_printed_before(self):
        done, asked = self.deps("--install", "demo")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, "Missing here, and installed by apt-get now (the purpose is demo):\n"
                                      "  cmake                    the build\n"
                                      "  3 packages with those that they need\n"
                                      "  12.3 MB to download\n"
                                      "  45.6 MB on disk\n")
        self.assertEqual([line.split()[-1] for line in asked], ["-qq", "cmake", "cmake"])


@unittest.skipUnless(shutil.which("cc"), "no compiler")
class Words(unittest.TestCase):
    def check(self, text):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(text)
            file.flush()
            done = subprocess.run([os.path.join(ROOT, "scripts/check_words.sh"), file.name], capture_output=True,
                                  text=True)
        return done.returncode, done.stdout

    def test_old_words_are_found_and_new_ones_named(self):
        for old, new in (("the muster of ranks", "membership"), ("Planted", "inject_bug"), ("memory is lent", "export"),
                         ("a face of the library", "compat"), ("#define NOTE_NONE 1", "alarm"), ("say(fd);", "send"),
                         ("hear_root()", "recv"), ("send_answer", "reply"), ("struct line *", "conn"),
                         ("boot_muster()", "membership"), ("crew_size", "block"), ("job->doing", "state"),
                         ("ll_far.h", "remote"), ("is_near(group)", "local"), ("a board of slots", "directory")):
            status, text = self.check(old + "\n")
            self.assertEqual((status, new in text), (1, True), old)

    def test_parts_of_other_words_pass(self):
        text = "silent plantations surface; Hugging Face; a note_end; a seatbelt; they say (and hear) an answer;\n" \
               "as far as it is near; nearly; an on-board card; what it is doing; tensor.is_leaf\n"
        self.assertEqual(self.check(text)[0], 0)


class Tidy(unittest.TestCase):
    def test_files_that_the_build_does_not_compile_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            tool = os.path.join(folder, "clang-tidy-14")
            with open(tool, "w") as file:
                file.write('#!/bin/sh\n[ "$1" != --version ] || echo "version 14.0"\n')
            os.chmod(tool, 0o755)
            known = os.path.join(ROOT, "src/util/log.c")
            with open(os.path.join(folder, "compile_commands.json"), "w") as file:
                json.dump([{"directory": ROOT, "file": known, "command": "cc -c " + known}], file)
            env = {**os.environ, "PATH": folder + ":" + os.environ["PATH"], "EPX_BUILD_DIR": folder}
            for names, status, words in ((["src/util/log.c"], 0, "1 files"), ([], 0, "1 files"),
                                         (["src/util/log.c", "src/util/env.c"], 1, "does not compile src/util/env.c:")):
                done = subprocess.run([os.path.join(ROOT, "scripts/tidy.sh"), *names], env=env, capture_output=True,
                                      text=True)
                self.assertEqual((done.returncode, words in done.stdout), (status, True), done.stdout + done.stderr)


class Spills(unittest.TestCase):
    """tests/scripts/cuda_spills.sh, by reports as scripts/keep_report.sh keeps them."""

    KERNELS = ("ll_dispatch", "ll_combine", "ll_combine_logfmt", "ht_dispatch", "ht_combine", "ht_notify")

    def compile(self, folder, kernel, spilled, status=0):
        lines = ["ptxas info    : Function properties for copy_row_many",
                 f"    0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads"]
        compiler = f"printf '%s\\n' '{lines[0]}' '{lines[1]}' >&2; exit {status}"
        keep = os.path.join(ROOT, "scripts/keep_report.sh")
        done = subprocess.run([keep, folder + "/ptxas", "sh", "-c", compiler, kernel + ".cu"], capture_output=True)
        self.assertEqual(done.returncode, status)

    def check(self, folder):
        done = subprocess.run(["bash", os.path.join(ROOT, "tests/scripts/cuda_spills.sh")], capture_output=True,
                              text=True, env={**os.environ, "EPX_BUILD_DIR": folder})
        return done.returncode, done.stdout + done.stderr

    def test_each_kernel_must_have_a_report(self):
        with tempfile.TemporaryDirectory() as folder:
            for kernel in self.KERNELS:
                self.compile(folder, kernel, 0)
            self.assertEqual(self.check(folder)[0], 0, self.check(folder)[1])
            self.compile(folder, "ht_combine", 0, status=1)  # the old report is no evidence
            status, text = self.check(folder)
            self.assertEqual((status, "no report of ht_combine" in text), (1, True), text)

    def test_a_spill_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            for kernel in self.KERNELS:
                self.compile(folder, kernel, 32 if kernel == "ht_dispatch" else 0)
            self.assertEqual(self.check(folder)[0], 1)


class Needed(unittest.TestCase):
    """Libraries that a file of a wheel may need."""

    def check(self, *options, libc=()):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "a.so")
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", file, "-Wl,--no-as-needed", *options],
                           input="int puts(const char *); int f(void) { return puts(\"\"); }", text=True, check=True)
            done = subprocess.run([os.path.join(ROOT, "scripts/check_needed.sh"), *libc, file], capture_output=True,
                                  text=True)
        return done.returncode, done.stdout

    def test_libraries(self):
        self.assertEqual(self.check("-lm"), (0, ""))
        status, text = self.check("-l:libstdc++.so.6")
        self.assertEqual(status, 1)
        self.assertIn("got libstdc++.so.6", text)

    def test_libc(self):
        self.assertEqual(self.check(libc=("--libc", "2.36")), (0, ""))
        status, text = self.check(libc=("--libc", "2.1"))
        self.assertEqual(status, 1)
        self.assertIn("expected libc 2.1 or older", text)


@unittest.skipUnless(shutil.which("cmake"), "no cmake")
class MissingHeaders(unittest.TestCase):
    """CMake, told to look for headers in an empty folder."""

    def configure(self, build, *options):
        empty = os.path.join(build, "empty")
        os.makedirs(empty, exist_ok=True)
        argv = ["cmake", "-S", ROOT, "-B", build, "-DEPX_CUDA=OFF", "-DEPX_BUILD_TESTS=OFF",
                f"-DCMAKE_FIND_ROOT_PATH={empty}",
                "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY", *options]
        done = subprocess.run(argv, capture_output=True, text=True)
        return done.returncode, " ".join(done.stderr.split())

    def test_the_package_and_the_option_are_named(self):
        with tempfile.TemporaryDirectory() as build:
            status, text = self.configure(build)
            self.assertNotEqual(status, 0)
            self.assertIn("libfabric-dev", text)
            self.assertIn("-DEPX_OFI=OFF", text)
            # Once it is installed, the same folder works: nothing remembers that it was missing.
            for name in ("rdma/fabric.h", "infiniband/verbs.h"):
                path = os.path.join(build, "empty/usr/include", name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                open(path, "w").close()
            self.assertEqual(self.configure(build)[0], 0)

    def test_a_build_without_networks_can_be_asked_for(self):
        with tempfile.TemporaryDirectory() as build:
            status, text = self.configure(build, "-DEPX_OFI=OFF")
            self.assertNotEqual(status, 0)
            self.assertIn("libibverbs-dev", text)
            self.assertEqual(self.configure(build, "-DEPX_OFI=OFF", "-DEPX_VERBS=OFF")[0], 0)


if __name__ == "__main__":
    unittest.main()
