# SPDX-License-Identifier: Apache-2.0
"""Print an object of a bucket: `python read_object.py BUCKET KEY`. Keys and endpoint are those of the environment."""

import sys

from obstore.store import S3Store

store = S3Store(sys.argv[1], client_options={"allow_http": True})
print(bytes(store.get(sys.argv[2]).bytes()).decode(), end="")
