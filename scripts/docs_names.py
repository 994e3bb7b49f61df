# SPDX-License-Identifier: Apache-2.0
"""Names in documentation that exist nowhere: targets, options, files, variables, functions. A part of check_docs.py."""
import fnmatch
import glob
import os
import re
import subprocess

import docs_code

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCES = ["bench", "cmake", "debian", "examples", "include", "python", "scripts", "sim", "src", "standin", "tests",
           "tools"]
FILE = r"(?<![\w./-])((?:" + "|".join([*SOURCES, "docs"]) + r")/[\w./*-]+)"
WORD = r"\b(?:EPX_[A-Z0-9_]*[A-Z0-9]|epx_[a-z0-9_]*[a-z0-9]|ncclEp\w+|NCCL_EP_[A-Z0-9_]*[A-Z0-9])\b(?!\*|[_.]|-)"
# Programs of others that the pages start, and the options that they have: who needs one more has tried it.
LAUNCHERS = {
    "cmake": {"--build", "--install", "--prefix"},
    "ctest": {"--test-dir"},
    "docker": {"--rm"},
    "mlnx_qos": {"--pfc", "--trust"},
    "mpirun": {"--host", "--mca", "--oversubscribe"},
    "srun": {"--export", "--mpi", "--ntasks-per-node"},
    "torchrun": {"--master-addr", "--nnodes", "--no-python", "--node-rank", "--nproc-per-node", "--rdzv-backend",
                 "--rdzv-endpoint", "--standalone"},
}
# Options and variables of other projects, which pages name beside their own.
OTHERS = {"--all2all-backend", "--deepep-config", "--deepep-mode", "--enable-dbo", "--moe-a2a-backend",
          "--moe-enable-deepep", "--moe-flex-dispatcher-backend", "--moe-token-dispatcher-type",
          "--overlap-moe-expert-parallel-comm", "HFI_NO_BACKTRACE", "IPATH_NO_BACKTRACE"}


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", errors="replace") as file:
        return file.read()


