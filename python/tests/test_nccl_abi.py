# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror of nccl.ep against include/nccl_ep/nccl_ep.h, as a C compiler sees it; what its dataclasses do."""

import ctypes
import dataclasses
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
STANDIN = os.path.join(ROOT, "standin", "include")
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


class OnlyDlpack:
    """A tensor of torch without its other interfaces."""

    def __init__(self, tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)


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
        got = printed_by("nccl_ep.h", lines, INCLUDE, STANDIN + "/nccl", STANDIN + "/cuda")
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
        self.assertEqual((struct.size, struct.magic, struct.num_experts), (120, 0xC00FFFEE, 16))
        dispatch = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)._lowpp
        self.assertEqual((dispatch.size, dispatch.quant_recipe), (24, 1))

    def test_every_field_reaches_its_struct(self) -> None:
        """Each field of each dataclass, set alone: the struct differs from the default one in that field alone."""
        ep = load_ours()
        memory = (ctypes.c_float * 6)()
        tensor = ep.Tensor(ctypes.addressof(memory), dtype=ep.DataType.FLOAT32, shape=(2, 3))
        names = ["GroupConfig", "HandleConfig", "DispatchConfig", "CombineConfig", "LayoutInfo", "DispatchInputs",
                 "DispatchOutputs", "CombineInputs", "CombineOutputs", "AllocConfig"]
        for cls in (getattr(ep, name) for name in names):
            for field in dataclasses.fields(cls):
                alone = {"alloc": ep.AllocConfig(context=1)}.get(field.name, 1)
                alone = tensor if "Tensor" in str(field.type) else alone
                plain, changed = cls()._lowpp, cls(**{field.name: alone})._lowpp
                differs = [name for name, *_ in plain._fields_
                           if self.bytes_of(plain, name) != self.bytes_of(changed, name)]
                self.assertEqual(differs, [field.metadata.get("lowpp", field.name)], cls)
                if alone is tensor:
                    self.assertEqual(getattr(changed, field.name), tensor.ptr)

    @staticmethod
    def bytes_of(struct: ctypes.Structure, name: str) -> bytes:
        place = getattr(type(struct), name)
        return ctypes.string_at(ctypes.addressof(struct) + place.offset, place.size)

    def test_streams(self) -> None:
        """An int, None, a stream of cuda.core (handle), of torch (cuda_stream), or __cuda_stream__; nothing else."""
        load_ours()
        pointer = sys.modules["epx_nccl_ep_under_test._bound"].stream_pointer
        self.assertEqual([pointer(None), pointer(0), pointer(0x70)], [0, 0, 0x70])
        self.assertEqual(pointer(types.SimpleNamespace(handle=0x80)), 0x80)
        self.assertEqual(pointer(types.SimpleNamespace(cuda_stream=0x90)), 0x90)

        class Protocol:
            def __cuda_stream__(self):
                return 0, 0xa0

        self.assertEqual(pointer(Protocol()), 0xa0)
        for wrong in (True, "7", object()):
            with self.assertRaises(TypeError):
                pointer(wrong)

    def test_errors(self) -> None:
        """NCCLEpError has the code; the functions that NVIDIA's package opens, and masks and errors, are declared."""
        ep = load_ours()
        self.assertEqual(ep.NCCLEpError(4).status, 4)
        abi = sys.modules["epx_nccl_ep_under_test._abi"]
        for name in ("GetVersion", "CreateGroup", "GroupDestroy", "HandleMemSize", "InitHandle", "UpdateHandle",
                     "CreateHandle", "HandleDestroy", "Dispatch", "Combine", "Complete", "MaskQuery", "MaskUpdate",
                     "MaskClean", "GetAsyncError", "ErrorClear"):
            self.assertIn("ncclEp" + name, abi.FUNCTIONS)

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
        for kind in (torch.int8, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32):
            plain = torch.zeros(3, 4, dtype=kind)
            other = ep.Tensor(OnlyDlpack(plain[1:]))  # memory of cuda.core has nothing else
            self.assertEqual((other.data, other.sizes, other.datatype),
                             (plain[1:].data_ptr(), (2, 4), ep.Tensor(plain).datatype))
        for wrong in (torch.zeros(4, 4).t(), torch.zeros(2, dtype=torch.complex64)):
            with self.assertRaises(ep.NcclInvalid):
                ep.Tensor(OnlyDlpack(wrong))


if __name__ == "__main__":
    unittest.main()
