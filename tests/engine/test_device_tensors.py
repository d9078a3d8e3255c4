# SPDX-License-Identifier: Apache-2.0
"""Tensors that stay in a device's memory between the steps of an ensemble.

The device is a fake: arrays of the host behind a door that counts who carries them in and out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32
from headrace.engine.cache import ResponseCache
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import answers, ask, config_of, counted, ensemble, serving_plane, step, submit


class FakeDevice:
    """Counts copies."""

    def __init__(self) -> None:
        self.out = 0
        self.taken_in = 0


class FakeDeviceArray:
    """What `contract.DeviceComputeInstance` asks of an array on a device, and no more."""

    def __init__(self, device: FakeDevice, inner: Any) -> None:
        self.device, self.inner = device, inner
        self.shape, self.dtype = inner.shape, inner.dtype

    def __getitem__(self, rows: Any) -> FakeDeviceArray:
        return FakeDeviceArray(self.device, self.inner[rows])

    def reshape(self, shape: Any) -> FakeDeviceArray:
        return FakeDeviceArray(self.device, self.inner.reshape(shape))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.device.out += 1
        return self.inner.copy()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        assert function is np.concatenate
        parts = [part.inner if isinstance(part, FakeDeviceArray) else part for part in args[0]]
        return FakeDeviceArray(self.device, np.concatenate(parts))


class DeviceInstance:
    """A model of the device: it doubles."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.batches: list[int] = []

    def compute(self, inputs: Mapping[str, Any], requested: Collection[str]) -> Mapping[str, Any]:
        return {name: array.inner for name, array in self.compute_on_device(inputs, requested).items()}

    def compute_on_device(self, inputs: Mapping[str, Any], requested: Collection[str]) -> Mapping[str, Any]:
        array = inputs["INPUT0"]
        if isinstance(array, FakeDeviceArray):
            array = array.inner
        else:
            self.device.taken_in += 1
        self.batches.append(len(array))
        return {"OUTPUT0": FakeDeviceArray(self.device, array * 2)}

    def close(self) -> None:
        pass


def on_device(name: str, **more: Any) -> Any:
    return config_of(name, instance_groups=(InstanceGroup(name, runs="thread"),), **more)


CHAIN = (step("first", "INPUT0=IN", "OUTPUT0=mid"), step("second", "INPUT0=mid", "OUTPUT0=OUT"))
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("requests", [1, 8])
def test_between_two_models_of_the_device_nothing_is_copied(requests: int) -> None:
    async def main() -> None:
        device = FakeDevice()
        first, second = DeviceInstance(device), DeviceInstance(device)
        models = [(on_device("first"), first), (on_device("second"), second), ensemble(*CHAIN)]
        async with serving_plane(models) as plane:
            submitted = [submit(plane, "ensemble", IN=X + n) for n in range(requests)]
            for n, answer in enumerate(await answers(submitted)):
                array = answer.outputs[0].array
                assert type(array) is np.ndarray
                np.testing.assert_array_equal(array, (X + n) * 4)
        assert device.out == 0
        assert device.taken_in == len(first.batches)
        assert sum(second.batches) == 2 * requests

    asyncio.run(main())


def test_a_model_of_the_host_gets_a_copy_and_so_does_the_caller() -> None:
    async def main() -> None:
        device = FakeDevice()
        seen: list[type] = []

        def on_host(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            seen.append(type(inputs["INPUT0"]))
            return {"OUTPUT0": inputs["INPUT0"] + 1}

        steps = (step("first", "INPUT0=IN", "OUTPUT0=mid"), step("host", "INPUT0=mid", "OUTPUT0=OUT"))
        both = ensemble(*steps, outputs="OUT mid")
        models = [(on_device("first"), DeviceInstance(device)), (config_of("host"), on_host), both]
        async with serving_plane(models) as plane:
            answer = await ask(plane, "ensemble", IN=X)
            arrays = {tensor.name: tensor.array for tensor in answer.outputs}
            np.testing.assert_array_equal(arrays["OUT"], X * 2 + 1)
            np.testing.assert_array_equal(arrays["mid"], X * 2)
            assert {type(array) for array in arrays.values()} == {np.ndarray}
        assert seen == [np.ndarray]
        assert device.out == 2

    asyncio.run(main())


def test_an_express_model_behind_a_model_of_the_device() -> None:
    async def main() -> None:
        device = FakeDevice()
        quick = config_of(
            "quick",
            inputs=(InputSpec("INPUT0", FP32, (3,)),),
            outputs=(OutputSpec("OUTPUT0", FP32, (3,)),),
            scheduling=None,
        )
        steps = (step("first", "INPUT0=IN", "OUTPUT0=mid"), step("quick", "INPUT0=mid", "OUTPUT0=OUT"))
        models = [
            (on_device("first"), DeviceInstance(device)),
            (quick, lambda inputs: {"OUTPUT0": np.negative(inputs["INPUT0"])}),
            ensemble(*steps),
        ]
        async with serving_plane(models) as plane:
            answer = await ask(plane, "ensemble", IN=X)
            np.testing.assert_array_equal(answer.outputs[0].array, X * -2)

    asyncio.run(main())


def test_others_in_the_batch_get_theirs_on_the_host() -> None:
    async def main() -> None:
        device = FakeDevice()
        first, second = DeviceInstance(device), DeviceInstance(device)
        models = [(on_device("first"), first), (on_device("second"), second), ensemble(*CHAIN)]
        async with serving_plane(models) as plane:
            requests = [submit(plane, "ensemble", IN=X), *(submit(plane, "first", INPUT0=X + n) for n in range(6))]
            through, *direct = await answers(requests)
            np.testing.assert_array_equal(through.outputs[0].array, X * 4)
            for n, answer in enumerate(direct):
                assert type(answer.outputs[0].array) is np.ndarray
                np.testing.assert_array_equal(answer.outputs[0].array, (X + n) * 2)

    asyncio.run(main())


def test_cached_answers_are_in_host_memory() -> None:
    async def main() -> None:
        device = FakeDevice()
        first, second = DeviceInstance(device), DeviceInstance(device)
        cached = on_device("second", response_cache=True)
        models = [(on_device("first"), first), (cached, second), ensemble(*CHAIN)]
        async with serving_plane(models, cache=ResponseCache(1 << 20)) as plane:
            for _ in range(2):
                answer = await ask(plane, "ensemble", IN=X)
                np.testing.assert_array_equal(answer.outputs[0].array, X * 4)
            assert counted(plane, "second").total().hit == 1

    asyncio.run(main())
