"""Reads files of PyTorch and safetensors with NumPy alone. Nothing in the files is run, see `pickles`.

read_torch_file    reads .bin, .pt and .pkl files of torch.save or pickle, whole modules included
read_tensors       reads the tensors of such a file, of a .safetensors, or of the shards of an *.index.json, by name
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import struct
import zipfile
from typing import Any, BinaryIO

from txl_tf.convert.pickles import (
    OBJECTS,
    BoundedFile,
    Named,
    PlainUnpickler,
    are_sizes,
    instance,
    is_text,
    items_with_text_keys,
    raises_file_error,
    set_items,
    shown,
    text,
    unneeded,
)
from txl_tf.convert.tensors import (
    MAX_HEADER,
    MAX_NUMBERS,
    Storage,
    Tensor,
    check_fetched,
    check_packed,
    data_of_member,
    read_safetensors,
    unique,
)
from txl_tf.errors import ParameterError

# The first byte of a pickle: in protocol 2 and later, or a container in protocols 0 and 1.
FIRST_BYTES = (b"\x80", b"(", b"]", b"}", b")", b"c")
MAGIC = 0x1950A86A20F9469CFC6C  # the number in the first pickle of a file of torch < 1.6
VERSION = 1001  # the number in its second pickle
MAX_KEY = 20  # digits of the key of a storage
MAX_PACKED = 4_000_000  # bytes of a data.pkl that is compressed
MAX_PARTS = 100_000  # parameters, modules and other attributes of a pickled network
MAX_NAME = 200  # characters of a parameter's name
REFUSAL = "no such file is made of"  # end of the message about a refused name, see `PlainUnpickler`

DTYPES = {  # class of a storage -> dtype
    "Float": "float32", "Half": "float16", "Double": "float64", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
# Packages of which a file may name every class. Their instances become `Named`.
PACKAGES = (
    "torch", "transformers", "tokenizers", "sacremoses", "pytorch_transformers", "pytorch_pretrained_bert", "apex",
    "mem_transformer", "proj_adaptive_softmax", "data_utils", "vocabulary", "utils", "numpy", "__main__",
)  # fmt: skip
BUILTINS = (
    "set", "frozenset", "dict", "list", "tuple", "int", "float", "complex", "object", "bytearray", "str", "bytes",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ reading


@raises_file_error("a file of PyTorch")
def read_torch_file(path: str) -> Any:
    """The content of a file of `torch.save` (zip, or the format before torch 1.6) or of a pickle.

    Dictionaries, lists, numbers and texts stay as they are. A tensor becomes a `Tensor`, and an instance of a class a
    `Named` with its attributes.

    Raises:
        RefusedError: the file names a class or function of another package. The error names it; it was not called.
        FileError: the file is damaged, or of another kind.
        OSError: the file cannot be read.
    """
    check_fetched(path)
    with open(path, "rb") as file:
        start = file.read(64)
        file.seek(0)
        if start.startswith(b"PK\x03\x04"):
            return _read_zip(path)
        if start[:1] not in FIRST_BYTES:
            raise ValueError(f"it begins with {shown(start[:20])}, as no file of torch.save and no pickle does")
        return _read_pickles(path, file)


@raises_file_error("an index of shards")
def read_shards(path: str) -> dict[str, Tensor]:
    """The tensors of all shards that an index names, by name. The shards are in the folder of the index.

    Raises:
        FileError: the index or a shard is damaged, or a tensor is not in the shard that the index names.
        OSError: a file cannot be read.
    """
    if os.path.getsize(path) > MAX_HEADER:
        raise ValueError(f"it has {os.path.getsize(path)} bytes")
    with open(path, "rb") as file:
        index = json.loads(file.read(), object_pairs_hook=unique)
    shards = index.get("weight_map") if type(index) is dict else None
    if type(shards) is not dict or not all(type(shard) is str for shard in shards.values()):
        raise ValueError("it has no weight_map from names to files")
    names_of: dict[str, list] = {}
    for name, shard in shards.items():
        names_of.setdefault(shard, []).append(name)
    all_tensors: dict[str, Tensor] = {}
    for shard, names in names_of.items():
        in_same_folder = os.path.basename(shard) == shard and len(shard) < 256
        if not in_same_folder or not shard.endswith((".bin", ".safetensors")):
            raise ValueError(f"{shown(shard)} must be a .bin or .safetensors of the same folder")
        tensors = read_tensors(os.path.join(os.path.dirname(path), shard))
        for name in tensors:
            if shards.get(name) != shard:
                raise ValueError(f"{shown(name)} is in {shown(shard)} and belongs in {shown(shards.get(name))}")
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ValueError(f"{shown(missing[0])} is not in {shown(shard)}")
        all_tensors.update(tensors)
    return all_tensors


@raises_file_error("a file of tensors")
def read_tensors(path: str) -> dict[str, Tensor]:
    """The tensors in a file, by name.

    The file is a .safetensors, an index of shards, or a file of PyTorch with a dictionary or a network. A dictionary
    without tensors gives `{}`.

    Raises:
        RefusedError: the file names a class or function of another package. It is a FileError.
        FileError: the file is damaged, contains neither a dictionary nor a network, or has a network that is too large;
            or an index does not fit its shards.
        OSError: the file cannot be read.
    """
    if path.endswith(".index.json"):
        return read_shards(path)
    return read_safetensors(path) if path.endswith(".safetensors") else named_tensors(read_torch_file(path))


# ------------------------------------------------------------------------------------------------ layouts of torch.save


def _read_zip(path: str) -> Any:
    """Returns the content of a zip archive of `<any>/data.pkl` and, for each storage, `<any>/data/<key>`.

    Raises:
        ValueError: the archive is damaged, or has another layout.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("two members of the archive have one name")
        if sum(member.compress_size for member in archive.infolist()) > os.fstat(file.fileno()).st_size:
            raise ValueError("the members of the archive lie in the same bytes")
        outside = [name for name in members if name.startswith("/") or ".." in name.split("/")]
        if outside:
            raise ValueError(f"the member {shown(outside[0])} lies outside the archive")
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"an archive of torch.save has one data.pkl in a folder, this one has {len(pickles)}")
        prefix = pickles[0].removesuffix("data.pkl")
        order = members.get(f"{prefix}byteorder")
        if order is not None and data_of_member(path, order, _data_at(file, order)) != b"little":
            raise ValueError("its byte order is not little-endian")
        member = members[pickles[0]]
        if member.compress_type != zipfile.ZIP_STORED and member.file_size > MAX_PACKED:
            raise ValueError(f"its data.pkl is compressed, and has {member.file_size} bytes")
        program = data_of_member(path, member, _data_at(file, member))
        unpickler = _TorchUnpickler(BoundedFile(io.BytesIO(program)), path)
        content = unpickler.load()
        for key, storage in unpickler.storages.items():
            member = members.get(f"{prefix}data/{key}")
            n_byte = storage.numel * storage.raw.itemsize
            if member is None or member.file_size != n_byte:
                has = "is missing" if member is None else f"has {member.file_size} bytes"
                raise ValueError(f"storage {key} of {n_byte} bytes {has}")
            storage.offset = _data_at(file, member)
            storage.member = None if member.compress_type == zipfile.ZIP_STORED else member
        return content


