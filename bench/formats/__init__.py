# SPDX-License-Identifier: Apache-2.0
"""The table of model formats that Headrace is measured with beside the framework's own call.

Read by workloads.py, servers.py, models.py and verdicts.py. What writes the files is in the modules beside this one, which
import their frameworks; they run in a process of their own (`python -m bench.formats.make`), so that bench has none of it.
"""

from dataclasses import dataclass

from bench.resnet50 import IMAGE


@dataclass(frozen=True)
class Format:
    """How models of a format are called by Headrace and its configurations."""

    name: str
    backend: str
    # The file or folder in a version's folder.
    file: str
    input_name: str
    output_name: str
    # Whether an image is height, width, channels.
    channels_last: bool = False

    @property
    def image(self) -> tuple[int, ...]:
        """The sizes of an image, without the rows."""
        channels, height, width = IMAGE
        return (height, width, channels) if self.channels_last else IMAGE


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("onnx", "onnxruntime", "model.onnx", "INPUT0", "OUTPUT0"),
        Format("pytorch", "pytorch", "model.pt", "INPUT__0", "OUTPUT__0"),
        Format("tensorflow", "tensorflow", "model.savedmodel", "INPUT0", "OUTPUT0", channels_last=True),
    )
}
