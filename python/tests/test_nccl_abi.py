# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror of nccl.ep against include/nccl_ep/nccl_ep.h, as a C compiler sees it; what its dataclasses do."""

import ctypes
import importlib.util
import os
import re
import shutil
import sys
import types
import unittest

from c_program import printed_by

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
INCLUDE = os.path.join(ROOT, "include", "nccl_ep")
OURS = os.path.join(ROOT, "python", "nccl", "ep")


def load_ours() -> types.ModuleType:
    """EPX's package under a name of its own: NVIDIA's may be installed beside."""
    name = "epx_nccl_ep_under_test"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.path.join(OURS, "__init__.py"),
                                                      submodule_search_locations=[OURS])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@unittest.skipUnless(sys.version_info >= (3, 10), "nccl.ep needs Python 3.10")
class NcclAbi(unittest.TestCase):
    @unittest.skipUnless(shutil.which("cc") and os.path.isdir(INCLUDE), "needs a C compiler and the header")
    def test_structs_are_those_of_the_header(self) -> None:
        load_ours()
        abi = sys.modules["epx_nccl_ep_under_test._abi"]
        lines, expected = [], {}
        for name, struct in abi.STRUCTS.items():
            lines.append('printf("%s %%zu\\n", sizeof(%s));' % (name, name))
            expected[name] = ctypes.sizeof(struct)
            for field, *_ in struct._fields_:
                lines.append('printf("%s.%s %%zu\\n", offsetof(%s, %s));' % (name, field, name, field))
                expected["%s.%s" % (name, field)] = getattr(struct, field).offset
        got = printed_by("nccl_ep.h", lines, INCLUDE, INCLUDE + "/standin/nccl", INCLUDE + "/standin/cuda")
        self.assertEqual(got, expected)

    @unittest.skipUnless(os.path.isdir(INCLUDE), "needs the header")
    def test_enums_are_those_of_the_header(self) -> None:
        ep = load_ours()
        text = ""
        for name in ("nccl_ep.h", "nccl_ep/ep_enums.h"):
            with open(os.path.join(INCLUDE, name), encoding="utf-8") as file:
                text += file.read()
        values = {name: int(value) for name, value in re.findall(r"\b(NCCL_EP_[A-Z0-9_]+) = (\d+)", text)}
        prefixes = {ep.Algorithm: "ALGO_%s", ep.Layout: "LAYOUT_%s", ep.PassDir: "%s_PASS",
                    ep.OverflowPolicy: "OVERFLOW_%s", ep.ZeroCopyMode: "ZERO_COPY_%s", ep.ExpertIdKind: "EXPERT_ID_%s",
                    ep.DispatchQuantizationRecipe: "DISP_QUANT_%s", ep.CombineQuantizationRecipe: "COMB_QUANT_%s"}
        for enum, form in prefixes.items():
            for member in enum:
                self.assertEqual(values["NCCL_EP_" + form % member.name], int(member), member)

    def test_dataclasses_are_keyword_only_and_follow_changes(self) -> None:
        ep = load_ours()
        with self.assertRaises(TypeError):
            ep.GroupConfig(ep.Algorithm.LOW_LATENCY)
        config = ep.GroupConfig(num_experts=8, max_token_bytes=64)
        config.num_experts = 16
        struct = config._lowpp
        self.assertEqual((struct.size, struct.magic, struct.num_experts), (112, 0xC00FFFEE, 16))
        dispatch = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)._lowpp
        self.assertEqual((dispatch.size, dispatch.quant_recipe), (24, 1))

    def test_tensors(self) -> None:
        ep = load_ours()
        memory = (ctypes.c_float * 6)()
        tensor = ep.Tensor(ctypes.addressof(memory), dtype=ep.DataType.FLOAT32, shape=(2, 3))
        self.assertEqual((tensor.sizes, tensor.ndim, tensor.datatype, tensor.data),
                         ((2, 3), 2, ep.DataType.FLOAT32, ctypes.addressof(memory)))
        for wrong in ({}, {"dtype": 7}, {"shape": (1,)}):
            with self.assertRaises(ValueError):
                ep.Tensor(4096, **wrong)
        with self.assertRaises(ep.NcclInvalid):
            ep.Tensor(object())
        with self.assertRaises(ep.NcclInvalid):
            ep.Tensor(4096, dtype=7, shape=(1,), window=8)

    def test_tensors_of_numpy_and_torch(self) -> None:
        ep = load_ours()
        try:
            import numpy
            import torch
        except ImportError:
            self.skipTest("needs NumPy and torch")
        array = numpy.zeros((4, 6), numpy.int64)
        self.assertEqual(ep.Tensor(array).datatype, ep.DataType.INT64)
        self.assertEqual(ep.Tensor(torch.zeros(2, 8, dtype=torch.bfloat16)).datatype, ep.DataType.BFLOAT16)
        with self.assertRaises(ep.NcclInvalid):
            ep.Tensor(array[:, ::2])
        with self.assertRaises(ep.NcclInvalid):
            ep.Tensor(torch.zeros(4, 4).t())


if __name__ == "__main__":
    unittest.main()