def tree():
    """{name: text} of all files but the documentation, and of what is generated from them."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=False).stdout.split()
    if not listed:  # not a checkout of git
        listed = [os.path.relpath(os.path.join(folder, name), ROOT) for top in SOURCES
                  for folder, _, names in os.walk(os.path.join(ROOT, top)) for name in names]
        listed += ["Makefile", "CMakeLists.txt", "Dockerfile"]
    skipped = re.compile(r"\.(md|png|gz|tar|whl)$|/test_docs.py$")  # whose names are wrong
    return {name: read(name) for name in listed
            if not skipped.search(name) and os.path.isfile(os.path.join(ROOT, name))}


class Names:
    """What code in the documentation may mention."""

    def __init__(self, build):
        self.files, self.python = tree(), docs_code.Python()
        text = "\n".join(self.files.values())
        self.words = set(re.findall(r"(?:\b|(?<=-D))(?:[A-Z0-9]+_[A-Z0-9_]+|(?:epx|test)_[a-z0-9_]+|ncclEp\w+)\b",
                                    self.without_tests()))
        self.words |= set(re.findall(r"\b(?:EPX_TEST_\w+|test_\w+|EPX_BUILD_DIR)\b", text + "\n".join(self.files)))
        self.options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        self.called = set(re.findall(r"\b(\w+)(?=\()", text))
        make = self.files.get("Makefile", "")
        self.targets = set(re.findall(r"^([a-z][a-z-]*):", make, re.MULTILINE))
        self.settings = set(re.findall(r"^([A-Z]+) \?=|\$\((?:or )?([A-Z_]+)", make, re.MULTILINE))
        self.settings = {word for pair in self.settings for word in pair} | {"CC"}
        cmake = "\n".join(body for name, body in self.files.items() if re.search(r"CMakeLists.txt$|\.cmake$", name))
        self.cmake = set(re.findall(r"\b(?:option|set|if|NOT|AND|DEFINED)[( ]\(?(\w+)", cmake))
        self.cxx = cmake + self.cxx_names(text)
        self.packages = {name[len("cmake/"):-len("-config.cmake.in")] for name in self.files
                         if name.endswith("-config.cmake.in")}
        self.debian = self.files.get("debian/control", "")
        self.build, self.makers = build, {}
        self.manual = {os.path.basename(path)[:-2] for path in glob.glob(os.path.join(build, "man", "man?", "*.?"))}

    def without_tests(self):
        """Tests use wrong names too."""
        return "\n".join(body for name, body in self.files.items() if not re.match(r"tests/|python/tests/", name))

    @staticmethod
    def cxx_names(text):
        """Kernels, as a profiler shows them."""
        return " ".join(f"epx::{name}" for name in re.findall(r"\bGPU_KERNEL\w*\((?:\w+, )?(\w+)", text))

    def wrong(self, code):
        for target in re.findall(r"(?:^|[\s;&])make ([a-z][a-z-]*)(?![\w.=/])", code):
            if target not in self.targets:
                yield f"make has no target {target}"
        for word in re.findall(r"\bmake [a-z-]+((?: [A-Z]\w*=\S*)+)", code):
            for setting in re.findall(r" (\w+)=", word):
                if setting not in self.settings:
                    yield f"make has no variable {setting}"
        for pattern, known, fault in ((r"-D(EPX_\w+)=", self.cmake, "CMake has no option {}"),
                                      (r"\bfind_package\((\w+)", self.packages, "CMake finds no package {}"),
                                      (r"\b([A-Za-z_]\w+)\(\)", self.called, "nothing in the tree is called {}()")):
            for word in re.findall(pattern, code):
                if word not in known:
                    yield fault.format(word)
        if re.fullmatch(r"epx::\w+", code) and not re.search(rf"\b{code}\b", self.cxx):
            yield f"CMake and kernels have no {code}"
        for path in re.findall(r"\bpip install(?: -\S+)*((?: \.\S*)+)", code):
            for folder in path.split():
                if not os.path.exists(os.path.join(ROOT, folder, "pyproject.toml")):
                    yield f"pip finds nothing to install in {folder}"
        for program, rest in re.findall(r"(?:^|[\s`(])(" + "|".join(LAUNCHERS) + r")\b([^`|;&#\n]*)", code):
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", re.split(r"\s\S*(?:epx|/\S+|\.py) ", rest)[0]):
                if option not in LAUNCHERS[program] and not self.launcher_has(rest, option):
                    yield f"{program} has no option {option}"
        yield from self.wrong_paths(code)

    @staticmethod
    def launcher_has(rest, option):
        """srun starts torchrun."""
        return any(program in rest and option in options for program, options in LAUNCHERS.items())

    def wrong_words(self, line, pattern):
        for word in re.findall(r"(?<!-D)(?:" + pattern + ")", line):
            if word not in self.words | OTHERS:
                yield f"nothing in the tree is called {word}"

    def wrong_paths(self, code):
        for word in re.findall(r"\blibepx(?:\d|-[a-z]+)(?=_|\b)|\bpython3-epx\w*", code):
            if not re.search(rf"\b{word}\b(?!-)", self.debian):
                yield f"there is no package {word}"
        for folder in re.findall(r"(?:^|\s)build/(\w+)/", code):
            if os.path.isdir(self.build) and not os.path.isdir(os.path.join(self.build, folder)):
                yield f"there is no build/{folder}"
        for path in re.findall(r"(?<![\w./~$<-])(build-[a-z]+/[\w./-]+)", code):
            if not self.is_built(path.rstrip("./")):
                yield f"nothing makes {path}"
        for path in re.findall(r"(?<![\w./~$<:-])((?!megatron/)(?:[\w-]+/)+[\w*-]+\.(?:py|sh|c|h|cu|cuh))\b", code):
            if not self.has_file(path.replace("NAME", "*")):
                yield f"there is no {path}"
        for page in re.findall(r"(?:^|\s)man (?:\d )?(epx\w*|nccl\w*)", code):
            if self.manual and page not in self.manual:
                yield f"there is no manual page {page}"
        for path, rest in re.findall(FILE + r"([^|;&#\n]*)", code):
            path = path.rstrip(".,").replace("NAME", "*")
            if not glob.glob(os.path.join(ROOT, path)):
                yield f"there is no {path}"
            elif path in self.files and re.search(r"\.(py|sh)$", path):
                for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", re.split(r" -- |\sbuild/|\sepx ", rest)[0]):
                    if not self.knows(path, option):
                        yield f"{path} has no option {option}"
        for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", code):  # whoever has it
            if option not in self.options | OTHERS | set().union(*LAUNCHERS.values()):
                yield f"nothing in the tree has an option {option}"

    @staticmethod
    def wrong_folders(line):
        """Of a text block: files and folders of the tree, which a table of it may name."""
        for path in re.findall(FILE, line) + re.findall(r"^([a-z]\w*/)(?=\s)", line):
            if not glob.glob(os.path.join(ROOT, path.rstrip(".,").replace("NAME", "*"))):
                yield f"there is no {path}"

    def is_built(self, path):
        """Below a folder that is made: whoever names the folder names all parts of the path too, or sources are called
        so."""
        folder, *parts = path.split("/")
        if folder not in self.makers:
            self.makers[folder] = "\n".join(text for text in self.files.values()
                                            if re.search(rf"(?<![\w-]){folder}(?![\w-])", text))
        return self.makers[folder] and all(
            any(f"/{part}{end}" in name for name in self.files for end in ("/", ".c")) or
            re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", self.makers[folder]) for part in parts)

    def has_file(self, path):
        """A file may be named without the folders above it."""
        return any(fnmatch.fnmatch("/" + name, "*/" + path) for name in self.files)

    def knows(self, path, option):
        """A script names its options itself, or a module beside it does; what it says of itself does not count."""
        folder, pattern = os.path.dirname(path), rf"(?<![\w-]){option}(?![\w-])"
        beside = [text for name, text in self.files.items()
                  if name == path or (os.path.dirname(name) == folder and name.endswith(".py"))]
        own = re.compile(r'^""".*?"""', re.DOTALL | re.MULTILINE)
        return any(re.search(pattern, own.sub("", text, count=1)) for text in beside)
