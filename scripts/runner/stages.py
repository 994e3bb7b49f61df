# SPDX-License-Identifier: Apache-2.0
"""The stages of `make test` and `make check`. Each function is a stage, its docstring what `scripts/test.sh --list`
says of it.

The aim is 8 minutes on 2 idle cores for `make test`, 15 for `make check`, and 3 for `make quick`; a run that takes
longer says so and does not fail (EPX_TEST_BUDGET_S, EPX_CHECK_BUDGET_S, EPX_QUICK_BUDGET_S). All stages together take
1300 to 1500 s of CPU time, which the lanes share.
Random tests multiply the number of their cases by EPX_TEST_SCALE, which the stages below set.
"""
import os
import platform
import re
import shutil
import subprocess
import time

import results
from run import SuiteParser

VENV = ".venv-test"  # survives `make clean`
MAKE_VENV = ["scripts/python_env.sh", VENV]
SLURM = ".slurm-test"  # likewise

# Expected seconds of steps on 2 idle cores, other lanes beside them; build-logs/times.json has those of the last run
# here.
TIMES = {
    "gcc-configure": 3, "gcc-build": 90, "gcc": 430, "quick": 60, "seeds-all": 9, "seeds-recover": 14, "seeds-join": 14,
    "seeds-late": 12, "install": 2, "demo": 8, "manual": 4, "docs": 60, "models": 60,
    "cxx": 20,
    "format": 10, "scripts": 12, "commits": 1, "layers": 8, "agent": 6,
    "tidy": 40,
    "venv": 60, "python-wheel": 20, "python-nccl": 20, "python-worlds": 20,
    "python-alone": 25, "python": 130, "python-layer": 4, "python-hf": 20, "python-train": 20,
    "clang-build": 60, "clang": 70, "address-build": 90, "address": 70, "address-rest": 50,
    "thread-build": 45, "thread": 120, "cross-build": 90, "cross": 30,
}

STEPS = {  # steps of each stage, where they are not the stage itself
    "gcc": ["gcc-configure", "gcc-build", "gcc"],
    "quick": ["gcc-configure", "gcc-build", "quick"],
    "symbols": ["symbols", "imports"],
    "seeds": ["seeds-all", "seeds-recover", "seeds-join", "seeds-late"],
    "format": ["format", "lines", "words"],
    "layers": ["layers", "agent"],
    "docs": ["manual", "docs"],
    "python": ["python-wheel", "python-nccl", "slurm", "python-worlds", "python-alone", "python",
               "python-layer", "python-hf", "python-train"],
    "clang": ["clang-configure", "clang-build", "clang"],
    "address": ["address-configure", "address-build", "address", "address-rest"],
    "thread": ["thread-configure", "thread-build", "thread"],
    "cross": ["cross-configure", "cross-build", "cross"],
}

TEST = ["quick", "symbols", "install", "demo", "seeds", "models", "venv", "python"]
ALL = ["scripts", "commits", "format", "layers", "noexit", "gcc", "symbols", "abi", "cxx", "install", "demo", "venv",
       "python", "clang", "address", "thread", "docs", "cross", "tidy", "seeds", "models"]
QUICK = ["scripts", "commits", "format", "layers", "noexit", "quick", "symbols", "cxx"]

# Stages that run side by side. The first two lanes take about 700 and 550 s of CPU time. Tests in them wait for clocks,
# for other processes, or for the one long test at the end of a stage, and would leave a core idle. The third lane only
# computes: it has a low priority (Run.command) and takes the time that is left over. The fourth downloads and unpacks
# what the last stage of the first waits for: with a low priority it took 736 s, and that stage began 90 s late.
LANES = [
    ["gcc", "quick", "symbols", "abi", "install", "demo", "python"],
    ["clang", "address", "thread", "docs"],
    ["scripts", "commits", "format", "layers", "noexit", "cxx", "cross", "tidy", "seeds", "models"],
    ["venv"],
]
LEFT_OVER = 2  # the lane of low priority


def lanes(names):
    """These stages as lists that run side by side: (number of the lane, stages)."""
    found = [(number, [name for name in names if name in lane]) for number, lane in enumerate(LANES)]
    return [(number, lane) for number, lane in found if lane]


def gcc_folder():
    """build/, where `make` compiles too, unless somebody has configured it for another compiler."""
    path = "build/CMakeCache.txt"
    if os.path.exists(path):
        compiler = re.search(r"^CMAKE_C_COMPILER:\w+=(.*)$", open(path).read(), re.MULTILINE)
        argv = [compiler.group(1) if compiler else "false", "--version"]
        if "Free Software Foundation" not in subprocess.run(argv, capture_output=True, text=True).stdout:
            return "build-gcc"
    return "build"