def _data_at(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """The position in the archive at which the data of a member begins: the end of the member's header.

    Raises:
        ValueError: the member has no header, is cut off, or cannot be unpacked.
    """
    check_packed(member)
    size = os.fstat(file.fileno()).st_size
    file.seek(min(max(member.header_offset, 0), size))
    header = file.read(30)
    if member.header_offset < 0 or len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError(f"the member {shown(member.filename)} has no header")
    offset = member.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
    if offset + member.compress_size > size:
        raise ValueError(f"the member {shown(member.filename)} goes beyond the end of the file")
    return offset


def _read_pickles(path: str, file: BinaryIO) -> Any:
    """Returns the content of a single pickle, or of a file of torch < 1.6.

    A file of torch < 1.6 has five pickles: a number, a version, the system, the content, and the keys of the storages.
    The storages follow in the order of the keys, each after its number of elements.

    Raises:
        ValueError: the file is damaged, or has another layout.
    """
    bounded = BoundedFile(file)
    unpickler = _TorchUnpickler(bounded, path)
    first = unpickler.load()
    if type(first) is not int or first != MAGIC:
        if unpickler.storages:
            raise ValueError("it names storages of torch.save, but is only a pickle")
        return first
    version = unpickler.load()
    system = unpickler.load()
    if version != VERSION or items_with_text_keys(system).get("little_endian") is not True:
        raise ValueError(f"its version is {shown(version)}, not {VERSION}, or it is not little-endian")
    content = unpickler.load()
    keys = unpickler.load()
    keys = [text(key) for key in keys] if type(keys) is list and all(map(is_storage_key, keys)) else None
    if keys is None or len(set(keys)) < len(keys) or set(keys) != set(unpickler.storages):
        raise ValueError("its list of storages is not that of its tensors")
    for key in keys:
        storage = unpickler.storages[key]
        (numel,) = struct.unpack("<q", file.read(8))
        if numel != storage.numel:
            raise ValueError(f"storage {key} of {storage.numel} numbers has {numel}")
        storage.offset = file.tell()
        end = storage.offset + numel * storage.raw.itemsize
        if end > bounded.size:
            raise ValueError(f"storage {key} goes to byte {end} of a file of {bounded.size} bytes: it is cut off")
        file.seek(end)
    return content


# ---------------------------------------------------------------------------------------------------------- unpickling


@dataclasses.dataclass(frozen=True)
class _StorageClass:
    """Stands for a class of storages, such as `torch.FloatStorage`."""

    dtype: str


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_) -> Tensor:
    """Stands for `torch._utils._rebuild_tensor` and `_rebuild_tensor_v2`. The values are from the file."""
    if not isinstance(storage, Storage):
        raise ValueError(f"a tensor of {shown(storage)}")
    if type(shape) not in (list, tuple) or type(stride) not in (list, tuple):
        raise ValueError(f"a tensor of shape {shown(shape)}, stride {shown(stride)}")
    return Tensor(storage, offset, tuple(shape), tuple(stride))  # lists could still grow in the pickle


