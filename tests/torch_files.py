"""Writes files as PyTorch and safetensors do, with NumPy and pickle alone.

    write_zip(path, {"weight": array, "step": 3})          torch >= 1.6
    write_legacy(path, Module("mem_transformer", "MemTransformerLM", {"bias": array}, {"word_emb": Module(...)}))
    write_safetensors(path, {"weight": array})
    write_shards(folder, arrays, 3, "safetensors")

Views of one array share its storage, as in PyTorch.
"""

import collections
import dataclasses
import functools
import io
import json
import math
import pickle
import struct
import zipfile

import numpy as np

from txl_tf.convert.torch_file import read_tensors

CLASSES = {  # dtype -> name of the storage, dtype of .safetensors
    "float32": ("Float", "F32"), "float16": ("Half", "F16"), "float64": ("Double", "F64"), "int64": ("Long", "I64"),
    "int32": ("Int", "I32"), "int16": ("Short", "I16"), "int8": ("Char", "I8"), "uint8": ("Byte", "U8"),
    "bool": ("Bool", "BOOL"), "bfloat16": ("BFloat16", "BF16"),
}  # fmt: skip


class BFloat16:
    """An array of bfloat16: the upper halves of float32, as uint16."""

    def __init__(self, halves):
        self.halves = halves


class Parameter:
    """`torch.nn.Parameter` of an array."""

    def __init__(self, array):
        self.array = array


class Instance:
    """An object of a class that need not exist."""

    def __init__(self, module, name, /, **attributes):
        self.cls = named(module, name)
        self.attributes = attributes


class Module(Instance):
    """A pickled `torch.nn.Module`. `parameters` are arrays or None, `modules` are of this class or None."""

    def __init__(self, module, name, /, parameters=(), modules=(), **attributes):
        parameters = {key: None if array is None else Parameter(array) for key, array in dict(parameters).items()}
        parts = {"_parameters": parameters, "_buffers": {}, "_modules": dict(modules), "_backward_hooks": {}}
        parts = {key: collections.OrderedDict(part) for key, part in parts.items()}
        super().__init__(module, name, training=False, **parts, **attributes)


def parameter_list(*arrays, as_attributes=False):
    """A `ParameterList`: its parameters are in `_parameters`, or attributes, as those of torch >= 1.12 may be."""
    parts = {str(i): array for i, array in enumerate(arrays)}
    if as_attributes:
        parts = {key: None if array is None else Parameter(array) for key, array in parts.items()}
        return Module("torch.nn.modules.container", "ParameterList", **parts, _size=len(arrays))
    return Module("torch.nn.modules.container", "ParameterList", parts)


@dataclasses.dataclass(eq=False)
class Storage:
    """Numbers in the file, of torch.<kind>Storage. `numel` may lie."""

    kind: str
    data: bytes
    numel: int


@dataclasses.dataclass(eq=False)
class Tensor:
    """A view of a storage. It may lie too."""

    storage: Storage
    offset: int
    shape: tuple
    stride: tuple


# ----------------------------------------------------------------------------------------------------------- pickling


@dataclasses.dataclass(frozen=True)
class Name:
    """What pickles as the name of a class or function, which nobody imports."""

    module: str
    name: str

    def __call__(self):
        """So that pickle takes it for a function."""


named = functools.cache(Name)  # a single one of each, for the memo