def gcc_options(folder):
    return ["-DEPX_BUILD_TESTS=ON"] + (["-DCMAKE_C_COMPILER=gcc"] if folder != "build" else [])


# ---- Checks of the text


def scripts(run):
    """tests of the scripts themselves, this program included"""
    run.check("scripts", ["python3", "-B", "-m", "unittest", "discover", "-s", "scripts/runner", "-p", "test_*.py"])


def commits(run):
    """messages of the commits since scripts/check_commits.sh exists"""
    run.check("commits", ["scripts/check_commits.sh"])


def format(run):  # pylint: disable=redefined-builtin
    """clang-format, lines of at most 120 columns, words that were given up"""
    run.check("format", ["scripts/format.sh"])
    run.check("lines", ["scripts/check_lines.sh"])
    run.check("words", ["scripts/check_words.sh"])


def tidy(run):
    """clang-tidy, with the checks of .clang-tidy"""
    run.await_event(run.gcc_built)
    run.check("tidy", ["scripts/tidy.sh"])


def layers(run):
    """includes point downwards, and devices provide what kernels ask for"""
    run.check("layers", ["scripts/check_layers.sh"])
    run.check("agent", ["scripts/check_agent.sh"])


def noexit(run):
    """nothing in the library ends the process or takes its descriptors 0 to 2"""
    run.check("noexit", ["scripts/check_no_exit.sh"])


# ---- gcc, and checks of its build


def gcc_build(run, folder):
    """Compiles, and lets stages of other lanes go on that wait for it, whether it succeeds or not."""
    try:
        return run.build("gcc", folder, gcc_options(folder))
    finally:
        run.gcc_built.set()


def gcc(run):
    """gcc -Werror, all tests (EPX_TEST_SCALE=0.75)"""
    folder = gcc_folder()
    if gcc_build(run, folder):
        run.ctest("gcc", folder, 0.75, [])


def quick(run):
    """gcc -Werror, all tests but the slow ones (EPX_TEST_SCALE=0.1)"""
    folder = gcc_folder()
    if gcc_build(run, folder):
        run.ctest("quick", folder, 0.1, ["-LE", "^(slow|cuda|hip)$"])


def seeds(run):
    """a minute of simulated groups: with faults, recoveries, ranks that join and that are late"""
    run.await_event(run.gcc_built)
    for faults in ("all", "recover", "join", "late"):
        run.check("seeds-" + faults, [gcc_folder() + "/epx", "sim", "--seeds", "1000", "--faults", faults, "--from",
                                      os.environ.get("EPX_TEST_SEED", "1")])


def models(run):
    """spin: models of protocols, which hold, and broken variants, of which each is found"""
    run.check("models", ["scripts/check_models.sh"])


def symbols(run):
    """what the libraries export and import"""
    folder = gcc_folder()
    run.check("symbols", ["scripts/check_symbols.sh", folder])
    names = ["libepx.so", "libnccl_ep.so", "libepx_nccl.so", "libepx_cudart.so"]
    run.check("imports", ["scripts/check_no_exit.sh", *(f"{folder}/{name}" for name in names)])


def abi(run):
    """what epx.h and nccl_ep.h declare against the last release"""
    run.check("abi", ["scripts/check_abi.py"])


def cxx(run):
    """headers and kernels are C++ too"""
    run.check("cxx", ["scripts/check_cxx.sh"])


def install(run):
    """an installed tree, used through pkg-config and CMake"""
    run.check("install", ["scripts/check_install.sh", gcc_folder()])


def demo(run):
    """make demo"""
    run.check("demo", ["timeout", "120", "scripts/demo.sh", gcc_folder()])


def docs(run):
    """the commands that README and docs show; their options and links; the manual pages"""
    run.await_event(run.gcc_built)
    run.check("manual", ["python3", "-B", "scripts/manual/check.py", gcc_folder()])
    run.check("docs", ["python3", "-B", "scripts/check_docs.py", "--build", gcc_folder()])


# ---- Python


# Without a pool of processes for torch.compile: each of them imports torch, for every rank that compiles.
TORCH_ENV = ["env", "OMP_NUM_THREADS=1", "TORCHINDUCTOR_COMPILE_THREADS=1"]


def torchrun(ranks, *argv):
    """A Python program on several ranks: of the wheel that was just installed, not of the source tree."""
    return ["timeout", "480", *TORCH_ENV, VENV + "/bin/python", "-m", "torch.distributed.run",
            "--standalone", "--nproc-per-node", str(ranks), *argv]