def _first_argument(value: Any, *_) -> Any:
    """Stands for functions and classes whose result is their first argument, such as `_rebuild_parameter`."""
    return value


def _tensor_of_type(function: Any, kind: Any, arguments: Any, *_) -> Any:
    """Stands for `torch._tensor._rebuild_from_type_v2`, which makes a tensor with attributes. They are ignored."""
    if function not in (_tensor, _first_argument) or type(arguments) is not tuple:
        raise ValueError(f"a tensor rebuilt by {shown(function)}")
    return function(*arguments)


# The stand-ins of classes and functions, by module and name.
KNOWN = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first_argument,
    ("torch._utils", "_rebuild_parameter_with_state"): _first_argument,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_of_type,
    ("torch", "Size"): _first_argument,
    ("collections", "Counter"): unneeded,
    ("argparse", "Namespace"): lambda *_: Named("Namespace"),
    ("re", "_compile"): unneeded,
    ("_codecs", "encode"): unneeded,
    ("copy_reg", "_reconstructor"): instance,
    ("copyreg", "_reconstructor"): instance,
    **{(module, name): unneeded for module in ("builtins", "__builtin__") for name in BUILTINS},
    **{
        (module, f"{name}Storage"): _StorageClass(dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in DTYPES.items()
    },
}


