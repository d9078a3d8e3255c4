# SPDX-License-Identifier: Apache-2.0
"""`Tensor` of `triton_python_backend_utils`, and its conversion to and from other libraries by DLPack."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.types import serialize_byte_tensor
from headrace.core import tensors as core
from headrace.core.dtypes import BF16, BYTES, dtype_of
from headrace.core.errors import InvalidArgument

Array = npt.NDArray[Any]

_CPU, _CUDA_HOST = 1, 3
_UINT_CODE, _BFLOAT_CODE = 1, 4
# Inside DLManagedTensor: data pointer, device type and number, rank; then code and bits of the type.
_DEVICE_AT, _CODE_AT, _BITS_AT = 8, 20, 21
_CAPSULE = b"dltensor"


class _OutgoingTensor(core.Tensor):
    """A tensor whose BYTES elements may be any object, as in Triton: elements other than bytes become strings."""

    __slots__ = ()

    def to_buffer(self) -> core.Buffer:
        """Return the bytes of the tensor, as `core.Tensor.to_buffer` does."""
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
            self.core: core.Tensor = _OutgoingTensor(name, BF16, array.view(np.uint16))
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
        self.core = _OutgoingTensor(name, dtype, array)

    def name(self) -> str:
        """Return its name."""
        return self.core.name

    def as_numpy(self) -> Array:
        """Return the array; an input's array is a view that stays valid as long as it is referenced."""
        if self.core.dtype is BF16:
            raise TritonModelException(
                f"Tensor '{self.core.name}' is BF16, which numpy does not have: use to_dlpack() or torch.from_dlpack()"
            )
        return self.core.array

    def triton_dtype(self) -> int:
        """Return Triton's number of its data type."""
        return self.core.dtype.config_number

    def shape(self) -> list[int]:
        """Return its dimensions."""
        return list(self.core.array.shape)

    def is_cpu(self) -> bool:
        """Return whether it is in CPU memory, as all tensors from the server are."""
        return True

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule of the array."""
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        """Return an unversioned DLPack capsule, which every library accepts; see the array API standard."""
        tensor = self.core
        if tensor.dtype is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = tensor.array if tensor.array.flags.writeable else tensor.array.copy()
        capsule = array.__dlpack__()
        if tensor.dtype is BF16:
            _poke(_address(capsule), _CODE_AT, _BFLOAT_CODE)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device; see the array API standard."""
        return (_CPU, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Wrap a tensor or capsule of another library, without a copy if it is in CPU memory."""
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
            # View the same bits with a dtype that numpy has.
            _poke(address, _CODE_AT, _UINT_CODE)
        array = np.from_dlpack(_Capsule(capsule))
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
            )
        if not bfloat:
            return Tensor(name, array)
        return received(_OutgoingTensor(name, BF16, array))


class DeviceTensor(Tensor):
    """A tensor in the memory of another device. It is copied to the CPU only when it is sent."""

    __slots__ = ("_foreign", "_name")

    def __init__(self, name: str, foreign: Any) -> None:
        self._name = name
        self._foreign = foreign

    @property
    def core(self) -> core.Tensor:  # type: ignore[override]
        """Return a copy in CPU memory."""
        return Tensor.from_dlpack(self._name, _to_cpu(self._foreign)).core

    def name(self) -> str:
        """Return its name."""
        return self._name

    def shape(self) -> list[int]:
        """Return its dimensions."""
        return list(self._foreign.shape)

    def is_cpu(self) -> bool:
        """Return False."""
        return False

    def as_numpy(self) -> Array:
        """Raise an error, as Triton does: numpy has no other devices."""
        raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        """Return the capsule of the other library."""
        return self._foreign.__dlpack__() if stream is None else self._foreign.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the tensor."""
        device: tuple[int, int] = self._foreign.__dlpack_device__()
        return device


def received(tensor: core.Tensor) -> Tensor:
    """Wrap a tensor that came from the server."""
    wrapped = Tensor.__new__(Tensor)
    wrapped.core = tensor
    return wrapped


class _Capsule:
    """An object that passes a capsule to numpy."""

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
            # torch tensors: drop gradients and make them contiguous.
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
