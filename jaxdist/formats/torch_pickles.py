"""Checks pickles of `torch.save` before torch loads them.

torch's `weights_only` runs no code, but allocates whatever a pickle asks for, as a bytearray of any size. Here
placeholder classes replace all names in a pickle, so that nothing is imported or called, and only plain Python values
are made. Calls that are not on the list are refused.
"""

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

from jaxdist.formats.pickles import Careful
from jaxdist.formats.stand_ins import STAND_INS
from jaxdist.formats.torch_zips import Place, storage_of

PICKLES = 5  # in a file of before torch 1.6: magic, protocol, system, the tree, keys of the storages that follow
PROTOCOL = 3  # the newest whose operations torch's own reader knows
BYTES, BYTEARRAY = "_codecs.encode", "builtins.bytearray"  # as Python's second protocol of pickles writes them
SETS = {"builtins.set", "collections.OrderedDict", "collections.Counter"}  # which hash what they are given
TYPED = "torch._tensor._rebuild_from_type_v2"  # calls the first that it is given
_REBUILT = ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "sparse_tensor")
QUANTIZED = "torch._utils._rebuild_qtensor"
TENSORS = {"torch.nn.parameter.Parameter", *(f"torch._utils._rebuild_{name}" for name in _REBUILT)}
PLAIN = {"builtins.complex", "torch.Size", "torch.device", "torch.serialization._get_layout"}

STORED = {  # torch's classes of storages: the dtype, and the bytes of a number
    "DoubleStorage": ("torch.float64", 8), "FloatStorage": ("torch.float32", 4), "HalfStorage": ("torch.float16", 2),
    "BFloat16Storage": ("torch.bfloat16", 2), "LongStorage": ("torch.int64", 8), "IntStorage": ("torch.int32", 4),
    "ShortStorage": ("torch.int16", 2), "CharStorage": ("torch.int8", 1), "ByteStorage": ("torch.uint8", 1),
    "BoolStorage": ("torch.bool", 1), "ComplexDoubleStorage": ("torch.complex128", 16),
    "ComplexFloatStorage": ("torch.complex64", 8), "UntypedStorage": ("torch.uint8", 1),
    "QInt8Storage": ("torch.qint8", 1), "QUInt8Storage": ("torch.quint8", 1), "QInt32Storage": ("torch.qint32", 4),
    "QUInt4x2Storage": ("torch.quint4x2", 1), "QUInt2x4Storage": ("torch.quint2x4", 1),
}  # fmt: skip


class Named:
    """Placeholder of a name, as of a class or function."""

    def __init__(self, name: str) -> None:
        self.name = name


class CallResult:
    """Placeholder of the result of a call."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __setitem__(self, key: Any, value: Any) -> None:
        self.length += 1


class Bytes(CallResult):
    """Placeholder of bytes, the only ones that a bytearray may be made of: a tensor could be taken for a size."""


class Rehearsal(Careful):
    """Reads a pickle in the order in which torch will. Raises UnpicklingError for calls that are not allowed, and where
    the `places` of the records are known, ValueError for storages larger than their records."""

    places: Mapping[str, Place] | None = None

    def load_proto(self) -> None:
        super().load_proto()
        if self.proto > PROTOCOL:
            raise UnpicklingError(f"it was saved with pickle_protocol={self.proto}, not torch's own; save it with 2")

    def find_class(self, module: str, name: str) -> Any:
        return Named(f"{'builtins' if module == '__builtin__' else module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        if self.places is not None:
            match pid:
                case (_, Named(name=name), key, _, count) if (kind := name.rpartition(".")[2]) in STORED:
                    storage_of(self.places, key, *STORED[kind], count)
                case _:
                    raise UnpicklingError("it has a storage of no known kind")
        return CallResult(0)

    def load_reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.append(self.result_of(called, arguments))

    load_newobj = load_reduce

    def load_build(self) -> None:
        self.charge(self.stack.pop())

    def result_of(self, called: Any, arguments: Any) -> CallResult:
        """The placeholder of the result of a call."""
        self.charge(arguments)
        if not isinstance(called, Named) or not isinstance(arguments, tuple):
            raise UnpicklingError("it calls what has no name")
        match called.name, arguments:
            case name, (Named() as inner, _, tuple() as inside, _) if name == TYPED:
                return self.result_of(inner, inside)
            case name, (str() as text, "latin1" | "latin-1") if name in (BYTES, BYTEARRAY):
                return Bytes(len(text))
            case name, () | (Bytes(),) if name == BYTEARRAY:
                return CallResult(sum(map(len, arguments)))
            case name, (list() as items,) if name in SETS:
                for item in items:
                    self.hashes(tuple(item) if isinstance(item, list) else item)  # a list is a key and a value
                return CallResult(len(items))
            case name, () | (dict(),) if name in SETS:
                return CallResult(sum(map(len, arguments)))
            case name, _ if name in PLAIN and not any(isinstance(x, CallResult) for x in self.written_out(arguments)):
                return CallResult(0)
            case name, _ if name == QUANTIZED:
                raise ValueError("it has a tensor that is quantized")
            case name, _ if name in TENSORS or name in STAND_INS:
                return CallResult(0)
        raise UnpicklingError(f"it has a {called.name}, which is neither a tensor nor a plain value")


def rehearse(file: Any, size: int, pickles: int = 1, places: Mapping[str, Place] | None = None) -> None:
    """Checks the consecutive pickles of a file of `size` bytes; `places` are those of the records of a zip. Raises
    ValueError or UnpicklingError for a hostile pickle, and any exception for a damaged one."""
    for _ in range(pickles):
        rehearsal = Rehearsal(file, size)
        rehearsal.places = places
        rehearsal.load()
