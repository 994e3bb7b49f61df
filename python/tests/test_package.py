# SPDX-License-Identifier: Apache-2.0
"""The packages as a user meets them: imports, documentation, errors that say what is wrong."""

import ast
import inspect
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import unittest
from typing import Set

import deep_ep
import deep_ep.utils
import epx
import epx.bootstrap
import torch
from epx import _library


def run(code: str, **environment: str) -> str:
    """Runs Python code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=True,
                          capture_output=True, text=True, timeout=60).stdout.strip()


def imported_beside(path: str) -> Set[str]:
    """Modules of the same package that a file imports anywhere, for type checkers too."""
    found: Set[str] = set()
    with open(path, encoding="utf-8") as file:
        for node in ast.walk(ast.parse(file.read())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                found |= {node.module.split(".")[0]} if node.module else {name.name for name in node.names}
    return found


def tests_of(path: str) -> Set[str]:
    """The names of a file's tests: functions test_* at its top or in its classes."""
    with open(path, encoding="utf-8") as file:
        return {node.name for node in ast.walk(ast.parse(file.read()))
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


class Rules(unittest.TestCase):
    def test_every_rule_of_v2_has_a_test(self) -> None:
        """deepep_v2.txt: each rule is followed by the tests that name it, and those exist."""
        here = os.path.dirname(os.path.abspath(__file__))
        exist = {"%s.%s" % (name[:-3], test) for name in os.listdir(here) if name.endswith(".py")
                 for test in tests_of(os.path.join(here, name))}
        rules, named = [], set()
        with open(os.path.join(here, "deepep_v2.txt"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("    "):
                    rules[-1][1].append(line.strip())
                elif line.strip() and not line.startswith("#"):
                    self.assertRegex(line, r"^[ER] ")
                    rules.append((line.strip(), []))
        for rule, tests in rules:
            self.assertTrue(tests, "no test of: " + rule)
            self.assertEqual([test for test in tests if test not in exist], [], rule)
            named.update(tests)
        self.assertGreater(len(rules), 60)
        self.assertEqual({test for test in exist if test.startswith("ranks_elastic")} - named, set())


PYTHON = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Distributions(unittest.TestCase):
    def test_names_and_versions(self) -> None:
        """PyPI has another project's epx: no distribution may have its name, or ask pip for it."""
        for name, distribution in (("pyproject.toml", "epx-moe-deep-ep"), ("nccl/pyproject.toml", "epx-moe-nccl-ep"),
                                   ("../pyproject.toml", "epx-moe")):
            with open(os.path.join(PYTHON, name), encoding="utf-8") as file:
                text = file.read()
            self.assertIn('\nname = "%s"\n' % distribution, text)
            self.assertNotRegex(text, r'dependencies = .*"epx[^-]')
            if distribution != "epx-moe":
                self.assertIn('\ndependencies = ["epx-moe==%s"]\n' % epx.__version__, text, name)
            if distribution == "epx-moe-deep-ep":
                self.assertIn('\nversion = "%s" ' % epx.__version__, text)

    def test_deep_ep_names_another_projects_epx(self) -> None:
        """The package does, and so does the module deep_ep.py of epx-moe-deep-ep."""
        code = """
import sys, types
sys.modules["epx"] = types.ModuleType("epx")
sys.modules["epx"].__file__ = "/elsewhere/epx/__init__.py"
try:
    import deep_ep
except ImportError as error:
    print(error)
"""
        package = os.path.dirname(deep_ep.__path__[0])
        for folder in (package, os.path.join(PYTHON, "names")):
            self.assertRegex(run(code, PYTHONPATH=folder), "^deep_ep: expected EPX's epx, got another project's "
                             ".*/elsewhere/epx/.*; do: pip", folder)

    def installed(self, folder: str) -> str:
        """A copy of the package in a folder where the other project's epx is installed too; its __init__.py."""
        package = os.path.join(folder, "epx")
        shutil.copytree(os.path.dirname(epx.__file__), package, ignore=shutil.ignore_patterns("__pycache__", "lib"))
        os.mkdir(os.path.join(folder, "epx-0.2.0.dist-info"))
        return os.path.join(package, "__init__.py")

    def test_import_notices_another_projects_epx(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.installed(folder)
            code = "import warnings; warnings.simplefilter('error'); import epx"
            with self.assertRaises(subprocess.CalledProcessError) as caught:
                run(code, PYTHONPATH=folder)
            self.assertIn("RuntimeWarning: epx: expected epx-moe alone in %s, got another project's epx beside it "
                          "(epx-0.2.0.dist-info); do: pip uninstall -y epx epx-moe; pip install epx-moe" % folder,
                          caught.exception.stderr)

    def test_program_notices_another_projects_epx(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with open(self.installed(folder), "w", encoding="utf-8") as file:
                file.write("another = True\n")
            done = subprocess.run([sys.executable, "-m", "epx", "version"], env={**os.environ, "PYTHONPATH": folder},
                                  capture_output=True, text=True, timeout=60)
            self.assertIn("another project's over it; do: pip uninstall -y epx epx-moe; pip install epx-moe\n",
                          done.stderr)


FOUND = "import importlib.util; print(importlib.util.find_spec('deep_ep').origin)"  # quicker than an import


class Use(unittest.TestCase):
    """EPX's deep_ep where another distribution has one, too."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name in ("deep_ep", "deep_ep_cpp"):
            os.mkdir(os.path.join(folder.name, name))
            with open(os.path.join(folder.name, name, "__init__.py"), "w", encoding="utf-8") as file:
                file.write("__version__ = 'another'\n")
        self.another = folder.name
        self.site = os.path.join(folder.name, "site")  # epx as a wheel has it: no folder deep_ep beside it
        shutil.copytree(os.path.dirname(epx.__file__), os.path.join(self.site, "epx"),
                        ignore=shutil.ignore_patterns("__pycache__", "lib", "dropins"))
        dropins = os.path.join(self.site, "epx", "dropins", "deep_ep")
        os.makedirs(dropins)
        for name in ("deep_ep", "deep_ep_cpp", "hybrid_ep_cpp"):
            os.symlink(os.path.join(os.path.dirname(deep_ep.__path__[0]), name), os.path.join(dropins, name))
        self.ours = os.path.join(dropins, "deep_ep", "__init__.py")
        self.theirs = os.path.join(self.another, "deep_ep", "__init__.py")
        self.path = self.another + os.pathsep + self.site

    def test_use(self) -> None:
        self.assertEqual(run(FOUND, PYTHONPATH=self.path), self.theirs)
        self.assertEqual(run("import epx; epx.use('deep_ep'); " + FOUND, PYTHONPATH=self.path), self.ours)

    def test_use_reaches_other_processes(self) -> None:
        code = """
import multiprocessing, os, subprocess, sys, epx
def child(queue):
    import importlib.util
    queue.put(importlib.util.find_spec("deep_ep").origin)
if __name__ == "__main__":
    epx.use("deep_ep")
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get(timeout=50))
        process.join()
    print(subprocess.check_output([sys.executable, "-c", %r], text=True))
""" % FOUND
        program = os.path.join(self.another, "program.py")
        with open(program, "w", encoding="utf-8") as file:
            file.write(code)
        output = subprocess.run([sys.executable, program], env={**os.environ, "PYTHONPATH": self.path}, check=True,
                                capture_output=True, text=True, timeout=200).stdout
        self.assertEqual(output.split(), [self.ours] * 4)

    def test_command(self) -> None:
        def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run([sys.executable, "-m", "epx.use", *arguments], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": self.path}, timeout=60)

        self.assertEqual(command("deep_ep", "--", sys.executable, "-c", FOUND).stdout, self.ours + "\n")
        self.assertIn("usage: python -m epx.use NAME... -- PROGRAM", command("deep_ep").stderr)
        self.assertEqual(command("deepep", "--", "true").stderr, "epx.use: expected one of deep_ep, got 'deepep'\n")
        self.assertEqual(command("deep_ep", "--", "/nowhere").stderr, "epx.use: /nowhere: No such file or directory\n")

    def test_use_comes_first(self) -> None:
        code = "import deep_ep, epx\ntry: epx.use('deep_ep')\nexcept ImportError as error: print(error)"
        self.assertRegex(run(code, PYTHONPATH=self.path), r"expected that nothing has imported deep_ep, got another "
                         r"project's \(.*/deep_ep/__init__.py\); call epx.use\('deep_ep'\) first$")

    def test_module_of_epx_moe_deep_ep(self) -> None:
        """deep_ep.py becomes EPX's package; a folder deep_ep beside it is found first, and neither is harmed."""
        names = os.path.join(PYTHON, "names")
        alone = os.pathsep.join([names, self.site])
        code = "import deep_ep_cpp, deep_ep.utils; print(deep_ep_cpp.Config is deep_ep.Config, deep_ep.__version__)"
        library = _library.load()._name  # the copy of epx has no folder lib
        self.assertEqual(run(code, PYTHONPATH=alone, EPX_LIBRARY=library), "True " + deep_ep.__version__)
        for name in os.listdir(names):
            if name.endswith(".py"):
                shutil.copy(os.path.join(names, name), self.another)
        self.assertEqual(run(FOUND, PYTHONPATH=self.path), self.theirs)
        code = "try: import hybrid_ep_cpp\nexcept ImportError as error: print(error)"
        self.assertRegex(run(code, PYTHONPATH=self.path), "^hybrid_ep_cpp: expected EPX's deep_ep beside it, got "
                         r"another project's \(.*\); call epx.use\('deep_ep'\) before$")


class Compiled(unittest.TestCase):
    """deep_ep_cpp and hybrid_ep_cpp, the names of DeepEP's compiled modules."""

    def test_names(self) -> None:
        import deep_ep_cpp

        self.assertIs(deep_ep_cpp.EventHandle, deep_ep.EventHandle)
        self.assertIs(deep_ep_cpp.Config, deep_ep.Config)
        self.assertIs(deep_ep_cpp.topk_idx_t, deep_ep.topk_idx_t)
        self.assertTrue(deep_ep_cpp.is_sm90_compiled())
        self.assertEqual(deep_ep_cpp.get_low_latency_rdma_size_hint(8, 512, 2, 4),
                         deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 512, 2, 4))
        with self.assertRaisesRegex(AttributeError, "'Buffer': EPX has no compiled runtime; deep_ep.Buffer is"):
            deep_ep_cpp.Buffer
        self.assertFalse(hasattr(deep_ep_cpp, "internode_dispatch"))

    def test_names_of_hybrid_ep(self) -> None:
        import hybrid_ep_cpp

        self.assertTrue(hasattr(hybrid_ep_cpp.HybridEpConfigInstance(), "topk"))  # so DeepEP's test asks for indices
        with self.assertRaisesRegex(AttributeError, "'HybridEPBuffer': .* deep_ep.HybridEPBuffer is the buffer"):
            hybrid_ep_cpp.HybridEPBuffer


class Imports(unittest.TestCase):
    def test_files_that_are_loaded_by_their_path(self) -> None:
        """As DeepEP's tests load them."""
        for name, function, given, result in (("math", "align", "129, 128", "256"),
                                              ("semantic", "value_or", "None, 5", "5"),
                                              ("testing", "parse_num_bytes", "'64K'", "65536")):
            path = os.path.join(os.path.dirname(deep_ep.utils.__file__), name + ".py")
            self.assertEqual(run("import runpy; print(runpy.run_path(%r)[%r](%s))" % (path, function, given)), result)

    def test_needs_neither_torch_nor_numpy(self) -> None:
        code = """
import sys, time
sys.modules["torch"] = sys.modules["numpy"] = None
begin = time.perf_counter()
import epx
print(time.perf_counter() - begin)
group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16)
print(group.info.nranks, group.stats()["waits"], epx.library_version())
group.destroy()
"""
        output = run(code, RANK="0", WORLD_SIZE="1").splitlines()
        self.assertEqual(output[1].split()[:2], ["1", "0"])
        times = [float(output[0])]
        while min(times) >= 0.3 and len(times) < 10:  # other programs run here too
            times.append(float(run(code, RANK="0", WORLD_SIZE="1").splitlines()[0]))
        self.assertLess(min(times), 0.3)

    def test_a_missing_library_is_named(self) -> None:
        output = run("""
import epx
try:
    epx.library_version()
except epx.EpxError as error:
    print(error)
""", EPX_LIBRARY="/nowhere/libepx.so")
        self.assertRegex(output, "EPX_LIBRARY: expected this version's libepx.so, got /nowhere/libepx.so: .*; name")

    def test_another_library_is_named(self) -> None:
        output = run("""
import epx
try:
    epx.library_version()
except epx.EpxError as error:
    print(error)
""", EPX_LIBRARY="libm.so.6")
        self.assertRegex(output, "EPX_LIBRARY: expected this version's libepx.so, got libm.so.6: is another library, "
                         "or another version .*undefined symbol: epx_.*; name that file, or unset the variable")

    def test_exceptions_have_public_names(self) -> None:
        kinds = [value for value in vars(epx).values() if isinstance(value, type) and issubclass(value, Exception)]
        kinds += [deep_ep.ArgumentError, deep_ep.UsageError]
        self.assertGreater(len(kinds), 10)
        for kind in kinds:
            self.assertIs(getattr(sys.modules[kind.__module__], kind.__qualname__), kind)
            self.assertIn(kind.__module__, ("epx", "deep_ep"))
            again = pickle.loads(pickle.dumps(kind(epx.Status.USAGE, "why")))
            self.assertEqual((type(again), again.status, str(again)), (kind, epx.Status.USAGE, "USAGE: why"))

    def test_no_process_group(self) -> None:
        calls = ("deep_ep.Buffer(dist.group.WORLD, 1 << 20)", "deep_ep.Buffer()", "deep_ep.ElasticBuffer(None, 1)",
                 "deep_ep.HybridEPBuffer(None, 64, 4, 1)", "epx.bootstrap.from_torch()",
                 "deep_ep.get_physical_domain_size(None)")
        output = run("""
import deep_ep, epx, torch.distributed as dist
for call in %r:
    try:
        eval(call)
    except epx.EpxError as error:
        print(error)
""" % (calls,)).splitlines()
        self.assertEqual(len(output), len(calls))
        for line in output:
            self.assertRegex(line, "group: expected a process group, got None .* not initialized; call "
                             r"torch.distributed.init_process_group\(\) first")

    def test_a_gpu_where_there_is_none(self) -> None:
        if torch.cuda.is_available():
            self.skipTest("this machine has a GPU")
        output = run("""
import epx
try:
    epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, device=epx.Device.CUDA)
except epx.UnsupportedError as error:
    print(error)
""", RANK="0", WORLD_SIZE="1")
        self.assertRegex(output, "device cuda: expected a GPU, found none: .*; choose the device cpu")

    def test_modules_import_each_other_in_one_direction(self) -> None:
        for package in (epx, deep_ep):
            folder = os.path.dirname(package.__file__ or "")
            imports = {name[:-3]: imported_beside(os.path.join(folder, name))
                       for name in os.listdir(folder) if name.endswith(".py") and name != "__init__.py"}
            while imports:  # take away those that import none of the others
                free = [name for name, needs in imports.items() if not needs & imports.keys()]
                self.assertTrue(free, "%s: modules that import each other: %s" % (package.__name__, imports))
                for name in free:
                    del imports[name]

    def test_names_of_deep_ep(self) -> None:
        for name in ("Buffer", "ElasticBuffer", "EPHandle", "EventOverlap", "EventHandle", "Config", "topk_idx_t",
                     "HybridEPBuffer", "initialize_uccl", "destroy_uccl", "check_nvlink_connections",
                     "get_physical_domain_size", "get_logical_domain_size", "__version__"):
            self.assertTrue(hasattr(deep_ep, name), name)
        self.assertIs(deep_ep.utils.EventHandle, deep_ep.EventHandle)
        self.assertIs(deep_ep.utils.EventOverlap, deep_ep.EventOverlap)
        self.assertEqual(deep_ep.Buffer.num_sms, 20)

    def test_signatures_of_deep_ep(self) -> None:
        expected = {
            "__init__": "group num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24 "
                        "allow_nvlink_for_low_latency_mode=True allow_mnnvl=False explicitly_destroy=False "
                        "enable_shrink=False comm=None",
            "get_dispatch_layout": "topk_idx num_experts previous_event=None async_finish=False "
                                   "allocate_on_comm_stream=False",
            "dispatch": "x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None "
                        "num_tokens_per_expert=None topk_idx=None topk_weights=None expert_alignment=1 "
                        "num_worst_tokens=0 config=None previous_event=None async_finish=False "
                        "allocate_on_comm_stream=False",
            "combine": "x handle topk_weights=None bias=None config=None previous_event=None async_finish=False "
                       "allocate_on_comm_stream=False",
            "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
                                    "cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None "
                                    "use_fp8=True round_scale=False use_ue8m0=False async_finish=False "
                                    "return_recv_hook=False",
            "low_latency_combine": "x topk_idx topk_weights handle use_logfmt=False zero_copy=False "
                                   "async_finish=False return_recv_hook=False out=None "
                                   "combine_wait_recv_cost_stats=None",
            "get_local_buffer_tensor": "dtype size=None offset=0 use_rdma_buffer=False",
            "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
            "low_latency_update_mask_buffer": "rank_to_mask mask=False",
            "low_latency_query_mask_buffer": "mask_status",
            "low_latency_clean_mask_buffer": "",
            "get_next_low_latency_combine_buffer": "handle",
        }
        expected.update(internode_dispatch=expected["dispatch"], internode_combine=expected["combine"])
        for name, text in expected.items():
            parameters = list(inspect.signature(getattr(deep_ep.Buffer, name)).parameters.values())[1:]
            got = " ".join(p.name if p.default is p.empty else "%s=%r" % (p.name, p.default) for p in parameters)
            got = got.replace("group=None", "group")
            for extra in (" is_intranode=None", " use_fabric=None", " use_default_stream_as_comm_stream=False",
                          " num_recv_tokens_per_expert_as_cuda=False", " use_nvfp4=False x_global_scale=None",
                          " overlap=False src_signals=None src_signal_expect_value=0 packed_recv_count=None "
                          "comp_signal=None block_m=64 threshold=0 num_sms=None"):
                if got.endswith(extra):  # those of forks, after all of DeepEP's
                    got = got[:-len(extra)]
            self.assertEqual(got, text, name)


class Documentation(unittest.TestCase):
    def test_every_public_name_has_a_docstring(self) -> None:
        missing = []
        for package in (epx, epx.bootstrap, deep_ep, deep_ep.utils):
            for name in getattr(package, "__all__", None) or [n for n in vars(package) if not n.startswith("_")]:
                value = getattr(package, name)
                if inspect.isfunction(value) or inspect.isclass(value):
                    missing += self.undocumented("%s.%s" % (package.__name__, name), value)
        self.assertEqual(missing, [])

    def undocumented(self, path: str, value) -> list:
        """Names without a docstring: a function, or a class and what it defines itself."""
        found = [] if inspect.getdoc(value) else [path]
        if inspect.isclass(value) and value.__module__.split(".")[0] in ("epx", "deep_ep"):
            for name, member in vars(value).items():
                member = member.__func__ if isinstance(member, staticmethod) else member
                public = not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
                if public and not (member.__doc__ or "").strip():
                    found.append("%s.%s" % (path, name))
        return found

    def test_every_public_function_has_type_hints(self) -> None:
        for package in (epx, deep_ep):
            for name in package.__all__:
                value = getattr(package, name)
                members = [value] if inspect.isfunction(value) else [
                    m for n, m in vars(value).items() if inspect.isfunction(m) and not n.startswith("_")
                ] if inspect.isclass(value) and value.__module__.split(".")[0] in ("epx", "deep_ep") else []
                for member in members:
                    self.assertIn("return", member.__annotations__, "%s.%s" % (name, member.__name__))


class Errors(unittest.TestCase):
    def test_exceptions_carry_status_and_message(self) -> None:
        try:
            epx.memory(2, num_experts=-1, max_tokens_per_rank=1, max_hidden_bytes=16)
            self.fail("accepted")
        except epx.ArgumentError as error:
            self.assertEqual(error.status, epx.Status.ARGUMENT)
            self.assertIn("num_experts", error.message)
            self.assertIn("expected 1 to", error.message)
            self.assertIsInstance(error, ValueError)
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((again.status, again.message), (error.status, error.message))

    def test_each_status_has_its_exception(self) -> None:
        for status in epx.Status:
            error = epx.errors.make_error(status, "why")
            self.assertEqual((error.status, str(error)), (status, "%s: why" % status.name))
        self.assertIsInstance(epx.errors.make_error(epx.Status.TIMEOUT, ""), TimeoutError)
        self.assertIsInstance(epx.errors.make_error(epx.Status.MEMORY, ""), MemoryError)
        self.assertEqual(epx.errors.make_error(99, "new").status, epx.Status.INTERNAL)

    def test_unknown_configuration(self) -> None:
        with self.assertRaisesRegex(epx.ArgumentError, "config: expected names of .*num_experts.*, got colour"):
            epx.memory(1, colour=3)
        with self.assertRaisesRegex(epx.ArgumentError, "config.num_experts: expected an integer, got 'many'"):
            epx.memory(1, num_experts="many")

    def test_config_of_deep_ep(self) -> None:
        config = deep_ep.Config()
        self.assertEqual((config.num_sms, config.num_max_rdma_chunked_recv_tokens), (20, 256))
        self.assertGreater(config.get_nvl_buffer_size_hint(14336, 8), 0)
        self.assertEqual(config.get_rdma_buffer_size_hint(14336, 8), 0)
        self.assertGreater(config.get_rdma_buffer_size_hint(14336, 16), 0)
        with self.assertRaisesRegex(ValueError, "num_sms: expected an integer of at least 0, got -2"):
            deep_ep.Config(-2)
        self.assertEqual(deep_ep.Buffer.get_dispatch_config(8).num_sms, deep_ep.Buffer.num_sms)
        self.assertEqual(deep_ep.Buffer.get_combine_config(3).num_sms, deep_ep.Buffer.num_sms)
        self.assertTrue(deep_ep.Buffer.is_sm90_compiled())


class Library(unittest.TestCase):
    def test_order_of_candidates(self) -> None:
        old = os.environ.pop("EPX_LIBRARY", None)
        try:
            self.assertEqual(_library.candidates()[-1], "libepx.so.0")
            os.environ["EPX_LIBRARY"] = "/here/it/is.so"
            self.assertEqual(_library.candidates(), ["/here/it/is.so"])
        finally:
            os.environ.pop("EPX_LIBRARY")
            if old is not None:
                os.environ["EPX_LIBRARY"] = old


if __name__ == "__main__":
    unittest.main()
