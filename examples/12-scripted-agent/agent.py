# SPDX-License-Identifier: Apache-2.0
"""An agent that edits a file: `python agent.py URL MODEL TASK`. It calls tools until the model has nothing more to call."""

import json
import sys
from pathlib import Path

from openai import OpenAI

url, model, task = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none")


def read_file(path):
    """Return the text of a file."""
    return Path(path).read_text()


def replace(path, old, new):
    """Replace a text in a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "replaced"


def tool(function, *arguments):
    """Describe a function to the model."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in arguments},
        "required": [*arguments],
    }
    return {"type": "function", "name": function.__name__, "description": function.__doc__, "parameters": schema}


functions = {"read_file": read_file, "replace": replace}
tools = [tool(read_file, "path"), tool(replace, "path", "old", "new")]
given, previous = [{"role": "user", "content": task}], None
while given:
    answer = client.responses.create(model=model, input=given, tools=tools, previous_response_id=previous)
    given, previous = [], answer.id
    for item in answer.output:
        if item.type == "reasoning":
            print("thinks:", item.content[0].text)
        elif item.type == "message":
            print("says:", item.content[0].text)
        elif item.type == "function_call":
            print("calls:", item.name, item.arguments)
            result = functions[item.name](**json.loads(item.arguments))
            given.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
