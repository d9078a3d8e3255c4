# SPDX-License-Identifier: Apache-2.0
"""`Tensor` as models know it, and its way to and from other libraries by DLPack."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.types import serialize_byte_tensor, triton_number
from headrace.core import tensors as core
from headrace.core.dtypes import BF16, BYTES, dtype_of
from headrace.core.errors import InvalidArgument

Array = npt.NDArray[Any]

_CPU, _CUDA_HOST = 1, 3
_UINT_CODE, _BFLOAT_CODE = 1, 4
# Inside DLManagedTensor: data pointer, device type and number, rank; then the code and the bits of the type.
_DEVICE_AT, _CODE_AT, _BITS_AT = 8, 20, 21
_CAPSULE = b"dltensor"


class _Sent(core.Tensor):
    """A tensor whose BYTES elements may be any object, as Triton has it: what is not bytes is turned into text."""

    __slots__ = ()

    def to_buffer(self) -> core.Buffer:
        """See `core.Tensor.to_buffer`."""
        if self.dtype is BYTES:
            return serialize_byte_tensor(self.array) or b""
        return super().to_buffer()


class Tensor:
    """A named array."""

    __slots__ = ("core",)

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(name, str) or not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        array = np.asarray(numpy_array)
        if array.dtype.name == "bfloat16":
            self.core: core.Tensor = _Sent(name, BF16, array.view(np.uint16))
            return
        if array.dtype.kind in "UVT":
            raise TritonModelException(
                f"Tensor '{name}' has the numpy type {array.dtype}, which is not supported: use np.object_ for text"
            )
        try:
            dtype = dtype_of(array)
        except InvalidArgument as error:
            raise TritonModelException(f"Tensor '{name}': {error}") from None
        if dtype is not BYTES and array.dtype != dtype.numpy:
            array = array.astype(dtype.numpy)
        self.core = _Sent(name, dtype, array)

    def name(self) -> str:
        """Its name."""
        return self.core.name

    def as_numpy(self) -> Array:
        """The array; of an input, a view that stays valid as long as it is kept."""
        if self.core.dtype is BF16:
            raise TritonModelException(
                f"Tensor '{self.core.name}' is BF16, which numpy does not have: use to_dlpack() or torch.from_dlpack()"
            )
        return self.core.array

    def triton_dtype(self) -> int:
        """The number of its data type."""
        return triton_number(self.core.dtype)

    def shape(self) -> list[int]:
        """Its dimensions."""
        return list(self.core.array.shape)

    def is_cpu(self) -> bool:
        """Whether it is in the CPU's memory, as all tensors are that come from the server."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the array."""
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        """See the array API standard. Always the plain capsule, which every library takes."""
        tensor = self.core
        if tensor.dtype is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = tensor.array if tensor.array.flags.writeable else tensor.array.copy()
        capsule = array.__dlpack__()
        if tensor.dtype is BF16:
            _poke(_address(capsule), _CODE_AT, _BFLOAT_CODE)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """See the array API standard."""
        return (_CPU, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Take over a tensor of another library, or a capsule of one; without a copy if it is in the CPU's memory."""
        if hasattr(tensor, "__dlpack__"):
            if tensor.__dlpack_device__()[0] not in (_CPU, _CUDA_HOST):
                return DeviceTensor(name, tensor)
            capsule = tensor.__dlpack__()
        elif type(tensor).__name__ == "PyCapsule":
            capsule = tensor
            if _peek32(_address(capsule), _DEVICE_AT) not in (_CPU, _CUDA_HOST):
                return DeviceTensor(name, _torch_from_dlpack(capsule))
        else:
            raise TritonModelException(f"from_dlpack needs a DLPack capsule or tensor, not {type(tensor).__name__}")
        address = _address(capsule)
        bfloat = _peek8(address, _CODE_AT) == _BFLOAT_CODE and _peek8(address, _BITS_AT) == 16
        if bfloat:
            # numpy takes the same bits under a name it knows.
            _poke(address, _CODE_AT, _UINT_CODE)
        array = np.from_dlpack(_Capsule(capsule))
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
            )
        if not bfloat:
            return Tensor(name, array)
        return received(_Sent(name, BF16, array))


class DeviceTensor(Tensor):
    """A tensor in another device's memory. Copied to the CPU's when it is sent, and only then."""

    __slots__ = ("_foreign", "_name")

    def __init__(self, name: str, foreign: Any) -> None:
        self._name = name
        self._foreign = foreign

    @property
    def core(self) -> core.Tensor:  # type: ignore[override]
        """A copy in the CPU's memory."""
        return Tensor.from_dlpack(self._name, _to_cpu(self._foreign)).core

    def name(self) -> str:
        """Its name."""
        return self._name

    def shape(self) -> list[int]:
        """Its dimensions."""
        return list(self._foreign.shape)

    def is_cpu(self) -> bool:
        """It is not."""
        return False

    def as_numpy(self) -> Array:
        """Refused, as Triton does: numpy has no other devices."""
        raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        """The other library's own."""
        return self._foreign.__dlpack__() if stream is None else self._foreign.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is."""
        device: tuple[int, int] = self._foreign.__dlpack_device__()
        return device


def received(tensor: core.Tensor) -> Tensor:
    """A tensor that came from the server."""
    made = Tensor.__new__(Tensor)
    made.core = tensor
    return made


class _Capsule:
    """Something numpy asks for the capsule it is given."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def _to_cpu(tensor: Any) -> Any:
    for method in ("cpu", "get"):
        if hasattr(tensor, method):
            moved = getattr(tensor, method)()
            # Of torch: without its gradients, and row by row.
            return moved.detach().contiguous() if hasattr(moved, "detach") else moved
    raise TritonModelException(
        f"a {type(tensor).__name__} that is not in the CPU's memory cannot be taken over: copy it to the CPU first"
    )


def _torch_from_dlpack(capsule: Any) -> Any:
    try:
        torch = importlib.import_module("torch.utils.dlpack")
    except ImportError:
        raise TritonModelException("a DLPack capsule of another device needs torch to be copied to the CPU") from None
    return torch.from_dlpack(capsule)


def _address(capsule: Any) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    try:
        return int(pointer(capsule, _CAPSULE) or 0)
    except ValueError:
        raise TritonModelException("the DLPack capsule is used up, or of a version that is not supported") from None


def _peek8(address: int, at: int) -> int:
    return ctypes.c_uint8.from_address(address + at).value


def _peek32(address: int, at: int) -> int:
    return ctypes.c_int32.from_address(address + at).value


def _poke(address: int, at: int, value: int) -> None:
    ctypes.c_uint8.from_address(address + at).value = value