def python_alone(run):
    """Tests of one process, counted one by one."""
    argv = ["timeout", "200", *TORCH_ENV, VENV + "/bin/python", "-m", "unittest", "discover", "-v", "-s",
            "python/tests", "-p", "test_*.py"]
    rc, output = run.command("python-alone", argv)
    passed, skipped = results.count_unittest(output)
    run.stage.add(passed, [], skipped)
    run.note(f"python-alone: {passed} passed, {len(skipped)} skipped")
    if rc:
        run.fail("python-alone", f"exit {rc}", output)


def python_suite(run):
    """python/tests/suite.py on 8 ranks."""
    rc, output = run.command("python", ["timeout", "480", *TORCH_ENV, VENV + "/bin/python", "python/tests/suite.py",
                                        "--fork", "8"], parser=SuiteParser())
    counts = results.count_suite(output)
    passed, failed, skipped = counts or (0, [], [])
    if rc and not failed:
        failed = [results.Item("suite", f"exit {rc}")]
    if failed:
        run.note("\n".join(line for line in output.splitlines() if not re.match(r"[WE]\d* ", line)))
    run.stage.add(passed, failed, skipped)
    run.note(f"python: {passed} passed, {len(failed)} failed, {len(skipped)} skipped")


def venv(run):
    """the Python environment of the stage python: downloads torch, and keeps it in .venv-test"""
    def tell(line):  # how much is downloaded is said before it is
        if re.match("downloading|no torch", line):
            run.note("venv: " + line)

    try:
        run.venv.passed = run.check("venv", MAKE_VENV, parser=tell)
    finally:
        run.venv.set()


def python(run):
    """wheels, the Python tests on 8 ranks, two models"""
    run.await_event(run.venv)
    if not run.venv.passed:
        return  # the stage venv says why
    if not run.check("python-wheel", ["scripts/check_wheel.sh", VENV]):
        return
    run.check("python-nccl", ["scripts/check_nccl_python.sh", VENV])
    slurm = ["DEBIAN_SLURM=" + os.path.abspath(SLURM)] if run.check("slurm", ["scripts/slurm_env.sh", SLURM]) else []
    run.check("python-worlds", ["env", "TORCHRUN=" + os.path.abspath(VENV + "/bin/torchrun"), *slurm,
                                "EPX_BUILD_DIR=" + os.path.abspath(gcc_folder()), "tests/scripts/bench_world.sh"])
    python_alone(run)
    python_suite(run)
    run.check("python-layer", ["timeout", "60", gcc_folder() + "/epx", "run", "-n", "3", VENV + "/bin/python",
                               "examples/moe_layer.py"])
    run.check("python-hf", torchrun(2, "examples/hf_moe.py", "--model", "qwen3", "mixtral", "--prompts", "1",
                                    "--length", "16", "--decode", "3"))
    run.check("python-train", torchrun(2, "examples/train_moe.py", "--steps", "20", "--batch", "8", "--length", "32"))


# ---- Other compilers


def cross_target():
    return "x86_64" if platform.machine() == "aarch64" else "aarch64"


def cross_tools():
    return f"{cross_target()}-linux-gnu-gcc", f"qemu-{cross_target()}"


def other_build(name):
    """(folder, options of CMake) of a stage that compiles everything once more."""
    compiler, emulator = cross_tools()
    # gcc compiles the tests and tools for all its warnings; the sanitizers do not miss what it would have removed.
    quickly = "-DEPX_CALLER_OPTIONS=-O0"
    return {
        # Its warnings do not depend on the optimisation, unlike gcc's. No script runs here, so no `epx predict`.
        "clang": ("build-clang", ["-DCMAKE_C_COMPILER=clang", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
                                  "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG", "-DEPX_TEST_INJECT=OFF",
                                  "-DEPX_COST_OPTIONS=-O0", quickly]),
        # UBSan looks at the kernels in the CPU device; it would take 8 s more to compile the simulation's, too.
        "address": ("build-asan", ["-DCMAKE_C_COMPILER=gcc", "-DEPX_SANITIZE=address", quickly,
                                   "-DEPX_SIM_OPTIONS=-fno-sanitize=undefined;-O0"]),
        # The simulation has one thread: its tests do not run here.
        "thread": ("build-tsan", ["-DCMAKE_C_COMPILER=gcc", "-DEPX_SANITIZE=thread", quickly,
                                  "-DEPX_SIM_OPTIONS=-fno-sanitize=all;-O0"]),
        "cross": ("build-cross", [
            "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={cross_target()}",
            f"-DCMAKE_C_COMPILER={compiler}",
            f"-DCMAKE_CROSSCOMPILING_EMULATOR={emulator};-L;/usr/{cross_target()}-linux-gnu", "-DEPX_CUDA=OFF", quickly,
            # Few tests of this stage run kernels. The stage gcc has the same lines, with all warnings of -O3.
            "-DEPX_SIM_OPTIONS=-O0", "-DEPX_KERNEL_OPTIONS=-O0"]),
    }[name]