class _TorchUnpickler(PlainUnpickler):
    """Reads the pickles of a file: each call of `load` reads the next one.

    Attributes:
        storages: the storages that the pickles name, by key. The caller of `load` sets their positions in the file.
    """

    def __init__(self, file: BoundedFile, path: str):
        own = dict.fromkeys([("collections", "OrderedDict"), ("collections", "defaultdict")], self._dictionary)
        super().__init__(file, path, KNOWN | own, REFUSAL, PACKAGES)
        self.storages: dict[str, Storage] = {}
        self._n_pair = 0

    def load(self) -> Any:
        """Reads the next pickle. Every pickle has a memo of its own."""
        self.memo.clear()
        return super().load()

    def _dictionary(self, *args: Any) -> dict:
        """Stands for `OrderedDict` and `defaultdict`. Python 2 calls them with a list of pairs.

        A small file can refer to the same list many times, and every dictionary gets a copy of it. So the pairs of the
        whole file are counted, and too many raise ValueError.
        """
        pairs = args[0] if args and type(args[0]) in (list, tuple) else []
        self._n_pair += len(pairs)
        if self._n_pair > OBJECTS + self._size // 8:
            raise ValueError(f"more than {OBJECTS + self._size // 8} pairs in a file of {self._size} bytes")
        if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("the items of a dictionary are no pairs")
        dictionary: dict = {}
        set_items(dictionary, [value for pair in pairs for value in pair])
        return dictionary

    def persistent_load(self, pid: Any) -> Any:
        """Returns the object for which the persistent id `pid` of torch.save stands.

        It is a storage, or the class of a module, which torch.save stores together with its source code. Every other
        kind of id raises ValueError.
        """
        kind, *rest = pid if type(pid) is tuple and pid else (None,)
        kind = text(kind) if is_text(kind) else None
        if kind == "module" and rest:
            return rest[0]
        if kind != "storage" or len(rest) not in (4, 5) or any(rest[4:]):
            raise ValueError(f"it refers to {shown(pid)}, which is no storage, or the view of one")
        storage_class, key, _, numel = rest[:4]
        is_known = isinstance(storage_class, _StorageClass) and is_storage_key(key) and are_sizes([numel], MAX_NUMBERS)
        if not is_known:
            raise ValueError(f"a storage is of {shown(storage_class)}, key {shown(key)}, {shown(numel)} numbers")
        key = text(key)
        storage = self.storages.setdefault(key, Storage(self._path, storage_class.dtype, numel))
        if (storage.dtype, storage.numel) != (storage_class.dtype, numel):
            raise ValueError(f"storage {key} is of two kinds")
        return storage


# ----------------------------------------------------------------------------------------------------- tensors by name


def named_tensors(content: Any) -> dict[str, Tensor]:
    """The tensors of a dictionary, or the parameters of a pickled network, by the names in its `state_dict`.

    Raises:
        ParameterError: `content` is neither, or the network is too large.
    """
    if isinstance(content, dict):
        return {name: value for name, value in items_with_text_keys(content).items() if isinstance(value, Tensor)}
    if not isinstance(content, Named):
        message = f"there are no tensors in {shown(content)}"
        raise ParameterError("found", shown(content), "a dictionary of tensors or a pickled network", message)
    tensors: dict[str, Tensor] = {}
    todo = [("", content)]
    n_part = 0
    while todo:  # without recursion and with a limit: a module may contain itself, or be part of many others
        prefix, module = todo.pop()
        attributes = module.attributes
        parameters = members(module, "_parameters")
        modules = members(module, "_modules")
        n_part += 1 + len(attributes) + len(parameters) + len(modules)
        longest = max(map(len, [*attributes, *parameters, *modules]), default=0)
        if n_part > MAX_PARTS or len(prefix) + longest > MAX_NAME:
            message = f"a network of more than {MAX_PARTS} parts, or with names of more than {MAX_NAME} characters"
            allowed = f"a network of at most {MAX_PARTS} parts, with names of at most {MAX_NAME} characters"
            raise ParameterError("found", n_part, allowed, message)
        of_list = {name: value for name, value in attributes.items() if name.isdecimal()}  # a list of torch >= 1.12
        for name, value in {**of_list, **parameters}.items():
            if isinstance(value, Tensor):
                tensors[prefix + name] = value
        todo += [(f"{prefix}{name}.", part) for name, part in modules.items() if type(part) is Named]
    return tensors


def members(module: Named, name: str) -> dict[str, Any]:
    """The parameters or modules of a pickled module, by name."""
    return items_with_text_keys(module.attributes.get(name))


def is_storage_key(value: Any) -> bool:
    """Whether `value` can be the key of a storage: text of at most `MAX_KEY` digits."""
    return is_text(value) and len(value) <= MAX_KEY and text(value).isdecimal()