class TorchPickler(pickle._Pickler):
    """Pickles as torch.save does, and keeps the `storages` by key.

    Args:
        sources: whether the first use of a module's class comes with its source, as before torch 1.6.
        order: `<` or `>`, the byte order of the storages.
    """

    def __init__(self, file, protocol, sources, order):
        super().__init__(file, protocol)
        self.storages, self._keys, self._of_array, self._tensors, self._seen = {}, {}, {}, {}, set()
        self._sources, self._order = sources, order

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        key = self._keys.setdefault(value, str(len(self._keys)))
        self.storages[key] = value
        view = (None,) if self._sources else ()  # of the storage, before torch 1.6
        return "storage", named("torch", f"{value.kind}Storage"), key, "cpu", value.numel, *view

    def save_name(self, value):
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_tensor(self, value):
        arguments = (value.storage, value.offset, value.shape, value.stride, False, collections.OrderedDict())
        self.save_reduce(named("torch._utils", "_rebuild_tensor_v2"), arguments, obj=value)

    def save_array(self, value):
        self.save(self._tensors.setdefault(id(value), (self.tensor_of(value), value))[0])

    def tensor_of(self, value):
        dtype, array = ("bfloat16", value.halves) if isinstance(value, BFloat16) else (value.dtype.name, value)
        base = array
        while isinstance(base.base, np.ndarray) and base.base.dtype == array.dtype:
            base = base.base
        if not base.flags.c_contiguous or min(array.strides, default=0) < 0:
            base = array = np.ascontiguousarray(array)
        data = base.astype(base.dtype.newbyteorder(self._order)).tobytes()
        _, storage = self._of_array.setdefault(id(base), (base, Storage(CLASSES[dtype][0], data, base.size)))
        offset = (array.ctypes.data - base.ctypes.data) // array.itemsize if array.size else 0
        return Tensor(storage, offset, array.shape, tuple(step // array.itemsize for step in array.strides))

    def save_parameter(self, value):
        arguments = (value.array, True, collections.OrderedDict())
        self.save_reduce(named("torch._utils", "_rebuild_parameter"), arguments, obj=value)

    def save_instance(self, value):
        cls = value.cls
        if self._sources and isinstance(value, Module) and cls not in self._seen:
            self.save_pers(("module", cls, f"/src/{cls.module}.py", f"class {cls.name}(nn.Module): pass\n"))
        else:
            self.save(cls)
        self._seen.add(cls)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(value)
        self.save(value.attributes)
        self.write(pickle.BUILD)

    dispatch = pickle._Pickler.dispatch | {
        Name: save_name, Tensor: save_tensor, np.ndarray: save_array, BFloat16: save_array, Parameter: save_parameter,
        Instance: save_instance, Module: save_instance,
    }  # fmt: skip


def pickled(tree, protocol=2, sources=False, order="<"):
    """The pickle of a tree, and its storages by key."""
    file = io.BytesIO()
    pickler = TorchPickler(file, protocol, sources, order)
    pickler.dump(tree)
    return file.getvalue(), pickler.storages


# -------------------------------------------------------------------------------------- files, whose paths are returned


def write_zip(path, tree, byteorder="little", compress=False, prefix="archive", protocol=2):
    """Writes a file of torch >= 1.6. The byte order is not in it if it is None."""
    program, storages = pickled(tree, protocol, order=">" if byteorder == "big" else "<")
    return zip_of(path, program, storages, byteorder, compress, prefix)


def zip_of(path, program, storages, byteorder="little", compress=False, prefix="archive"):
    """As `write_zip`, of a pickle."""
    members = {"data.pkl": program} | ({"byteorder": byteorder.encode()} if byteorder else {})
    members |= {f"data/{key}": storage.data for key, storage in storages.items()} | {"version": b"3\n"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(f"{prefix}/{name}", data)
    return str(path)


def write_legacy(path, tree, byteorder="little", protocol=2):
    """Writes a file of torch < 1.6."""
    program, storages = pickled(tree, protocol, sources=True, order=">" if byteorder == "big" else "<")
    return legacy_of(path, program, storages, byteorder=byteorder)


def legacy_of(path, program, storages, byteorder="little", **others):
    """As `write_legacy`, of a pickle. Others may replace the pickles `magic`, `version`, `system` and `keys`."""
    system = {"protocol_version": 1001, "little_endian": byteorder == "little", "type_sizes": {"int": 4, "long": 4}}
    parts = {"magic": 0x1950A86A20F9469CFC6C, "version": 1001, "system": system, "program": 0, "keys": list(storages)}
    parts = {name: pickle.dumps(part, 2) for name, part in parts.items()} | {"program": program} | others
    with open(path, "wb") as file:
        file.write(b"".join(parts.values()))
        for storage in storages.values():
            file.write(storage.numel.to_bytes(8, byteorder) + storage.data)
    return str(path)


def write_safetensors(path, arrays, metadata=None):
    """Writes the arrays of a dictionary, and texts by name if there are any."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, array in arrays.items():
        dtype, array = ("bfloat16", array.halves) if isinstance(array, BFloat16) else (array.dtype.name, array)
        begin, data = len(data), data + array.astype(array.dtype.newbyteorder("<")).tobytes()
        header[name] = {"dtype": CLASSES[dtype][1], "shape": array.shape, "data_offsets": [begin, len(data)]}
    return safetensors_of(path, json.dumps(header).encode(), data)


def safetensors_of(path, header, data=b"", length=None):
    """As `write_safetensors`, of a header in JSON; `length` is what the file says of its length."""
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return str(path)


def write_shards(folder, arrays, n, kind="bin"):
    """Writes the arrays of a dictionary into `n` files, .bin or .safetensors, and their index."""
    stem, write = ("pytorch_model", write_zip) if kind == "bin" else ("model", write_safetensors)
    names, each, weight_map = list(arrays), math.ceil(len(arrays) / n), {}
    for i in range(n):
        shard, part = f"{stem}-{i + 1:05}-of-{n:05}.{kind}", names[i * each : (i + 1) * each]
        write(folder / shard, {name: arrays[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return str(index)


# ------------------------------------------------------------------------------------------------------ what is read


def arrays_of(path):
    return {name: tensor.array() for name, tensor in read_tensors(path).items()}


def assert_same(arrays, expected):
    """The same names, values and dtypes."""
    assert sorted(arrays) == sorted(expected)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name, strict=True)