def clang(run):
    """clang -Werror, test programs but slow ones and those that wait for failures (EPX_TEST_SCALE=0.1)"""
    if run.build("clang", *other_build("clang")):
        run.ctest("clang", "build-clang", 0.1, ["-L", "^program$", "-LE", "^(slow|noclang)$"])


def probe(flags, env=None, prefix=()):
    """Compiles and runs a program that does nothing: seconds that it took, or None if a sanitizer cannot run here."""
    os.makedirs("build-logs/probe", exist_ok=True)
    with open("build-logs/probe/probe.c", "w") as file:
        file.write("int main(void) { return 0; }\n")
    program = os.path.abspath("build-logs/probe/probe")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.run(["gcc", *flags, program + ".c", "-o", program], **quiet).returncode:
        return None
    begin = time.monotonic()
    rc = subprocess.run([*prefix, program], env={**os.environ, **(env or {})}, **quiet).returncode
    return None if rc else time.monotonic() - begin


def address(run):
    """AddressSanitizer, LeakSanitizer, UBSan: all tests but slow ones (EPX_TEST_SCALE=0.12)"""
    # Not detect_stack_use_after_return, which gcc 13 and later switch on: it makes tests of small functions hundreds of
    # times slower, its stacks are not aligned for vectors of 64 bytes (gcc 13.2), and tasks of the simulation switch
    # stacks.
    leaks = probe(["-fsanitize=address"], {"ASAN_OPTIONS": "detect_leaks=1"})
    if leaks is None:
        run.skip("LeakSanitizer", "LeakSanitizer cannot run here (it needs ptrace): leaks not checked")
    # On some machines (aarch64 with gcc 12) LeakSanitizer takes 4 s at the end of every process. There it looks at the
    # programs that make groups and connections (labels ranks, leaks; tests/lib_leaks makes it 1 s), and not at the
    # others or at ranks that are processes of their own; machines where it is quick check them all.
    quick = leaks is not None and leaks < 2
    if leaks is not None and not quick:
        run.note(f"address: LeakSanitizer takes {leaks:.0f} s per process here: on in programs with groups only")
    if not run.build("address", *other_build("address")):
        return
    env = {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
           "LSAN_OPTIONS": f"suppressions={os.getcwd()}/scripts/lsan.supp:print_suppressions=0"}
    env["ASAN_OPTIONS"] = f"detect_stack_use_after_return=0:detect_leaks={int(leaks is not None)}"
    run.ctest("address", "build-asan", 0.12, ["-L", "^(ranks|leaks)$", "-LE", "^(slow|noasan)$"], env)
    env["ASAN_OPTIONS"] = f"detect_stack_use_after_return=0:detect_leaks={int(quick)}"
    run.ctest("address-rest", "build-asan", 0.12, ["-LE", "^(slow|noasan|ranks|leaks)$"], env)


def thread(run):
    """ThreadSanitizer: all tests but slow ones (EPX_TEST_SCALE=0.1)"""
    prefix = ()
    if probe(["-fsanitize=thread"]) is None:
        # Some kernels place memory where ThreadSanitizer does not expect it; without randomisation they do not.
        prefix = ("setarch", "-R")
        if probe(["-fsanitize=thread"], prefix=prefix) is None:
            run.skip("thread", "ThreadSanitizer cannot run here")
            return
    env = {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0:second_deadlock_stack=1"}
    if run.build("thread", *other_build("thread")):
        run.ctest("thread", "build-tsan", 0.1, ["-LE", "^(slow|notsan)$"], env, prefix)


def cross(run):
    """the other architecture: everything compiled with -Werror, some tests under qemu-user"""
    missing = [name for name in cross_tools() if not shutil.which(name)]
    if missing:
        run.skip("cross", f"there is no {' and no '.join(missing)}")
        return
    if run.build("cross", *other_build("cross")):
        run.ctest("cross", "build-cross", 0.1, ["-L", "^cross$"])
