# SPDX-License-Identifier: Apache-2.0
"""Computes a function in a session of TensorFlow's.

Called by `backends.tensorflow.backend`. A session is used, and not a concrete function of TensorFlow 2, because it has
threads of its own, computes in the thread that calls it, gives its memory back when it is closed, and is called more
quickly. Microseconds for one call (TensorFlow 2.21, one thread, Neoverse-N1), arrays in and out:

                                      two INT32[16]   ResNet-50
    the session's callable, as here        21           276 400
      with a pool of one thread            48           274 900
    Session.run                           271           274 800
    a concrete function                   669           287 500
      by its `_call_flat`                 293

Arrays whose memory begins at a multiple of 64 bytes are not copied on their way in; results never are on theirs out.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.signature import Port
from headrace.backends.tensorflow.function import Function, dismantle
from headrace.backends.tensorflow.runtime import CallableOptions, tf
from headrace.core.dtypes import BF16, BYTES
from headrace.core.errors import HeadraceError, Internal, InvalidArgument

log = logging.getLogger("headrace.backends")

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


class Session:
    """One session, with the weights in it. May be called by several threads at a time."""

    def __init__(self, name: str, function: Function, inputs: list[str], outputs: list[str], settings: Any) -> None:
        self._name = name
        ports = {**function.signature.inputs, **function.signature.optional}
        self._inputs: list[tuple[str, Port, bool]] = [(key, ports[key], ports[key].dtype is BF16) for key in inputs]
        given = function.signature.outputs
        # All that the configuration names are computed each time: another choice would be another copy of the constants.
        self._outputs = [(key, given[key].dtype is BF16, given[key].dtype is BYTES) for key in outputs]
        self._session: Any = None
        self._call: Any = None
        self._graph = function.graph
        try:
            self._session = tf.compat.v1.Session(graph=function.graph, config=settings)
            for step in function.setup:
                self._session.run(step.operation, dict(step.feed))
            self._defaults = self._default_values(function)
            self._call = _callable(
                self._session, [function.feeds[key] for key in inputs], [function.fetches[key] for key in outputs]
            )
        except Exception:
            log.exception("model %s: TensorFlow could not make it ready", name)
            self.close()
            raise InvalidArgument(
                f"model '{name}': TensorFlow {tf.__version__} could not make '{function.filename}' ready to compute. It is "
                "damaged, its parts do not belong together, or memory ran out; the server's log says which. Export the "
                "model again"
            ) from None
        _trim()

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> dict[str, Array]:
        """Compute a batch."""
        feed = []
        for name, port, is_bf16 in self._inputs:
            array = inputs.get(name)
            if array is None:
                feed.append(self._default(name))
            elif not port.takes(array.shape):
                # TensorFlow does not look at the shapes it is fed with, only at what becomes of them.
                raise self._refused(inputs)
            else:
                feed.append(array.view(_BFLOAT16) if is_bf16 else array)
        try:
            results = self._call(*feed)
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._explained(error, inputs) from None
        outputs: dict[str, Array] = {}
        for (name, is_bf16, is_text), result in zip(self._outputs, results, strict=True):
            if is_text:
                # A single string comes as itself.
                outputs[name] = result if isinstance(result, np.ndarray) else np.array(result, dtype=object)
                continue
            array = np.asarray(result)
            # What the graph passes on as it is lies in the caller's memory, which may change when it has its answer.
            for given in feed:
                if np.may_share_memory(array, given):
                    array = array.copy()
            # A constant is not copied on its way out: whoever wrote into it would change the model.
            array.flags.writeable = False
            outputs[name] = array.view(np.uint16) if is_bf16 else array
        return outputs

    def close(self) -> None:
        """Give the memory back: that of the weights, the graph and what was computed with. A GPU's is kept by TensorFlow."""
        self._call = None
        session, self._session = self._session, None
        if session is not None:
            session.close()
            del session
        graph, self._graph = self._graph, None
        if graph is not None:
            dismantle(graph)
            del graph
        _trim()

    def _default_values(self, function: Function) -> dict[str, Array]:
        """Of the inputs that need not be given."""
        values = {name: tf.make_ndarray(value) for name, value in function.defaults.items()}
        for name, _, _ in self._inputs:
            if name in function.signature.optional and name not in values:
                tensor = function.graph.get_tensor_by_name(function.feeds[name])
                if tensor.op.type == "PlaceholderWithDefault":
                    values[name] = np.asarray(self._session.run(tensor))
        return values

    def _default(self, name: str) -> Array:
        value = self._defaults.get(name)
        if value is None:
            raise InvalidArgument(f"model '{self._name}' needs the input '{name}': send it with the others")
        return value

    def _explained(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """What a caller may know of it. The text of TensorFlow tells of the model's inside, and is for the log."""
        if isinstance(error, tf.errors.InvalidArgumentError | tf.errors.OutOfRangeError):
            return self._refused(inputs)
        return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")

    def _refused(self, inputs: Mapping[str, Array]) -> InvalidArgument:
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept these inputs, by their shapes or values: {shapes}. Compare them with "
            "the model's metadata; the server's log may say where it stopped"
        )


def _callable(session: Any, feeds: list[str], fetches: list[str]) -> Any:
    """Arrays in, arrays out, in these orders."""
    make = getattr(session, "_make_callable_from_options", None)
    if make is None:
        # Not of the public interface, so it may go; what is, takes 250 us more.
        return session.make_callable(fetches, feeds)
    return make(CallableOptions(feed=feeds, fetch=fetches))


def _trim() -> None:
    """Hand freed memory back to the system: a load of ResNet-50 frees 800 MB that the C library would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
