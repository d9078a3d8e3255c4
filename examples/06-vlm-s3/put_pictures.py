# SPDX-License-Identifier: Apache-2.0
"""Three pictures into a bucket: `python put_pictures.py BUCKET`. Keys and endpoint are those of the environment."""

import io
import sys

from obstore.store import S3Store
from PIL import Image

store = S3Store(sys.argv[1], client_options={"allow_http": True})
for name, colour in (("sea", "navy"), ("meadow", "green"), ("rose", "red")):
    file = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(file, "JPEG")
    store.put(f"pictures/{name}.jpg", file.getvalue())
print(*(each["path"] for page in store.list("pictures/") for each in page), sep="\n")
