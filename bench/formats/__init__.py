# SPDX-License-Identifier: Apache-2.0
"""The table of model formats that Headrace is measured with beside the framework's own call.

Read by workloads.py, servers.py, models.py and verdicts.py. What writes the files is in the modules beside this one, which
import their frameworks; they run in a process of their own (`python -m bench.formats.make`), so that bench has none of it.
"""

from dataclasses import dataclass

from bench.resnet50 import CLASSES, IMAGE

RESNET50, FOREST, SMALL = "resnet50", "forest", "small"
# The same for the large and the small one: what is called before a load is counted has as many numbers everywhere.
COLUMNS = 16


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
    # What its large model is called.
    large: str = RESNET50
    # What that takes and gives for each row, where it is not ResNet-50.
    columns: int = 0
    given: int = CLASSES

    @property
    def image(self) -> tuple[int, ...]:
        """The sizes of an image, or the columns of a table, without the rows."""
        if self.columns:
            return (self.columns,)
        channels, height, width = IMAGE
        return (height, width, channels) if self.channels_last else IMAGE


FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        Format("onnx", "onnxruntime", "model.onnx", "INPUT0", "OUTPUT0"),
        Format("pytorch", "pytorch", "model.pt", "INPUT__0", "OUTPUT__0"),
        Format("tensorflow", "tensorflow", "model.savedmodel", "INPUT0", "OUTPUT0", channels_last=True),
    )
}
# Trees, which are measured for their loading only: what Headrace adds to a call is shown by the others.
FORESTS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        Format("xgboost", "xgboost", "model.ubj", "input", "predict", large=FOREST, columns=COLUMNS, given=1),
        Format("lightgbm", "lightgbm", "model.txt", "input", "predict", large=FOREST, columns=COLUMNS, given=1),
    )
}
