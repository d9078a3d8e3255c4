# SPDX-License-Identifier: Apache-2.0
"""Our schema is Triton's, and more."""

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2

from headrace.models.config.messages import config_schema, new_config

OWN = 1001


def names_and_numbers(messages, prefix=""):
    """Every field and enum value with its number, type and label."""
    results = set()
    for message in messages:
        where = f"{prefix}{message.name}."
        for field in message.field:
            if field.number < OWN:
                results.add((where + field.name, field.number, field.type, field.label, field.type_name))
        for enum in message.enum_type:
            if enum.name != "Runs":
                results |= {(f"{where}{enum.name}.{value.name}", value.number) for value in enum.value}
        results |= names_and_numbers(message.nested_type, where)
    return results


def described(file):
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def test_every_name_and_number_is_tritons():
    ours, theirs = described(config_schema().files[0]), described(model_config_pb2.DESCRIPTOR)
    assert names_and_numbers(ours.message_type) == names_and_numbers(theirs.message_type)
    assert [(v.name, v.number) for v in ours.enum_type[0].value] == [
        (v.name, v.number) for v in theirs.enum_type[0].value
    ]


def test_a_message_means_the_same_to_tritons_client():
    ours = new_config(name="m", max_batch_size=8, backend="python")
    ours.input.add(name="x", data_type=11, dims=[-1, 3], optional=True)
    ours.sequence_batching.oldest.max_candidate_sequences = 4
    theirs = model_config_pb2.ModelConfig.FromString(ours.SerializeToString())
    assert (theirs.name, theirs.max_batch_size, theirs.backend) == ("m", 8, "python")
    assert list(theirs.input[0].dims) == [-1, 3] and theirs.input[0].optional
    assert theirs.sequence_batching.oldest.max_candidate_sequences == 4


@pytest.mark.parametrize(
    ("message", "field", "number"),
    [
        ("ModelInput", "pad_value", 1001),
        ("ModelInput", "finite", 1002),
        ("ModelOutput", "padded_like", 1001),
        ("ModelInstanceGroup", "runs", 1001),
        ("ModelDynamicBatching", "max_queue_delay_auto", 1001),
        ("ModelDynamicBatching", "latency_target_ms", 1002),
    ],
)
def test_our_own_fields_are_out_of_tritons_way(message, field, number):
    assert config_schema().message(f"inference.{message}").DESCRIPTOR.fields_by_name[field].number == number
