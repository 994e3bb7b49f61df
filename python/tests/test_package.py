# SPDX-License-Identifier: Apache-2.0
"""The packages as a user meets them: imports, documentation, errors that say what is wrong."""

import ast
import inspect
import os
import pickle
import subprocess
import sys
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


class Distributions(unittest.TestCase):
    def test_dependency_is_this_epx(self) -> None:
        """PyPI has another project's epx: pip may take none but the version that this tree has."""
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        for name in ("pyproject.toml", os.path.join("nccl", "pyproject.toml")):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                self.assertIn('\ndependencies = ["epx==%s"]\n' % epx.__version__, file.read(), name)

    def test_another_projects_epx_is_named(self) -> None:
        code = """
import sys, types
sys.modules["epx"] = types.ModuleType("epx")
sys.modules["epx"].__file__ = "/elsewhere/epx/__init__.py"
try:
    import deep_ep
except ImportError as error:
    print(error)
"""
        self.assertRegex(run(code), "^deep_ep: /elsewhere/epx/.* another project's epx: pip uninstall epx, then")


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

    def test_not_beside_another_projects_deep_ep(self) -> None:
        code = """
import sys, types
sys.modules["deep_ep"] = types.ModuleType("deep_ep")
sys.modules["deep_ep"].__file__ = "/elsewhere/deep_ep/__init__.py"
try:
    import %s
except ImportError as error:
    print(error)
"""
        for name in ("deep_ep_cpp", "hybrid_ep_cpp"):
            self.assertRegex(run(code % name),
                             "^%s: this one is EPX's, and deep_ep is another .*/elsewhere/.*EPX_DEEP" % name)


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
