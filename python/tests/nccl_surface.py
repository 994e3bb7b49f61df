# SPDX-License-Identifier: Apache-2.0
"""nccl_surface.py FOLDER: EPX's nccl.ep (in FOLDER) has what NVIDIA's (installed) has: names, enums and their values,
fields of dataclasses in their order and with their defaults, methods and functions with their parameters. EPX's may
have more. Started by scripts/check_nccl_python.sh, which preloads EPX's libraries for NVIDIA's package."""

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import os
import sys

import nccl.ep as theirs

NAME = "epx_nccl_ep"
faults, compared = [], 0


def load_ours(folder):
    path = os.path.join(folder, "nccl", "ep")
    spec = importlib.util.spec_from_file_location(NAME, os.path.join(path, "__init__.py"),
                                                  submodule_search_locations=[path])
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def check(what, expected, got):
    global compared
    compared += 1
    if expected != got:
        faults.append("%s: NVIDIA's has %s, EPX's has %s" % (what, expected, got))


def default_of(field):
    """Comparable in both packages: numbers, None, or the name of a class that is made."""
    if field.default is not dataclasses.MISSING:
        return field.default if field.default is None else int(field.default)
    return getattr(field.default_factory, "__name__", "required")


def parameters_of(function):
    """(name, kind, has a default) of each."""
    return [(p.name, str(p.kind), p.default is not p.empty) for p in inspect.signature(function).parameters.values()]


def compare_class(name, their, our):
    if issubclass(their, enum.Enum):
        check(name, {m.name: int(m) for m in their}, {m.name: int(m) for m in our if m.name in their.__members__})
        return
    if dataclasses.is_dataclass(their):
        fields = [(f.name, f.kw_only, default_of(f)) for f in dataclasses.fields(their)]
        check(name, fields, [(f.name, f.kw_only, default_of(f)) for f in dataclasses.fields(our)][:len(fields)])
        check(name + "._lowpp", True, hasattr(our, "_lowpp"))
        return
    for member, value in vars(their).items():
        if member.startswith("_") and member != "__init__":
            continue
        own = inspect.getattr_static(our, member, None)
        if own is None:
            check(name + "." + member, "it", "nothing")
        elif isinstance(value, property):
            check(name + "." + member, "a property", "a property" if isinstance(own, property) else type(own).__name__)
        elif name != "Handle" or member != "__init__":  # handles are made by groups
            check(name + "." + member, parameters_of(getattr(their, member)), parameters_of(getattr(our, member)))


def main():
    ours = load_ours(sys.argv[1])
    for name in theirs.__all__:
        their, our = getattr(theirs, name), getattr(ours, name, None)
        check("%s in __all__" % name, True, name in ours.__all__)
        if our is not None and inspect.isclass(their) and not hasattr(their, "argtypes") and name not in (
                "AllocFn", "FreeFn"):
            compare_class(name, their, our)
        elif our is not None and inspect.isfunction(their):
            check(name, parameters_of(their), parameters_of(our))
    for name in ("AllocFn", "FreeFn"):
        their, our = getattr(theirs, name), getattr(ours, name)
        check(name, (their._restype_, their._argtypes_), (our._restype_, our._argtypes_))
    torch = [importlib.import_module(module + ".interop.torch") for module in ("nccl.ep", NAME)]
    for name in getattr(torch[0], "__all__", ["get_nccl_comm_from_group"]):
        check("interop.torch." + name, [p[0] for p in parameters_of(getattr(torch[0], name))],
              [p[0] for p in parameters_of(getattr(torch[1], name))])
    for fault in faults:
        print(fault)
    print("nccl.ep beside NVIDIA's: %d comparisons, %d differ" % (compared, len(faults)))
    return 1 if faults or compared < 60 else 0


sys.exit(main())
